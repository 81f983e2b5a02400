"""A package that OpenRLHF imports and this test does not call: it has no build for a CPU."""
