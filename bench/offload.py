"""Offload from Python beside `windlass bench offload`, and what 10,000 tensors cost.

    python bench/offload.py [--model-bytes 1Gi] [--turns 5] [--repeats 15] [--json FILE]

Needs a release build of the package and torch. Both take turns in one run, because a shared machine changes its mind:

- `python / rust`: the median offload of host tensors through `WeightManager`, beside the median round of
  `windlass bench offload` on as many bytes with as many threads. Both write into slots that were touched before, and
  neither has an agent. Of each turn the two are compared; the median of the ratios counts.
- `overhead`: `offload` of 10,000 small parameters, less the copy of as many bytes in one piece into memory that was
  touched before. What iterating over `named_parameters()` costs by itself is told beside it. Processor time is told
  too, which others on the machine disturb less; the bar is on the median of the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "gpu"))

import needs  # noqa: E402

needs.need("torch", "windlass")

import torch  # noqa: E402
from torch import nn  # noqa: E402

import windlass  # noqa: E402
from windlass import WeightManager  # noqa: E402

#: Of the issue: what Python must reach of Rust, and milliseconds for the calls of 10,000 tensors.
BAR_RATIO, BAR_OVERHEAD_MS = 0.8, 20.0
SMALL_TENSORS, SMALL_SHAPE = 10_000, (32, 32)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model-bytes", default="1Gi", help="as windlass bench takes it")
    parser.add_argument("--turns", type=needs.whole(1), default=5)
    parser.add_argument("--repeats", type=needs.whole(1), default=15)
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-") as home:
        small = overhead(home, options.repeats * 3)
        turns = [beside(home, options.model_bytes, options.repeats, threads) for _ in range(options.turns)]
    ratio = statistics.median(t["python_gbps"] / t["rust_gbps"] for t in turns)
    bars = [
        {"name": "python / rust", "value": round(ratio, 4), "bar": BAR_RATIO, "met": ratio >= BAR_RATIO},
        {
            "name": "overhead of 10,000 tensors, ms",
            "value": small["median_ms"]["overhead"],
            "bar": BAR_OVERHEAD_MS,
            "met": small["median_ms"]["overhead"] < BAR_OVERHEAD_MS,
        },
    ]
    versions = {
        "windlass": windlass.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    result = {
        **{"bench": "offload.py", "threads": threads, "repeats": options.repeats, "versions": versions},
        **{"machine": {"cpu": cpu(), "cores": os.cpu_count()}, "turns": turns, "small": small, "bars": bars},
    }
    text = json.dumps(result)
    sys.stdout.write(text + "\n")
    if options.json:
        with open(options.json, "w") as out:
            out.write(text + "\n")
    return 0 if all(bar["met"] for bar in bars) else 1


def timed(work: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each round."""
    out = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        out.append((time.perf_counter() - begun) * 1e3)
    return out


class Offloads:
    """A manager whose slots have been written to."""

    def __init__(self, home: str, name: str, given: Callable[[], Any]) -> None:
        self.manager = WeightManager(model_id=name, region_dir=home, agent={"enabled": False})
        self._given, self._version = given, 0
        for _ in range(4):
            self.next()

    def next(self) -> None:
        self._version += 1
        self.manager.offload(self._given(), self._version, 0, 1)


def beside(home: str, model_bytes: str, repeats: int, threads: int) -> dict[str, float]:
    """One turn of Rust and one of Python."""
    words = ["--model-bytes", model_bytes, "--repeats", str(repeats), "--threads", str(threads), "--json"]
    command = [sys.executable, "-m", "windlass", "bench", "offload", "--region-dir", home, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    rust = json.loads(done.stdout)
    # As many tensors of as many bytes: the shapes do not matter to a copy. Not of zeros, which need no memory at all.
    rows = rust["bytes"] // rust["tensors"] // 2
    weights = {f"layers.{i}.weight": torch.ones(rows, dtype=torch.bfloat16) for i in range(rust["tensors"])}
    size = sum(t.nbytes for t in weights.values())
    offloads = Offloads(home, "model", lambda: weights)
    took = timed(offloads.next, repeats)
    offloads.manager.close()
    return {
        "bytes": size,
        "tensors": len(weights),
        "rust_gbps": rust["gbps"],
        "rust_of_copy": rust["ratio"],
        "python_gbps": round(size / statistics.median(took) / 1e6, 2),
        "python_best_gbps": round(size / min(took) / 1e6, 2),
    }


def overhead(home: str, repeats: int) -> dict[str, Any]:
    """What 10,000 parameters cost beyond their bytes."""
    model = nn.Module()
    for i in range(100):
        layer = nn.Module()
        for j in range(SMALL_TENSORS // 100):
            layer.register_parameter(f"p{j}", nn.Parameter(torch.ones(SMALL_SHAPE), requires_grad=False))
        model.add_module(f"layer{i}", layer)
    size = sum(p.nbytes for p in model.parameters())
    source = torch.ones(size, dtype=torch.uint8)
    slot = torch.ones(size, dtype=torch.uint8)
    begun = time.perf_counter()
    offloads = Offloads(home, "small", model.named_parameters)
    first = (time.perf_counter() - begun) * 1e3
    probes: dict[str, Callable[[], object]] = {
        "copy": lambda: slot.copy_(source),
        "iterate": lambda: sum(1 for _ in model.named_parameters()),
        "offload": offloads.next,
    }
    wall: dict[str, list[float]] = {name: [] for name in probes}
    busy: dict[str, list[float]] = {name: [] for name in probes}
    for _ in range(repeats):
        for name, work in probes.items():
            begun = time.process_time()
            wall[name] += timed(work, 1)
            busy[name].append((time.process_time() - begun) * 1e3)
    offloads.manager.close()

    def told(pick: Callable[[list[float]], float], times: dict[str, list[float]]) -> dict[str, float]:
        found = {name: round(pick(ms), 2) for name, ms in times.items()}
        # Iterating over the parameters, which is torch's own work, is part of it.
        return {**found, "overhead": round(found["offload"] - found["copy"], 2)}

    return {
        "tensors": SMALL_TENSORS,
        "bytes": size,
        "median_ms": told(statistics.median, wall),
        "best_ms": told(min, wall),
        # Of all threads; others on the machine disturb it less.
        "cpu_ms": told(statistics.median, busy),
        "first_four_ms": round(first, 1),
    }


def cpu() -> str:
    with open("/proc/cpuinfo") as lines:
        return next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown"
        )


if __name__ == "__main__":
    raise SystemExit(main())
