"""Loading versions from an image into the live weights of an engine's worker.

:class:`LoadOrder` and :class:`Report` are what a driver and a worker say to each other; :class:`Live` is the worker's
side, :func:`take` the loop's part of an engine of one's own, and :class:`ModelSession` a torch model as its worker. What
needs torch is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass._lazy import lazily
from windlass.load.order import Failure, Last, LiveVersion, LoadOrder, PlanSummary, Report, label, version_of
from windlass.load.take import take

if TYPE_CHECKING:
    from windlass.load.live import Live, Session
    from windlass.load.model import ModelSession

__all__ = [
    "Failure",
    "Last",
    "Live",
    "LiveVersion",
    "LoadOrder",
    "ModelSession",
    "PlanSummary",
    "Report",
    "Session",
    "label",
    "take",
    "version_of",
]


_LATER = {
    "Live": "windlass.load.live",
    "Session": "windlass.load.live",
    "ModelSession": "windlass.load.model",
}
__getattr__ = lazily(__name__, _LATER)
