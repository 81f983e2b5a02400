"""Random and adversarial states of weights."""

from __future__ import annotations

import random
from typing import Any

import codec
import numpy as np
from codec import Tensor

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Draw:
    """Random and adversarial states of weights."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.made = 0

    def units(self, count: int, unit: int, kind: str) -> Any:
        word, bits = WORDS[unit], 8 * unit
        if kind == "edges":
            top = 1 << (bits - 1)
            inf = {8: 0x78, 16: 0x7F80, 32: 0x7F800000, 64: 0x7FF0 << 48}[bits]
            ends = [
                0,
                1,
                2,
                top,
                top - 1,
                top + 1,
                2 * top - 1,
                2 * top - 2,
                inf,
                inf + 1,
                inf | top,
                inf - 1,
            ]
            return self.rng.choice(np.array(ends, dtype=word), count)
        if kind == "weights" and unit in (2, 4):
            bits32 = self.rng.normal(0, 0.02, count).astype(np.float32).view(np.uint32)
            return (bits32 >> np.uint32(16)).astype(np.uint16) if unit == 2 else bits32
        return (
            self.rng.integers(0, 1 << bits, count, dtype=np.uint64, endpoint=False).astype(word)
            if bits < 64
            else (self.rng.integers(0, (1 << 64) - 1, count, dtype=np.uint64, endpoint=True))
        )

    def which(self, count: int, rate: float | str) -> Any:
        mask = np.zeros(count, bool)
        if rate == "one":
            mask[self.pick.randrange(count)] = True
        elif rate == "ends":
            mask[[0, -1]] = True
        elif rate == "runs":
            for _ in range(self.pick.randrange(1, 6)):
                at = self.pick.randrange(count)
                mask[at : at + self.pick.randrange(1, max(2, count // 5))] = True
        elif rate == "uneven":
            half = count // 2
            mask[:half] = self.rng.random(half) < 0.3
            mask[half:] = self.rng.random(count - half) < 0.001
        elif isinstance(rate, float):
            mask = self.rng.random(count) < rate
        return mask

    def change(self, old: Any, mask: Any, step: str, is_float: bool) -> Any:
        word, bits = old.dtype.type, old.dtype.itemsize * 8
        count = int(mask.sum())
        new = old.copy()
        if step == "bits":
            new[mask] = self.units(count, bits // 8, "random")
        elif step == "edges":
            new[mask] = self.units(count, bits // 8, "edges")
        else:
            high = {"one": 1, "small": 40}.get(step, 1 << (bits - 2))
            size = self.rng.integers(1, high, count, endpoint=True).astype(np.int64)
            if step == "mixed":
                size = np.where(self.rng.random(count) < 0.02, size, 1)
            size *= self.rng.choice(np.array([-1, 1]), count)
            with np.errstate(over="ignore"):
                line = to_line(old[mask], is_float) + size.astype(word)
            new[mask] = from_line(line, is_float)
        return new

    def tensor(self, dtype: str, count: int, rate: float | str, step: str, kind: str) -> Tensor:
        unit, is_float = codec.DTYPES[dtype][1:]
        if dtype.startswith("F6"):
            count = -(-count // 3) * 3
        if dtype == "C64":
            count += count % 2
        old = self.units(count, unit, kind)
        new = self.change(old, self.which(count, rate), step, is_float)
        self.made += 1
        name = f"t{self.made:05}.{dtype}.{count}.{rate}.{step}.{kind}"
        return Tensor(name, dtype, old.view(np.uint8), new.view(np.uint8))


def to_line(v: Any, is_float: bool) -> Any:
    top = v.dtype.type(1 << (v.dtype.itemsize * 8 - 1))
    return np.where(v & top != 0, ~v, v | top) if is_float else v


def from_line(v: Any, is_float: bool) -> Any:
    top = v.dtype.type(1 << (v.dtype.itemsize * 8 - 1))
    return np.where(v & top != 0, v ^ top, ~v) if is_float else v
