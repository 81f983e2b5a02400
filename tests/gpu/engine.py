"""Records and copies on the side of an engine."""

from __future__ import annotations

import random
from collections.abc import Callable

import codec
import numpy as np
import torch
from codec import Block, Bytes, Tensor

from programs import PATCH, PIECE, PLACE, TALLY, Programs


class Engine:
    """Parameters of an engine, fused and sliced at random, and the tables by which records reach them."""

    def __init__(
        self,
        programs: Programs,
        pick: random.Random,
        blocks: list[Block],
        raw: bytes,
        records: dict[int, codec.Record],
    ) -> None:
        self.programs, self.blocks = programs, blocks
        tensors = list({id(b.tensor): b.tensor for b in blocks}.values())
        pieces: dict[int, list[tuple[Tensor, int, int, int, int, int, int]]] = {}
        at = 0
        for t in tensors:
            u, n = t.unit, t.units
            at = -(-at // 8) * 8 + pick.randrange(0, 64, u)
            shape = pick.choice(["whole", "halves", "columns", "twice"])
            mine = pieces.setdefault(id(t), [])
            if shape == "columns" and n % 4 == 0 and n >= 8:
                # Columns of a matrix of n/4 rows: two of each row here, two there, each with a pitch of its own.
                rows = n // 4
                for column in (0, 2):
                    mine.append((t, column * u, 2 * u, 4 * u, rows, at, 3 * u))
                    at += rows * 3 * u
            elif shape == "halves" and n >= 2:
                cut = pick.randrange(1, n) * u
                mine.append((t, 0, cut, cut, 1, at + len(t.old) - cut, cut))
                mine.append((t, cut, len(t.old) - cut, len(t.old) - cut, 1, at, len(t.old) - cut))
                at += len(t.old)
            else:
                for _ in range(2 if shape == "twice" else 1):
                    mine.append((t, 0, len(t.old), len(t.old), 1, at, len(t.old)))
                    at += len(t.old) + 8 * u
        self.pieces, self.size = pieces, at + 64
        self.memory = programs.zeros(self.size)
        table: list[tuple[int, ...]] = []
        places: list[tuple[int, ...]] = []
        self.rows: dict[int, int] = {}
        first = {}
        for t in tensors:
            first[id(t)] = (len(table), len(pieces[id(t)]))
            for _, begin, run, pitch, count, to, to_pitch in pieces[id(t)]:
                table.append((begin, run, pitch, count, self.memory.data_ptr() + to, to_pitch))
        for b in blocks:
            self.rows[b.number] = len(places)
            u, mantissa = b.tensor.unit, codec.MANTISSA.get(b.tensor.dtype, 0)
            places.append(
                (b.start * u, b.stride * u, b.run, b.count, *first[id(b.tensor)], b.tensor.is_float, mantissa)
            )
        self.table = programs.table(np.array(table, PIECE))
        self.places = programs.table(np.array(places, PLACE))
        self.sums = programs.zeros(16 * len(blocks))
        self.raw = programs.table(np.frombuffer(raw + b"\0" * 16, np.uint8))
        self.records = records

    def image(self, state: Callable[[Tensor], Bytes]) -> Bytes:
        host = np.full(self.size, 0xEE, np.uint8)
        for mine in self.pieces.values():
            for t, begin, run, pitch, count, to, to_pitch in mine:
                for r in range(count) if count < 4 else (None,):
                    if r is None:
                        source = state(t)[(begin + np.arange(count) * pitch)[:, None] + np.arange(run)]
                        host[(to + np.arange(count) * to_pitch)[:, None] + np.arange(run)] = source
                    else:
                        source = state(t)[begin + r * pitch : begin + r * pitch + run]
                        host[to + r * to_pitch : to + r * to_pitch + run] = source
        return host

    def place(self, state: Callable[[Tensor], Bytes]) -> None:
        self.memory.copy_(torch.from_numpy(self.image(state)))
        sums = np.array([b.sum(state(b.tensor)) for b in self.blocks], np.uint64)
        self.sums.copy_(torch.from_numpy(sums.reshape(-1).view(np.uint8)))

    def apply(
        self, checked: bool, patches: dict[int, tuple[int, int, int, tuple[int, int]]] | None = None
    ) -> dict[int, int]:
        """Applies all records, or these (offset, length, mode, sum); the outcome by block."""
        if patches is None:
            patches = {n: (r.offset, len(r.payload), r.mode, r.sum) for n, r in self.records.items()}
        outcomes: dict[int, int] = {}
        tally = self.programs.zeros(1, TALLY)
        unit = {b.number: b.tensor.unit for b in self.blocks}
        for work, u in enumerate((1, 2, 4, 8)):
            mine = [n for n in patches if unit[n] == u]
            if not mine:
                continue
            rows = [
                (o, sum_, length, mode, self.rows[n], 0)
                for n in mine
                for o, length, mode, sum_ in [patches[n]]
            ]
            table, told = self.programs.table(np.array(rows, PATCH)), self.programs.zeros(4 * len(mine))
            self.programs.start(
                f"apply_{u}",
                "windlass_apply",
                places=self.places,
                pieces=self.table,
                patches=table,
                payload=self.raw,
                sums=self.sums if checked else 0,
                outcomes=told,
                tally=tally,
                count=len(mine),
                work=work,
            )
            outcomes.update(zip(mine, map(int, self.programs.read(told, np.uint32))))
        counted = self.programs.read(tally, TALLY)[0]["outcome"]
        assert [sum(o == i for o in outcomes.values()) for i in range(4)] == list(map(int, counted))
        return outcomes

    def check(self, state: Callable[[Tensor], Bytes]) -> None:
        found, want = self.programs.read(self.memory), self.image(state)
        if not np.array_equal(found, want):
            at = int(np.flatnonzero(found != want)[0])
            near = [
                p[0].name for mine in self.pieces.values() for p in mine if p[5] <= at < p[5] + p[4] * p[6]
            ]
            raise AssertionError(f"byte {at} of the parameters, in {near}")
