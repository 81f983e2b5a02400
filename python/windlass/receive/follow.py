"""An engine of your own that follows a publisher: its weights, and how it is paused.

Owns: :class:`Follower`, the order in which a version comes into an engine (pull, stage, pause, load, resume), what
happens when a load fails, and the retries of :meth:`Follower.run`. vLLM and SGLang have loaders of their own; this is for
everything else. Must not: know what an engine is, or run in the background: the caller's thread does the work, in
:meth:`Follower.step` or :meth:`Follower.run`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from windlass import _windlass
from windlass.errors import (
    WindlassCorrupt,
    WindlassError,
    WindlassInvalid,
    WindlassNotFound,
    WindlassPeerLost,
    WindlassTimeout,
)
from windlass.plain import numbers
from windlass.receive.receiver import Image, Receiver

__all__ = ["Follower", "Loaded"]

log = logging.getLogger("windlass")

Pause = Callable[[], AbstractContextManager[object]]

#: The first and the longest rest of :meth:`Follower.run` after a failure; each one in a row is twice as long as the one
#: before, less up to a quarter of it.
FIRST_REST_S, LONGEST_REST_S = 0.1, 60.0
#: How often it looks for something newer meanwhile.
GLANCE_S = 0.5


@dataclass(frozen=True)
class Loaded:
    """One version that an engine has taken over."""

    version: int
    incarnation: int
    digest: str | None
    #: How the image came by it: "full", "delta", "fuzzy", or "none" if it was there already. Of live weights
    #: (:class:`windlass.load.Live`) how they were written: "sparse", "dense" or "session".
    mode: str
    #: How long the engine stood still.
    pause_ms: float
    #: How long the load itself took.
    load_ms: float

    def metrics(self, prefix: str = "windlass/load_") -> dict[str, float]:
        """What a logger such as wandb or TensorBoard plots: numbers by flat names.

        >>> Loaded(7, 1, None, "delta", 12.0, 9.0).metrics()
        {'windlass/load_version': 7, 'windlass/load_pause_ms': 12.0, 'windlass/load_load_ms': 9.0}
        """
        return numbers(prefix, self, ("version", "pause_ms", "load_ms"))


@runtime_checkable
class LiveWeights(Protocol):
    """Weights that take versions over by themselves: :class:`windlass.load.Live`."""

    def take(self, receiver: Receiver, pause: Pause, timeout: float = ...) -> Any:
        """:func:`windlass.load.take`."""


class Follower:
    """Keeps an engine at the newest version that a :class:`~windlass.Receiver` has.

    ``load`` is either the live weights of a torch model (:class:`windlass.load.Live`), which take each version by the best
    way there is, on a GPU before the image has it; or a function. ``load(image)`` puts a version into the engine:
    :attr:`Image.tensors` are the image's own memory, whole and proved by the digest, valid until ``load`` returns. ``pause()`` gives a context manager that is entered before ``load`` and
    left after it; without one the engine is not paused. The pull goes on before the pause: the engine stands still for
    the load only. ``stage(image)`` is called before the pause as well, with the version that is about to be loaded, to do
    what can be done while the engine serves (:meth:`windlass.load.Live.stage`); if it fails, ``load`` does all of it.

    If ``load`` raises, it is called once more, still paused, because what it had begun must be finished. If that fails
    too, the context manager is left with the error (do not resume then: the weights may be of two versions), the
    follower is :attr:`fenced`, and the next step tries again whether or not there is a newer version.

    >>> follower = Follower(receiver, load=lambda image: model.load_state_dict(image.tensors))    # doctest: +SKIP
    >>> for loaded in follower.run():                                                             # doctest: +SKIP
    ...     print(loaded.version, loaded.pause_ms)
    """

    def __init__(
        self,
        receiver: Receiver,
        load: Callable[[Image], object] | LiveWeights,
        pause: Pause = contextlib.nullcontext,
        stage: Callable[[Image], object] | None = None,
    ) -> None:
        self._receiver = receiver
        if stage is not None and isinstance(load, LiveWeights):
            raise WindlassInvalid("live weights stage by themselves: give Follower no stage=")
        self._load = load
        self._pause = pause
        self._stage = stage
        self._live: tuple[int, int] | None = None
        self._fenced = False

    @property
    def live(self) -> tuple[int, int] | None:
        """What the engine has: (incarnation, version). ``None`` before the first load and while it is fenced."""
        return self._live

    @property
    def fenced(self) -> bool:
        """A load began and did not finish: the engine must not serve."""
        return self._fenced

    def step(self, timeout: float = 60.0) -> Loaded | None:
        """Brings the engine to the newest version, if that is newer than what it has; waits for one until ``timeout``.

        ``None`` if nothing newer came. An error leaves the engine as it was, unless it is :attr:`fenced`.
        """
        if isinstance(self._load, LiveWeights):
            return self._step_live(self._load, timeout)
        until = time.monotonic() + timeout
        mode = "none"
        while True:
            with contextlib.suppress(WindlassNotFound):  # nothing is published yet
                mode = self._receiver.sync(max(0.1, until - time.monotonic()))["mode"]
            # What an engine has is not what its image has: the image may be ahead, or of an earlier run.
            if self._receiver.version is not None and (loaded := self._take(self._load, mode)) is not None:
                return loaded
            left = until - time.monotonic()
            if left <= 0 or self._receiver.wait_newer(left) is None:
                return None

    def _step_live(self, weights: LiveWeights, timeout: float) -> Loaded | None:
        paused = 0.0

        @contextlib.contextmanager
        def pause() -> Iterator[None]:
            nonlocal paused
            start, before = time.monotonic(), self._live
            with self._pause():
                self._live, self._fenced = None, True
                yield
            # A pause in which nothing was written is left like this, too.
            self._live, self._fenced = before, False
            paused += time.monotonic() - start

        report = weights.take(self._receiver, pause, timeout)
        if report is None:
            return None
        live, last = report.live, report.last
        self._live = (live.incarnation, live.version)
        image = self._receiver.status().image
        digest = None
        if image is not None and (int(image.identity.incarnation), image.identity.version) == self._live:
            digest = image.digest
        return Loaded(live.version, live.incarnation, digest, last.how, paused * 1e3, last.ms)

    def _take(self, load: Callable[[Image], object], mode: str) -> Loaded | None:
        with self._receiver.hold() as image:
            if (image.incarnation, image.version) == self._live:
                return None
            self._prepare(image)
            start = time.monotonic()
            with self._pause():
                self._live = None
                loading = time.monotonic()
                self._load_whole(load, image)
                loaded = time.monotonic()
        paused = time.monotonic() - start
        # Leaving the hold proved that the image was not taken back while it was read.
        self._live = (image.incarnation, image.version)
        self._fenced = False
        return Loaded(
            image.version, image.incarnation, image.digest, mode, paused * 1e3, (loaded - loading) * 1e3
        )

    def _prepare(self, image: Image) -> None:
        if self._stage is None or self._fenced:
            return
        try:
            self._stage(image)
        except Exception as e:
            log.warning("version %d could not be staged, and is loaded nevertheless: %s", image.version, e)

    def _load_whole(self, load: Callable[[Image], object], image: Image) -> None:
        self._fenced = True
        try:
            load(image)
        except Exception as first:
            log.warning("loading version %d failed, once more: %s", image.version, first)
            try:
                load(image)
            except Exception as e:
                raise WindlassCorrupt(
                    f"version {image.version} could not be loaded, twice: {e}",
                    "the engine may hold parts of two versions: keep it paused until a load succeeds",
                ) from e

    def run(self, until: int | None = None, patience: float = 5.0) -> Iterator[Loaded]:
        """Every version as it is loaded, for ever or until version ``until`` is there.

        A publisher that is away is waited for, and a version that could not be fetched is tried again: after 0.1 s, then
        after twice as long each time, up to a minute. A success begins anew, and what is newer is tried at once. Other
        errors end it; calling it again goes on.
        """
        backoff = _windlass.Backoff()
        while True:
            try:
                loaded = self.step(patience)
            except (WindlassPeerLost, WindlassTimeout) as e:
                if not self._rest(backoff, e):
                    backoff.reset()
                continue
            backoff.reset()
            if loaded is not None:
                yield loaded
                if until is not None and loaded.version >= until:
                    return

    def _rest(self, backoff: _windlass.Backoff, error: Exception) -> bool:
        """Waits before the next attempt, or until the publisher is back. Whether failures go on counting: not if there is
        something newer to try."""
        rest, longer = backoff.failed(FIRST_REST_S, LONGEST_REST_S, time.monotonic_ns())
        if longer:
            log.info("%s; trying again in %.1f s", error, rest)
        ends = time.monotonic() + rest
        failed = self._newest()
        while (left := ends - time.monotonic()) > 0:
            time.sleep(min(left, GLANCE_S))
            newest = self._newest() if ends > time.monotonic() else None
            if newest is not None and newest != failed:
                return failed is None
        return True

    def _newest(self) -> tuple[int, int] | None:
        """What the publisher has that the image has not, if it answers."""
        with contextlib.suppress(WindlassError):
            return self._receiver.wait_newer(0.05)
        return None
