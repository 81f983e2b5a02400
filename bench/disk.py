"""Checkpoints for engines on another host: by a copy of the files, and by the disk bridge of Windlass.

    sudo .venv/bin/python bench/disk.py [--rate 200mbit] [--mib 256] [--change 1] [--repeats 5] [--json FILE]

Needs root, `ip`, `tc`, `unshare` (`tests/hosts/hosts.py`) and `rsync`, torch, and a release build of the package (`make gpu-build`).
slime, miles, prime-rl and AReaL can pass weights on as checkpoints in a directory that trainers and engines share. The trainer and the
engine are hosts of their own here: namespaces of this machine, with a link of a rate between them. For every version the trainer
writes a checkpoint, and the same checkpoint is brought to the engine's host in three ways, one after another:

- `whole`: `rsync --whole-file`. All bytes cross the link, as they do when an engine reads them from a network file system.
- `changes`: `rsync --no-whole-file` with the version before at hand, so that it finds out by checksums what changed.
- `windlass`: `windlass publish --follow` and `windlass receive --as-dir`.

Measured is the time from the end of the trainer's write until the directory is complete on the engine's host, and the bytes that the
trainer's host has sent meanwhile, headers included. Reading the directory into the engine is the same for all and not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "tests" / "hosts"), str(ROOT / "python")]

import needs  # noqa: E402

needs.need("torch", "safetensors", "windlass")

import torch  # noqa: E402
from hosts import Bench, Host, bench, missing, until  # noqa: E402
from relay import a_rate  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from swarm import Service  # noqa: E402

import windlass  # noqa: E402

WAYS = ("whole", "changes", "windlass")
TENSORS = 32
AGENT, RSYNC = 7000, 8730
#: How long a version may take.
PATIENCE = 600.0


class Checkpoints:
    """What the trainer writes."""

    def __init__(self, home: Path, mib: int, change: float) -> None:
        self.home, self.version = home, 0
        self._bits = torch.Generator().manual_seed(1)
        self._weights = torch.zeros((TENSORS, (mib << 19) // TENSORS), dtype=torch.int16)
        self._changed = round(self._weights.shape[1] * change / 100)

    def write(self) -> Path:
        """The next one. The first has random weights, and some elements of the later ones differ from the one before."""
        shape = self._weights.shape
        if self.version == 0:
            self._weights.copy_(torch.randint(1, 1 << 15, shape, dtype=torch.int16, generator=self._bits))
        else:
            where = torch.randint(0, shape[1], (TENSORS, self._changed), generator=self._bits)
            # Steps of one place, as most steps of training are.
            self._weights.scatter_add_(1, where, torch.ones_like(where, dtype=torch.int16))
        self.version += 1
        path = self.home / f"v{self.version}"
        path.mkdir()
        rows = {f"layer.{n}": row.view(torch.bfloat16) for n, row in enumerate(self._weights)}
        save_file(rows, path / "model.safetensors")
        return path


class Hosts:
    """A trainer's host that serves its checkpoints in both ways, and an engine's host that follows by Windlass."""

    def __init__(self, home: Path, made: Bench, rate: str) -> None:
        self.home = home
        self.trainer, self.engine = made.host("trainer", rate), made.host("engine", rate)
        (home / "token").touch(0o600)
        (home / "token").write_text(secrets.token_hex(16))
        (home / "model").mkdir()
        (home / "model" / "config.json").write_text("{}")
        config = home / "rsyncd.conf"
        config.write_text(
            f"use chroot = no\n[weights]\npath = {home}\nread only = yes\nuid = root\ngid = root\n"
        )
        options = ["--daemon", "--no-detach", f"--config={config}", f"--port={RSYNC}"]
        self._daemon = self.trainer.start("rsync", *options, f"--address={self.trainer.address}")
        self._publisher = self._service(
            self.trainer, "publish", f"--follow={home}/v%d", "--model=policy", "--region=/dev/shm/region",
            "--", f"--bind={self.trainer.address}", f"--ports={AGENT}",
        )  # fmt: skip
        self._receiver: Service | None = None

    def _service(self, host: Host, name: str, *words: str) -> Service:
        return Service(
            host, self.home / f"{host.name}.log", name, f"--token-file={self.home / 'token'}", *words
        )

    def bring(self, way: str, checkpoint: Path) -> dict[str, float]:
        """Brings a checkpoint to the engine's host. The seconds and the bytes that it took."""
        there = self.engine.path(f"/dev/shm/{way}/{checkpoint.name}")
        sent, began = self.trainer.sent(), time.monotonic()
        if way == "windlass":
            (checkpoint / ".windlass-ready").touch()
            if self._receiver is None:
                # The first version is waited for, so that the receiver's start is not part of its time.
                self._publisher.wait(1, PATIENCE)
                began = time.monotonic()
                self._receiver = self._service(
                    self.engine, "receive", f"--from=http://{self.trainer.address}:{AGENT}", "--dir=/dev/shm/images",
                    "--as-dir=/dev/shm/windlass/v%d", f"--model-dir={self.home / 'model'}",
                )  # fmt: skip
            until(f"{there.name} by windlass", there.is_dir, PATIENCE)
        else:
            before = there.parent / f"v{int(checkpoint.name[1:]) - 1}"
            how = ["--whole-file"] if way == "whole" else ["--no-whole-file"]
            if way == "changes" and before.is_dir():
                how.append(f"--copy-dest=/dev/shm/{way}/{before.name}")
            source = f"rsync://{self.trainer.address}:{RSYNC}/weights/{checkpoint.name}/"
            words = ["rsync", "--recursive", "--mkpath", *how, source, f"/dev/shm/{way}/{checkpoint.name}/"]
            done = self.engine.start(*words)
            assert done.wait(PATIENCE) == 0, f"rsync ended with {done.returncode}"
            shutil.rmtree(before, ignore_errors=True)
        seconds = time.monotonic() - began
        found, written = (load_file(path / "model.safetensors") for path in (there, checkpoint))
        assert found.keys() == written.keys()
        assert all(torch.equal(found[n].view(torch.int16), written[n].view(torch.int16)) for n in written), (
            way
        )
        return {"seconds": seconds, "sent": self.trainer.sent() - sent}

    def close(self) -> None:
        self._daemon.kill()
        self._daemon.wait(PATIENCE)


@contextlib.contextmanager
def hosts(home: Path, rate: str) -> Iterator[Hosts]:
    with bench() as made:
        found = Hosts(home, made, rate)
        try:
            yield found
        finally:
            found.close()


def row(name: str, found: dict[str, Any], image: int) -> None:
    took = sorted(r["seconds"] for r in found["rounds"])
    sys.stdout.write(
        f"{name:18} {found['seconds']:8.3f} [{took[0]:.3f}..{took[-1]:.3f}] s   sent {found['sent'] / image:8.4f} of the image\n"
    )
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=a_rate, default="200mbit", help="of the links, as tc takes it")
    parser.add_argument("--mib", type=needs.whole(1), default=256, help="MiB of a checkpoint")
    parser.add_argument("--change", type=float, default=1.0, help="percent of the elements that change")
    parser.add_argument("--repeats", type=needs.whole(1), default=5, help="versions after the first")
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args()
    if lacks := missing():
        needs.end(f"no bench of hosts: {lacks}", 2)
    if shutil.which("rsync") is None:
        needs.end("rsync is not installed: it is the way that Windlass is compared with", 2)
    rounds: dict[str, list[dict[str, float]]] = {}
    # Hosts have a /tmp and a /dev/shm of their own.
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp", prefix="windlass-disk-") as folder,
        hosts(Path(folder), options.rate) as pair,
    ):
        written = Checkpoints(Path(folder), options.mib, options.change)
        for version in range(options.repeats + 1):
            checkpoint = written.write()
            for way in WAYS:
                kind = "first" if version == 0 else "next"
                rounds.setdefault(f"{kind}, {way}", []).append(pair.bring(way, checkpoint))
            shutil.rmtree(checkpoint)
    image = options.mib << 20
    results = {
        name: {**{key: statistics.median(r[key] for r in some) for key in some[0]}, "rounds": some}
        for name, some in rounds.items()
    }
    for name, found in results.items():
        row(name, found, image)
    version = subprocess.run(["rsync", "--version"], capture_output=True, text=True, check=True).stdout
    result = {
        "bench": "disk",
        "windlass": windlass.__version__,
        "rsync": version.splitlines()[0],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "rate": options.rate,
        "change_percent": options.change,
        "bytes": image,
        "results": results,
    }
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
