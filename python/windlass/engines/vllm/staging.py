"""What an order needs, brought to a worker's host and GPU while the model goes on computing.

Owns: :class:`Staging` and :class:`Bringing`, what a worker has under way. Called by :mod:`windlass.engines.vllm.extension`, whose other methods wait for it
before they touch the weights. Must not: run the engine's loader: a rehearsal puts other tensors in the place of the model's, so
that an image of a layout that is new is left to be checked between two steps (:attr:`Staging.unknown_layout`).

A delta that a receiver hands over is brought by Rust alone: a thread of Python would wait for the interpreter, which an engine
that computes gives back late. From an image it is a thread of Python, and so is what brings a version to the host.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.errors import WindlassInvalid, WindlassStale, WindlassTimeout
from windlass.load.order import Failure

if TYPE_CHECKING:
    from windlass._windlass import Layout
    from windlass.load.device import Arriving
    from windlass.load.live import Live
    from windlass.load.order import LoadOrder
    from windlass.plain import Plain
    from windlass.receive.pulling import Pulling, PullOrder
    from windlass.receive.reading import Selection

__all__ = ["Bringing", "Staging"]


class Bringing:
    """Brings a version to this host from its creation on; after the one before, whose connection it takes over.

    With ``place``, which is the worker's number and how many there are on this host, it brings only what the workers of the
    host read. For each new incarnation it :attr:`asks` what this worker reads of its layout, and goes on after :meth:`answer`.
    """

    def __init__(
        self, order: PullOrder, before: Bringing | None, place: tuple[int, int] | None = None
    ) -> None:
        self._order, self._before, self._place = order, before, place
        self._until = time.monotonic() + order.timeout
        self._pulling: Pulling | None = None
        #: The incarnation whose layout was asked about last.
        self._known: str | None = None
        self._asked: Layout | None = None
        self._answered = threading.Event()
        self._needs: Selection | Exception | None = None
        self._told: Plain = {"error": Failure(kind="bug", text="it ended without a word").to_dict()}
        self._thread = threading.Thread(target=self._run, name="windlass-pull", daemon=True)
        self._thread.start()

    def told(self) -> Plain:
        """Whether it is done; then what went wrong, or where the version is."""
        if self._thread.is_alive():
            return {"done": False, "error": None}
        return {"done": True, **self._told}

    @property
    def asks(self) -> Layout | None:
        """The layout of which it must know what this worker reads, found out between two steps of the model."""
        return None if self._answered.is_set() else self._asked

    def answer(self, needs: Selection | Exception) -> None:
        """What this worker reads of that layout, or why that cannot be told."""
        self._needs = needs
        self._answered.set()

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
            if before is not None and self._pulling is before._pulling:
                self._known = before._known
            if self._place is not None:
                self._say_what_is_read(self._pulling, self._place)
            left = max(0.1, self._until - time.monotonic())
            brought = self._pulling.bring(order.identity, left, exact=order.exact)
            self._told = {
                "error": None,
                "image": str(brought.image),
                "incarnation": brought.identity.incarnation,
                "version": brought.identity.version,
                "digest": brought.digest,
                "mode": "none" if brought.synced is None else brought.synced.mode,
                "wire_bytes": 0 if brought.synced is None else brought.synced.wire_bytes,
            }
        except Exception as e:
            self._told = {"error": Failure.of(e).to_dict()}

    def _say_what_is_read(self, pulling: Pulling, place: tuple[int, int]) -> None:
        from windlass import _windlass

        order = self._order
        if self._known == f"{order.incarnation:016x}":
            return
        if order.token is None:
            raise WindlassInvalid("a pull needs the agent's token", "give the order a token")
        tls_ca = None if order.tls_ca is None else Path(order.tls_ca)
        left = max(0.1, self._until - time.monotonic())
        incarnation, self._asked = _windlass.layout_of(order.endpoint, order.token, tls_ca, left)
        if not self._answered.wait(max(0.1, self._until - time.monotonic())):
            raise WindlassTimeout(
                "the driver did not ask in time whether the version is here, and what the worker reads is found out only then",
                "call windlass_pulled until it says done",
            )
        if isinstance(self._needs, Exception):
            raise self._needs
        assert self._needs is not None
        pulling.read(order.model_id, self._needs, *place)
        self._known = incarnation


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
