"""Two releases of the command against each other: `compat.py OLD NEW`, as `make compat` runs it.

Each part talks to parts of the other release, in both directions: trainer and agent with receivers, receivers among each other
(relay), a controller with trainers and receivers, stores, and files of one release that the other takes over (images, regions).
Every receiver must have every version with the digest that both releases compute of the trainer's own slot: the first version as
a full image, the others as deltas. Takes nothing but the two programs, and ends with 1 if something differs.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE_S = 120.0
MODEL = "policy"
SIZE = ["--model-bytes=4Mi", "--change=1", "--seed=1"]

Event = dict[str, Any]


class Failure(Exception):
    """What does not work between the two."""


class Release:
    """A program, and what it is called in messages."""

    def __init__(self, name: str, path: str) -> None:
        self.name, self.path = name, str(pathlib.Path(path).resolve())

    def ask(self, *args: str) -> Event:
        """Runs a command to its end."""
        ran = subprocess.run([self.path, *args, "--json"], capture_output=True, text=True, timeout=PATIENCE_S)
        told: Event = json.loads(ran.stdout.splitlines()[-1]) if ran.stdout else {}
        if ran.returncode:
            raise Failure(f"{self.name} {' '.join(args)}: {told or ran.stderr}")
        return told


class Process:
    """A running command of a release, and the events that it prints."""

    def __init__(self, release: Release, *args: str) -> None:
        self.title = f"{release.name} {args[0]}"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [release.path, *args, "--json"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._events: queue.Queue[Event | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    def say(self, line: str) -> None:
        """A line for its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def wait(self, what: str, wanted: Callable[[Event], bool]) -> Event:
        """The next event that is wanted. Those before it are dropped; a failure among them is one."""
        until, seen = time.monotonic() + PATIENCE_S, []
        while True:
            try:
                event = self._events.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise Failure(f"{self.title}: no {what} within {PATIENCE_S:g} s; it said {seen}") from None
            if event is None:
                self._errors.seek(0)
                raise Failure(f"{self.title}: ended before {what}; it said {seen}; {self._errors.read()}")
            if wanted(event):
                return event
            seen.append(event)

    def event(self, name: str) -> Event:
        """The next event of that name."""
        return self.wait(name, lambda event: event.get("event") == name)

    def end(self) -> None:
        """SIGTERM and the end of its input, for which a rank waits; then its own end."""
        assert self._process.stdin is not None
        self._process.terminate()
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)


class Trainer:
    """A trainer of one rank in one release, and its agent."""

    def __init__(
        self, stack: contextlib.ExitStack, home: pathlib.Path, release: Release, *agent: str
    ) -> None:
        self.region, self.token_file, self._stack = home / "region", home / "token", stack
        self.release, self._options = release, agent
        names = [f"--region={self.region}", f"--model-id={MODEL}", "--rank=0", "--ranks=1"]
        self._rank = started(stack, release, "demo-rank", *names, *SIZE)
        self._rank.event("ready")
        self.start_agent(release)

    def start_agent(self, release: Release) -> None:
        """Starts an agent, perhaps of another release than the one before."""
        files = [f"--region={self.region}", f"--token-file={self.token_file}"]
        self.agent = started(self._stack, release, "agent", *files, "--relay-from=2", *self._options)
        self.endpoint = str(self.agent.event("listening")["endpoint"])

    def publish(self, version: int) -> None:
        """A step, and its version."""
        for verb, name in (("train", "trained"), ("offload", "committed")):
            self._rank.say(f"{verb} {version}")
            self._rank.event(name)

    def about(self) -> Event:
        """What the agent shows."""
        return request(f"{self.endpoint}/get_version", self.token_file)

    def sealed(self, version: int) -> Event:
        """What the agent shows once it has sealed a version."""
        until = time.monotonic() + PATIENCE_S
        while (about := self.about()).get("version") != version:
            if time.monotonic() > until:
                raise Failure(f"{self.agent.title}: version {version} was not sealed: {about}")
            time.sleep(0.02)
        return about


def started(stack: contextlib.ExitStack, release: Release, *args: str) -> Process:
    process = Process(release, *args)
    stack.callback(process.end)
    return process


def request(url: str, token_file: pathlib.Path, body: Event | None = None) -> Event:
    headers = {
        "Authorization": f"Bearer {token_file.read_text().strip()}",
        "Content-Type": "application/json",
    }
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=PATIENCE_S) as answer:
            told: Event = json.load(answer)
            return told
    except urllib.error.HTTPError as e:
        raise Failure(f"{url}: {e.code} {e.read().decode()}") from None


def digest_of(file: pathlib.Path, releases: tuple[Release, Release]) -> str:
    """What both releases compute of a file's bytes."""
    digests = {release.name: str(release.ask("verify", str(file))["state_digest"]) for release in releases}
    if len(set(digests.values())) != 1:
        raise Failure(f"the digests of {file} differ: {digests}")
    return digests[releases[0].name]


def compare(trainer: Trainer, images: list[pathlib.Path], releases: tuple[Release, Release]) -> None:
    """The images equal the trainer's own slot of the newest version, by the digest that its agent announced."""
    announced = trainer.about()["digest"]
    slots = {digest_of(slot, releases) for slot in trainer.region.glob("*.safetensors")}
    if announced not in slots:
        raise Failure(f"the agent announced {announced}; the trainer's slots have {slots}")
    for image in images:
        if (found := digest_of(image / MODEL / "a.safetensors", releases)) != announced:
            raise Failure(f"{image} has {found}, the trainer {announced}")


def synced(receiver: Process, version: int, mode: str | None) -> None:
    event = receiver.wait(
        f"version {version}",
        lambda e: e.get("event") == "synced" and e["image"]["identity"]["version"] == version,
    )
    if mode is not None and event["mode"] != mode:
        raise Failure(
            f"{receiver.title}: version {version} came as {event['mode']}, expected {mode}: {event}"
        )


@contextlib.contextmanager
def place() -> Iterator[tuple[contextlib.ExitStack, pathlib.Path]]:
    """A directory, and processes that end before it goes."""
    with (
        tempfile.TemporaryDirectory(prefix="windlass-compat-", dir="/dev/shm") as home,
        contextlib.ExitStack() as stack,
    ):
        yield stack, pathlib.Path(home)


def receivers(ours: Release, theirs: Release) -> None:
    """A trainer of one release, receivers of both; then each image, and the region, is taken over by the other release."""
    both = (ours, theirs)
    with place() as (stack, home):
        trainer = Trainer(stack, home, ours)

        def follow(release: Release, number: int) -> Process:
            source = [f"--from={trainer.endpoint}", f"--token-file={trainer.token_file}"]
            # An agent that is started again listens elsewhere; one that shares the region's host is found by it.
            return started(stack, release, "receive", *source, f"--dir={home / str(number)}")

        order = [theirs, theirs, ours]
        running = [follow(release, number) for number, release in enumerate(order)]
        images = [home / str(number) for number in range(len(order))]
        for version in (1, 2, 3):
            trainer.publish(version)
            for receiver in running:
                synced(receiver, version, "full" if version == 1 else "delta")
        compare(trainer, images, both)
        for receiver in running:
            receiver.end()
        trainer.agent.end()
        trainer.start_agent(theirs)
        swapped = [theirs if release is ours else ours for release in order]
        running = [follow(release, number) for number, release in enumerate(swapped)]
        for version in (4, 5):
            trainer.publish(version)
            for receiver in running:
                synced(receiver, version, "delta")
        compare(trainer, images, both)


def controller(ours: Release, theirs: Release) -> None:
    """A controller of one release, with trainer and receivers of the other; a receiver of its own release joins them."""
    both = (ours, theirs)
    with place() as (stack, home):
        trainer = Trainer(stack, home, theirs)
        token = f"--token-file={trainer.token_file}"
        boss = started(stack, ours, "controller", f"--set=main={MODEL}", token, "--settle=0.05")
        endpoint = str(boss.event("listening")["endpoint"])
        images = [home / "0", home / "1"]
        for release, image in zip((theirs, ours), images):
            asked = [f"--controller={endpoint}", f"--controller-token-file={trainer.token_file}", token]
            started(
                stack,
                release,
                "receive",
                *asked,
                f"--dir={image}",
                f"--name={image.name}",
                f"--model={MODEL}",
            )
        until = time.monotonic() + PATIENCE_S
        while len(there := request(f"{endpoint}/status", trainer.token_file)["receivers"]) < len(images):
            if time.monotonic() > until:
                raise Failure(
                    f"the controller has {len(there)} of {len(images)} receivers after {PATIENCE_S:g} s: {there}"
                )
            time.sleep(0.02)
        for version in (1, 2, 3):
            trainer.publish(version)
            about = trainer.sealed(version)
            words = {"model_id": MODEL, "incarnation": about["incarnation"], "version": version}
            words |= {
                "sender_endpoint": trainer.endpoint,
                "sync": True,
                "delta_ratio": 0.01,
                "delta_sparsity": 0.99,
            }
            words |= {
                "spans": [{"lane": "trainer", "what": "offload", "began_ms_ago": 2.0, "ended_ms_ago": 1.0}]
            }
            told = request(f"{endpoint}/notify_version", trainer.token_file, words)
            if told["served"]["version"] != version:
                raise Failure(f"{boss.title}: version {version} was announced, and is not served: {told}")
        for release in both:
            gate = release.ask("gate", "3", f"--controller={endpoint}", token)
            top = release.ask("top", endpoint, token)
            if top["sets"][0]["syncs"][-1]["state"] != "served" or top["errors"]:
                raise Failure(f"{release.name} top at {boss.title}: {top}")
            if gate["version"] != 3:
                raise Failure(f"{release.name} gate at {boss.title}: {gate}")
        compare(trainer, images, both)


def store(ours: Release, theirs: Release) -> None:
    """A store that an agent of one release writes, and receivers of both read; then the other release's agent goes on with it."""
    both = (ours, theirs)
    with place() as (stack, home):
        url = f"file://{home}/store"
        (home / "store").mkdir()
        trainer = Trainer(stack, home, ours, f"--store={url}")
        running = [
            started(stack, release, "receive", f"--from={url}", f"--dir={home / release.name}")
            for release in both
        ]
        # So many that a composed delta is among them where a release has those.
        for version in range(1, 19):
            trainer.publish(version)
            trainer.agent.event("stored")
        for receiver in running:
            synced(receiver, 18, None)
        images = [home / release.name for release in both]
        compare(trainer, images, both)
        trainer.agent.end()
        trainer.start_agent(theirs)
        for version in (19, 20):
            trainer.publish(version)
            trainer.agent.event("stored")
        for receiver in running:
            synced(receiver, 20, None)
        for release in both:
            started(
                stack, release, "receive", f"--from={url}", f"--dir={home}/late-{release.name}", "--until=20"
            ).wait(
                "version 20", lambda e: e.get("event") == "synced" and e["image"]["identity"]["version"] == 20
            )
            images.append(home / f"late-{release.name}")
        compare(trainer, images, both)


def main(old: str, new: str) -> int:
    before, now = Release("old", old), Release("new", new)
    failed = 0
    for check in (receivers, controller, store):
        for ours, theirs in ((before, now), (now, before)):
            begun = time.monotonic()
            try:
                check(ours, theirs)
                result = "passed"
            except Failure as e:
                failed += 1
                result = f"FAILED: {e}"
            print(
                f"{check.__name__:10} {ours.name} with {theirs.name}: {result} ({time.monotonic() - begun:.1f} s)",
                flush=True,
            )
    return min(failed, 1)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: compat.py OLD NEW, two programs")
    sys.exit(main(sys.argv[1], sys.argv[2]))
