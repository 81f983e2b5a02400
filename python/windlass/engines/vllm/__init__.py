"""Windlass in vLLM.

:func:`register` is the entry point of ``vllm.general_plugins``: it makes the transfer backend ``windlass`` known on both
sides and gives workers the methods of :mod:`windlass.engines.vllm.extension`. Importing this module imports neither vLLM nor
torch.
"""

from __future__ import annotations

import inspect
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

    _register_backend("WeightTransferEngineFactory", _receiving_half())
    # The trainer's half came with vLLM 0.28.
    _register_backend("WeightTransferTrainerFactory", ("trainer", "WindlassTrainerWeightTransferEngine"))
    install()
    install_core()


def _register_backend(factory: str, half: tuple[str, str]) -> None:
    """Makes a half of the backend known, where this vLLM has a factory for it."""
    try:
        import vllm.distributed.weight_transfer.factory as factories
    except ImportError:
        log.info("this vLLM has no transfer backends; the worker's methods are there")
        return
    found = getattr(factories, factory, None)
    if found is not None and BACKEND not in found._registry:
        module, name = half
        found.register_engine(BACKEND, f"windlass.engines.vllm.{module}", name)


def _receiving_half() -> tuple[str, str]:
    """vLLM 0.26 and later give a backend its whole configuration; before, only the model."""
    try:
        from vllm.distributed.weight_transfer.base import WeightTransferEngine

        whole = "vllm_config" in inspect.signature(WeightTransferEngine.__init__).parameters
    except ImportError:
        whole = True
    return ("backend", "WindlassWeightTransferEngine") if whole else ("older", "OlderWeightTransferEngine")


__getattr__ = lazily(__name__, _LAZY)
