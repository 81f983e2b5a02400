"""Two lines that publish a model from the loop of a training library.

:class:`WindlassCallback` is for ``transformers.Trainer``, :class:`LightningCallback` for Lightning, :class:`AcceleratePublisher` for a
loop of one's own with Accelerate: docs/callbacks.md. Importing this package imports none of them, nor torch; each class imports its
library when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass._lazy import lazily

if TYPE_CHECKING:
    from windlass.callbacks.accelerate import AcceleratePublisher
    from windlass.callbacks.lightning import LightningCallback
    from windlass.callbacks.trainer import WindlassCallback

__all__ = ["AcceleratePublisher", "LightningCallback", "WindlassCallback"]

__getattr__ = lazily(
    __name__,
    {
        "AcceleratePublisher": "windlass.callbacks.accelerate",
        "LightningCallback": "windlass.callbacks.lightning",
        "WindlassCallback": "windlass.callbacks.trainer",
    },
)
