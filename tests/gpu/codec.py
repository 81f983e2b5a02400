"""What the kernels are held against: containers of the CPU encoder, and sums by their definition.

The formats are those of `windlass_core::delta` and `windlass_core::digest`, read from their documentation.
"""

from __future__ import annotations

import json
import struct
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
BLOCK_UNITS = 1 << 16
#: Seconds that a program may take.
PATIENCE = 120
SPARSE, CONTEXT, BITMAP, DENSE = 1, 2, 3, 4

#: safetensors' name: bits of an element, bytes of a unit, whether units are floats.
DTYPES = {
    "BOOL": (8, 1, False),
    "F4": (4, 1, False),
    "F6_E2M3": (6, 1, False),
    "F6_E3M2": (6, 1, False),
    "U8": (8, 1, False),
    "I8": (8, 1, False),
    "F8_E5M2": (8, 1, True),
    "F8_E4M3": (8, 1, True),
    "F8_E8M0": (8, 1, False),
    "F8_E4M3FNUZ": (8, 1, True),
    "F8_E5M2FNUZ": (8, 1, True),
    "I16": (16, 2, False),
    "U16": (16, 2, False),
    "F16": (16, 2, True),
    "BF16": (16, 2, True),
    "I32": (32, 4, False),
    "U32": (32, 4, False),
    "F32": (32, 4, True),
    "C64": (64, 4, True),
    "F64": (64, 8, True),
    "I64": (64, 8, False),
    "U64": (64, 8, False),
}

#: Explicit bits of it in a float.
MANTISSA = {
    "F8_E5M2": 2,
    "F8_E4M3": 3,
    "F8_E4M3FNUZ": 3,
    "F8_E5M2FNUZ": 2,
    "F16": 10,
    "BF16": 7,
    "F32": 23,
    "C64": 23,
    "F64": 52,
}


@dataclass
class Tensor:
    """Two states of a tensor, as bytes."""

    name: str
    dtype: str
    old: Bytes
    new: Bytes

    @property
    def unit(self) -> int:
        return DTYPES[self.dtype][1]

    @property
    def is_float(self) -> bool:
        return DTYPES[self.dtype][2]

    @property
    def units(self) -> int:
        return len(self.old) // self.unit


@dataclass
class Block:
    """A block of the cut table: runs of units, from unit `start` of the tensor on."""

    number: int
    tensor: Tensor
    start: int
    run: int
    stride: int
    count: int = 1

    @property
    def units(self) -> int:
        return self.run * self.count

    def gather(self, state: Bytes) -> Bytes:
        """The block's bytes, run after run."""
        u = self.tensor.unit
        if self.count == 1:
            return state[self.start * u : (self.start + self.run) * u]
        begins = (self.start + np.arange(self.count) * self.stride)[:, None] * u
        return np.asarray(state[(begins + np.arange(self.run * u)[None, :]).reshape(-1)])

    def scatter(self, state: Bytes, fresh: Bytes) -> None:
        """Puts the block's bytes where they belong."""
        size = self.run * self.tensor.unit
        for i in range(self.count):
            at = (self.start + i * self.stride) * self.tensor.unit
            state[at : at + size] = fresh[i * size : (i + 1) * size]

    def sum(self, state: Bytes) -> tuple[int, int]:
        """Its sum, by the definition."""
        u = self.tensor.unit
        begins = (self.start + np.arange(self.count, dtype=np.uint64) * np.uint64(self.stride)) * np.uint64(u)
        at = (begins[:, None] + np.arange(self.run * u, dtype=np.uint64)[None, :]).reshape(-1)
        return sum_bytes(at, self.gather(state))


def canonical(tensors: Iterable[Tensor]) -> list[Tensor]:
    return sorted(tensors, key=lambda t: (-(8 if t.dtype == "C64" else t.unit), t.name.encode()))


def blocks_of(tensors: Iterable[Tensor]) -> list[Block]:
    """The blocks of tensors in canonical order, by default cuts."""
    blocks: list[Block] = []
    for t in canonical(tensors):
        for start in range(0, t.units, BLOCK_UNITS):
            run = min(BLOCK_UNITS, t.units - start)
            blocks.append(Block(len(blocks), t, start, run, run))
    return blocks


def splitmix(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    with np.errstate(over="ignore"):
        x = x * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


LOW = [
    splitmix(np.uint64(seed) + np.arange(1, 1025, dtype=np.uint64)) >> np.uint64(32)
    for seed in (0x0057494E444C4153, 0x00532D4C4F572D42)
]


def sum_bytes(at: np.ndarray[Any, np.dtype[np.uint64]], bytes_: Bytes) -> tuple[int, int]:
    """The sum of bytes that stand at these bytes of a tensor."""
    terms = (bytes_.astype(np.uint64) + np.uint64(1)) << (np.uint64(8) * (at & np.uint64(3)))
    word, group = at >> np.uint64(2), at >> np.uint64(12)
    lanes = []
    with np.errstate(over="ignore"):
        for low, seed in zip(LOW, (0x6A09E667F3BCC908, 0xBB67AE8584CAA73B)):
            high = splitmix(np.uint64(seed) + group) | np.uint64(1)
            lanes.append(int((terms * low[word & np.uint64(1023)] * high).sum(dtype=np.uint64)))
    return lanes[0], lanes[1]


@dataclass
class Record:
    mode: int
    sum: tuple[int, int]
    payload: bytes
    offset: int


def varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def parse(raw: bytes) -> tuple[dict[int, Record], int]:
    """The records of a container by block, and how many units changed."""
    assert raw[:8] == b"WLDELTA1"
    at = struct.unpack_from("<I", raw, 8)[0]
    records: dict[int, Record] = {}
    while raw[at : at + 4] == b"PART":
        count, index, payload = struct.unpack_from("<III", raw, at + 4)
        here, data = at + 24, at + 24 + index
        block = -1
        for _ in range(count):
            gap, here = varint(raw, here)
            block += gap + 1
            mode = raw[here]
            length, here = varint(raw, here + 1)
            a, b = struct.unpack_from("<QQ", raw, here)
            here += 16
            records[block] = Record(mode, (a, b), raw[data : data + length], data)
            data += length
        assert here == at + 24 + index and data == here + payload
        at = data
    assert raw[at : at + 4] == b"END\0"
    _, total, changes = struct.unpack_from("<IQQ", raw, at + 4)
    assert total == len(records)
    return records, changes


def write_safetensors(path: Path, tensors: Iterable[Tensor], state: str) -> None:
    header: dict[str, Any] = {}
    at, parts = 0, []
    for t in canonical(tensors):
        data = getattr(t, state)
        shape = [len(data) * 8 // DTYPES[t.dtype][0]]
        header[t.name] = {"dtype": t.dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for data in parts:
            f.write(data.tobytes())


def container(windlass: list[str], tensors: list[Tensor], mode: str = "plain") -> bytes:
    """What the CPU encoder makes of them."""
    with tempfile.TemporaryDirectory() as folder:
        old, new, out = (Path(folder) / n for n in ("old.safetensors", "new.safetensors", "delta"))
        write_safetensors(old, tensors, "old")
        write_safetensors(new, tensors, "new")
        command = [*windlass, "delta", "make", str(old), str(new), "--mode", mode, "-o", str(out)]
        quiet = subprocess.DEVNULL
        subprocess.run(command, check=True, stdin=quiet, stdout=quiet, timeout=PATIENCE)
        return out.read_bytes()
