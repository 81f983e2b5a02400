"""Windlass: weight sync for RL post-training, bit-exact, versioned, at hardware speed.

The names here are the ones that most programs need. The others are in the subpackages: :mod:`windlass.publish` and
:mod:`windlass.extract` for trainers, :mod:`windlass.transfer` for sync strategies and their requests, :mod:`windlass.receive`,
:mod:`windlass.load` and :mod:`windlass.engines` for engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from windlass import _moved
from windlass._lazy import lazily
from windlass._windlass import __version__
from windlass.config import SenderAgentConfig, WeightManagerConfig
from windlass.errors import (
    WindlassBug,
    WindlassCancelled,
    WindlassCorrupt,
    WindlassDenied,
    WindlassError,
    WindlassExhausted,
    WindlassInvalid,
    WindlassNotFound,
    WindlassPeerLost,
    WindlassStale,
    WindlassTimeout,
    WindlassUnsupported,
)
from windlass.names import SourceMap
from windlass.receive.follow import Follower
from windlass.receive.receiver import Image, Receiver, open_image
from windlass.transfer.base import WeightLoader, choose, register_strategy, strategy_from_config

if TYPE_CHECKING:
    from windlass.controller import Controller, gate, serve_evals
    from windlass.extract import WeightExtractor
    from windlass.publish.inputs import WeightSource
    from windlass.publish.manager import Offloaded, WeightManager
    from windlass.transfer.sync import WeightSyncManager

__all__ = [
    "Controller",
    "Follower",
    "Image",
    "Offloaded",
    "Receiver",
    "SenderAgentConfig",
    "SourceMap",
    "WeightExtractor",
    "WeightLoader",
    "WeightManager",
    "WeightManagerConfig",
    "WeightSource",
    "WeightSyncManager",
    "WindlassBug",
    "WindlassCancelled",
    "WindlassCorrupt",
    "WindlassDenied",
    "WindlassError",
    "WindlassExhausted",
    "WindlassInvalid",
    "WindlassNotFound",
    "WindlassPeerLost",
    "WindlassStale",
    "WindlassTimeout",
    "WindlassUnsupported",
    "__version__",
    "choose",
    "gate",
    "open_image",
    "register_strategy",
    "serve_evals",
    "strategy_from_config",
]

#: Names that need torch, or that few programs need, and their modules: each is imported at its first use.
_LAZY = {
    "Controller": "windlass.controller",
    "Offloaded": "windlass.publish.manager",
    "WeightExtractor": "windlass.extract",
    "WeightManager": "windlass.publish.manager",
    "WeightSource": "windlass.publish.inputs",
    "WeightSyncManager": "windlass.transfer.sync",
    "gate": "windlass.controller",
    "serve_evals": "windlass.controller",
}
_lazy = lazily(__name__, _LAZY)
_moved.install()


def __getattr__(name: str) -> Any:
    return _moved.old_name(name) if name in _moved.NAMES else _lazy(name)


def __dir__() -> list[str]:
    return sorted(__all__)
