"""What an order needs, brought to a worker's host and GPU while the model goes on computing.

Owns: :class:`Staging` and :class:`Bringing`, what a worker has under way. Called by :mod:`windlass.engines.vllm.extension`, whose other methods wait for it
before they touch the weights. Must not: run the engine's loader: a rehearsal puts other tensors in the place of the model's, so
that an image of a layout that is new is left to be checked between two steps (:attr:`Staging.unknown_layout`).

A delta that a receiver hands over is brought by Rust alone: a thread of Python would wait for the interpreter, which an engine
that computes gives back late. From an image it is a thread of Python, and so is what brings a version to the host.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from windlass.errors import WindlassStale, WindlassTimeout
from windlass.load.order import Failure

if TYPE_CHECKING:
    from windlass.load.device import Arriving
    from windlass.load.live import Live
    from windlass.load.order import LoadOrder
    from windlass.plain import Plain
    from windlass.receive.pulling import Pulling, PullOrder

__all__ = ["Bringing", "Staging"]


class Bringing:
    """Brings a version to this host from its creation on; after the one before, whose connection it takes over."""

    def __init__(self, order: PullOrder, before: Bringing | None) -> None:
        self._order, self._before = order, before
        self._pulling: Pulling | None = None
        self._told: Plain = {"error": Failure(kind="bug", text="it ended without a word").to_dict()}
        self._thread = threading.Thread(target=self._run, name="windlass-pull", daemon=True)
        self._thread.start()

    def told(self) -> Plain:
        """Whether it is done; then what went wrong, or where the version is."""
        if self._thread.is_alive():
            return {"done": False, "error": None}
        return {"done": True, **self._told}

    def _run(self) -> None:
        from windlass.receive.pulling import Pulling

        order, before = self._order, self._before
        try:
            if before is not None:
                self._before = None
                if before._pulling is not None and not before._pulling.follows(order):
                    # What is awaited from a trainer that is gone must not keep the next one waiting.
                    before._pulling.stop()
                before._thread.join()
            self._pulling = Pulling.of(order, None if before is None else before._pulling)
            brought = self._pulling.bring(order.identity, order.timeout, exact=order.exact)
            self._told = {
                "error": None,
                "image": str(brought.image),
                "incarnation": brought.identity.incarnation,
                "version": brought.identity.version,
                "digest": brought.digest,
                "wire_bytes": 0 if brought.synced is None else brought.synced.wire_bytes,
            }
        except Exception as e:
            self._told = {"error": Failure.of(e).to_dict()}


class Staging:
    """Stages an order from its creation on."""

    def __init__(self, live: Live, order: LoadOrder) -> None:
        #: What went wrong, once it is :attr:`done`: the order cannot be carried out.
        self.error: Exception | None = None
        #: Whether the order has to be checked between two steps instead.
        self.unknown_layout = False
        self._live, self._order = live, order
        self._thread: threading.Thread | None = None
        self._arriving: Arriving | None = None
        if order.delta is None:
            # The process may end while it is at work: nothing of the model is written.
            self._thread = threading.Thread(target=self._run, name="windlass-stage", daemon=True)
            self._thread.start()
            return
        self._arriving = live.begin_delta(order)
        if self._arriving is None:
            self.error = WindlassStale(
                f"the delta to version {order.version} cannot be applied to what the weights are",
                "load from the image",
            )

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or the other."""
        if self._thread is not None:
            return not self._thread.is_alive()
        if self._arriving is not None and self._arriving.job.done:
            self._arrived()
        return self._arriving is None

    def join(self, timeout: float | None) -> None:
        """Waits for the end; an error after ``timeout`` seconds, a minute beyond the order's own if not given."""
        if self._thread is not None:
            limit = self._order.timeout + 60.0 if timeout is None else timeout
            self._thread.join(limit)
            if self._thread.is_alive():
                raise WindlassTimeout(f"version {self._order.version} was not staged within {limit:g} s")
        elif self._arriving is not None:
            # It has the order's own deadline.
            self._arrived()

    def _arrived(self) -> None:
        arriving, self._arriving = self._arriving, None
        assert arriving is not None
        try:
            self._live.delta_arrived(arriving)
            self._live.check(self._order)
        except Exception as e:
            self.error = e

    def _run(self) -> None:
        live, order = self._live, self._order
        try:
            if not live.knows(order):
                self.unknown_layout = True
                return
            live.stage(order)
            live.check(order)
        except Exception as e:
            self.error = e
