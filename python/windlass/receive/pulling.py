"""Versions for several processes of one host: one of them pulls, the others wait for it.

Owns: :class:`Pulling`. Called inside engines that are told of a version and where it comes from: vLLM's workers and servers, and the
workers of frameworks. Must not: keep a thread, or load anything.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from windlass import _windlass
from windlass.config import Config
from windlass.errors import WindlassError, WindlassStale, WindlassTimeout
from windlass.identity import Identity
from windlass.receive.receiver import Receiver, Synced

__all__ = ["Brought", "PullOrder", "Pulling"]

#: How many deltas stay beside the image, for engines that were away for some versions.
KEPT = 4
#: How often an image that another process changes is looked at.
LOOK_S = 0.01


@dataclass(frozen=True, kw_only=True)
class PullOrder(Config):
    """Which version to bring to this host, from which agent, into an image below which directory.

    >>> PullOrder.from_dict({"endpoint": "http://trainer:18100", "model_id": "policy", "incarnation": 1, "version": 3}).image_dir
    '/dev/shm/windlass-images'
    """

    endpoint: str
    model_id: str
    incarnation: int
    version: int
    token: str | None = field(default=None, repr=False)
    tls_ca: str | None = None
    image_dir: str = "/dev/shm/windlass-images"
    timeout: float = 300.0

    def __post_init__(self) -> None:
        self._text("endpoint", "model_id", "image_dir")
        self._text("token", "tls_ca", optional=True)
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

    @classmethod
    def of(cls, order: PullOrder, before: Pulling | None = None) -> Pulling:
        """What carries out an order: the one before, if it follows the same agent into the same place."""
        if before is not None:
            same = before._from == (order.endpoint, order.token, order.tls_ca)
            if same and before._directory == Path(order.image_dir):
                return before
            before.close()
        return cls(order.image_dir, endpoint=order.endpoint, token=order.token, tls_ca=order.tls_ca)

    def image_of(self, model_id: str) -> Path:
        """The directory of a model's image."""
        return self._directory / model_id

    def bring(self, wanted: Identity, timeout: float) -> Brought:
        """Returns when the image holds the version or a newer one: of the same incarnation, or of a later one."""
        until = time.monotonic() + timeout
        image = self.image_of(wanted.model_id)
        while not self._is_first():
            # The one that pulls may die meanwhile: then it is up to this one.
            found = self._look(image, wanted.model_id, 0.0)
            if found is not None and _is_enough(found.identity, wanted):
                return found
            if time.monotonic() >= until:
                raise WindlassTimeout(
                    f"{wanted} did not come into the image {str(image)!r} within {timeout:g} s",
                    "see the log of the process on this host that pulls",
                )
            time.sleep(LOOK_S)
        if self._receiver is None:
            endpoint, token, tls_ca = self._from
            self._receiver = Receiver(
                self._directory,
                endpoint=endpoint,
                token=token,
                tls_ca=tls_ca,
                keep_deltas=KEPT,
                timeout=max(1.0, until - time.monotonic()),
            )
        synced = self._receiver.wait(wanted.version, max(1.0, until - time.monotonic()))
        found = self._look(image, wanted.model_id, max(1.0, until - time.monotonic()))
        if found is None or not _is_enough(found.identity, wanted):
            raise WindlassStale(
                f"{wanted} was asked for, and the agent at {self._from[0]} has {found and found.identity}",
                "ask the trainer that publishes it",
            )
        return replace(found, synced=synced)

    def close(self) -> None:
        """Lets go of the image, which stays for the next one that pulls."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _is_first(self) -> bool:
        if self._lock is not None:
            return True
        _windlass.make_place(self._directory)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self._directory / ".puller", flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    @staticmethod
    def _look(image: Path, model_id: str, timeout: float) -> Brought | None:
        try:
            held = _windlass.open_image(image, 5.0, timeout)
        except WindlassError:
            return None
        identity = Identity(model_id, int(held.incarnation, 16), held.version)
        found = Brought(image, identity, held.digest or "", None)
        held.finish()
        return found


def _is_enough(have: Identity, wanted: Identity) -> bool:
    return (have.incarnation, have.version) >= (wanted.incarnation, wanted.version)
