"""Versions for several processes of one host: one of them pulls, the others wait for it.

Owns: :class:`Pulling`. Called inside engines that are told of a version and where it comes from: vLLM's workers and servers, and the
workers of frameworks. Must not: load anything.

The one that pulls keeps the image open, which is cheaper than opening it for each version, and lets go of it when it is idle and
another process of the host asks for it: an engine that is told of no more versions must not keep them from the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from windlass import _windlass
from windlass.config import Config
from windlass.errors import WindlassCancelled, WindlassError, WindlassStale, WindlassTimeout
from windlass.identity import Identity
from windlass.receive.reading import Reading, Selection
from windlass.receive.receiver import Receiver, Synced

__all__ = ["Brought", "PullOrder", "Pulling"]

#: How many deltas stay beside the image, for engines that were away for some versions.
KEPT = 4
#: How often an image that another process changes is looked at.
LOOK_S = 0.01
#: After how long the process that pulls is asked to let go, and how often it looks whether it is.
ASK_S, IDLE_S = 2.0, 0.25


def default_image_dir() -> str:
    """Where images are if nobody says it: in memory, and each user's apart.

    >>> default_image_dir().startswith("/dev/shm/windlass-images-")
    True
    """
    return f"/dev/shm/windlass-images-{os.getuid()}"


@dataclass(frozen=True, kw_only=True)
class PullOrder(Config):
    """Which version to bring to this host, from which agent, into an image below which directory: by default one of this user's.

    >>> PullOrder.from_dict({"endpoint": "http://trainer:18100", "model_id": "policy", "incarnation": 1, "version": 3}).version
    3
    """

    endpoint: str
    model_id: str
    incarnation: int
    version: int
    token: str | None = field(default=None, repr=False)
    tls_ca: str | None = None
    image_dir: str | None = None
    timeout: float = 300.0
    #: Whether the incarnation is known. Before its first version, a trainer only knows one that is lower.
    exact: bool = True
    #: Whether each host brings only what its workers read: ``auto`` if the engine has workers on several hosts.
    slice: Literal["auto", "always", "never"] = "auto"

    def __post_init__(self) -> None:
        self._text("endpoint", "model_id")
        self._text("token", "tls_ca", "image_dir", optional=True)
        self._flag("exact")
        self._choice("slice", "auto", "always", "never")
        self._by_core("endpoint", _windlass.check_endpoint)
        self._by_core("model_id", _windlass.check_model_id)
        self._count("incarnation", 0, 2**64 - 1)
        self._count("version", 0, 2**64 - 1)
        self._seconds("timeout")

    @property
    def identity(self) -> Identity:
        """What is to be brought."""
        return Identity(self.model_id, self.incarnation, self.version)


@dataclass(frozen=True)
class Brought:
    """A version in an image of this host."""

    #: The image's directory.
    image: Path
    #: What it holds: what was asked for, or something newer.
    identity: Identity
    digest: str
    #: What was carried; ``None`` if another process of the host pulled it.
    synced: Synced | None


class Pulling:
    """Images below ``image_dir`` that follow the agent at ``endpoint``.

    The first process on the host to ask for a version is the one that pulls, for as long as it lives. After that the next to
    ask does.
    """

    def __init__(
        self,
        image_dir: str | os.PathLike[str],
        *,
        endpoint: str,
        token: str | None = None,
        tls_ca: str | None = None,
    ) -> None:
        self._directory = Path(image_dir)
        self._from = (endpoint, token, tls_ca)
        self._lock: int | None = None
        self._receiver: Receiver | None = None
        #: What the receiver keeps, if that is not all.
        self._slice: Selection | None = None
        #: What this process reads, if that is not all.
        self._reading: Reading | None = None
        #: Held while a version is brought.
        self._busy = threading.Lock()
        self._stopped = threading.Event()

    @classmethod
    def of(cls, order: PullOrder, before: Pulling | None = None) -> Pulling:
        """What carries out an order: the one before, if it follows the same agent into the same place."""
        if before is not None:
            if before.follows(order) and not before._stopped.is_set():
                return before
            before.close()
        directory = order.image_dir or default_image_dir()
        return cls(directory, endpoint=order.endpoint, token=order.token, tls_ca=order.tls_ca)

    def follows(self, order: PullOrder) -> bool:
        """Whether it brings what an order names: from the same agent, into the same place."""
        same = self._from == (order.endpoint, order.token, order.tls_ca)
        return same and self._directory == Path(order.image_dir or default_image_dir())

    def image_of(self, model_id: str) -> Path:
        """The directory of a model's image."""
        return self._directory / model_id

    def bring(self, wanted: Identity, timeout: float, *, exact: bool = True) -> Brought:
        """Returns when the image holds the version or a newer one: of the same incarnation, or unless ``exact`` of a later one."""
        with self._busy:
            return self._bring(wanted, timeout, exact)

    def read(self, model_id: str, selection: Selection, worker: int, workers: int) -> None:
        """From now on this process, the engine's ``worker``, reads no more of the model than ``selection``. It is one of
        ``workers`` on this host, which all say so; what any of them reads is brought."""
        with self._busy:
            if self._reading is not None:
                self._reading.close()
            _windlass.make_place(self._directory)
            self._reading = Reading(self._directory, model_id, selection, worker, workers)

    def stop(self) -> None:
        """Calls off what is being brought: it ends with an error. Returns at once."""
        self._stopped.set()

    def _bring(self, wanted: Identity, timeout: float, exact: bool) -> Brought:
        begun = time.monotonic()
        until = begun + timeout
        image = self.image_of(wanted.model_id)
        ask = begun + ASK_S
        while not self._is_first(wanted.model_id):
            self._check_stopped()
            # The one that pulls may die meanwhile: then it is up to this one.
            found = self._look(image, wanted.model_id, 0.0, self._reading)
            if found is not None and _is_enough(found.identity, wanted, exact):
                return found
            if time.monotonic() >= ask:
                ask += ASK_S
                self._wanted(wanted.model_id).touch()
            if time.monotonic() >= until:
                raise WindlassTimeout(
                    f"{wanted} did not come into the image {str(image)!r} within {timeout:g} s",
                    f"see the log of {self._holder(wanted.model_id)}, which pulls for this host",
                )
            time.sleep(LOOK_S)
        kept = None if self._reading is None else self._reading.of_all(until, self._stopped)
        if self._receiver is not None and kept != self._slice:
            # Workers read something else than before: the image is another one.
            self._receiver.close()
            self._receiver = None
        self._slice = kept
        if self._receiver is None:
            endpoint, token, tls_ca = self._from
            self._receiver = Receiver(
                self._directory,
                endpoint=endpoint,
                token=token,
                tls_ca=tls_ca,
                slice=kept,
                keep_deltas=KEPT,
                timeout=max(1.0, until - time.monotonic()),
            )
        left = max(1.0, until - time.monotonic())
        synced = self._receiver.wait(wanted.version, left, self._stopped)
        found = self._look(image, wanted.model_id, max(1.0, until - time.monotonic()), self._reading)
        if found is None or not _is_enough(found.identity, wanted, exact):
            raise WindlassStale(
                f"{wanted} was asked for, and the agent at {self._from[0]} has {found and found.identity}",
                "ask the trainer that publishes it",
            )
        # Whoever asked meanwhile has it now.
        self._wanted(wanted.model_id).unlink(missing_ok=True)
        return replace(found, synced=synced)

    def close(self) -> None:
        """Lets go of the image, which stays for the next one that pulls."""
        self._stopped.set()
        with self._busy:
            self._let_go()
            if self._reading is not None:
                self._reading.close()
                self._reading = None

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            raise WindlassCancelled("the pull was called off: another trainer publishes now")

    def _let_go(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _wanted(self, model_id: str) -> Path:
        """What a process makes that waits for the one that pulls."""
        return self._directory / f".wanted-{model_id}"

    def _puller(self, model_id: str) -> Path:
        return self._directory / f".puller-{model_id}"

    def _holder(self, model_id: str) -> str:
        with contextlib.suppress(OSError, ValueError):
            return f"process {int(self._puller(model_id).read_text())}"
        return "the process"

    def _watch_idle(self, model_id: str) -> None:
        """Lets go of the image when another process asks for it and nothing is being brought."""
        wanted = self._wanted(model_id)
        while not self._stopped.wait(IDLE_S):
            if wanted.exists() and self._busy.acquire(blocking=False):
                try:
                    self._let_go()
                finally:
                    self._busy.release()
                return

    def _is_first(self, model_id: str) -> bool:
        if self._lock is not None:
            return True
        _windlass.make_place(self._directory)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self._puller(model_id), flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        os.truncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        self._wanted(model_id).unlink(missing_ok=True)
        threading.Thread(target=self._watch_idle, args=(model_id,), name="windlass-idle", daemon=True).start()
        return True

    @staticmethod
    def _look(image: Path, model_id: str, timeout: float, reading: Reading | None) -> Brought | None:
        """What the image holds, if it has all that this process reads."""
        try:
            held = _windlass.open_image(image, 5.0, timeout, slices=reading is not None)
        except WindlassError:
            return None
        try:
            if reading is not None and not reading.covered_by(held):
                return None
            identity = Identity(model_id, int(held.incarnation, 16), held.version)
            return Brought(image, identity, held.digest or "", None)
        finally:
            held.finish()


def _is_enough(have: Identity, wanted: Identity, exact: bool) -> bool:
    if have.incarnation == wanted.incarnation:
        return have.version >= wanted.version
    return not exact and have.incarnation > wanted.incarnation
