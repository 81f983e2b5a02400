"""One version into an engine of one's own, by the best way there is.

Owns: :func:`take`, which joins a receiver and the live weights of a worker. Called by an engine's own loop, one call at a
time. Must not: know an engine; it is paused by what the caller passes.

::

    wait ─► fetch the delta ─► stage it, while the model computes ─► pause: apply ─► go on ─► the image follows
                 │ no delta, not on a GPU, other weights than its base
                 └─► the image is brought up to date ─► stage from it ─► pause: load ─► go on

Invariants:

1. The engine goes on only with one whole version: a load that fails halfway is repeated, whole, in the same pause, and if
   that fails too the error leaves through the pause (``test_an_engine_that_cannot_be_loaded_is_not_let_go_on``).
2. Weights that are behind the image or a mixture are loaded from it at once, without anything newer.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from windlass.errors import WindlassCorrupt, WindlassInvalid, WindlassNotFound, WindlassStale
from windlass.load.order import LoadOrder, Report

if TYPE_CHECKING:
    from windlass.load.live import Live
    from windlass.receive.receiver import Receiver

__all__ = ["take"]

log = logging.getLogger("windlass")

Pause = Callable[[], AbstractContextManager[Any]]


def take(
    live: Live, receiver: Receiver, pause: Pause, timeout: float = 60.0, load_timeout: float = 600.0
) -> Report | None:
    """Brings a worker's weights to the newest version, once there is one that they are not; ``None`` if none came within
    ``timeout``. ``report.live`` is the version that they are then. ``load_timeout`` bounds the rest: from a version that came
    to the weights and the image.

    ``pause()`` is a context manager: within it no step of the model is under way, and it is left when the next may begin. If
    it is left by an exception, the weights may be a mixture, and the engine must stay paused until a call went well. Errors
    outside of it, as of a publisher that is away, leave the engine at the version that it has: call again.

    >>> while serving:                                                                   # doctest: +SKIP
    ...     report = take(live, receiver, engine.pause)
    """
    if _is_behind(live, receiver):
        if not _has_image(receiver, timeout, load_timeout):
            return None
        until = time.monotonic() + load_timeout
    else:
        newer = receiver.wait_newer(timeout)
        if newer is None:
            return None
        # However late it came, it has as much time as any.
        until = time.monotonic() + load_timeout
        fetched = receiver.fetch(_left(until), newer)
        if fetched is None:
            receiver.sync(_left(until))
        elif live.stage_fetched(fetched, _left(until)):
            report = _apply(live, receiver, fetched, pause, until)
            if report is not None:
                return report
        else:
            receiver.show(fetched, _left(until))
    with receiver.hold(_left(until), _left(until)) as image:
        order = dataclasses.replace(LoadOrder.of(image), timeout=_left(until))
        live.stage(order)
        with pause():
            return _whole(live, order, live.load(order))


def _is_behind(live: Live, receiver: Receiver) -> bool:
    """Whether the image has something that the weights do not, or there is none."""
    report, image = live.report(), receiver.status().image
    if image is None or report.live is None or report.state != "clean":
        return True
    known = image.identity
    return (report.live.incarnation, report.live.version) != (int(known.incarnation), known.version)


def _has_image(receiver: Receiver, timeout: float, load_timeout: float) -> bool:
    """Brings the image to the newest version; false if there is none yet."""
    try:
        receiver.sync(load_timeout)
    except WindlassNotFound:
        # Nothing was published yet.
        if receiver.wait_newer(timeout) is None:
            return False
        receiver.sync(load_timeout)
    return True


def _apply(live: Live, receiver: Receiver, fetched: Any, pause: Pause, until: float) -> Report | None:
    """A staged delta into the weights, and then into the image. ``None`` if the image, which has it then, is to be loaded."""
    report = None
    with pause():
        try:
            report = live.load_fetched(fetched, _left(until))
        except (WindlassInvalid, WindlassStale) as e:
            # Nothing was written.
            log.info("version %d is loaded from the image: %s", fetched.version, e)
        if report is not None and report.state != "clean":
            receiver.show(fetched, _left(until))
            with receiver.hold(_left(until), _left(until)) as image:
                order = dataclasses.replace(LoadOrder.of(image), timeout=_left(until))
                return _whole(live, order, report)
    receiver.show(fetched, _left(until))
    return report


def _whole(live: Live, order: LoadOrder, report: Report) -> Report:
    """What a load left, loaded again if it is a mixture: first as it is quickest, then by the engine's own loader."""
    for how in ("dense", "session"):
        if report.state == "clean":
            return report
        log.warning("version %d is loaded again, whole: %s", order.version, report.error)
        report = live.load(dataclasses.replace(order, how=how))
    if report.state != "clean":
        raise WindlassCorrupt(
            f"version {order.version} could not be loaded, and the weights are a mixture: {report.error}",
            "keep the engine paused, and start it anew if it happens again",
        )
    return report


def _left(until: float) -> float:
    return max(1.0, until - time.monotonic())
