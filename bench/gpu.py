"""The GPU path beside the limits of the device's memory, on layouts of Qwen3 models.

    python bench/gpu.py [--size 0.6B 1.7B 8B] [--repeats 12] [--json FILE]

Needs a CUDA device and torch. Weights are made up: normal, bf16, and a step like Adam's after which about one in a
hundred differs. Everything takes turns in one run and is timed by events on one stream; medians count.

| figure | what | beside it |
|---|---|---|
| encode | diff, records, new sums and baseline in one pass | reading both states; `!=`, `nonzero` and gather by torch |
| sum | the digest of weights where they are | reading them once |
| replay | all tensors into fused parameters | copying as many bytes at once |
| apply | the records of a delta into fused parameters | |
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "gpu"))

import needs  # noqa: E402

needs.need("torch", "numpy")

import numpy as np  # noqa: E402
import programs  # noqa: E402
import torch  # noqa: E402
from programs import BLOCK, COPY, ENTRY, PATCH, PIECE, PLACE, SPAN, TALLY, Device  # noqa: E402

BLOCK_UNITS = 1 << 16
COPY_BYTES = 256 << 10
#: hidden, intermediate, layers, heads, key-value heads, tied embeddings
MODELS = {
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "1.7B": (2048, 6144, 28, 16, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
}
RATES = (0.0002, 0.001, 0.01, 0.036, 0.06, 0.1, 0.3, 1.0)
BARS = {"encode": 0.6, "encode_8B_ms": 12.0, "sum": 1.5, "replay": 1.5}

READ = np.dtype([(n, np.uint64) for n in ("a", "b", "chunks", "sink")])
probes = dict.fromkeys(("read_2", "read_4"), ("ReadArgs", READ))
programs.PROGRAMS["read"] = ([str(ROOT / "bench" / "read")], [], probes)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def layout(model: str) -> Iterator[tuple[str, int, tuple[str, int]]]:
    """Every tensor: its name, its elements, and the parameter of an engine that it becomes a part of, in order."""
    hidden, inner, layers, heads, kv, tied = MODELS[model]
    vocab, head = 151_936, 128
    yield "model.embed_tokens.weight", vocab * hidden, ("embed", 0)
    if not tied:
        yield "lm_head.weight", vocab * hidden, ("lm_head", 0)
    for i in range(layers):
        p = f"model.layers.{i}."
        yield p + "self_attn.q_proj.weight", heads * head * hidden, (p + "qkv", 0)
        yield p + "self_attn.k_proj.weight", kv * head * hidden, (p + "qkv", 1)
        yield p + "self_attn.v_proj.weight", kv * head * hidden, (p + "qkv", 2)
        yield p + "self_attn.o_proj.weight", heads * head * hidden, (p + "o", 0)
        yield p + "mlp.gate_proj.weight", inner * hidden, (p + "gate_up", 0)
        yield p + "mlp.up_proj.weight", inner * hidden, (p + "gate_up", 1)
        yield p + "mlp.down_proj.weight", inner * hidden, (p + "down", 0)
        for norm, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden)):
            yield p + norm + ".weight", size, (p + norm, 0)
        for norm in ("q_norm", "k_norm"):
            yield p + f"self_attn.{norm}.weight", head, (p + norm, 0)
    yield "model.norm.weight", hidden, ("norm", 0)


def step(weights: torch.Tensor, rate: float) -> torch.Tensor:
    """Weights after a step of the same size for each, from somewhere within the rounding of the old ones."""
    lr = 1e-6
    sample = weights[: 1 << 22]
    for _ in range(12):
        lr *= rate / max((stepped(sample, lr) != sample).float().mean().item(), 1e-6) if rate < 1 else 1
    out = torch.empty_like(weights)
    for at in range(0, len(weights), 1 << 27):
        out[at : at + (1 << 27)] = stepped(weights[at : at + (1 << 27)], lr if rate < 1 else 1.0)
    return out


def stepped(old: torch.Tensor, lr: float) -> torch.Tensor:
    value = old.float()
    ulp = torch.exp2(torch.floor(torch.log2(value.abs().clamp_min(1e-30))) - 7)
    within = (torch.rand_like(value) - 0.5) * ulp * 0.98
    # The neighbour below a power of two is half as far.
    within = torch.where(old.view(torch.int16) & 0x7F == 0, within / 2, within)
    sign = torch.sign(torch.rand_like(value) - 0.5)
    return (value + within + sign * lr).to(torch.bfloat16)


class Timer:
    """Repeats of some work by events, warmed up."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.ms: dict[str, list[float]] = {}

    def time(self, name: str, work: Callable[[int], Any], warm: int = 2) -> float:
        events = []
        for i in range(warm + self.repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            work(i)
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        self.ms[name] = [b.elapsed_time(e) for b, e in events[warm:]]
        return statistics.median(self.ms[name])

    def median(self, name: str) -> float:
        return statistics.median(self.ms[name])


class Model:
    """Two states of a model, a baseline, and an engine's fused parameters, all in the device's memory."""

    def __init__(self, device: Device, name: str, rate: float) -> None:
        self.device = device
        self.tensors = list(layout(name))
        self.offsets, at = [], 0
        for _, count, _ in self.tensors:
            self.offsets.append(at)
            at += -(-count // 128) * 128
        self.elements = sum(c for _, c, _ in self.tensors)
        self.bytes = 2 * self.elements
        torch.manual_seed(7)
        first = torch.empty(at, dtype=torch.bfloat16, device="cuda")
        for i in range(0, at, 1 << 27):
            first[i : i + (1 << 27)].normal_(0, 0.02)
        self.states = [first, step(first, rate)]
        self.baseline = first.clone()
        numbers, blocks = 0, []
        for (_, count, _), offset in zip(self.tensors, self.offsets):
            for start in range(0, count, BLOCK_UNITS):
                run = min(BLOCK_UNITS, count - start)
                blocks.append((2 * (offset + start), 2 * start, run, numbers))
                numbers += 1
        self.geometry = np.array(blocks, np.uint64)
        self.count = numbers
        self.tables = [self.blocks(s.data_ptr()) for s in self.states]
        spans = np.zeros(numbers, SPAN)
        spans["at"] = self.geometry[:, 0]
        spans["start"], spans["run"], spans["count"] = self.geometry[:, 1], self.geometry[:, 2] * 2, 1
        spans["sum"] = np.arange(numbers)
        self.span_array = spans
        self.sums = device.zeros(16 * numbers)
        self.entries = device.zeros(numbers, ENTRY)
        self.capacity = self.bytes // 2
        self.out = device.zeros(self.capacity)
        self.tally = device.zeros(1, TALLY)

    def blocks(self, fresh: int, wide: int = 1) -> torch.Tensor:
        table = np.zeros(self.count, BLOCK)
        table["fresh"] = fresh + self.geometry[:, 0] * np.uint64(wide)
        table["base"] = self.baseline.data_ptr() + self.geometry[:, 0]
        table["start"], table["run"], table["count"] = self.geometry[:, 1], self.geometry[:, 2], 1
        table["number"], table["is_float"] = self.geometry[:, 3], 1
        return self.device.table(table)

    def spans(self, at: int) -> torch.Tensor:
        table = self.span_array.copy()
        table["at"] += np.uint64(at)
        return self.device.table(table)

    def encode(self, table: torch.Tensor, program: str = "encode_2", grid: int = 0) -> None:
        self.tally.zero_()
        self.device.start(
            program,
            "windlass_encode",
            grid,
            blocks=table,
            sums=self.sums,
            out=self.out,
            entries=self.entries,
            tally=self.tally,
            capacity=self.capacity,
            count=self.count,
            entry_capacity=self.count,
            work=0,
        )

    def sum(self, spans: torch.Tensor, sums: torch.Tensor) -> None:
        self.tally.zero_()
        sums.zero_()
        self.device.start(
            "sum", "windlass_sum", spans=spans, sums=sums, tally=self.tally, count=self.count, work=0
        )

    def told(self) -> Any:
        return self.device.read(self.tally, TALLY)[0]

    def check(self, state: int) -> None:
        """Baseline and sums are those of this state."""
        assert torch.equal(self.baseline.view(torch.int16), self.states[state].view(torch.int16)), (
            "the baseline"
        )
        fresh = torch.zeros_like(self.sums)
        self.sum(self.spans(self.states[state].data_ptr()), fresh)
        assert torch.equal(fresh, self.sums), "the sums"

    # ---- The engine

    def fuse(self) -> None:
        """Parameters, and the tables by which tensors and records reach them."""
        sizes: dict[str, int] = {}
        for _, count, (parameter, _) in self.tensors:
            sizes[parameter] = sizes.get(parameter, 0) + count
        self.parameters = {p: torch.zeros(n, dtype=torch.bfloat16, device="cuda") for p, n in sizes.items()}
        filled = dict.fromkeys(sizes, 0)
        copies, pieces, places = [], [], []
        for i, (_, count, (parameter, _)) in enumerate(self.tensors):
            to = self.parameters[parameter].data_ptr() + 2 * filled[parameter]
            filled[parameter] += count
            pieces.append((0, 2 * count, 2 * count, 1, to, 2 * count))
            for at in range(0, 2 * count, COPY_BYTES):
                size = min(COPY_BYTES, 2 * count - at)
                copies.append((2 * self.offsets[i] + at, to + at, size, size, size, 1))
            for start in range(0, count, BLOCK_UNITS):
                run = min(BLOCK_UNITS, count - start)
                places.append((2 * start, 2 * run, run, 1, i, 1, 1, 0))
        self.copies = np.array(copies, COPY)
        self.pieces = self.device.table(np.array(pieces, PIECE))
        self.places = self.device.table(np.array(places, PLACE))
        self.engine_sums = torch.zeros_like(self.sums)
        self.outcomes = self.device.zeros(4 * self.count)

    def replay_table(self, state: int) -> torch.Tensor:
        table = self.copies.copy()
        table["from"] += np.uint64(self.states[state].data_ptr())
        return self.device.table(table)

    def replay(self, table: torch.Tensor) -> None:
        self.tally.zero_()
        self.device.start(
            "copy", "windlass_copy", copies=table, tally=self.tally, count=len(self.copies), work=0
        )

    def patches(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The records that were last encoded, as they would come from the host."""
        told = self.told()
        entries = self.device.read(self.entries, ENTRY)[: int(told["entries"])]
        rows = np.zeros(len(entries), PATCH)
        for field in ("offset", "sum", "length", "mode"):
            rows[field] = entries[field]
        rows["place"] = entries["number"]
        rows = rows[np.argsort(rows["place"])]
        payload = self.out[: int(told["cursor"]) + 16].clone()
        return self.device.table(rows), payload, len(rows)

    def apply(self, patches: tuple[torch.Tensor, torch.Tensor, int], checked: bool) -> None:
        table, payload, count = patches
        self.tally.zero_()
        self.device.start(
            "apply_2",
            "windlass_apply",
            places=self.places,
            pieces=self.pieces,
            patches=table,
            payload=payload,
            sums=self.engine_sums if checked else 0,
            outcomes=self.outcomes,
            tally=self.tally,
            count=count,
            work=0,
        )

    def check_engine(self, state: int) -> None:
        at = dict.fromkeys(self.parameters, 0)
        for (_, count, (parameter, _)), offset in zip(self.tensors, self.offsets):
            held = self.parameters[parameter][at[parameter] : at[parameter] + count]
            want = self.states[state][offset : offset + count]
            assert torch.equal(held.view(torch.int16), want.view(torch.int16)), parameter
            at[parameter] += count


def read_limit(device: Device, timer: Timer, name: str, a: int, b: int, each: int) -> float:
    """The quickest way found to read two ranges of so many bytes; ms."""
    sink = device.zeros(16)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    best = ""

    def probe(kernel: str, ctas: int) -> Callable[[int], None]:
        return lambda _: device.start("read", kernel, ctas, a=a, b=b, chunks=each // 16, sink=sink)

    for kernel in ("read_2", "read_4"):
        for per in (4, 8, 16, 32):
            tried = f"{name}/{kernel}x{per}"
            timer.time(tried, probe(kernel, processors * per))
            if not best or timer.median(tried) < timer.median(best):
                best = tried
    timer.ms = {k: v for k, v in timer.ms.items() if not k.startswith(f"{name}/") or k == best}
    timer.ms[name] = timer.ms.pop(best)
    return timer.median(name)


def torch_way(model: Model, state: int) -> int:
    """What changed, by torch: positions and values of every tensor."""
    changed = 0
    for (_, count, _), offset in zip(model.tensors, model.offsets):
        fresh = model.states[state][offset : offset + count]
        old = model.states[1 - state][offset : offset + count]
        at = (fresh != old).nonzero().squeeze(1)
        _ = fresh[at], at.to(torch.int32)
        changed += len(at)
    return changed


def measure(device: Device, name: str, rate: float, repeats: int) -> dict[str, Any]:
    model, timer = Model(device, name, rate), Timer(repeats)
    result = {"model": name, "elements": model.elements} | encoder(model, timer)
    result |= engine(model, timer)
    model.parameters.clear()
    result |= elsewhere(model, timer)
    if model.elements < 3e9:
        result |= cast(model, timer)
    result["ms"] = timer.ms
    return result


def encoder(model: Model, timer: Timer) -> dict[str, Any]:
    """Diff and encode, and sums, beside what they must read."""
    device, turns = model.device, timer.repeats + 2
    a, b = (s.data_ptr() for s in model.states)
    size = model.states[0].numel() * 2 // 32 * 32
    both = read_limit(device, timer, "read_both", a, b, size)
    once = read_limit(device, timer, "read_once", a, a + size // 2 // 16 * 16, size // 2)
    spans = model.spans(a)
    digest = timer.time("sum", lambda _: model.sum(spans, model.sums))
    # The baseline is the first state: each turn goes to the other one.
    encode = timer.time("encode", lambda i: model.encode(model.tables[1 - i % 2]))
    told = model.told()
    assert int(told["lost"]) == 0
    model.check(turns % 2)
    by_torch = timer.time("torch", lambda i: torch_way(model, i % 2), warm=1)
    entries = device.read(model.entries, ENTRY)[: int(told["entries"])]
    payload, changes, cursor = int(entries["length"].sum()), int(told["changes"]), int(told["cursor"])
    host = torch.empty(cursor, dtype=torch.uint8, pin_memory=True)
    d2h = timer.time("d2h", lambda _: host.copy_(model.out[:cursor], non_blocking=True))
    return {
        "changed": changes / model.elements,
        # As in a container: 22 bytes of index a record at the most.
        "bits_per_change": 8 * (payload + 22 * len(entries)) / changes,
        "delta_bytes": payload,
        "modes": {str(m): int((entries["mode"] == m).sum()) for m in (1, 3, 4)},
        "read_both_ms": both,
        "read_tb_s": 2 * size / both / 1e9,
        "read_once_ms": once,
        "encode_ms": encode,
        "encode_of_limit": both / encode,
        "torch_ms": by_torch,
        "sum_ms": digest,
        "sum_of_read": digest / once,
        "d2h_ms": d2h,
    }


def engine(model: Model, timer: Timer) -> dict[str, Any]:
    """All tensors, and a delta, into fused parameters."""
    device, turns = model.device, timer.repeats + 2
    model.fuse()
    tables = [model.replay_table(s) for s in (0, 1)]
    replay = timer.time("replay", lambda i: model.replay(tables[i % 2]))
    model.check_engine((turns - 1) % 2)
    flat = torch.empty_like(model.states[0])
    copy = timer.time("copy", lambda i: flat.copy_(model.states[i % 2]))
    # Deltas both ways, so that turns can go on for ever.
    model.baseline.copy_(model.states[0])
    model.sum(model.spans(model.states[0].data_ptr()), model.sums)
    model.engine_sums.copy_(model.sums)
    ways = []
    for to in (1, 0):
        model.encode(model.tables[to])
        ways.append(model.patches())
    figures = {}
    for name, checked in (("apply_unchecked", False), ("apply", True)):
        model.replay(tables[0])
        works = [partial(model.apply, way, checked) for way in ways]
        figures[f"{name}_ms"] = timer.time(name, lambda i: works[i % 2]())  # noqa: B023
        assert int(model.told()["outcome"][1]) == ways[0][2], "every record applied"
        model.check_engine(turns % 2)
    sent = ways[0][1].cpu().pin_memory()
    landing = torch.empty_like(sent, device="cuda")
    figures["h2d_ms"] = timer.time("h2d", lambda _: landing.copy_(sent, non_blocking=True))
    device.finish()
    return figures | {"replay_ms": replay, "copy_ms": copy, "replay_of_copy": replay / copy}


def cast(model: Model, timer: Timer) -> dict[str, Any]:
    """The same with fp32 weights, rounded on the way."""
    masters = [s.float() for s in model.states]
    tables = [model.blocks(m.data_ptr(), wide=2) for m in masters]
    model.baseline.copy_(model.states[0])
    model.sum(model.spans(model.states[0].data_ptr()), model.sums)
    ms = timer.time("encode_cast", lambda i: model.encode(tables[1 - i % 2], "encode_cast"))
    model.check(timer.repeats % 2)
    floor = timer.median("read_both") * 1.5
    return {"encode_cast_ms": ms, "encode_cast_of_limit": floor / ms}


def elsewhere(model: Model, timer: Timer) -> dict[str, Any]:
    """The same weights where they are less easy to read: columns of a wider matrix, and two bytes off alignment."""
    device = model.device
    found: dict[str, Any] = {}
    tables: dict[str, list[torch.Tensor]] = {"columns": [], "unaligned": []}
    tiles = 4 * (model.states[0].numel() // (64 * 4096)) - 4
    i = np.arange(tiles, dtype=np.uint64)
    for state in model.states:
        # Tiles of 64 rows of 1024 columns, four of them side by side.
        t = np.zeros(tiles, BLOCK)
        corner = i // np.uint64(4) * np.uint64(64 * 4096 * 2) + i % np.uint64(4) * np.uint64(2048)
        t["fresh"], t["fresh_pitch"] = np.uint64(state.data_ptr()) + corner, 8192
        t["base"] = np.uint64(model.baseline.data_ptr()) + i * np.uint64(1 << 17)
        t["start"], t["pitch"], t["run"], t["count"], t["is_float"] = (
            i % np.uint64(4) * np.uint64(2048),
            8192,
            1024,
            64,
            1,
        )
        tables["columns"].append(device.table(t))
        shifted = device.read(model.blocks(state.data_ptr() + 2), BLOCK)[:-1]
        tables["unaligned"].append(device.table(shifted))
    whole = model.count
    for name, (first, second) in tables.items():
        model.count = tiles if name == "columns" else whole - 1
        device.start("encode_2", "windlass_fill", blocks=first, count=model.count)
        ms = timer.time(f"encode_{name}", lambda n: model.encode((second, first)[n % 2]))  # noqa: B023
        found |= {f"encode_{name}_ms": ms, f"encode_{name}_of_limit": timer.median("read_both") / ms}
    model.count = whole
    return found


def at_rate(device: Device, name: str, rate: float, repeats: int) -> dict[str, float]:
    """Encoding at another change rate, slow blocks included."""
    model, timer = Model(device, name, rate), Timer(repeats)
    model.sum(model.spans(model.states[0].data_ptr()), model.sums)
    ms = timer.time("encode", lambda i: model.encode(model.tables[1 - i % 2]))
    told = model.told()
    changed, size, lost = int(told["changes"]) / model.elements, int(told["cursor"]), int(told["lost"])
    return {"changed": changed, "encode_ms": ms, "delta_bytes": size, "lost": lost}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = needs.one_of(MODELS)
    parser.add_argument("--size", "--sizes", dest="sizes", nargs="+", type=size, default=list(MODELS))
    parser.add_argument("--repeats", type=needs.whole(1), default=12)
    parser.add_argument("--rate", type=needs.share, default=0.01, help="share of the weights that change")
    parser.add_argument("--rates", type=size, help="also encode the model of this size at other rates")
    parser.add_argument("--json", type=Path, help="where to write everything that was measured")
    args = parser.parse_args()
    needs.need_device()
    device = Device()
    properties = torch.cuda.get_device_properties(0)
    report: dict[str, Any] = {
        "device": properties.name,
        "memory": properties.total_memory,
        "processors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "repeats": args.repeats,
        "bars": BARS,
        "models": [],
    }
    say(f"{properties.name}, torch {torch.__version__}; medians of {args.repeats}, ms [fastest..slowest]")
    for name in args.sizes:
        r = measure(device, name, args.rate, args.repeats)
        report["models"].append(r)
        torch.cuda.empty_cache()
        spread = {k: f"{statistics.median(v):8.3f} [{min(v):.3f}..{max(v):.3f}]" for k, v in r["ms"].items()}
        say(
            f"{name}: {r['elements'] / 1e9:.3f} G elements, {100 * r['changed']:.2f} % changed, "
            f"{r['bits_per_change']:.2f} bits a change, {r['delta_bytes'] / 1e6:.1f} MB, modes {r['modes']}"
        )
        for what, line in spread.items():
            say(f"  {what:16} {line}")
        say(
            f"  encode {r['encode_of_limit']:.2f} of the read limit ({r['read_tb_s']:.2f} TB/s), "
            f"{r['torch_ms'] / r['encode_ms']:.1f} x torch; sum {r['sum_of_read']:.2f} x one read; "
            f"replay {r['replay_of_copy']:.2f} x one copy"
        )
        others = {
            k: v
            for k, v in r.items()
            if k.startswith("encode_") and k.endswith("_limit") and k != "encode_of_limit"
        }
        say("  " + ", ".join(f"{k.removesuffix('_of_limit')} {v:.2f} of it" for k, v in others.items()))
    if args.rates:
        report["rates"] = []
        for rate in RATES:
            report["rates"].append(r := at_rate(device, args.rates, rate, args.repeats))
            torch.cuda.empty_cache()
            say(
                f"  {args.rates} at {100 * r['changed']:7.3f} %: {r['encode_ms']:.3f} ms, {r['delta_bytes'] / 1e6:.1f} MB, lost {r['lost']}"
            )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
