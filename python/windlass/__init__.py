"""Windlass: weight sync for RL post-training, bit-exact, versioned, at hardware speed."""

from __future__ import annotations

from windlass._windlass import __version__
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

__all__ = [
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
]
