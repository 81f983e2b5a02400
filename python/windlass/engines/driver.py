"""One engine, paused and loaded through the core.

Owns: :class:`EngineDriver`, the Python end of what ``windlass receive --engine`` does with one server: its lock, its journal
and the guard process that resumes the server if this process dies. Called by loaders. Must not: know a route of a server.

The server is **fenced** from the first write until a whole load is done: it stays paused if that fails, and the journal
says so to the next driver.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from typing import Any, Literal, Protocol

from windlass import _windlass
from windlass.errors import WindlassError
from windlass.publish.supervise import own_environment, own_program

__all__ = ["EngineDriver", "Pauses", "Writing", "paused"]

log = logging.getLogger("windlass")


class Pauses(Protocol):
    """Pauses one engine for weights that this process writes."""

    @property
    def name(self) -> str:
        """What messages call the engine."""

    def pause(self, label: str | None, timeout: float) -> bool:
        """Pauses it; ``label`` is to come. Answers whether an earlier load did not finish."""

    def touch(self, touched: bool) -> None:
        """A write is about to begin; or the engine refused it, and nothing was written."""

    def clear(self, timeout: float) -> None:
        """Flushes the prefix cache."""

    def finish(self, clear: bool, label: str | None, timeout: float) -> None:
        """Everything is written: flush, name the version, resume."""

    def resume(self) -> None:
        """Nothing was written: resume. An engine whose weights are not whole stays paused."""

    def fence(self, error: str) -> None:
        """Stay paused until a whole load is done."""


class Writing:
    """The time between a pause and its end."""

    def __init__(self, pauses: Pauses, dirty: bool) -> None:
        self._pauses = pauses
        self._touched = False
        #: An earlier load did not finish: this one must be whole.
        self.dirty = dirty

    def touched(self, touched: bool = True) -> None:
        """Called before the first write; from here on a failure leaves the engine paused. With false: the engine refused, and
        nothing was written."""
        if touched != self._touched:
            self._pauses.touch(touched)
            self._touched = touched

    def failed(self, error: BaseException) -> bool:
        """The engine goes on with what it had, or stays paused. Answers whether it stays."""
        try:
            if self._touched:
                self._pauses.fence(str(error))
            else:
                self._pauses.resume()
        except WindlassError as e:
            log.error(
                "%s could not be %s: %s", self._pauses.name, "paused" if self._touched else "resumed", e
            )
        if self._touched or self.dirty:
            log.error(
                "%s stays paused: a load began and did not finish (%s); load a whole version again, or restart it",
                self._pauses.name,
                error,
            )
        return self._touched or self.dirty


@contextlib.contextmanager
def paused(pauses: Pauses, label: str | None, clear: bool, timeout: float) -> Iterator[Writing]:
    """The engine paused inside the block; at its end it is flushed if ``clear``, called ``label``, and resumed."""
    writing = Writing(pauses, pauses.pause(label, timeout))
    try:
        yield writing
        pauses.finish(clear, label, timeout)
    except BaseException as e:
        writing.failed(e)
        raise


class EngineDriver:
    """Drives one server.

    >>> driver = EngineDriver("sglang", "http://127.0.0.1:30000", key="...")               # doctest: +SKIP
    >>> driver.load("/dev/shm/images/policy")["version"]                                   # doctest: +SKIP
    'windlass:0000000000000001:7'
    >>> with driver.paused("step-8") as writing:                                           # doctest: +SKIP
    ...     writing.touched()
    ...     send_weights()

    - ``token``: of the Windlass plugin in a vLLM server; ``key``: the server's own API key.
    - ``pause``: ``keep``, ``wait`` or ``abort``, or SGLang's ``retract`` or ``in_place``. ``cache``: ``reset`` or ``keep``.
    - ``lease``: seconds from a pause to the first write; then the server goes on. ``timeout``: of a load.
    - ``model_dir``: the checkpoint of the server, to compare an image with; ``unchecked`` if the caller has compared.
    - ``extras``: ``ignore`` or ``error``, for tensors that the server does not take.
    - ``disk``: an SGLang server loads from a path, whether it has the loader of Windlass or not.
    - ``dir``: where the lock and the journal are. Drivers of one server must name the same.
    """

    def __init__(
        self,
        kind: Literal["vllm", "sglang"],
        url: str,
        *,
        token: str | None = None,
        key: str | None = None,
        pause: str = "keep",
        cache: str = "reset",
        lease: float = 60.0,
        timeout: float = 600.0,
        model_dir: str | os.PathLike[str] | None = None,
        extras: str = "ignore",
        disk: bool = False,
        unchecked: bool = False,
        dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self._cache, self._timeout = cache, timeout
        options: dict[str, Any] = {
            "token": token,
            "key": key,
            "pause": pause,
            "cache": cache,
            "lease": lease,
            "timeout": timeout,
            "model_dir": model_dir,
            "extras": extras,
            "disk": disk,
            "unchecked": unchecked,
            "dir": dir,
        }
        self._arguments = kind, url, options
        self._made: tuple[int, _windlass.EngineDriver] | None = None

    @property
    def core(self) -> _windlass.EngineDriver:
        """Has the steps of :meth:`paused`. Made at first use, because it makes a directory; a forked child has its own, with a
        guard of its own."""
        if self._made is None or self._made[0] != os.getpid():
            kind, url, options = self._arguments
            core = _windlass.EngineDriver(
                kind, url, program=own_program(), environment=own_environment(), **options
            )
            self._made = os.getpid(), core
        return self._made[1]

    def load(
        self,
        image_dir: str | os.PathLike[str],
        *,
        label: str | None = None,
        links: str | os.PathLike[str] | None = None,
        model_dir: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Loads the version in an image, which must be ``label`` if that is given: check, pause, load, flush, name, resume.

        ``links`` is the directory of links for a server that loads from a path. Answers ``version``, ``how``, ``pause_ms``,
        ``load_ms``, ``extras``, ``retried`` and ``slow``.
        """
        done: dict[str, Any] = json.loads(
            self.core.load(image_dir, label=label, links=links, model_dir=model_dir, timeout=timeout)
        )
        return done

    def status(self, timeout: float = 30.0) -> dict[str, Any]:
        """What the server and its journal say: ``engine``, ``live``, ``phase`` (of a load that did not end)."""
        status: dict[str, Any] = json.loads(self.core.status(timeout))
        return status

    def is_dirty(self) -> bool:
        """Whether a load began and did not end, by the journal: the server needs a whole one."""
        return self.core.is_dirty()

    def paused(
        self, label: str | None = None, *, clear: bool = True, timeout: float | None = None
    ) -> contextlib.AbstractContextManager[Writing]:
        """The server paused, for weights that this process writes inside the block. See :class:`Writing`.

        At its end the prefix cache is flushed, unless it is to be kept or ``clear`` is false, the version is called ``label``,
        and the server goes on.
        """
        limit = self._timeout if timeout is None else timeout
        return paused(self.core, label, clear and self._cache == "reset", limit)
