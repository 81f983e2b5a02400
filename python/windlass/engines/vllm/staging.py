"""What an order needs, brought to a worker's GPU while the model goes on computing.

Owns: :class:`Staging`, what a worker has under way. Called by :mod:`windlass.engines.vllm.extension`, whose other methods wait for it
before they touch the weights. Must not: run the engine's loader: a rehearsal puts other tensors in the place of the model's, so
that an image of a layout that is new is left to be checked between two steps (:attr:`Staging.unknown_layout`).

A delta that a receiver hands over is brought by Rust alone: a thread of Python would wait for the interpreter, which an engine
that computes gives back late. From an image it is a thread of Python, the one that a worker has.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from windlass.errors import WindlassStale, WindlassTimeout

if TYPE_CHECKING:
    from windlass.load.device import Arriving
    from windlass.load.live import Live
    from windlass.load.order import LoadOrder

__all__ = ["Staging"]


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
