"""The gate of one engine: paused, open for weights, finished, let go on; or fenced.

Owns: who may load, what is known about an engine while its weights change, and SGLang's own session around the change. A
server is paused and resumed by :class:`windlass.engines.driver.EngineDriver`, an engine in this process by
:class:`InProcess`. Used by the loader and by :mod:`windlass.engines.sglang.colocated`. Must not: move weights.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from windlass.engines.driver import EngineDriver, Pauses, Writing
from windlass.engines.sglang.engine import Embedded, Engine, Server
from windlass.errors import (
    WindlassError,
    WindlassInvalid,
    WindlassStale,
    WindlassTimeout,
    WindlassUnsupported,
)

__all__ = ["SHORT", "Gate", "InProcess", "Passage", "Pause", "left", "must", "short"]

log = logging.getLogger("windlass")

Pause = Literal["retract", "abort", "in_place", "wait"]

#: How long a call may take that only looks or switches something.
SHORT = 30.0
#: How long requests that were told to end may take to do so.
ENDING = 10.0


class InProcess:
    """Pauses an ``sglang.Engine`` in this process, by its own methods. It dies with the process: it needs no guard."""

    def __init__(self, engine: Embedded, pause: Pause) -> None:
        self.name = engine.name
        self._engine, self._pause = engine, pause
        #: The last load did not finish.
        self._dirty = False
        self._touched = False

    def pause(self, label: str | None, lease: float, timeout: float) -> bool:
        """Pauses, unless the load itself waits for requests to end."""
        self._touched = False
        if self._pause != "wait":
            must(self._engine, "pause_generation", {"mode": self._pause}, "pause", timeout)
        return self._dirty

    def touch(self, touched: bool) -> None:
        """From here on, or again, something is or nothing was written."""
        self._touched = touched

    def resume(self) -> None:
        """Resumes, unless the load needed no pause."""
        if self._pause != "wait" or self._dirty:
            must(self._engine, "continue_generation", {}, "continue", SHORT)
        self._dirty = False

    def fail(self, error: str) -> bool:
        """Resumes; or pauses, also if the load needed no pause, if its weights are of no version."""
        self._dirty = self._dirty or self._touched
        if not self._dirty:
            self.resume()
        else:
            mode = "retract" if self._pause == "wait" else self._pause
            must(self._engine, "pause_generation", {"mode": mode}, "fence", SHORT)
        return self._dirty

    def clear(self, timeout: float) -> None:
        """Flushes the prefix cache. Requests that were ended are waited for; a refusal beyond that is an error."""
        until = time.monotonic() + min(ENDING, timeout)
        while not (reply := self._engine.flush(timeout=timeout)).ok:
            if time.monotonic() >= until:
                raise WindlassStale(
                    f"{self.name}: the prefix cache was not flushed: {reply.message}",
                    "requests are still running: pause with 'retract' or 'abort'",
                )
            time.sleep(0.05)

    def label(self, label: str, timeout: float) -> None:
        """Names the version."""
        body = {"new_version": label, "abort_all_requests": False}
        must(self._engine, "update_weight_version", body, "label", timeout)


class Passage:
    """One load on its way through the gate."""

    def __init__(self, label: str | None, until: float, writing: Writing | None) -> None:
        self.label = label
        #: The deadline.
        self.until = until
        #: ``None`` for an engine that sleeps: it was paused before.
        self.writing = writing

    def touched(self, touched: bool = True) -> None:
        """The engine may begin to write; or, if false, has refused to."""
        if self.writing is not None:
            self.writing.touched(touched)


class Gate:
    """The state of one engine, and the way through."""

    def __init__(
        self,
        engine: Server | Embedded,
        pause: Pause,
        cache: Literal["reset", "keep"],
        *,
        timeout: float = 300.0,
        dir: Path | None = None,
    ) -> None:
        self.engine = engine
        self.pause: Pause = pause
        self.cache = cache
        #: A load began and did not finish.
        self.dirty = False
        #: Memory that the engine gave up, by tag: it sleeps.
        self.released: list[str] = []
        #: The label of what was loaded into one that sleeps.
        self._label: str | None = None
        self._sessions: bool | None = None
        self._busy = threading.Lock()
        #: Of a server.
        self.driver: EngineDriver | None = None
        self._in_process: InProcess | None = None
        if isinstance(engine, Embedded):
            self._in_process = InProcess(engine, pause)
        else:
            url, key = engine.address
            self.driver = EngineDriver(
                "sglang", url, key=key, pause=pause, cache=cache, timeout=timeout, dir=dir
            )

    @property
    def name(self) -> str:
        """What messages call the engine."""
        return self.engine.name

    @property
    def _pauses(self) -> Pauses:
        if self.driver is not None:
            return self.driver.core
        assert self._in_process is not None
        return self._in_process

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
    def stopped(self, label: str | None, until: float, *, flush: bool = True) -> Iterator[Passage]:
        """The engine paused. Afterwards it goes on, unless something was written and not finished."""
        passage = self.halt(label, until)
        try:
            yield passage
            self.passed(passage, flush=flush)
        except BaseException as e:
            self.failed(passage, e)
            raise

    def halt(self, label: str | None, until: float) -> Passage:
        """Pauses, unless it sleeps already."""
        if self.released:
            return Passage(label, until, None)
        writing = Writing(self._pauses, label, left(until), left(until))
        self.dirty = writing.dirty
        return Passage(label, until, writing)

    def passed(self, passage: Passage, *, flush: bool = True) -> None:
        """A whole load is done: the engine is flushed and goes on under its label."""
        if passage.writing is None:
            self._label = passage.label
        else:
            passage.writing.done(flush and self.cache == "reset", left(passage.until))
        self.dirty = False

    def failed(self, passage: Passage, error: BaseException) -> None:
        """A load is not done: the engine goes on with what it had, or stays paused."""
        if passage.writing is None:
            self.dirty = True
        else:
            self.dirty = passage.writing.failed(error)

    def load(self, image: str, links: Path, **how: Any) -> tuple[float, float]:
        """The whole load of an image by a server that reads it from a path."""
        assert self.driver is not None
        try:
            done = self.driver.load(image, links, **how)
        except BaseException:
            self.dirty = self.driver.core.is_dirty()
            raise
        self.dirty = False
        return done

    def sleep(self, tags: list[str], until: float) -> None:
        """Pauses, and has the engine give up memory."""
        passage = self.halt(None, until)
        assert passage.writing is not None
        try:
            self._pauses.clear(short(until))
            # From here on it has nothing to generate from, whatever the answer is.
            passage.touched()
            must(self.engine, "release_memory_occupation", {"tags": tags}, "sleep", left(until))
        except BaseException as e:
            self.failed(passage, e)
            raise
        self.dirty, self.released, self._label = True, tags, None

    def take_back(self, tags: list[str], until: float) -> None:
        """Has the engine take back memory that it gave up."""
        wanted = [tag for tag in tags if tag in self.released]
        if wanted:
            must(self.engine, "resume_memory_occupation", {"tags": wanted}, "wake", left(until))
            self.released = [tag for tag in self.released if tag not in wanted]

    def wake(self, until: float) -> None:
        """The end of :meth:`sleep`, when memory and weights are back."""
        if self._label is not None:
            self._pauses.label(self._label, left(until))
        self._pauses.resume()

    @contextlib.contextmanager
    def open_for_weights(self, until: float) -> Iterator[None]:
        """SGLang's own session."""
        self.begin(until)
        try:
            yield
            self.end(until)
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
            log.warning("%s has an open weight update of another driver: it is taken over", self.name)

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
            must(self.engine, "end_weight_update", {}, "end", left(until))


def must(engine: Engine, route: str, body: Mapping[str, object], stage: str, timeout: float) -> None:
    """A request that has to succeed."""
    reply = engine.ask(route, body, stage=stage, timeout=timeout)
    if not reply.known:
        raise WindlassUnsupported(reply.message, "see docs/sglang.md for the versions that have it")
    if not reply.ok:
        raise WindlassInvalid(f"{engine.name}: {stage}: {reply.message}")


def left(until: float) -> float:
    """Seconds until a deadline; an error when it has passed."""
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise WindlassTimeout("the deadline of the load passed", "raise the timeout")
    return seconds


def short(until: float) -> float:
    """The same for a call that only looks or switches something."""
    return min(SHORT, left(until))
