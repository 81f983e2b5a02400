"""A peer for test_peers.py that is wrong: it flips one bit of a parameter after a version has arrived."""

from __future__ import annotations

import torch
from peers.peer import Engine, Meeting, Pause, Tensors
from peers.ways.by_indexes import Indexes, Receiver


class Corrupt(Receiver):
    def __init__(self, weights: Tensors, meeting: Meeting, pause: Pause) -> None:
        super().__init__(weights, meeting, pause)
        self._norm = weights["model.norm.weight"]

    def take(self, version: int) -> None:
        super().take(version)
        if version == 2:
            self._norm.view(torch.int16)[0] ^= 1


class Corrupting(Indexes):
    name = "corrupting"

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Corrupt(weights, meeting, pause)


PEERS = [Corrupting()]
