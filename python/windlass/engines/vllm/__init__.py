"""Windlass in vLLM.

:func:`register` is the entry point of ``vllm.general_plugins``: it makes the transfer backend ``windlass`` known on both
sides and gives workers the methods of :mod:`windlass.engines.vllm.extension`. Importing this module imports neither vLLM nor
torch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from windlass._lazy import lazily

if TYPE_CHECKING:
    from windlass.engines.vllm.endpoint import WindlassEndpoint
    from windlass.engines.vllm.extension import WorkerExtension
    from windlass.engines.vllm.loader import VLLMWeightLoader
    from windlass.engines.vllm.trainer import WindlassTrainerInitInfo, WindlassTrainerWeightTransferEngine

__all__ = [
    "VLLMWeightLoader",
    "WindlassEndpoint",
    "WindlassTrainerInitInfo",
    "WindlassTrainerWeightTransferEngine",
    "WorkerExtension",
    "register",
]

_LAZY = {
    "VLLMWeightLoader": "windlass.engines.vllm.loader",
    "WindlassEndpoint": "windlass.engines.vllm.endpoint",
    "WindlassTrainerInitInfo": "windlass.engines.vllm.trainer",
    "WindlassTrainerWeightTransferEngine": "windlass.engines.vllm.trainer",
    "WorkerExtension": "windlass.engines.vllm.extension",
}

log = logging.getLogger("windlass")

#: The name of the backend.
BACKEND = "windlass"


def register() -> None:
    """Called by vLLM in each of its processes, possibly more than once."""
    from windlass.engines.vllm.core import install as install_core
    from windlass.engines.vllm.extension import install

    try:
        from vllm.distributed.weight_transfer.factory import (
            WeightTransferEngineFactory,
            WeightTransferTrainerFactory,
        )
    except ImportError:
        log.info("this vLLM has no transfer backends; the worker's methods are there")
    else:
        if BACKEND not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(
                BACKEND, "windlass.engines.vllm.backend", "WindlassWeightTransferEngine"
            )
        if BACKEND not in WeightTransferTrainerFactory._registry:
            WeightTransferTrainerFactory.register_engine(
                BACKEND, "windlass.engines.vllm.trainer", "WindlassTrainerWeightTransferEngine"
            )
    install()
    install_core()


__getattr__ = lazily(__name__, _LAZY)
