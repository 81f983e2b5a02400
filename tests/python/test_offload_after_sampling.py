"""Regression: an offload after a forward pass without a backward one failed, since FSDP2 leaves weights gathered."""

from __future__ import annotations

import tempfile

from ranks import run_ranks


def test_a_model_that_fsdp2_left_gathered_is_offloaded_from_its_shards() -> None:
    run_ranks(2, "sampling_ranks:offloaded_after_sampling", timeout=100)


def test_gathered_parameters_given_one_by_one_are_refused_with_the_remedy() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as home:
        run_ranks(2, "sampling_ranks:parameters_after_sampling", [home], timeout=100)
