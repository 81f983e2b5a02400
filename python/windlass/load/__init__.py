"""Loading versions from an image into the live weights of an engine's worker.

:class:`LoadOrder` and :class:`Report` are what a driver and a worker say to each other; :class:`Live` is the worker's
side. ``Live`` needs torch and is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from windlass.load.order import Failure, Last, LiveVersion, LoadOrder, PlanSummary, Report, label, version_of

if TYPE_CHECKING:
    from windlass.load.live import Live, Session

__all__ = [
    "Failure",
    "Last",
    "Live",
    "LiveVersion",
    "LoadOrder",
    "PlanSummary",
    "Report",
    "Session",
    "label",
    "version_of",
]


def __getattr__(name: str) -> Any:
    if name not in ("Live", "Session"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from windlass.load import live

    return getattr(live, name)
