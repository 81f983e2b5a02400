"""The device layer as the package calls it, by the wall clock, beside the limits of the machine.

    PYTHONPATH=python python bench/device.py [--repeats 10] [--json FILE] [--small]
    PYTHONPATH=python python bench/device.py --baseline [8B]

Needs a CUDA device, torch and the built extension (a release build). Layouts and steps are those of `bench/gpu.py`;
every figure is the median of calls from Python to their return, control included. `--small` takes 0.6 B everywhere.
`--baseline` measures only this: the pass of an encode where the baseline is on the device, half of it, and on the host, beside
what is expected and beside one copy of as many bytes into pinned memory.

| figure | what | beside it | bar |
|---|---|---|---|
| offload | all tensors of 1.7 B into the slot, until all is there | one copy of as many bytes into pinned memory | 0.9 of its rate |
| encode | 8 B: diff, records and new sums, until they are on the host | | 12 ms for the pass |
| dense | 8 B into fused parameters | one device copy of as many bytes | 1.5 of its time |
| apply | a delta of 8 B at 1 % into fused parameters: the engine's pause | | 10 ms |
| digest | 8 B where they are | reading them once | 1.5 of its time |
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "bench")]

import needs  # noqa: E402

needs.need("torch", "numpy", "windlass")

import torch  # noqa: E402
from gpu import Timer, layout, read_limit, say, step  # noqa: E402
from programs import Device  # noqa: E402

from windlass import _windlass as w  # noqa: E402


def clock(repeats: int, work: Callable[[int], Any], warm: int = 2) -> list[float]:
    """Milliseconds of every call."""
    told = []
    for i in range(warm + repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work(i)
        told.append((time.perf_counter() - began) * 1e3)
    return told[warm:]


class Run:
    """What was measured."""

    def __init__(self, repeats: int) -> None:
        self.repeats, self.ms = repeats, {}
        self.figures: dict[str, Any] = {}

    def time(self, name: str, work: Callable[[int], Any], warm: int = 2) -> float:
        self.ms[name] = clock(self.repeats, work, warm)
        median = statistics.median(self.ms[name])
        say(f"  {name:22} {median:9.3f} ms [{min(self.ms[name]):.3f}..{max(self.ms[name]):.3f}]")
        return median

    def tell(self, name: str, value: float, bar: str) -> None:
        self.figures[name] = value
        say(f"  {name:22} {value:9.3f}    bar {bar}")


class Weights:
    """Two states of a model, tensor by tensor, and a region for them."""

    def __init__(self, folder: str, model: str, rate: float = 0.01) -> None:
        self.tensors = list(layout(model))
        torch.manual_seed(7)
        self.layout = w.Layout([(n, "BF16", [c]) for n, c, _ in self.tensors])
        self.at = {name: at for name, _, _, at, _ in self.layout.tensors()}
        self.bytes = self.layout.data_bytes
        first = torch.empty(self.bytes // 2, dtype=torch.bfloat16, device="cuda")
        for i in range(0, len(first), 1 << 27):
            first[i : i + (1 << 27)].normal_(0, 0.02)
        self.states = [first, step(first, rate)]
        region = Path(folder) / "region"
        self.publisher = w.Publisher.create(region, "model", self.layout, memfd="auto")
        self.copies = self.publisher.plan([(self.at[n], 2 * c, []) for n, c, _ in self.tensors])

    def addresses(self, state: int) -> list[int]:
        base = self.states[state].data_ptr()
        return [base + self.at[n] for n, _, _ in self.tensors]

    def fuse(self, gpu: w.Gpu) -> None:
        """Parameters of an engine, and the plan that brings the image there."""
        sizes: dict[str, int] = {}
        for _, count, (parameter, _) in self.tensors:
            sizes[parameter] = sizes.get(parameter, 0) + count
        self.parameters = {p: torch.zeros(n, dtype=torch.bfloat16, device="cuda") for p, n in sizes.items()}
        filled, copies, names = dict.fromkeys(sizes, 0), [], list(sizes)
        for name, count, (parameter, _) in self.tensors:
            copies.append((name, 0, names.index(parameter), filled[parameter], [count], [1], [1]))
            filled[parameter] += count
        self.plan = w.LoadPlan(self.layout, [(p, n, "BF16") for p, n in sizes.items()], copies)
        self.device = gpu.load_plan(self.plan, [p.data_ptr() for p in self.parameters.values()])

    def close(self) -> None:
        self.publisher.close()
        self.publisher.discard()


def offload(run: Run, gpu: w.Gpu, model: str) -> None:
    say(f"offload of {model}")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        weights = Weights(folder, model)
        pinned = torch.empty(weights.bytes // 2, dtype=torch.bfloat16, pin_memory=True)

        def plain(i: int) -> None:
            pinned.copy_(weights.states[i % 2], non_blocking=True)
            torch.cuda.synchronize()

        copy = run.time("pinned_d2h", plain)
        began = time.perf_counter()
        weights.publisher.begin(1, 60.0)
        weights.publisher.copy_device(gpu, weights.copies, weights.addresses(0))
        weights.publisher.commit(60.0)
        say(f"  the first took {time.perf_counter() - began:.2f} s, registering the slot")
        version = 1
        copied: list[float] = []

        def publish(i: int) -> None:
            nonlocal version
            version += 1
            weights.publisher.begin(version, 60.0)
            began = time.perf_counter()
            direct = weights.publisher.copy_device(gpu, weights.copies, weights.addresses(i % 2))
            copied.append((time.perf_counter() - began) * 1e3)
            weights.publisher.commit(60.0)
            assert direct

        whole = run.time("offload", publish)
        run.ms["offload_copy"] = copied[2:]
        run.tell("offload_gb_s", weights.bytes / whole / 1e6, f"pinned {weights.bytes / copy / 1e6:.1f} GB/s")
        run.tell("offload_of_pinned", copy / whole, ">= 0.9")
        masters = [s.float() for s in weights.states]
        casts = [True] * len(weights.tensors)

        def cast(i: int) -> None:
            nonlocal version
            version += 1
            base = masters[i % 2].data_ptr()
            addresses = [base + 2 * weights.at[n] for n, _, _ in weights.tensors]
            weights.publisher.begin(version, 60.0)
            weights.publisher.copy_device(gpu, weights.copies, addresses, 0, casts)
            weights.publisher.commit(60.0)

        wide = run.time("offload_cast", cast)
        run.tell("cast_of_pinned", copy / wide, "none")
        weights.close()


def device_copy(run: Run, states: list[torch.Tensor]) -> float:
    flat = torch.empty_like(states[0])

    def copy(i: int) -> None:
        flat.copy_(states[i % 2])
        torch.cuda.synchronize()

    return run.time("device_copy", copy)


def deltas(run: Run, gpu: w.Gpu, model: str) -> None:
    say(f"deltas of {model}")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        weights = Weights(folder, model)
        device, timer = Device(), Timer(run.repeats)
        state = weights.states[0]
        size = weights.bytes // 64 * 64
        once = read_limit(
            device, timer, "read_once", state.data_ptr(), state.data_ptr() + size // 2, size // 2
        )
        say(f"  reading once {once:.3f} ms")
        baseline = gpu.baseline(weights.copies)
        say(f"  baseline {baseline.bytes[0] / 1e9:.2f} GB, room for records {baseline.bytes[1] / 1e9:.2f} GB")
        baseline.reset(weights.addresses(0), 1)
        version, records = 1, None

        def encode(_: int) -> None:
            nonlocal version, records
            records = None
            # Odd versions are the first state, even ones the second.
            records = baseline.encode(weights.addresses(version % 2), version, version + 1)
            version += 1
            passes.append(records.milliseconds[0])

        passes: list[float] = []
        whole = run.time("encode_to_host", encode)
        assert records is not None and records.lost == 0
        share = records.changes / (weights.bytes / 2)
        say(f"  {100 * share:.2f} % changed, {records.payload_bytes / 1e6:.1f} MB in {len(records)} records")
        run.tell("encode_to_host_ms", whole, "none")
        run.tell("encode_pass_ms", statistics.median(passes[-run.repeats :]), "<= 12 for 8 B")
        say("  pass, copy, index of the last: " + ", ".join(f"{ms:.3f}" for ms in records.milliseconds))
        ways = []
        for _ in range(2):
            encode(0)
            ways.append(records.container())
        records = None
        weights.fuse(gpu)
        image = weights.states[1 - version % 2]
        weights.device.dense(image.data_ptr())
        dense = run.time("dense", lambda i: weights.device.dense(weights.states[i % 2].data_ptr()))
        copy = device_copy(run, weights.states)
        run.tell("dense_of_copy", dense / copy, "<= 1.5")
        digest = run.time("digest", lambda _: weights.device.digest())
        run.tell("digest_of_read", digest / once, "<= 1.5")
        weights.device.dense(image.data_ptr())
        stage = []

        def apply(i: int) -> None:
            weights.device.apply(staged[i % 2])

        staged = []
        for way in ways:
            began = time.perf_counter()
            staged.append(weights.device.stage(way))
            stage.append((time.perf_counter() - began) * 1e3)
        say(f"  staging a delta before the pause took {stage[0]:.1f} and {stage[1]:.1f} ms")
        run.ms["stage"] = stage
        pause = run.time("apply", apply)
        run.tell("pause_8B_ms", pause, "<= 10")
        combined = json.loads(w.combine_digests(weights.layout, [weights.device.digest()]))
        assert combined["digest"] == baseline.digest(), "the parameters are what was published"
        weights.close()


def placements(run: Run, gpu: w.Gpu, model: str) -> None:
    say(f"baselines of {model}")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        weights = Weights(folder, model)
        some = min(weights.bytes, 2 << 30) // 2
        pinned = torch.empty(some, dtype=torch.bfloat16, pin_memory=True)

        def plain(i: int) -> None:
            pinned.copy_(weights.states[i % 2][:some], non_blocking=True)
            torch.cuda.synchronize()

        copy = run.time("pinned_d2h", plain) * weights.bytes / (2 * some)
        say(f"  a copy of all of it {copy:9.3f} ms ({weights.bytes / copy / 1e6:.1f} GB/s)")
        room = weights.bytes // 16
        digests = set()
        for name, how in {
            "device": {},
            "half": {"keep": "auto", "most": room + weights.bytes // 2},
            "host": {"keep": "host"},
        }.items():
            began = time.perf_counter()
            baseline = gpu.baseline(weights.copies, None, room, **how)
            made = time.perf_counter() - began
            baseline.reset(weights.addresses(0), 1)
            filled = time.perf_counter() - began - made
            device, host, _, expected, _ = baseline.place
            say(
                f"  {name}: {device / 1e9:.2f} GB on the device, {host / 1e9:.2f} GB on the host; made in {made:.2f} s, "
                f"filled in {filled:.2f} s"
            )
            passes: list[float] = []
            for version in range(1, run.repeats + 3):
                # Odd versions are the first state, even ones the second.
                records = baseline.encode(weights.addresses(version % 2), version, version + 1)
                assert records.lost == 0 and records.changes > 0
                passes.append(records.milliseconds[0])
                del records
            digests.add(baseline.digest())
            run.ms[f"pass_{name}"] = passes[2:]
            median = statistics.median(passes[2:])
            run.tell(f"pass_{name}_ms", median, f"expected {expected:.0f} ms, of a copy {median / copy:.2f}")
            if host:
                extra = median - statistics.median(run.ms["pass_device"])
                run.tell(f"bus_{name}_gb_s", host / extra / 1e6, "50 is expected of PCIe 5")
            del baseline
        assert len(digests) == 1, digests
        say("  all three hold the same state")
        weights.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=needs.whole(1), default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--baseline", nargs="?", const="1.7B", choices=["0.6B", "1.7B", "8B"])
    args = parser.parse_args()
    needs.need_device()
    gpu = w.Gpu.open(0)
    say(
        f"{gpu.name}, driver for CUDA {gpu.cuda[0]}.{gpu.cuda[1]}, torch {torch.__version__}; medians of {args.repeats}"
    )
    run = Run(args.repeats)
    if args.baseline:
        placements(run, gpu, args.baseline)
    else:
        offload(run, gpu, "0.6B" if args.small else "1.7B")
        gc.collect()
        torch.cuda.empty_cache()
        deltas(run, gpu, "0.6B" if args.small else "8B")
    if args.json:
        told = {"device": gpu.name, "cuda": gpu.cuda, "torch": torch.__version__, "figures": run.figures}
        args.json.write_text(json.dumps(told | {"ms": run.ms}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
