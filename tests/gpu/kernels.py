"""The CUDA kernels beside the CPU codec: records byte for byte, sums, application, copies.

    PYTHONPATH=python python tests/gpu/kernels.py [--host] [--windlass COMMAND] [--scale 1.0] [NAME...]

Needs torch, numpy, a CUDA device and the command `windlass`, which is this Python's unless told. With `--host` the kernels run on the CPU (`host.h`), on less data. Every test
draws new data; `--seed` repeats a run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import needs

needs.need("torch", "numpy")

import codec  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from codec import Block, Bytes, Tensor  # noqa: E402
from drawing import WORDS, Draw  # noqa: E402
from engine import Engine  # noqa: E402

from programs import COPY, SPAN, TALLY, Device, Host, Programs  # noqa: E402
from rank import Rank, baseline  # noqa: E402


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def old(t: Tensor) -> Bytes:
    return t.old


def new(t: Tensor) -> Bytes:
    return t.new


def compare(blocks: list[Block], found: tuple[Any, dict[int, Any], Bytes], records: dict[int, Any]) -> None:
    """Every record is the CPU's: mode, bytes and sum."""
    _, entries, out = found
    for b in blocks:
        e, r = entries.get(b.number), records.get(b.number)
        name = f"block {b.number} of {b.tensor.name}"
        assert (e is None) == (r is None), f"{name}: one of both has no record"
        if e is None or r is None:
            continue
        at, length = int(e["offset"]), int(e["length"])
        assert int(e["mode"]) == r.mode, f"{name}: mode {e['mode']} instead of {r.mode}"
        payload = out[at : at + length].tobytes()
        if payload != r.payload:
            same = next(i for i, (x, y) in enumerate(zip(payload + b"\0", r.payload + b"\1")) if x != y)
            raise AssertionError(
                f"{name}: mode {r.mode}, {length} bytes for {len(r.payload)}, differ from byte {same} on"
            )
        assert tuple(map(int, e["sum"])) == tuple(r.sum), f"{name}: sum"
        changed = (b.gather(b.tensor.old) != b.gather(b.tensor.new)).reshape(-1, b.tensor.unit).any(1).sum()
        assert int(e["changes"]) == int(changed), f"{name}: changes"


@dataclass
class Setting:
    programs: Programs
    windlass: list[str]
    draw: Draw
    scale: float

    def some(self, count: int) -> int:
        return max(1, int(count * self.scale))


# ---- Tests

SIZES = [
    1,
    2,
    3,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    33,
    64,
    65,
    127,
    255,
    257,
    1000,
    4095,
    4097,
    20_000,
    65_535,
    65_536,
    65_537,
    140_001,
]
RATES: list[float | str] = [0.0, "one", "ends", 0.0003, 0.01, 0.03, 0.07, 0.12, 0.5, 1.0, "runs", "uneven"]
STEPS = ["one", "small", "mixed", "bits", "edges"]


def tensors_of_every_kind(s: Setting) -> list[Tensor]:
    d, made = s.draw, []
    for dtype in codec.DTYPES:
        for _ in range(s.some(40)):
            size = d.pick.choice(SIZES if s.scale >= 1 or d.pick.random() < 0.1 else SIZES[:18])
            made.append(
                d.tensor(
                    dtype,
                    size,
                    d.pick.choice(RATES),
                    d.pick.choice(STEPS),
                    d.pick.choice(["weights", "edges", "random"]),
                )
            )
    for dtype in ("U8", "BF16", "F32", "F64", "I16"):
        for rate in RATES if s.scale >= 1 else (0.01, 0.12):
            made.append(d.tensor(dtype, 65_536, rate, "mixed", "weights"))
    return made


def test_records_and_sums_are_those_of_the_cpu(s: Setting) -> str:
    tensors = tensors_of_every_kind(s)
    records, changes = codec.parse(codec.container(s.windlass, tensors))
    rank = Rank(s.programs, codec.blocks_of(tensors))
    rank.begin(old)
    rank.check_state(old)
    rank.place(new)
    found = rank.encode()
    compare(rank.blocks, found, records)
    assert int(found[0]["changes"]) == changes and int(found[0]["lost"]) == 0
    rank.check_state(new)
    again = rank.encode()
    assert int(again[0]["entries"]) == 0, "a second pass finds nothing"
    modes = [sum(r.mode == m for r in records.values()) for m in (1, 3, 4)]
    return (
        f"{len(tensors)} tensors, {len(rank.blocks)} blocks, {changes} changes; sparse/bitmap/dense {modes}"
    )


def test_unaligned_weights_give_the_same_records(s: Setting) -> str:
    tensors = tensors_of_every_kind(Setting(s.programs, s.windlass, s.draw, s.scale * 0.4))
    records, _ = codec.parse(codec.container(s.windlass, tensors))
    skews = {id(t): s.draw.pick.randrange(1, 256 // t.unit) * t.unit for t in tensors}
    rank = Rank(s.programs, codec.blocks_of(tensors), skews=skews)
    rank.begin(old)
    rank.check_state(old, sums=False)
    rank.place(new)
    compare(rank.blocks, rank.encode(), records)
    rank.check_state(new)
    return f"{len(tensors)} tensors"


def test_blocks_of_several_runs_are_encoded_where_they_are(s: Setting) -> str:
    """Column slices. The CPU's records are those of the same units in a tensor of their own."""
    d, blocks, alone = s.draw, [], []
    for _ in range(s.some(60)):
        dtype = d.pick.choice([n for n in codec.DTYPES if n not in ("F4", "F6_E2M3", "F6_E3M2", "C64")])
        rows, columns = d.pick.randrange(2, 40), d.pick.choice([3, 8, 33, 64, 256, 1000, 1536])
        t = d.tensor(dtype, rows * columns, d.pick.choice(RATES), d.pick.choice(STEPS), "weights")
        left = d.pick.randrange(columns)
        width = d.pick.randrange(1, columns - left + 1)
        if d.pick.random() < 0.5 and columns >= 64:
            left, width = left // 16 * 16, max(16, width // 16 * 16)
            width = min(width, columns - left)
        b = Block(0, t, left, width, columns, rows)
        gathered = Tensor(t.name, dtype, b.gather(t.old).copy(), b.gather(t.new).copy())
        blocks.append(b)
        alone.append(gathered)
    numbers = {b.tensor.name: b.number for b in codec.blocks_of(alone)}
    for b in blocks:
        b.number = numbers[b.tensor.name]
    records, _ = codec.parse(codec.container(s.windlass, alone))
    for b in blocks:
        if b.number in records:
            records[b.number].sum = b.sum(b.tensor.new)
    rank = Rank(s.programs, blocks)
    rank.begin(old)
    rank.check_state(old)
    rank.place(new)
    compare(blocks, rank.encode(), records)
    rank.check_state(new)
    return f"{len(blocks)} blocks"


def test_fp32_weights_are_cast_as_torch_does(s: Setting) -> str:
    d = s.draw
    tensors, fresh = [], {}
    for count in [1, 5, 8, 1000, 4099] + [65_537] * s.some(3):
        for rate in (0.0, 0.01, 0.3, 1.0):
            t = d.tensor("BF16", count, 0.0, "one", d.pick.choice(["weights", "random", "edges"]))
            master = (t.old.view(np.uint16).astype(np.uint32) << np.uint32(16)) + d.rng.integers(
                -0x7FFF, 0x7FFF, count
            ).astype(np.uint32)
            mask = d.rng.random(count) < rate
            master[mask] = d.rng.integers(0, 1 << 32, int(mask.sum()), dtype=np.uint64).astype(np.uint32)
            ends = np.array(
                [0x7F800000, 0x7F800001, 0xFFFFFFFF, 0x80000000, 1, 0x7F7FFFFF, 0x3F808000, 0x3F818000]
            )
            some = d.rng.random(count) < rate / 4
            master[some] = d.rng.choice(ends.astype(np.uint32), int(some.sum()))
            values = torch.from_numpy(master.view(np.float32).copy()).to(s.programs.device)
            cast = values.to(torch.bfloat16).view(torch.int16).cpu().numpy().view(np.uint16)
            if s.programs.device == "cpu":  # torch on a CPU has another NaN
                cast = np.where((master & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FFF), cast)
            t.new = cast.view(np.uint8)
            tensors.append(t)
            fresh[id(t)] = master.view(np.uint8)
    records, changes = codec.parse(codec.container(s.windlass, tensors))
    widened = {
        id(t): (t.old.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.uint8) for t in tensors
    }
    for skewed in (0, 4):
        rank = Rank(
            s.programs, codec.blocks_of(tensors), skews=dict.fromkeys(widened, skewed), program="encode_cast"
        )
        rank.begin(lambda t: widened[id(t)])
        # A cast makes every NaN the same one, so that the baseline is not always what was widened.
        rank.baseline.copy_(torch.from_numpy(baseline(rank, old)))
        rank.sum()
        rank.place(lambda t: fresh[id(t)])
        compare(rank.blocks, rank.encode(), records)
        rank.check_state(new)
    return f"{len(tensors)} tensors, {changes} changes"


def test_what_does_not_fit_is_told_and_nothing_is_written_beyond(s: Setting) -> str:
    # Whole blocks with many changes take a CPU minutes.
    units = 65_536 if s.scale >= 1 else 9_000
    tensors = [
        s.draw.tensor("BF16", units, r, "mixed", "weights") for r in (0.01, 0.02, 0.2, 1.0) * s.some(3)
    ]
    records, changes = codec.parse(codec.container(s.windlass, tensors))
    need = sum(-(-len(r.payload) // 4) * 4 for r in records.values())
    lost = 0
    for capacity in (0, 1000, need // 3 // 4 * 4, need - 4, need):
        rank = Rank(s.programs, codec.blocks_of(tensors), capacity=capacity)
        rank.begin(old)
        rank.place(new)
        tally, entries, out = rank.encode()
        assert int(tally["cursor"]) == need and int(tally["changes"]) == changes
        missing = {n for n, e in entries.items() if int(e["offset"]) == (1 << 64) - 1}
        assert len(missing) == int(tally["lost"]) and bool(missing) == (capacity < need)
        lost += len(missing)
        assert (out[capacity:] == 0xCC).all(), f"written beyond {capacity} bytes"
        kept = [b for b in rank.blocks if b.number not in missing]
        compare(kept, (tally, entries, out), {n: r for n, r in records.items() if n not in missing})
        for n in missing:
            assert tuple(map(int, entries[n]["sum"])) == records[n].sum
        rank.check_state(new)
    return f"{lost} records lost in 5 capacities"


def test_sums_follow_step_after_step(s: Setting) -> str:
    d = s.draw
    tensors = [
        d.tensor(t, d.pick.randrange(1, 70_000), 0.01, "mixed", "weights")
        for t in ("BF16", "F32", "U8", "F64")
    ]
    rank = Rank(s.programs, codec.blocks_of(tensors))
    rank.begin(old)
    for step in range(4):
        for t in tensors:
            units = (t.old if step == 0 else t.new).view(WORDS[t.unit])
            t.new = d.change(units, d.which(len(units), 0.02 * 4**step), "small", t.is_float).view(np.uint8)
        rank.place(new)
        rank.encode()
        rank.check_state(new)
    return "4 steps"


def test_spans_of_any_alignment_have_their_sum(s: Setting) -> str:
    d, spans, wants = s.draw, [], []
    memory = d.rng.integers(0, 256, 1 << 20, dtype=np.uint8)
    here = s.programs.zeros(len(memory) + 64)
    here[: len(memory)].copy_(torch.from_numpy(memory))
    for i in range(s.some(300)):
        count = d.pick.choice([1, 1, 2, 7])
        run = d.pick.choice([1, 2, 3, 5, 16, 31, 100, 4096, 4097, 10_000, 70_001])
        pitch, stride = run + d.pick.randrange(5000), run + d.pick.randrange(9000)
        at = d.pick.randrange(len(memory) - pitch * (count - 1) - run)
        start = d.pick.randrange(1 << 40) if d.pick.random() < 0.5 else d.pick.randrange(5000)
        spans.append((here.data_ptr() + at, pitch, start, stride, run, count, i // 2, 0))
        places = (np.arange(count, dtype=np.int64)[:, None] * pitch + np.arange(run)[None, :]).reshape(
            -1
        ) + at
        bytes_at = start + (
            np.arange(count, dtype=np.uint64)[:, None] * np.uint64(stride) + np.arange(run, dtype=np.uint64)
        ).reshape(-1)
        wants.append(codec.sum_bytes(bytes_at.astype(np.uint64), memory[places]))
    sums, tally = s.programs.zeros(16 * len(spans)), s.programs.zeros(1, TALLY)
    table = s.programs.table(np.array(spans, SPAN))
    s.programs.start("sum", "windlass_sum", spans=table, sums=sums, tally=tally, count=len(spans), work=0)
    found = s.programs.read(sums, np.uint64).reshape(-1, 2)
    for i in range(0, len(wants), 2):
        for lane in (0, 1):
            want = sum(w[lane] for w in wants[i : i + 2]) % (1 << 64)
            assert int(found[i // 2][lane]) == want, spans[i : i + 2]
    return f"{len(spans)} spans"


SKIPPED, APPLIED, REFETCH, MALFORMED = range(4)


def engine(s: Setting, share: float) -> Engine:
    tensors = tensors_of_every_kind(Setting(s.programs, s.windlass, s.draw, s.scale * share))
    raw = codec.container(s.windlass, tensors)
    records, _ = codec.parse(raw)
    return Engine(s.programs, s.draw.pick, codec.blocks_of(tensors), raw, records)


def test_records_reach_fused_parameters(s: Setting) -> str:
    e = engine(s, 0.5)
    e.place(old)
    told = e.apply(checked=True)
    assert set(told.values()) <= {APPLIED}, told
    e.check(new)
    sums = s.programs.read(e.sums, np.uint64).reshape(-1, 2)
    assert all(tuple(map(int, sums[e.rows[b.number]])) == b.sum(b.tensor.new) for b in e.blocks)
    assert set(e.apply(checked=True).values()) <= {SKIPPED}, "twice is once"
    e.check(new)
    e.place(old)
    assert set(e.apply(checked=False).values()) <= {APPLIED}
    e.check(new)
    return f"{len(e.records)} records into {sum(map(len, e.pieces.values()))} pieces"


def test_a_foreign_base_is_not_touched(s: Setting) -> str:
    e = engine(s, 0.25)
    wrong: dict[int, Bytes] = {}
    patches = {}
    for b in e.blocks:
        state = wrong.setdefault(id(b.tensor), b.tensor.old.copy())
        state[b.start * b.tensor.unit + s.draw.pick.randrange(b.run * b.tensor.unit)] ^= (
            1 << s.draw.pick.randrange(8)
        )
        r = e.records.get(b.number)
        luck = np.array_equal(b.gather(state), b.gather(b.tensor.new))
        if r and r.mode != codec.DENSE and not luck:
            patches[b.number] = (r.offset, len(r.payload), r.mode, r.sum)
    e.place(lambda t: wrong[id(t)])
    sums = s.programs.read(e.sums)
    told = e.apply(checked=True, patches=patches)
    assert set(told.values()) <= {REFETCH}, told
    e.check(lambda t: wrong[id(t)])
    assert np.array_equal(s.programs.read(e.sums), sums)
    return f"{len(told)} records refused"


def test_damaged_records_write_nothing(s: Setting) -> str:
    e = engine(s, 0.5)
    e.place(old)
    raw = bytearray(s.programs.read(e.raw).tobytes())
    patches = {}
    for n, r in e.records.items():
        length, mode = len(r.payload), r.mode
        how = s.draw.pick.choice(["shorter", "form", "mode", "bits", "bits", "sum"])
        if how == "shorter":
            length = s.draw.pick.randrange(0, length)
        elif how == "form":
            mode = {1: 3, 3: 1, 4: 1}[mode]
        elif how == "mode":
            mode = s.draw.pick.choice([0, 2, 5, 77])
        elif how == "bits":
            raw[r.offset + s.draw.pick.randrange(length)] ^= 1 << s.draw.pick.randrange(8)
        patches[n] = (r.offset, length, mode, (r.sum[0], r.sum[1] ^ 1) if how == "sum" else r.sum)
    e.raw.copy_(torch.from_numpy(np.frombuffer(bytes(raw), np.uint8).copy()))
    told = e.apply(checked=True, patches=patches)
    assert set(told.values()) <= {REFETCH, MALFORMED}, told
    e.check(old)
    return f"{sum(t == MALFORMED for t in told.values())} malformed, {sum(t == REFETCH for t in told.values())} refused"


def test_copies_of_any_shape_and_alignment(s: Setting) -> str:
    d, copies = s.draw, []
    size = 1 << 22
    source = d.rng.integers(0, 256, size, dtype=np.uint8)
    want = np.full(size * 2, 0xEE, np.uint8)
    here, there = s.programs.zeros(size), s.programs.zeros(size * 2)
    here.copy_(torch.from_numpy(source))
    there.fill_(0xEE)
    at = 0
    for _ in range(s.some(200)):
        grain = d.pick.choice([1, 2, 4, 16, 16])
        run = d.pick.choice([1, 2, 3, 5, 16, 17, 100, 1024, 4096, 5000, 20_000]) * grain
        count = 1 if d.pick.random() < 0.4 else d.pick.randrange(1, 20)
        run = min(run, size // 8 // count // grain * grain)
        from_pitch, to_pitch = run + grain * d.pick.randrange(30), run + grain * d.pick.randrange(30)
        start = d.pick.randrange(0, size - (count - 1) * from_pitch - run, grain)
        at = -(-at // grain) * grain + grain * d.pick.randrange(40)
        if at + count * to_pitch > size * 2:
            break
        copies.append((here.data_ptr() + start, there.data_ptr() + at, from_pitch, to_pitch, run, count))
        for r in range(count):
            want[at + r * to_pitch : at + r * to_pitch + run] = source[
                start + r * from_pitch : start + r * from_pitch + run
            ]
        at += (count - 1) * to_pitch + run
    tally = s.programs.zeros(1, TALLY)
    table = s.programs.table(np.array(copies, COPY))
    s.programs.start("copy", "windlass_copy", copies=table, tally=tally, count=len(copies), work=0)
    assert np.array_equal(s.programs.read(there), want)
    return f"{len(copies)} copies"


def test_copies_are_rounded_as_torch_does(s: Setting) -> str:
    d, copies = s.draw, []
    source = d.rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint64).astype(np.uint32)
    here, there = s.programs.zeros(source.nbytes), s.programs.zeros(source.nbytes)
    here.copy_(torch.from_numpy(source.view(np.uint8)))
    there.fill_(0xEE)
    values = torch.from_numpy(source.view(np.float32)).to(s.programs.device)
    cast = values.to(torch.bfloat16).view(torch.int16).cpu().numpy().view(np.uint16)
    # torch on a CPU has another NaN.
    cast = np.where((source & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FFF), cast)
    want = np.full(source.nbytes // 2, 0xEEEE, np.uint16)
    at = 0
    for _ in range(s.some(120)):
        run, count = d.pick.choice([1, 3, 8, 17, 500, 2048, 5000]), d.pick.choice([1, 1, 2, 9])
        from_pitch, to_pitch = run + d.pick.randrange(9), run + d.pick.randrange(9)
        start = d.pick.randrange(len(source) - count * from_pitch)
        at += d.pick.randrange(20)
        if at + count * to_pitch > len(want):
            break
        copies.append((4 * start, 2 * at, 4 * from_pitch, 2 * to_pitch, 2 * run, count))
        for r in range(count):
            first = start + r * from_pitch
            want[at + r * to_pitch : at + r * to_pitch + run] = cast[first : first + run]
        at += (count - 1) * to_pitch + run
    table, tally = s.programs.table(np.array(copies, COPY)), s.programs.zeros(1, TALLY)
    fields = {"copies": table, "from": here, "to": there, "tally": tally, "count": len(copies), "work": 0}
    s.programs.start("copy", "windlass_cast", **fields)
    assert np.array_equal(s.programs.read(there, np.uint16), want)
    return f"{len(copies)} copies"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", action="store_true", help="run the kernels on the CPU")
    parser.add_argument(
        "--windlass", help="the command, with its first words; python -m windlass unless told"
    )
    parser.add_argument("--patience", type=float, default=900, help="seconds that a test may take")
    parser.add_argument("--scale", type=float, help="how much data; 1 on a GPU")
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 32))
    parser.add_argument("names", nargs="*", help="parts of the names of tests")
    args = parser.parse_args()
    if not args.host:
        needs.need_device("the kernels")
    if args.windlass is None:
        needs.need("windlass")
    windlass = [sys.executable, "-m", "windlass"] if args.windlass is None else args.windlass.split()
    programs: Programs = Host() if args.host else Device()
    scale = args.scale or (0.03 if args.host else 1.0)
    say(f"seed {args.seed}, {'the CPU' if args.host else torch.cuda.get_device_name()}")

    def alone(test: Callable[[Setting], str]) -> Callable[[], str]:
        # Each test draws from the seed, whichever others run.
        return lambda: test(Setting(programs, windlass, Draw(args.seed), scale))

    tests = {name: alone(test) for name, test in globals().items() if name.startswith("test_")}
    return needs.run_tests(tests, args.names, patience=args.patience)


if __name__ == "__main__":
    sys.exit(main())
