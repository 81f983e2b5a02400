"""vLLM servers that a trainer brings versions to, by the routes of :mod:`windlass.engines.vllm.endpoint`.

Owns: :class:`Servers`. Called by the adapters of frameworks that reach engines by HTTP. Must not: import an engine.

Two steps, each callable alone: :meth:`Servers.pull` brings a version to the hosts of all servers while they generate,
:meth:`Servers.load` has each of them load it, which it does as one transaction of its own: nobody has to pause or resume it. A
server that is away is asked again until the deadline: one that was restarted gets the version then.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from windlass import _windlass
from windlass.engines.vllm.endpoint import PREFIX, PauseOptions
from windlass.errors import (
    WindlassDenied,
    WindlassError,
    WindlassInvalid,
    WindlassNotFound,
    WindlassPeerLost,
    WindlassTimeout,
)
from windlass.http import HttpClient
from windlass.load.order import LoadOrder
from windlass.transfer.client import EnginesFailed

if TYPE_CHECKING:
    from windlass.frameworks.sender import Source
    from windlass.identity import Identity

__all__ = ["Loaded", "Servers", "own_address"]

log = logging.getLogger("windlass")

T = TypeVar("T")
#: How long a server that does not answer is left alone before it is asked again.
AGAIN_S = 0.5
#: What a server needs to have the routes.
NEEDS = (
    "start it with windlass in its environment and VLLM_PLUGINS=windlass WINDLASS_TOKEN_FILE=FILE, and give the same file here "
    "(token_file=FILE)"
)


@dataclass(frozen=True)
class Loaded:
    """What one server did with a version."""

    url: str
    #: Bytes that came over the network to its host; 0 if another process of the host brought them.
    wire_bytes: int
    #: Until the version was on its host, while it generated.
    pull_s: float
    #: How long no token was generated.
    pause_s: float
    #: The whole load, most of it while it generated.
    load_s: float


class Servers:
    """Some vLLM servers, each with the token of its routes.

    ``image_dir`` is a directory on the servers' hosts, best in memory. ``pause`` says how generation is paused. ``timeout`` bounds one
    version: bringing and loading it everywhere; ``away`` how long a server may not answer meanwhile.
    """

    def __init__(
        self,
        urls: str | Iterable[str],
        *,
        token: str | None = None,
        token_file: str | Path | None = None,
        image_dir: str | None = None,
        pause: PauseOptions | None = None,
        timeout: float = 600.0,
        away: float = 120.0,
    ) -> None:
        if token is not None and token_file is not None:
            raise WindlassInvalid("give a token or the file that holds it, not both")
        if token_file is not None:
            token = _windlass.read_token(Path(token_file))
        self._token, self._image_dir, self._timeout = token, image_dir, timeout
        self._pause = pause or PauseOptions()
        self._away = away
        self._servers: dict[str, HttpClient] = {}
        for url in [urls] if isinstance(urls, str) else urls:
            self.add(url)
        #: What was brought to which server last, and how: (image, bytes, seconds).
        self._brought: dict[str, tuple[Identity, str, int, float]] = {}

    @property
    def urls(self) -> list[str]:
        """Their addresses."""
        return list(self._servers)

    def add(self, url: str) -> str:
        """One more server, from the next version on; its address as it is known here."""
        client = HttpClient(url, token=self._token, timeout=self._timeout, attempts=1)
        self._servers[client.url] = client
        return client.url

    def only(self, url: str) -> Servers:
        """A server that is not among them yet, alone."""
        how: dict[str, Any] = {"image_dir": self._image_dir, "pause": self._pause, "timeout": self._timeout}
        return Servers(url, token=self._token, away=self._away, **how)

    def remove(self, url: str) -> None:
        """One server less."""
        self._servers.pop(url.rstrip("/"), None)

    def check(self, timeout: float | None = None) -> list[dict[str, Any]]:
        """Waits until all of them answer, and returns what they say of themselves. An error if one has not our routes."""

        def ask(client: HttpClient, until: float) -> dict[str, Any]:
            try:
                return client.get(f"{PREFIX}/status", stage="ask the engine", timeout=_left(until)).object()
            except WindlassNotFound as e:
                raise WindlassInvalid(f"{client.url} has no routes of windlass", NEEDS) from e
            except WindlassDenied as e:
                raise WindlassDenied(f"{client.url} does not accept the token that was given", NEEDS) from e

        return self._each("answer", ask, timeout)

    def pull(self, source: Source, identity: Identity, timeout: float | None = None) -> None:
        """Brings a version to the hosts of all servers, while they generate."""

        def bring(client: HttpClient, until: float) -> None:
            self._bring(client, source, identity, until)

        self._each("pull", bring, timeout)

    def load(
        self, source: Source, identity: Identity, digest: str = "", timeout: float | None = None
    ) -> list[Loaded]:
        """Has all servers load a version that was brought to them; it is brought again to one that was away."""

        def load(client: HttpClient, until: float) -> Loaded:
            image, size, seconds = self._bring(client, source, identity, until)
            order = LoadOrder(
                **asdict(identity),
                image=image,
                digest=digest,
                timeout=_left(until),
            )
            body = {"order": order.to_dict(), "pause": self._pause.to_dict()}
            try:
                told = client.post(
                    f"{PREFIX}/load", body, stage="load the version", timeout=_left(until)
                ).object()
            except WindlassPeerLost:
                # What is on its host when it is back is not known.
                self._brought.pop(client.url, None)
                raise
            return Loaded(client.url, size, seconds, told["pause_ms"] / 1e3, told["ms"] / 1e3)

        return self._each("load", load, timeout)

    def _bring(
        self, client: HttpClient, source: Source, identity: Identity, until: float
    ) -> tuple[str, int, float]:
        known = self._brought.get(client.url)
        if known is not None and known[0] == identity:
            return known[1:]
        body = source.order(identity, _left(until), self._image_dir)
        said = client.post(f"{PREFIX}/pull", body, stage="pull the version", timeout=_left(until)).object()
        told = said["image"], said["wire_bytes"], said["ms"] / 1e3
        self._brought[client.url] = (identity, *told)
        return told

    def _each(self, what: str, act: Callable[[HttpClient, float], T], timeout: float | None) -> list[T]:
        """Does something with all servers at once; errors of all of them in one."""
        # Servers may be added and removed meanwhile.
        clients = list(self._servers.values())
        if not clients:
            raise WindlassInvalid("there are no servers to bring a version to")
        until = time.monotonic() + (self._timeout if timeout is None else timeout)
        done: dict[str, T] = {}
        failures: dict[str, BaseException] = {}

        def one(client: HttpClient) -> None:
            try:
                done[client.url] = _answered(client, act, until, self._away)
            except WindlassError as e:
                failures[client.url] = e

        with ThreadPoolExecutor(len(clients), thread_name_prefix="windlass-servers") as pool:
            list(pool.map(one, clients))
        if failures:
            raise EnginesFailed.at(what, failures, len(clients))
        return [done[client.url] for client in clients]


def _answered(client: HttpClient, act: Callable[[HttpClient, float], T], until: float, away: float) -> T:
    """What a server answers, once it does: one that is away may be on its way back."""
    gone: float | None = None
    while True:
        try:
            return act(client, until)
        except WindlassPeerLost as e:
            if gone is None:
                gone = time.monotonic()
                log.warning("%s does not answer, and is asked again for %g s: %s", client.url, away, e)
            if time.monotonic() + AGAIN_S >= min(until, gone + away):
                raise WindlassTimeout(f"{e}; it did not come back in time", e.advice) from e
            time.sleep(AGAIN_S)


def _left(until: float) -> float:
    return max(0.1, until - time.monotonic())


def own_address(urls: Sequence[str]) -> str | None:
    """The address by which servers on other hosts reach this one; ``None`` if all of them are here."""
    for url in urls:
        host = urlsplit(url).hostname
        try:
            found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        except OSError as e:
            raise WindlassInvalid(
                f"the host of {url} has no address: {e}", "see whether its name is right"
            ) from e
        for family, kind, _, _, address in found:
            try:
                with socket.socket(family, kind) as probe:
                    # Nothing is sent: the system only says which way it would go.
                    probe.connect(address)
                    own = str(probe.getsockname()[0])
            except OSError:
                # No way leads there, as to an IPv6 address from a host without IPv6.
                continue
            if own != address[0] and not own.startswith("127."):
                return own
            break
    return None
