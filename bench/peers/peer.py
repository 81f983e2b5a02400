"""What a peer is: a way to bring a trainer's weights to an engine, by its own public interface.

Owns: :class:`Peer`, its two ends, and how they find each other. A peer is one small file in this folder, in the list of
``peers.listed``. The ends live in processes of their own (``sides``); what they share is a directory. Must not: measure.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

#: How long anything of a peer may take.
PATIENCE = 180.0
Tensors = Mapping[str, torch.Tensor]


class Pause:
    """When the engine could not serve. ``wait`` returns when its device has done what was started: what was begun before the pause
    is not part of it, and what is begun in it is."""

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self.seconds, self._wait = 0.0, wait
        #: When the last one ended.
        self.ended: float | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self._wait()
        began = time.monotonic()
        yield
        self._wait()
        self.ended = time.monotonic()
        self.seconds += self.ended - began


class Meeting:
    """A directory in shared memory in which the ends of a peer leave each other notes."""

    def __init__(self, home: Path, port: int, server: str = "") -> None:
        self.home, self.port = home, port
        #: Of a real engine, its URL.
        self.server = server

    def put(self, name: str, note: Any) -> None:
        path = self.home / f"{name}.json"
        path.with_suffix(".new").write_text(json.dumps(note))
        path.with_suffix(".new").rename(path)

    def get(self, name: str) -> Any:
        path, until = self.home / f"{name}.json", time.monotonic() + PATIENCE
        while not path.exists():
            if time.monotonic() > until:
                raise TimeoutError(f"the other end has not left {name!r} within {PATIENCE:g} s")
            time.sleep(0.002)
        return json.loads(path.read_text())


class Trainer(ABC):
    """The trainer's end. ``weights`` are the live parameters; a step changes them in place."""

    @abstractmethod
    def send(self, version: int) -> None:
        """Returns when the weights may change again."""

    def settle(self) -> None:
        """Returns when nothing goes on in the background."""

    def close(self) -> None:
        """Ends it."""


class Engine(ABC):
    """The engine's end. It writes into live parameters, inside ``pause()``."""

    @abstractmethod
    def take(self, version: int) -> None:
        """Is called before the version is sent, and returns when the live parameters are that version."""

    def settle(self) -> None:
        """Returns when nothing goes on in the background."""

    def digest(self) -> str | None:
        """Of the live parameters, where they are not those of this process."""
        return None

    def close(self) -> None:
        """Ends it."""


class Peer(ABC):
    """A way. ``settings`` says what is set other than by default, and why."""

    name: str
    what: str
    settings: str = ""
    #: The distributions whose versions are told.
    packages: tuple[str, ...] = ()
    #: Where the engine's parameters are: in its end's own process, or in a server of vllm or sglang.
    lane: str = "parameters"
    #: Bytes go through a directory instead of a connection.
    by_files: bool = False

    def missing(self) -> str | None:
        """Why it cannot run here."""
        return None

    def versions(self) -> dict[str, str]:
        found = {}
        for name in self.packages:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
        return found

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        raise NotImplementedError

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        raise NotImplementedError


def why_not(attempt: Callable[[], Any]) -> str | None:
    """The error of an attempt, in one line."""
    try:
        attempt()
    except BaseException as e:
        text = str(e).strip().splitlines()
        return f"{type(e).__name__}: {text[0] if text else ''}"
    return None


def lacks(module: str) -> str | None:
    """Why a module cannot be imported."""
    return why_not(lambda: importlib.import_module(module))


class Line:
    """One TCP connection between the ends: whole numbers and bytes, and no copies that can be avoided."""

    def __init__(self, link: socket.socket) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.settimeout(PATIENCE)
        self._link = link

    @classmethod
    def listen(cls, meeting: Meeting) -> Line:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(PATIENCE)
            meeting.put("line", server.getsockname()[1])
            return cls(server.accept()[0])

    @classmethod
    def connect(cls, meeting: Meeting) -> Line:
        return cls(socket.create_connection(("127.0.0.1", meeting.get("line")), PATIENCE))

    def say(self, *numbers: int) -> None:
        self._link.sendall(struct.pack(f"<{len(numbers)}q", *numbers))

    def hear(self, count: int = 1) -> tuple[int, ...]:
        return struct.unpack(f"<{count}q", self.read(bytearray(8 * count)))

    def write(self, data: Any) -> None:
        self._link.sendall(data)

    def read(self, into: Any) -> Any:
        view = memoryview(into).cast("B")
        while view:
            count = self._link.recv_into(view)
            if not count:
                raise ConnectionError("the other end has closed the connection")
            view = view[count:]
        return into

    def close(self) -> None:
        self._link.close()


def raw(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor, in place."""
    return tensor.view(-1).view(torch.uint8).numpy()


class Landing:
    """Where an engine's end receives whole tensors: in the live parameters, which then are paused all the while, or in a copy of
    the model from which one copy is made in the pause."""

    def __init__(self, weights: Tensors, pause: Pause, staged: bool) -> None:
        self._weights, self._pause, self._staged = weights, pause, staged
        self.tensors = {n: torch.zeros_like(t) for n, t in weights.items()} if staged else dict(weights)

    @contextlib.contextmanager
    def open(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """While whole tensors are received."""
        if not self._staged:
            with self._pause():
                yield self.tensors
            return
        yield self.tensors
        with self._pause():
            for name, tensor in self.tensors.items():
                self._weights[name].copy_(tensor)
