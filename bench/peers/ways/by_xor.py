"""XOR with the version before, compressed by zstd: how delta modes of frameworks send a version."""

from __future__ import annotations

from typing import Any

import torch

from peers.peer import Engine, Line, Meeting, Pause, Peer, Tensors, Trainer, lacks, raw

#: The fastest positive level. Higher ones cost more time than they save bytes.
LEVEL = 1


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.int16)


class Sender(Trainer):
    def __init__(self, weights: Tensors, meeting: Meeting) -> None:
        import zstandard

        self._now = [whole(t) for t in weights.values()]
        self._before = [t.clone() for t in self._now]
        self._zstd = zstandard.ZstdCompressor(level=LEVEL, threads=-1)
        self._line = Line.listen(meeting)

    def send(self, version: int) -> None:
        self._line.say(version)
        for now, before in zip(self._now, self._before):
            # What was the version before becomes the difference, is sent, and becomes the new version.
            before.bitwise_xor_(now)
            packed = self._zstd.compress(raw(before))
            self._line.say(len(packed))
            self._line.write(packed)
            before.copy_(now)


class Receiver(Engine):
    def __init__(self, weights: Tensors, meeting: Meeting, pause: Pause) -> None:
        import zstandard

        self._live, self._pause = [whole(t) for t in weights.values()], pause
        self._zstd: Any = zstandard.ZstdDecompressor()
        self._line = Line.connect(meeting)

    def take(self, version: int) -> None:
        assert self._line.hear() == (version,)
        # Unpacked before the pause, so that the pause is only the XOR.
        changes = []
        for _ in self._live:
            packed = self._line.read(bytearray(self._line.hear()[0]))
            changes.append(torch.frombuffer(bytearray(self._zstd.decompress(packed)), dtype=torch.int16))
        with self._pause():
            for live, change in zip(self._live, changes):
                live.bitwise_xor_(change)


class Xor(Peer):
    name = "XOR + zstd"
    what = "XOR with the version before, zstd per tensor, one TCP stream; unpacked before the pause"
    settings = f"level {LEVEL}, as many threads as cores"
    packages = ("zstandard", "torch")

    def missing(self) -> str | None:
        return lacks("zstandard")

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        return Sender(weights, meeting)

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Receiver(weights, meeting, pause)


PEERS = [Xor()]
