"""Versions through a store, compared with the plainest parallel client on the same store.

    .venv/bin/python bench/store.py [--server s3s-fs | --url file:///dev/shm/bench] [--mib 1024] [--change 1] [--repeats 5] [--json FILE]

Needs torch, `obstore` (Python bindings of the object_store crate: `pip install obstore`) and a release build of the package
(`make gpu-build`). `--server` names an S3 server that is started on a free port, with its objects in memory: `s3s-fs` (`cargo install s3s-fs
--features binary`) or `.venv/bin/moto_server`. `--url` names an empty place in a store, such as s3://bucket/bench with AWS_ENDPOINT_URL and
credentials in the environment. Without either, the store is a directory in memory. What was written is removed at the end.

- `upload`: from the end of `offload()` until the version is in the store, sealing and hashing included, against as many bytes put in parts of
  the same length, as many at once.
- `fetch`: `windlass receive --version 1` from its start to its end, process, hashes and image included, against the same bytes got in ranges of
  the same length, as many at once, into memory that is there.
- `late`: the same for an anchor and ten deltas, against all of their bytes got so.
- `memory of the upload`, `of the fetch`: the most anonymous memory of the agent and of the receiver, in MiB.
- `wire`: bytes of a version's objects (delta, index, head), of the image.
- `catch-up`: bytes that a receiver fetches which has the anchor's version and is 17 versions behind, of the 17 deltas; and for one that is
  16 versions behind and stopped in the middle between two composed deltas.
- `composed`: bytes of the composed deltas, spread over the versions, of the image. `wire` is without them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "python")]

import needs  # noqa: E402

needs.need("torch", "obstore", "windlass")

import obstore  # noqa: E402
import torch  # noqa: E402
from obstore.store import from_url  # noqa: E402

import windlass  # noqa: E402
from windlass import WeightManager  # noqa: E402
from windlass.config import StoreConfig  # noqa: E402

TENSORS = 32
#: As the agent and the receiver have them.
PART, PARTS_AT_ONCE = 32 << 20, 4
RANGE, RANGES_AT_ONCE = 8 << 20, 8
#: How far behind a receiver is that catches up, and how many deltas a late one gets.
BEHIND, LATE = 16, 10
#: The version of a receiver that stopped in between: composed deltas begin at 1, 17, 33 and so on.
BETWEEN = 9
PATIENCE = 1200.0


class Model:
    """Weights as an optimiser moves them: float32 masters and an update that remembers the last ones, cast to bfloat16.

    How the changes of several versions overlap decides what composed deltas save. With this memory the share that changed grows by 1.8, 3.1, 5.2
    and 6.9 over 2, 4, 8 and 12 versions; in bench/runs/2026-11-15-xeon-2core-grpo it grows by 1.9, 3.2, 5.2 and 6.8.
    """

    MEMORY = 0.92

    def __init__(self, mib: int, change: float) -> None:
        self._bits = torch.Generator().manual_seed(1)
        shape = (TENSORS, (mib << 19) // TENSORS)
        self._masters = torch.empty(shape).normal_(0, 0.02, generator=self._bits)
        self._updates = torch.empty(shape, dtype=torch.float16).normal_(generator=self._bits)
        self._weights = self._masters.bfloat16()
        self._length = 1e-6
        # The share that changes grows with the length of the update, and ever more slowly.
        for _ in range(4):
            moved = self._masters[0].add(self._updates[0].float(), alpha=self._length).bfloat16()
            self._length *= change / 100 / (moved != self._weights[0]).float().mean().item()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {f"layer.{n}": row for n, row in enumerate(self._weights)}

    def step(self) -> None:
        fresh = torch.empty(self._masters.shape[1])
        for master, update, weight in zip(self._masters, self._updates, self._weights, strict=True):
            fresh.normal_(0, (1 - self.MEMORY**2) ** 0.5, generator=self._bits)
            update.copy_(fresh.add_(update, alpha=self.MEMORY))
            weight.copy_(master.add_(fresh, alpha=self._length))

    def data(self) -> memoryview:
        return memoryview(self._weights.view(torch.uint8).numpy()).cast("B")


@contextlib.contextmanager
def serving(program: str, home: Path) -> Iterator[str]:
    """Starts an S3 server. The URL of a place in it, for this process and those that it starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    key, secret, endpoint = "AKIAWINDLASSBENCH", "not-a-real-secret", f"http://127.0.0.1:{port}"
    words = {
        "moto_server": ["-H", "127.0.0.1", "-p", port],
        "s3s-fs": ["--host=127.0.0.1", f"--port={port}", f"--access-key={key}", f"--secret-key={secret}", str(home)],
    }  # fmt: skip
    name = Path(program).name
    if name not in words:
        needs.end(f"--server {program}: give moto_server or s3s-fs, or start it and give --url", 2)
    if name == "s3s-fs":
        (home / "bench").mkdir()
    os.environ.update(
        AWS_ENDPOINT_URL=endpoint, AWS_ACCESS_KEY_ID=key, AWS_SECRET_ACCESS_KEY=secret, AWS_REGION="us-east-1", AWS_ALLOW_HTTP="true"
    )  # fmt: skip
    with (home / "log").open("wb") as log:
        server = subprocess.Popen([program, *words[name]], stdout=log, stderr=log)
    try:
        until, ask = time.monotonic() + 60, urllib.request.Request(f"{endpoint}/bench", method="PUT")
        while True:
            try:
                urllib.request.urlopen(ask, timeout=60).close()
                break
            except urllib.error.HTTPError:
                break  # s3s-fs has the bucket, and asks for a signature.
            except OSError as error:
                if server.poll() is not None or time.monotonic() > until:
                    needs.end(f"{program} does not answer: {error} {(home / 'log').read_text()}", 1)
                time.sleep(0.05)
        yield "s3://bench/run"
    finally:
        server.terminate()
        server.wait()


class Memory:
    """The most anonymous memory that a child of this process has while this is entered, in MiB."""

    def __init__(self, without: Sequence[int] = ()) -> None:
        self.mib = 0.0
        self._without = set(without)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._end.wait(0.05):
            self.mib = max([self.mib, *(mib for pid, mib in children() if pid not in self._without)])

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def children() -> list[tuple[int, float]]:
    """The children of this process, with the MiB of their anonymous memory."""
    found = []
    for task in Path("/proc/self/task").glob("*/children"):
        # Both may end meanwhile.
        with contextlib.suppress(OSError, IndexError):
            for pid in task.read_text().split():
                after = Path(f"/proc/{pid}/status").read_text().split("RssAnon:")[1]
                found.append((int(pid), int(after.split()[0]) / 1024))
    return found


async def at_once(work: Sequence[Callable[[], Awaitable[Any]]], most: int) -> None:
    gate = asyncio.Semaphore(most)

    async def one(job: Callable[[], Awaitable[Any]]) -> None:
        async with gate:
            await job()

    await asyncio.gather(*(one(job) for job in work))


def clear(store: Any, below: str | None = None) -> None:
    names = [entry["path"] for page in obstore.list(store, below) for entry in page]
    if names:
        obstore.delete(store, names)


def plain_upload(store: Any, data: memoryview) -> float:
    parts = [data[at : at + PART] for at in range(0, len(data), PART)]

    def job(number: int) -> Callable[[], Awaitable[Any]]:
        return lambda: obstore.put_async(store, f"plain/{number}", parts[number], use_multipart=False)

    began = time.monotonic()
    asyncio.run(at_once([job(number) for number in range(len(parts))], PARTS_AT_ONCE))
    return time.monotonic() - began


def plain_fetch(store: Any, objects: Sequence[tuple[str, int]], memory: memoryview) -> float:
    async def one(name: str, start: int, end: int, at: int) -> None:
        got = await obstore.get_range_async(store, name, start=start, end=end)
        memory[at : at + end - start] = memoryview(got)

    jobs: list[Callable[[], Awaitable[Any]]] = []
    at = 0
    for name, size in objects:
        for start in range(0, size, RANGE):
            end = min(start + RANGE, size)
            jobs.append(lambda name=name, start=start, end=end, at=at: one(name, start, end, at))  # type: ignore[misc]
            at += end - start
    began = time.monotonic()
    asyncio.run(at_once(jobs, RANGES_AT_ONCE))
    return time.monotonic() - began


def command(*words: str) -> tuple[float, dict[str, Any]]:
    """Runs the command. The seconds that it took, and the last line that it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "windlass", *words, "--json"], env=environment, capture_output=True, text=True,
        timeout=PATIENCE, check=False,
    )  # fmt: skip
    seconds = time.monotonic() - began
    if done.returncode:
        needs.end(f"windlass {words[0]} ended with {done.returncode}: {done.stdout}{done.stderr}", 1)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return seconds, lines[-1]


def receive(url: str, version: int, home: Path) -> tuple[float, dict[str, Any]]:
    home.mkdir(exist_ok=True)
    return command("receive", f"--from={url}/policy", f"--version={version}", f"--dir={home}")


def objects_of(url: str, version: int) -> list[tuple[str, int]]:
    _, shown = command("store", "show", f"{url}/policy", f"--version={version}")
    return [(f"policy/{found['object']}", int(found["bytes"])) for found in shown["objects"]]


def measure(url: str, store: Any, model: Model, options: argparse.Namespace, home: Path) -> dict[str, Any]:
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    data = model.data()
    memory = memoryview(bytearray(2 * len(data)))
    for turn in range(options.repeats):
        config, others = StoreConfig(url=f"{url}/{turn}"), [pid for pid, _ in children()]
        with WeightManager(region_dir=str(home), timeout=PATIENCE, store=config) as wm:
            wm.offload(model.weights, 1)
            with Memory(others) as memory_of:
                began = time.monotonic()
                wm.wait_stored(1)
                note("upload", time.monotonic() - began)
            note("memory of the upload", memory_of.mib)
        note("plain upload", plain_upload(store, data))
        with Memory(others) as memory_of:
            seconds, _ = receive(f"{url}/{turn}", 1, home / f"image-{turn}")
        note("fetch", seconds)
        note("memory of the fetch", memory_of.mib)
        parts = [
            (f"{turn}/{name}", size) for name, size in objects_of(f"{url}/{turn}", 1) if "/anchors/" in name
        ]
        note("plain fetch", plain_fetch(store, parts, memory))
        command("gc", str(home), "--yes", "--images")
        clear(store, f"{turn}")
    clear(store, "plain")
    base = f"{url}/steps"
    with WeightManager(region_dir=str(home), timeout=PATIENCE, store=StoreConfig(url=base)) as wm:
        wm.offload(model.weights, 1)
        wm.wait_stored(1)
        receive(base, 1, home / "behind")
        for version in range(2, BEHIND + BETWEEN + 1):
            if version == BETWEEN + 1:
                receive(base, BETWEEN, home / "between")
            model.step()
            wm.offload(model.weights, version)
            wm.wait_stored(version)
            own = [
                size
                for name, size in objects_of(base, version)
                if f"-{version:020}-" in name or "/versions/" in name
            ]
            note("wire", sum(own) / len(data))
    for name, have, to in (("behind", 1, BEHIND + 2), ("between", BETWEEN, BETWEEN + BEHIND)):
        _, last = receive(base, to, home / name)
        _, shown = command("store", "show", f"{base}/policy", f"--version={to}")
        apart = sum(delta["bytes"] for delta in shown["chain"] if delta["base"] >= have)
        note("catch-up" if name == "behind" else "catch-up from between", last["wire_bytes"] / apart)
    composed = sum(delta["bytes"] for delta in shown["composed"])
    note("composed", composed / len(data) / (shown["composed"][-1]["target"] - 1) if composed else 0.0)
    late = [(f"steps/{name}", size) for name, size in objects_of(base, LATE + 1)]
    for turn in range(options.repeats):
        note("late", receive(base, LATE + 1, home / f"late-{turn}")[0])
        note("plain late", plain_fetch(store, late, memory))
        command("gc", str(home), "--yes", "--images")
    return {name: {"median": statistics.median(values), "all": values} for name, values in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--url", help="an empty place in a store [default: a directory in memory]")
    place.add_argument("--server", help="an S3 server to start: moto_server or s3s-fs, or its path")
    parser.add_argument("--mib", type=needs.whole(64), default=1024, help="MiB of the image")
    parser.add_argument("--change", type=float, default=1.0, help="percent of the elements that change")
    parser.add_argument("--repeats", type=needs.whole(1), default=5, help="rounds")
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="windlass-store-") as folder,
        contextlib.ExitStack() as stack,
    ):
        home = Path(folder)
        for name in ("run", "server"):
            (home / name).mkdir()
        if options.server:
            url = stack.enter_context(serving(options.server, home / "server"))
        else:
            url = (options.url or f"file://{home}/run").rstrip("/")
        store = from_url(url)
        try:
            found = measure(url, store, Model(options.mib, options.change), options, home)
        finally:
            clear(store)
    gib = options.mib / 1024
    ratios = {
        "plain upload / upload": (found["plain upload"]["median"] / found["upload"]["median"], 0.8, True),
        "plain fetch / fetch": (found["plain fetch"]["median"] / found["fetch"]["median"], 0.8, True),
        "late / plain late": (found["late"]["median"] / found["plain late"]["median"], 1.2, False),
        "wire, of the image": (found["wire"]["median"], 0.0105, False),
        "wire with composed ones": (found["wire"]["median"] + found["composed"]["median"], 0.0105, False),
        "catch-up, of the deltas": (found["catch-up"]["median"], 0.5, False),
        "the same, from between": (found["catch-up from between"]["median"], 0.5, False),
    }
    for name in ("upload", "plain upload", "fetch", "plain fetch", "late", "plain late"):
        values = found[name]["all"]
        sys.stdout.write(
            f"{name:14} {found[name]['median']:8.3f} s [{min(values):.3f}..{max(values):.3f}]  {gib / found[name]['median']:6.2f} GiB/s\n"
        )
    for name in ("memory of the upload", "memory of the fetch"):
        values = found[name]["all"]
        sys.stdout.write(
            f"{name:20} {found[name]['median']:8.1f} MiB [{min(values):.1f}..{max(values):.1f}]\n"
        )
    for name, (value, bar, least) in ratios.items():
        met = value >= bar if least else value <= bar
        sign = ">=" if least else "<="
        sys.stdout.write(f"{name:24} {value:8.4f}  bar {sign} {bar}  {'met' if met else 'MISSED'}\n")
    result = {
        "url": url.partition("://")[0],
        "server": Path(options.server).name if options.server else None,
        "mib": options.mib,
        "change": options.change,
        "repeats": options.repeats,
        "found": found,
        "ratios": {name: value for name, (value, _, _) in ratios.items()},
        "windlass": windlass.__version__,
        "obstore": obstore.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
