"""Windlass in vLLM.

:func:`register` is the entry point of ``vllm.general_plugins``: it makes the transfer backend ``windlass`` known on both
sides and gives workers the methods of :mod:`windlass.vllm.extension`. Importing this module imports neither vLLM nor
torch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.vllm.endpoint import WindlassEndpoint
    from windlass.vllm.extension import WorkerExtension
    from windlass.vllm.loader import VLLMWeightLoader
    from windlass.vllm.trainer import WindlassTrainerInitInfo, WindlassTrainerWeightTransferEngine

__all__ = [
    "VLLMWeightLoader",
    "WindlassEndpoint",
    "WindlassTrainerInitInfo",
    "WindlassTrainerWeightTransferEngine",
    "WorkerExtension",
    "register",
]

_LAZY = {
    "VLLMWeightLoader": "windlass.vllm.loader",
    "WindlassEndpoint": "windlass.vllm.endpoint",
    "WindlassTrainerInitInfo": "windlass.vllm.trainer",
    "WindlassTrainerWeightTransferEngine": "windlass.vllm.trainer",
    "WorkerExtension": "windlass.vllm.extension",
}

log = logging.getLogger("windlass")

#: The name of the backend.
BACKEND = "windlass"


def register() -> None:
    """Called by vLLM in each of its processes, possibly more than once."""
    from windlass.vllm.core import install as install_core
    from windlass.vllm.extension import install

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
                BACKEND, "windlass.vllm.backend", "WindlassWeightTransferEngine"
            )
        if BACKEND not in WeightTransferTrainerFactory._registry:
            WeightTransferTrainerFactory.register_engine(
                BACKEND, "windlass.vllm.trainer", "WindlassTrainerWeightTransferEngine"
            )
    install()
    install_core()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
