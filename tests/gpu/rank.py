"""The encoder, as a rank of a trainer would call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from codec import Block, Bytes, Tensor

from programs import BLOCK, ENTRY, SPAN, TALLY, Programs


class Rank:
    """Weights, baseline and sums of some blocks in the device's memory."""

    def __init__(
        self,
        programs: Programs,
        blocks: list[Block],
        skews: dict[int, int] | None = None,
        capacity: int | None = None,
        program: str | None = None,
    ) -> None:
        self.programs, self.blocks = programs, blocks
        tensors = list({id(b.tensor): b.tensor for b in blocks}.values())
        wide = 2 if program == "encode_cast" else 1
        at, self.places = 0, {}
        for t in tensors:
            at = -(-at // 256) * 256 + (skews or {}).get(id(t), 0)
            self.places[id(t)] = at
            at += len(t.old) * wide
        self.weights = programs.zeros(at + 64)
        self.wide = wide
        classes: dict[str, list[Block]] = {}
        for b in blocks:
            classes.setdefault(program or f"encode_{b.tensor.unit}", []).append(b)
        self.order = [b for these in classes.values() for b in these]
        self.bases, at = [], 0
        for b in self.order:
            self.bases.append(at)
            at += -(-b.units * b.tensor.unit // 16) * 16
        self.baseline = programs.zeros(at + 16)
        table = np.zeros(len(self.order), BLOCK)
        spans = np.zeros(len(self.order), SPAN)
        for i, b in enumerate(self.order):
            u = b.tensor.unit
            fresh = self.weights.data_ptr() + self.places[id(b.tensor)] + b.start * u * wide
            base = self.baseline.data_ptr() + self.bases[i]
            pitch = b.stride * u
            table[i] = (
                fresh,
                pitch * wide,
                base,
                b.start * u,
                pitch,
                b.run,
                b.count,
                b.number,
                b.tensor.is_float,
            )
            spans[i] = (base, b.run * u, b.start * u, pitch, b.run * u, b.count, i, 0)
        self.table, self.spans = programs.table(table), programs.table(spans)
        self.sums = programs.zeros(16 * len(self.order))
        payload = sum(b.units * b.tensor.unit + 16 for b in self.order)
        self.capacity = payload if capacity is None else capacity
        self.out = programs.zeros(self.capacity + 256)
        self.entries = programs.zeros(len(self.order), ENTRY)
        self.tally = programs.zeros(1, TALLY)
        self.classes, first = [], 0
        for name, these in classes.items():
            self.classes.append((name, first, len(these)))
            first += len(these)

    def place(self, state: Callable[[Tensor], Bytes]) -> None:
        host = np.full(len(self.weights), 0xEE, np.uint8)
        for t in {id(b.tensor): b.tensor for b in self.blocks}.values():
            data, at = state(t), self.places[id(t)]
            host[at : at + len(data)] = data
        self.weights.copy_(torch.from_numpy(host))

    def start(self, kernel: str) -> None:
        self.tally.zero_()
        for work, (program, first, count) in enumerate(self.classes):
            self.programs.start(
                program,
                kernel,
                blocks=self.table.data_ptr() + first * BLOCK.itemsize,
                sums=self.sums.data_ptr() + first * 16,
                out=self.out,
                entries=self.entries,
                tally=self.tally,
                capacity=self.capacity,
                count=count,
                entry_capacity=len(self.order),
                work=work,
            )

    def begin(self, state: Callable[[Tensor], Bytes]) -> None:
        """Makes this state the baseline, with its sums."""
        self.place(state)
        self.start("windlass_fill")
        self.sum()

    def sum(self) -> None:
        self.sums.zero_()
        self.tally.zero_()
        self.programs.start(
            "sum",
            "windlass_sum",
            spans=self.spans,
            sums=self.sums,
            tally=self.tally,
            count=len(self.order),
            work=0,
        )

    def encode(self) -> tuple[Any, dict[int, Any], Bytes]:
        self.out.fill_(0xCC)
        self.entries.zero_()
        self.start("windlass_encode")
        tally = self.programs.read(self.tally, TALLY)[0]
        entries = self.programs.read(self.entries, ENTRY)[: int(tally["entries"])]
        return tally, {int(e["number"]): e for e in entries}, self.programs.read(self.out)

    def check_state(self, state: Callable[[Tensor], Bytes], sums: bool = True) -> None:
        base = self.programs.read(self.baseline)
        table = self.programs.read(self.sums, np.uint64).reshape(-1, 2)
        for i, b in enumerate(self.order):
            want = b.gather(state(b.tensor))
            assert np.array_equal(base[self.bases[i] : self.bases[i] + len(want)], want), (
                f"baseline of {b.tensor.name}"
            )
            if sums:
                assert tuple(map(int, table[i])) == b.sum(state(b.tensor)), f"sum of {b.tensor.name}"


def baseline(rank: Rank, state: Callable[[Tensor], Bytes]) -> Bytes:
    host = np.zeros(len(rank.baseline), np.uint8)
    for b, at in zip(rank.order, rank.bases):
        data = b.gather(state(b.tensor))
        host[at : at + len(data)] = data
    return host
