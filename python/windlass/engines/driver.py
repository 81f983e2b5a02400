"""One engine, paused and loaded through the core.

Owns: :class:`EngineDriver`, the Python end of what ``windlass receive --engine`` does with one server: its lock, its journal
and the guard process that resumes the server if this process dies. Called by loaders. Must not: know a route of a server.

The server is **fenced** from the first write until a whole load is done: it stays paused if that fails, and the journal
says so to the next driver.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any, Literal, Protocol

from windlass import _windlass
from windlass.errors import WindlassError
from windlass.publish.supervise import own_environment, own_program

__all__ = ["EngineDriver", "Pauses", "Writing"]

log = logging.getLogger("windlass")


class Pauses(Protocol):
    """Pauses one engine for weights that this process writes."""

    @property
    def name(self) -> str:
        """What messages call the engine."""

    def pause(self, label: str | None, lease: float, timeout: float) -> bool:
        """Pauses it; ``label`` is to come. Answers whether an earlier load did not finish."""

    def touch(self, touched: bool) -> None:
        """A write is about to begin; or the engine refused it, and nothing was written."""

    def resume(self) -> None:
        """Everything is written: resumes it."""

    def fail(self, error: str) -> bool:
        """Resumes it if nothing was written. Answers whether it stays paused until a whole load is done."""

    def clear(self, timeout: float) -> None:
        """Flushes the prefix cache."""

    def label(self, label: str, timeout: float) -> None:
        """Names the version that was written."""


class Writing:
    """The time between a pause and its end."""

    def __init__(self, pauses: Pauses, label: str | None, lease: float, timeout: float) -> None:
        self._pauses, self._label = pauses, label
        self._touched = False
        #: An earlier load did not finish: this one must be whole.
        self.dirty = pauses.pause(label, lease, timeout)

    def touched(self, touched: bool = True) -> None:
        """Called before the first write; from here on a failure leaves the engine paused. With false: the engine refused, and
        nothing was written."""
        if touched != self._touched:
            self._pauses.touch(touched)
            self._touched = touched

    def done(self, clear: bool, timeout: float) -> None:
        """Everything is written: flush if ``clear``, name the version, resume."""
        if clear:
            self._pauses.clear(timeout)
        if self._label is not None:
            self._pauses.label(self._label, timeout)
        self._pauses.resume()

    def failed(self, error: BaseException) -> bool:
        """The engine goes on with what it had, or stays paused. Answers whether it stays."""
        stays = self._touched or self.dirty
        try:
            stays = self._pauses.fail(str(error))
        except WindlassError as e:
            log.error("%s could not be %s: %s", self._pauses.name, "paused" if stays else "resumed", e)
        if stays:
            log.error(
                "%s stays paused: a load began and did not finish (%s); load a whole version again, or restart it",
                self._pauses.name,
                error,
            )
        return stays


class EngineDriver:
    """Drives one server.

    >>> driver = EngineDriver("sglang", "http://127.0.0.1:30000", key="...")               # doctest: +SKIP
    >>> with driver.paused("step-8") as writing:                                           # doctest: +SKIP
    ...     writing.touched()
    ...     send_weights()

    - ``key``: the server's own API key.
    - ``pause``: ``keep``, ``wait`` or ``abort``, or SGLang's ``retract`` or ``in_place``. ``cache``: ``reset`` or ``keep``.
    - ``timeout``: of a load, and of the time from a pause to the first write; then the server goes on.
    - ``dir``: where the lock and the journal are. Drivers of one server must name the same.
    """

    def __init__(
        self,
        kind: Literal["vllm", "sglang"],
        url: str,
        *,
        key: str | None = None,
        pause: str = "keep",
        cache: str = "reset",
        timeout: float = 600.0,
        dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self._cache, self._timeout = cache, timeout
        options: dict[str, Any] = {"key": key, "pause": pause, "cache": cache, "dir": dir}
        self._arguments = kind, url, options
        self._made: tuple[int, _windlass.EngineDriver] | None = None

    @property
    def core(self) -> _windlass.EngineDriver:
        """Has the steps of :meth:`paused`. Made at first use; a forked child has its own, with a guard of its own."""
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
        links: str | os.PathLike[str],
        *,
        label: str | None = None,
        model_dir: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
    ) -> tuple[float, float]:
        """Has an SGLang server read an image, which must hold ``label`` if that is given: pause, load, flush, name, resume.

        It reads through the directory ``links``, which gets links to the image and to what ``model_dir`` has beside weights.
        The caller has checked that the image fits. Answers how many milliseconds the server was paused, and how many of
        them the load took.
        """
        limit = self._timeout if timeout is None else timeout
        return self.core.load(image_dir, links, label=label, model_dir=model_dir, lease=limit, timeout=limit)

    @contextlib.contextmanager
    def paused(
        self, label: str | None = None, *, clear: bool = True, timeout: float | None = None
    ) -> Iterator[Writing]:
        """The server paused, for weights that this process writes inside the block. See :class:`Writing`.

        At its end the prefix cache is flushed, unless it is to be kept or ``clear`` is false, the version is called ``label``,
        and the server goes on.
        """
        limit = self._timeout if timeout is None else timeout
        writing = Writing(self.core, label, limit, limit)
        try:
            yield writing
            writing.done(clear and self._cache == "reset", limit)
        except BaseException as e:
            writing.failed(e)
            raise
