"""The trainer's side: a rank's weights become versions that engines can fetch. Its entry point is :class:`windlass.WeightManager`."""
