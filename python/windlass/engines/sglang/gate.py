"""The gate of one engine: paused, open for weights, finished, let go on; or fenced.

Owns: what is known about an engine while its weights change, and the calls around the change: pause, SGLang's own
session, flush, label, continue. Used by the loader and by :mod:`windlass.engines.sglang.colocated`. Must not: move weights.

An engine is **fenced** from the first write until a whole load is done: if that fails it stays paused. A failure before
the first write lets it go on with what it had.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from windlass.engines.sglang.engine import Engine
from windlass.engines.sglang.lease import Lease
from windlass.errors import (
    WindlassError,
    WindlassInvalid,
    WindlassStale,
    WindlassTimeout,
    WindlassUnsupported,
)

__all__ = ["SHORT", "Gate", "Passage", "Pause", "left", "short"]

log = logging.getLogger("windlass")

Pause = Literal["retract", "abort", "in_place", "wait"]

#: How long a call may take that only looks or switches something.
SHORT = 30.0
#: How long requests that were told to end may take to do so.
ENDING = 10.0


class Passage:
    """One load on its way through the gate."""

    def __init__(self, until: float, lease: Lease | None) -> None:
        #: The deadline.
        self.until = until
        self._touched = False
        self._lease = lease

    @property
    def touched(self) -> bool:
        """Whether the engine may have begun to write. Set before it is asked to."""
        return self._touched

    @touched.setter
    def touched(self, value: bool) -> None:
        if self._lease is not None and value != self._touched:
            (self._lease.touched if value else self._lease.paused)()
        self._touched = value


class Gate:
    """The state of one engine, and the way through."""

    def __init__(self, engine: Engine, pause: Pause, cache: Literal["reset", "keep"]) -> None:
        self.engine = engine
        self.pause: Pause = pause
        self.cache = cache
        #: A load began and did not finish.
        self.dirty = False
        #: Memory that the engine gave up, by tag: it sleeps.
        self.released: list[str] = []
        self._sessions: bool | None = None
        self._fenced = False
        self._busy = threading.Lock()
        # An engine in this process dies with it.
        self._lease = None if engine.address is None or pause == "wait" else Lease(*engine.address)

    @property
    def name(self) -> str:
        """What messages call the engine."""
        return self.engine.name

    @contextlib.contextmanager
    def alone(self, until: float) -> Iterator[None]:
        """One at a time."""
        self.enter(until)
        try:
            yield
        finally:
            self.leave()

    def enter(self, until: float) -> None:
        """Waits for its turn; :meth:`leave` ends it."""
        if not self._busy.acquire(timeout=left(until)):
            raise WindlassTimeout(f"{self.name}: another load is still going on")

    def leave(self) -> None:
        """Ends its turn."""
        self._busy.release()

    @contextlib.contextmanager
    def stopped(self, until: float) -> Iterator[Passage]:
        """The engine paused. Afterwards it goes on, unless something was written and not finished."""
        passage = self.passage(until)
        self.halt(until)
        try:
            yield passage
        except BaseException as e:
            self.failed(passage, e)
            raise
        self.passed(passage)

    def passage(self, until: float) -> Passage:
        """The way through the gate, for one load."""
        return Passage(until, None if self.dirty or self.released else self._lease)

    def passed(self, passage: Passage) -> None:
        """A whole load is done: the engine goes on."""
        if self._fenced:
            self.must("continue_generation", {}, "continue", passage.until, idempotent=True)
            self._let_go()
        else:
            self.go_on(passage.until)
        self.dirty = self._fenced = False

    def failed(self, passage: Passage, error: BaseException) -> None:
        """A load is not done: the engine goes on with what it had, or stays paused."""
        if passage.touched:
            self.fence()
        if self.dirty:
            log.error(
                "%s stays paused: a load began and did not finish (%s); load a whole version again, or restart it",
                self.name,
                error,
            )
            return
        try:
            self.go_on(time.monotonic() + SHORT)
        except WindlassError as e:
            log.error("%s: nothing was written, but it does not go on: %s", self.name, e)

    def fence(self) -> None:
        """Has the engine stand still until a whole load is done, also where it was not paused for the last one."""
        self.dirty = True
        self._let_go()
        if self.released or self._fenced:
            return
        mode = "retract" if self.pause == "wait" else self.pause
        try:
            self.must("pause_generation", {"mode": mode}, "fence", time.monotonic() + SHORT, idempotent=True)
            self._fenced = True
        except WindlassError as e:
            log.error("%s could not be paused after a load that did not finish: %s", self.name, e)

    def halt(self, until: float) -> None:
        """Pauses, unless loading takes the engine's own lock, or it sleeps already."""
        if self.pause != "wait" and not self.released:
            if self._lease is not None and not self.dirty:
                self._lease.paused()
            self.must("pause_generation", {"mode": self.pause}, "pause", until, idempotent=True)

    def go_on(self, until: float) -> None:
        """The end of :meth:`halt`."""
        if self.pause != "wait" and not self.released:
            self.must("continue_generation", {}, "continue", until, idempotent=True)
            self._let_go()

    def _let_go(self) -> None:
        if self._lease is not None:
            self._lease.over()

    @contextlib.contextmanager
    def open_for_weights(self, until: float) -> Iterator[None]:
        """SGLang's own session; :meth:`finish` closes it when all went well."""
        self.begin(until)
        try:
            yield
        except BaseException:
            self.give_up()
            raise

    def begin(self, until: float) -> None:
        """Opens the session that SGLang has from 0.5.21 on. Older ones need none, which is found out once."""
        if self._sessions is False:
            return
        body = {"selector": "target"}
        reply = self.engine.ask("begin_weight_update", body, stage="begin", timeout=left(until))
        self._sessions = reply.known
        if reply.known and not reply.ok:
            if "already open" not in reply.message:
                raise WindlassInvalid(f"{self.name}: begin: {reply.message}")
            # Of a driver that is gone. What was begun there is finished by what is loaded now.
            log.warning("%s has an open weight update of somebody else: it is taken over", self.name)

    @property
    def ends(self) -> bool:
        """Whether the end of a session post-processes weights once more: whether there are sessions."""
        return bool(self._sessions)

    def give_up(self) -> None:
        """Closes the session after a failure, if the engine still listens."""
        with contextlib.suppress(WindlassError):
            self.end(time.monotonic() + SHORT)

    def end(self, until: float) -> None:
        """Closes the session, if there are any."""
        if self._sessions:
            self.must("end_weight_update", {}, "end", until)

    def finish(self, label: str | None, until: float) -> None:
        """The end of a load that went well: session, cache, label."""
        self.end(until)
        if self.flushes:
            self.flush(until)
        if label is not None:
            body = {"new_version": label, "abort_all_requests": False}
            reply = self.engine.ask(
                "update_weight_version", body, stage="label", timeout=short(until), idempotent=True
            )
            if reply.known and not reply.ok:
                raise WindlassInvalid(f"{self.name}: the label {label} was refused: {reply.message}")

    @property
    def flushes(self) -> bool:
        """Whether a load ends with an empty cache. One that sleeps has none."""
        return self.cache == "reset" and not self.released

    def flush(self, until: float) -> None:
        """Empties the prefix cache. Requests that were ended are waited for; a refusal beyond that is an error."""
        deadline = time.monotonic() + min(ENDING, short(until))
        while True:
            reply = self.engine.flush(timeout=short(until))
            if reply.ok:
                return
            if time.monotonic() >= deadline:
                raise WindlassStale(
                    f"{self.name}: the prefix cache was not flushed: {reply.message}",
                    "requests are still running: pause with 'retract' or 'abort'",
                )
            time.sleep(0.05)

    def must(
        self, route: str, body: Mapping[str, Any], stage: str, until: float, *, idempotent: bool = False
    ) -> None:
        """A request that has to succeed."""
        reply = self.engine.ask(route, body, stage=stage, timeout=left(until), idempotent=idempotent)
        if not reply.known:
            raise WindlassUnsupported(reply.message, "see docs/sglang.md for the versions that have it")
        if not reply.ok:
            raise WindlassInvalid(f"{self.name}: {stage}: {reply.message}")


def left(until: float) -> float:
    """Seconds until a deadline; an error when it has passed."""
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise WindlassTimeout("the deadline of the load passed", "raise the timeout")
    return seconds


def short(until: float) -> float:
    """The same for a call that only looks or switches something."""
    return min(SHORT, left(until))
