"""Context records by their specification (`windlass_core::delta`), and weights that they fit.

The CPU's encoder makes one kind of them: fourteen classes, a parameter that fits. Decoders must read them all.
"""

from __future__ import annotations

from typing import Any

import codec
import numpy as np
import torch
from codec import Tensor
from drawing import WORDS, Draw, from_line, to_line

ESCAPE = 16
#: Dtypes whose units have an exponent: how torch calls them, where it does.
FLOATS = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "C64": torch.float32,
    "F64": torch.float64,
}


def exponents(units: Any, dtype: str) -> Any:
    bits = units.dtype.itemsize * 8
    magnitude = units & units.dtype.type((1 << (bits - 1)) - 1)
    return (magnitude >> units.dtype.type(codec.MANTISSA[dtype])).astype(np.int64)


def tensor(d: Draw, dtype: str, count: int, rate: float) -> Tensor:
    """Weights of which the small ones change most often, as those in training do."""
    count += count % 2
    values = torch.from_numpy(d.rng.normal(0, 0.02, count))
    old = values.to(FLOATS[dtype]).view(torch.uint8).numpy().view(WORDS[codec.DTYPES[dtype][1]]).copy()
    some = d.rng.random(count) < 0.001
    old[some] = d.units(int(some.sum()), old.dtype.itemsize, "edges")
    e = exponents(old, dtype)
    mask = d.rng.random(count) < np.minimum(1.0, rate * 2.0 ** (np.median(e) - e).clip(-40, 8))
    new = d.change(old, mask, d.pick.choice(["one", "small", "mixed"]), True)
    d.made += 1
    name = f"c{d.made:05}.{dtype}.{count}.{rate}"
    return Tensor(name, dtype, old.view(np.uint8), new.view(np.uint8))


def packed(fields: list[tuple[int, int]]) -> bytes:
    """A section of fields: value, bits."""
    value = at = 0
    parts: list[bytes] = []
    for field, width in fields:
        value |= field << at
        at += width
        if at >= 4096:
            parts.append((value & ((1 << 4096) - 1)).to_bytes(512, "little"))
            value, at = value >> 4096, at - 4096
    return b"".join(parts) + value.to_bytes(-(-at // 8), "little")


def unary(numbers: list[int]) -> bytes:
    ones = np.cumsum(np.array(numbers, np.int64) + 1) - 1
    bits = np.zeros(int(ones[-1]) + 1, np.uint8)
    bits[ones] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def varint(number: int) -> bytes:
    out = bytearray()
    while number >= 128:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def payload(old: Any, new: Any, dtype: str, top: int, classes: int, parameters: list[int]) -> bytes | None:
    """The record of a change with these classes and parameters of values; `None` if nothing changed."""
    bits = old.dtype.itemsize * 8
    changed = np.flatnonzero(old != new)
    if len(changed) == 0:
        return None
    of_unit = np.minimum(np.maximum(top - exponents(old, dtype), 0), classes - 1)
    with np.errstate(over="ignore"):
        steps = to_line(new, True) - to_line(old, True)
        sign = np.where(steps >> old.dtype.type(bits - 1) != 0, ~old.dtype.type(0), old.dtype.type(0))
        codes = ((steps << old.dtype.type(1)) ^ sign) - old.dtype.type(1)
    table, ks = b"", []
    gaps_low, gaps_high, low, high, escapes = [], [], [], [], []
    for c in range(classes):
        members = np.flatnonzero(of_unit == c)
        mine = changed[of_unit[changed] == c]
        ranks = np.searchsorted(members, mine)
        table += varint(len(mine))
        if len(mine) == 0:
            continue
        ratio = max(1, len(members) * 7 // (len(mine) * 10))
        gap, k = min(15, ratio.bit_length() - 1), parameters[c]
        ks.append((k, bits.bit_length() - 1))
        for g in np.diff(ranks, prepend=-1) - 1:
            gaps_low.append((int(g) & ((1 << gap) - 1), gap))
            gaps_high.append(int(g) >> gap)
        for code in codes[mine]:
            rest = int(code) >> k
            low.append((int(code) & ((1 << k) - 1), k))
            high.append(min(rest, ESCAPE))
            if rest >= ESCAPE:
                escapes.append((rest, bits - k))
    head = (len(changed) - 1).to_bytes(2, "little") + (top | classes - 1 << 12).to_bytes(2, "little")
    sections = [packed(ks), packed(gaps_low), unary(gaps_high), packed(low), unary(high), packed(escapes)]
    return head + table + b"".join(sections)


class Fault(Exception):
    """A record that cannot be meant, at least not for this block."""


class Reader:
    """Takes sections off the front of a payload."""

    def __init__(self, raw: bytes) -> None:
        self.bits = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little")

    def take(self, bits: int) -> Any:
        if -(-bits // 8) * 8 > len(self.bits):
            raise Fault("it ends within a section")
        section, filling = self.bits[:bits], self.bits[bits : -(-bits // 8) * 8]
        if filling.any():
            raise Fault("a section is not filled up with zeros")
        self.bits = self.bits[-(-bits // 8) * 8 :]
        return section

    def count(self) -> int:
        value = shift = 0
        while True:
            byte = number(self.take(8))
            value |= (byte & 127) << shift
            if byte < 128:
                if (byte == 0 and shift) or value >= 1 << 32:
                    raise Fault("no varint")
                return value
            shift += 7
            if shift > 28:
                raise Fault("a varint is too long")

    def fields(self, widths: list[int]) -> list[int]:
        section, at, out = self.take(sum(widths)), 0, []
        for w in widths:
            out.append(number(section[at : at + w]))
            at += w
        return out

    def unary(self, count: int) -> list[int]:
        ones = np.flatnonzero(self.bits)[:count]
        if len(ones) < count:
            raise Fault("it has fewer changes than it says")
        self.take(int(ones[-1]) + 1)
        return [int(z) for z in np.diff(ones, prepend=-1) - 1]


def number(bits: Any) -> int:
    return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")


def read(old: Any, raw: bytes, dtype: str) -> Any:
    """The units that a payload leads to. A Fault if it leads nowhere."""
    bits, r = old.dtype.itemsize * 8, Reader(raw)
    changes, head = number(r.take(16)) + 1, number(r.take(16))
    top, classes = head & 4095, (head >> 12) + 1
    if changes > len(old):
        raise Fault("more changes than units")
    counts = [r.count() for _ in range(classes)]
    width = bits.bit_length() - 1
    if any(c > changes for c in counts):
        raise Fault("class table")
    ks = r.fields([width for c in counts if c])
    if sum(counts) != changes:
        raise Fault("class table")
    ks = [ks.pop(0) if c else 0 for c in counts]
    of_unit = np.minimum(np.maximum(top - exponents(old, dtype), 0), classes - 1)
    members = [np.flatnonzero(of_unit == c) for c in range(classes)]
    gaps = [min(15, max(1, len(m) * 7 // max(10 * n, 1)).bit_length() - 1) for m, n in zip(members, counts)]
    owner = [c for c, n in enumerate(counts) for _ in range(n)]
    low = r.fields([gaps[c] for c in owner])
    positions, rank, before = [], -1, -1
    for c, fraction, zeros in zip(owner, low, r.unary(changes)):
        rank = (rank if c == before else -1) + (zeros << gaps[c] | fraction) + 1
        before = c
        if rank >= len(members[c]):
            raise Fault("a position is beyond the class")
        positions.append(members[c][rank])
    low, high = r.fields([ks[c] for c in owner]), r.unary(changes)
    for c, zeros in zip(owner, high):
        if zeros > ESCAPE if bits - ks[c] >= 5 else zeros >> (bits - ks[c]):
            raise Fault("a value is beyond its unit")
    escapes = r.fields([bits - ks[c] for c, zeros in zip(owner, high) if zeros == ESCAPE])
    if any(e < ESCAPE for e in escapes) or len(r.bits):
        raise Fault("escaped without need, or it goes on after its end")
    new, word = old.copy(), old.dtype.type
    codes = [(escapes.pop(0) if z == ESCAPE else z) << ks[c] | f for c, f, z in zip(owner, low, high)]
    if any(code == (1 << bits) - 1 for code in codes):
        raise Fault("a step leads nowhere")
    steps = [((code + 1) >> 1) ^ (-((code + 1) & 1) & ((1 << bits) - 1)) for code in codes]
    with np.errstate(over="ignore"):
        line = to_line(old[positions], True) + np.array(steps, np.uint64).astype(word)
    new[positions] = from_line(line, True)
    return new
