"""A publisher and receivers that pass its versions on to each other, each on a host of its own.

Owns: :class:`Swarm`, for the tests of relays here and for `bench/relay.py`, and :class:`Service`, a process on a host with the events
that it has told, each with the time at which it was read. All hosts share one clock.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from hosts import PATIENCE, Bench, Host, run, until
from safetensors.torch import load_file, save_file

Event = dict[str, Any]
#: Where the agent listens.
PORT = 7000
TENSORS = 16
ASK = (
    "import sys, urllib.request as r; "
    "print(r.urlopen(r.Request(sys.argv[1], headers={'Authorization': 'Bearer ' + sys.argv[2]}), timeout=60).read().decode())"
)


class Service:
    """A process on a host."""

    def __init__(self, host: Host, log: Path, *words: str) -> None:
        self.host, self._log = host, log
        self._told: list[tuple[float, Event]] = []
        words = ("-m", "windlass", words[0], "--json", "--with-parent", *words[1:])
        with log.open("w") as err:
            self._process = host.python(*words, out=subprocess.PIPE, err=err)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._told.append((time.monotonic(), json.loads(line)))

    def has(self, version: int) -> tuple[float, Event] | None:
        """The event of a version that was published or that arrived here, and when it was told."""
        for at, event in tuple(self._told):
            identity = event.get("identity") or (event.get("image") or {}).get("identity") or {}
            if event.get("event") in ("published", "synced") and identity.get("version") == version:
                return at, event
        return None

    def wait(self, version: int, patience: float = PATIENCE) -> tuple[float, Event]:
        """Waits for that event."""

        def look() -> tuple[float, Event] | None:
            found, ended = self.has(version), self._process.poll()
            assert found or ended is None, f"{self.host.name} ended: {self._told[-1:]} {self.warnings()}"
            return found

        return until(f"version {version} on {self.host.name}", look, patience)

    def warnings(self) -> str:
        """The lines that it has written to standard error."""
        return self._log.read_text()

    def stop(self) -> None:
        """Ends it, and waits until it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)


class Swarm:
    """A publisher's host and those of receivers, and the weights that are published."""

    def __init__(self, home: Path, bench: Bench, rate: str, receivers: int, mib: int) -> None:
        self.home, self.bytes = home, mib << 20
        self._token = secrets.token_hex(16)
        (home / "token").touch(0o600)
        (home / "token").write_text(self._token)
        self.source = bench.host("publisher", rate)
        self.hosts = [bench.host(f"receiver-{n}", rate) for n in range(receivers)]
        self.version = 0
        self._bits = torch.Generator().manual_seed(1)
        self._weights = torch.zeros((TENSORS, self.bytes // 2 // TENSORS), dtype=torch.int16)
        self._services = 0

    def _start(self, host: Host, name: str, *words: str) -> Service:
        self._services += 1
        log = self.home / f"{self._services:03d}-{host.name}.log"
        return Service(host, log, name, f"--token-file={self.home / 'token'}", *words)

    def publish(self, *options: str, trust: Sequence[str] = ()) -> None:
        """Starts the publisher, with options of its agent and those by which it trusts the agent, and publishes a first version."""
        place = [f"--bind={self.source.address}", f"--ports={PORT}", *options]
        follow = [f"--follow={self.home}/v%d", "--model=policy", "--region=/dev/shm/region"]
        self.publisher = self._start(self.source, "publish", *follow, *trust, "--", *place)
        self.next()

    def receive(self, host: Host, *options: str, scheme: str = "http") -> Service:
        """Starts a receiver."""
        url = f"{scheme}://{self.source.address}:{PORT}"
        words = [f"--from={url}", "--dir=/dev/shm/images", f"--name={host.name}", *options]
        return self._start(host, "receive", *words)

    def next(self, every: int = 1) -> float:
        """Publishes a version in which every so many elements have changed, and says when it was sealed. Where all have changed, it
        reaches everybody as an image, because the delta is larger."""
        some = self._weights[:, self.version % every :: every]
        some ^= torch.randint(1, 1 << 15, some.shape, dtype=torch.int16, generator=self._bits)
        self.version += 1
        path = self.home / f"v{self.version}"
        path.mkdir()
        save_file(self._tensors(), path / "model.safetensors")
        (path / ".windlass-ready").touch()
        at, _ = self.publisher.wait(self.version)
        shutil.rmtree(path)
        return at

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {f"layer.{n}": row.view(torch.bfloat16) for n, row in enumerate(self._weights)}

    def arrived(self, receivers: Iterable[Service], patience: float = PATIENCE) -> list[Event]:
        """Waits until receivers have the newest version, bit by bit. How it came to each."""
        events = []
        for receiver in receivers:
            events.append(receiver.wait(self.version, patience)[1])
            (image,) = receiver.host.path("/dev/shm/images/policy").glob("*.safetensors")
            found, wanted = load_file(image), self._tensors()
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                same = torch.equal(found[name].view(torch.int16), value.view(torch.int16))
                assert same, (receiver.host.name, name)
        return events

    def under_way(self, before: int, part: float) -> None:
        """Waits until the publisher's host has sent a part of the image, since it had sent ``before``."""
        enough = before + part * self.bytes
        until(f"{part} of the image is sent", lambda: self.source.sent() >= enough or None)

    def status(self) -> dict[str, Any]:
        """What the agent says."""
        url = f"http://{self.source.address}:{PORT}/status"
        found: dict[str, Any] = json.loads(
            run(*self.source.inside(sys.executable, "-c", ASK, url, self._token))
        )
        return found


def total(events: Sequence[Event], key: str) -> int:
    """The sum of a number that events have."""
    return sum(event[key] for event in events)
