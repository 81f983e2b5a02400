"""The CUDA kernels beside the CPU codec: records byte for byte, sums, application, copies.

    PYTHONPATH=python python tests/gpu/kernels.py [--host] [--windlass COMMAND] [--scale 1.0] [NAME...]

Needs torch, numpy, a CUDA device and the command `windlass`, which is this Python's unless told. With `--host` the kernels run on the CPU (`host.h`), on less data. Every test
draws new data; `--seed` repeats a run.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from dataclasses import dataclass
from typing import Any

import needs

needs.need("torch", "numpy")

import codec  # noqa: E402
import context  # noqa: E402
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


def contexts(s: Setting, share: float) -> Engine:
    """Records of the CPU's encoder in context mode, into parameters fused and sliced."""
    d, tensors = s.draw, []
    sizes = [65_536, 65_537, 140_001, 20_000, 33_333, 4097] if s.scale >= 1 else [9_000, 65_536, 4097, 70_001]
    for dtype in context.FLOATS:
        for _ in range(max(2, int(40 * share * s.scale))):
            tensors.append(context.tensor(d, dtype, d.pick.choice(sizes), d.pick.choice([0.002, 0.01, 0.04])))
    raw = codec.container(s.windlass, tensors, "context")
    records, _ = codec.parse(raw)
    return Engine(s.programs, d.pick, codec.blocks_of(tensors), raw, records)


def of_mode(e: Engine, mode: int) -> dict[int, codec.Record]:
    return {n: r for n, r in e.records.items() if r.mode == mode}


def test_context_records_reach_fused_parameters(s: Setting) -> str:
    e = contexts(s, 0.3)
    here = of_mode(e, codec.CONTEXT)
    units = {b.tensor.unit for b in e.blocks if b.number in here}
    assert units == {1, 2, 4, 8}, f"no context records of all units: {units}"
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
    return f"{len(here)} of {len(e.records)} records into {sum(map(len, e.pieces.values()))} pieces"


def drawn_context(s: Setting, each: int, most: int) -> Engine:
    """Context records that the CPU's encoder would not make: any classes, any parameters, any changes, NaNs.

    So many of each dtype, of at most so many units."""
    d, tensors = s.draw, []
    sizes = [n for n in SIZES if n <= most]
    for dtype in (n for n, (_, _, is_float) in codec.DTYPES.items() if is_float):
        for _ in range(each):
            size = d.pick.choice(sizes)
            rate = d.pick.choice([r for r in RATES if r])
            kind = d.pick.choice(["weights", "edges", "random"])
            tensors.append(d.tensor(dtype, size, rate, d.pick.choice(STEPS), kind))
    raw, records = b"", {}
    blocks = codec.blocks_of(tensors)
    # Column slices too, which are blocks of several runs.
    for dtype in ("F8_E4M3", "F16", "BF16", "F32", "F64"):
        rows, columns = d.pick.randrange(2, 40), 4 * d.pick.choice([2, 8, 33, 250])
        t = d.tensor(dtype, rows * columns, 0.05, d.pick.choice(STEPS), "weights")
        left = d.pick.randrange(columns)
        width = d.pick.randrange(1, columns - left + 1)
        b = Block(len(blocks), t, left, width, columns, rows)
        fresh, t.new = b.gather(t.new), t.old.copy()
        b.scatter(t.new, fresh)
        blocks.append(b)
    for b in blocks:
        word, bits = WORDS[b.tensor.unit], 8 * b.tensor.unit
        classes = d.pick.randrange(1, 17)
        e = context.exponents(b.gather(b.tensor.old).view(word), b.tensor.dtype)
        top = int(d.pick.choice([e.max(), e.min(), np.median(e), 0, 4095]))
        # Short unary parts where codes are long, or records grow beyond what a container holds.
        least = 0 if b.units < 5000 or d.pick.random() < 0.3 else bits // 2
        parameters = [d.pick.randrange(least, bits) for _ in range(classes)]
        fresh = b.gather(b.tensor.new).view(word)
        made = context.payload(
            b.gather(b.tensor.old).view(word), fresh, b.tensor.dtype, top, classes, parameters
        )
        if made is not None:
            raw += b"\0" * d.pick.randrange(4)
            records[b.number] = codec.Record(codec.CONTEXT, b.sum(b.tensor.new), made, len(raw))
            raw += made
    return Engine(s.programs, d.pick, blocks, raw, records)


def test_context_records_of_any_classes_and_parameters_are_read(s: Setting) -> str:
    e = drawn_context(s, max(6, s.some(40)), 1 << 18 if s.scale >= 1 else 70_000)
    for checked in (True, False):
        e.place(old)
        told = e.apply(checked)
        wrong = {n: t for n, t in told.items() if t != APPLIED}
        assert not wrong, [(b.tensor.name, wrong[b.number]) for b in e.blocks if b.number in wrong]
        e.check(new)
    return f"{len(e.records)} records"


def test_context_records_are_those_of_the_specification(s: Setting) -> str:
    """What the tests' own encoder makes of the CPU's classes and parameters is what the CPU made."""
    e = contexts(s, 0.1)
    here = of_mode(e, codec.CONTEXT)
    for b in e.blocks:
        if r := here.get(b.number):
            head = int.from_bytes(r.payload[2:4], "little")
            at, counts = 4, []
            for _ in range((head >> 12) + 1):
                count, at = codec.varint(r.payload, at)
                counts.append(count)
            width, word = (8 * b.tensor.unit).bit_length() - 1, WORDS[b.tensor.unit]
            bits = int.from_bytes(r.payload[at : at + 16], "little")
            parameters = []
            for count in counts:
                parameters.append(bits & ((1 << width) - 1) if count else 0)
                bits >>= width if count else 0
            was, now = b.gather(b.tensor.old).view(word), b.gather(b.tensor.new).view(word)
            made = context.payload(was, now, b.tensor.dtype, head & 4095, len(counts), parameters)
            assert made == r.payload, f"block {b.number} of {b.tensor.name}"
    return f"{len(here)} records"


def test_context_records_over_a_foreign_base_write_nothing(s: Setting) -> str:
    e = contexts(s, 0.1)
    wrong: dict[int, Bytes] = {}
    for b in e.blocks:
        state = wrong.setdefault(id(b.tensor), b.tensor.old.copy())
        for _ in range(s.draw.pick.choice([1, 1, 100])):
            at = b.start * b.tensor.unit + s.draw.pick.randrange(b.run * b.tensor.unit)
            state[at] ^= 1 << s.draw.pick.randrange(8)
    patches = {n: (r.offset, len(r.payload), r.mode, r.sum) for n, r in of_mode(e, codec.CONTEXT).items()}
    e.place(lambda t: wrong[id(t)])
    sums = s.programs.read(e.sums)
    told = e.apply(checked=True, patches=patches)
    assert told and set(told.values()) <= {REFETCH}, told
    e.check(lambda t: wrong[id(t)])
    assert np.array_equal(s.programs.read(e.sums), sums)
    return f"{len(told)} records refused"


def damaged(s: Setting, raw: bytearray, r: codec.Record) -> int:
    """Damages the payload in place; its length."""
    pick, length = s.draw.pick, len(r.payload)
    how = pick.choice(["shorter", "head", "bits", "bits", "bytes", "longer"])
    if how == "shorter":
        return pick.randrange(0, length)
    if how == "longer":
        return length + 1
    if how == "bytes":
        first = pick.randrange(length)
        end = min(length, first + 8)
        raw[r.offset + first : r.offset + end] = s.draw.rng.bytes(end - first)
    else:
        last = min(length, 24) if how == "head" else length
        raw[r.offset + pick.randrange(last)] ^= 1 << pick.randrange(8)
    return length


def test_damaged_context_records_are_read_as_the_specification_says(s: Setting) -> str:
    """What cannot be meant writes nothing. What can be leads where it says, or, with sums, nowhere but to its sum."""
    told_all: list[int] = []
    for e in (contexts(s, 0.1), drawn_context(s, max(12, s.some(60)), 5000)):
        sound = s.programs.read(e.raw).tobytes()
        for checked in (True, False):
            raw, patches = bytearray(sound), {}
            for n, r in of_mode(e, codec.CONTEXT).items():
                patches[n] = (r.offset, damaged(s, raw, r), r.mode, r.sum)
            e.raw.copy_(torch.from_numpy(np.frombuffer(bytes(raw), np.uint8).copy()))
            base = {id(b.tensor): b.tensor.old.copy() for b in e.blocks}
            for state in base.values():
                # Some tensors are not those that the record begins from, so that classes have other sizes.
                for _ in range(s.draw.pick.choice([0, 0, 1, 5, 50])):
                    state[s.draw.pick.randrange(len(state))] = s.draw.pick.randrange(256)
            states, want = {k: v.copy() for k, v in base.items()}, {}
            for b in e.blocks:
                if b.number not in patches:
                    continue
                at, length, _, end = patches[b.number]
                units = b.gather(base[id(b.tensor)]).view(WORDS[b.tensor.unit])
                try:
                    fresh = context.read(units, bytes(raw[at : at + length]), b.tensor.dtype).view(np.uint8)
                except context.Fault:
                    continue
                after = states[id(b.tensor)].copy()
                b.scatter(after, fresh)
                if not checked or b.sum(after) == end:
                    states[id(b.tensor)] = after
                    want[b.number] = APPLIED
            e.place(lambda t, now=base: now[id(t)])  # type: ignore[misc]
            told = e.apply(checked, patches)
            told_all += told.values()
            wrong = [n for n, t in told.items() if (t == APPLIED) != (want.get(n) == APPLIED)]
            assert not wrong, [(b.tensor.name, told[b.number]) for b in e.blocks if b.number in wrong]
            e.check(lambda t, now=states: now[id(t)])  # type: ignore[misc]
    assert {REFETCH, MALFORMED} <= set(told_all) <= {APPLIED, REFETCH, MALFORMED}
    return f"{told_all.count(MALFORMED)} malformed, {told_all.count(REFETCH)} refused of {len(told_all)}"


def test_context_records_that_only_look_right_are_refused(s: Setting) -> str:
    """Each fault by itself, in a block of three units whose record has one change; without sums, which would show it."""
    told: list[str] = []
    for dtype in ("F8_E5M2", "BF16", "F32", "F64", "I16"):
        bits, unit = 8 * codec.DTYPES[dtype][1], codec.DTYPES[dtype][1]
        width, ones = bits.bit_length() - 1, (1 << (bits - 1)) - 1

        def made(
            table: bytes = b"\1", k: int = 0, gap: int = 0, high: int = 0, low: int = 0, rest: int = -1
        ) -> bytes:
            fields = [context.packed([(k, width)]), context.packed([(0, 1)]), context.unary([gap])]  # noqa: B023
            fields += [context.packed([(low, k)]), context.unary([high])]
            fields += [context.packed([(rest, bits - k)])] if rest >= 0 else []  # noqa: B023
            return b"\0\0\0\0" + table + b"".join(fields)

        cases = {
            "sound": made(),
            "sound, escaped": made(high=16, rest=16),
            "a varint of two bytes": made(table=b"\x81\0"),
            "a varint of four bytes": made(table=b"\x81\x80\x80\0"),
            "no changes": made(table=b"\0"),
            "a position beyond": made(gap=2),
            "a step of zero": made(k=bits - 1, high=1, low=ones),
            "a step of zero, escaped": made(high=16, rest=(1 << bits) - 1),
            "beyond the unit": made(k=bits - 1, high=2),
            "escaped where nothing is": made(k=bits - 4, high=16),
            "escaped without need": made(high=16, rest=15),
            "beyond an escape": made(high=17),
            "a byte more": made() + b"\0",
            "a byte less": made()[:-1],
            "nothing": b"",
        }
        tensors = [
            Tensor(f"{i:02}", dtype, np.zeros(3 * unit, np.uint8), np.zeros(3 * unit, np.uint8))
            for i in range(len(cases))
        ]
        raw, records, states = b"", {}, {}
        for b, payload in zip(codec.blocks_of(tensors), cases.values()):
            records[b.number] = codec.Record(codec.CONTEXT, (1, 1), payload, len(raw))
            states[id(b.tensor)] = b.tensor.old
            raw += payload
            try:
                units = (
                    context.read(b.tensor.old.view(WORDS[unit]), payload, dtype)
                    if b.tensor.is_float
                    else None
                )
                states[id(b.tensor)] = b.tensor.old if units is None else units.view(np.uint8)
            except context.Fault:
                pass
        e = Engine(s.programs, s.draw.pick, codec.blocks_of(tensors), raw, records)
        e.place(old)
        outcomes = e.apply(checked=False)
        good = {name for name, n in zip(cases, outcomes) if outcomes[n] == APPLIED}
        assert good == ({"sound", "sound, escaped"} if codec.DTYPES[dtype][2] else set()), (dtype, good)
        e.check(lambda t, now=states: now[id(t)])  # type: ignore[misc]
        told.append(dtype)
    return f"{len(cases)} records of {', '.join(told)}"


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
    failed = 0
    tests = {n: f for n, f in globals().items() if n.startswith("test_")}
    say(f"seed {args.seed}, {'the CPU' if args.host else torch.cuda.get_device_name()}")
    for name, test in tests.items():
        if args.names and not any(n in name for n in args.names):
            continue
        # What hangs says where, and ends.
        faulthandler.dump_traceback_later(args.patience, exit=True)
        began = time.monotonic()
        try:
            note = test(Setting(programs, windlass, Draw(args.seed), scale))
            say(f"ok    {time.monotonic() - began:6.1f} s  {name}: {note}")
        except AssertionError as e:
            failed += 1
            say(f"FAIL  {time.monotonic() - began:6.1f} s  {name}: {e}")
    faulthandler.cancel_dump_traceback_later()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
