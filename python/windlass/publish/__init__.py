"""The trainer's side: a rank's weights become versions that engines can fetch. Its door is :class:`windlass.WeightManager`."""
