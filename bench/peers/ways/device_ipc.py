"""CUDA IPC by torch's own reductions, as colocated frameworks do it: the engine opens the trainer's memory and copies on the device.

*once*: handles of all parameters are sent with the first version. *each version*: they are made, sent and opened anew, as frameworks
must whose parameters move. *packed*: the trainer copies buckets into two buffers, whose handles are sent once, while the engine copies
out of the other one. Without a GPU, tensors of the host are shared in the same way by its shared memory.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing as mp

from peers.device import Device
from peers.peer import Engine, Line, Meeting, Pause, Peer, Tensors, Trainer
from peers.staging import buckets, length

#: Bytes of a bucket, as in vLLM's packed transfer, and buffers.
BUCKET, BUFFERS = 1 << 30, 2


def handles(tensors: list[torch.Tensor]) -> bytes:
    # Tensors of the host: as files by name, so that no descriptors have to be sent.
    mp.set_sharing_strategy("file_system")
    written = io.BytesIO()
    ForkingPickler(written, pickle.HIGHEST_PROTOCOL).dump(tensors)
    return written.getvalue()


def opened(text: Any) -> list[torch.Tensor]:
    mp.set_sharing_strategy("file_system")
    found: list[torch.Tensor] = pickle.loads(text)
    return found


def device_of(weights: Tensors) -> Device:
    return Device(str(next(iter(weights.values())).device))


def say_bytes(line: Line, text: bytes) -> None:
    line.say(len(text))
    line.write(text)


def hear_bytes(line: Line) -> Any:
    return line.read(bytearray(line.hear()[0]))


class Lender(Trainer):
    def __init__(self, weights: Tensors, meeting: Meeting, every: bool) -> None:
        self._weights, self._every = list(weights.values()), every
        self._line = Line.listen(meeting)

    def send(self, version: int) -> None:
        self._line.say(version)
        if self._every or version == 1:
            say_bytes(self._line, handles(self._weights))
        # They are read from the live parameters.
        self._line.hear()


class Borrower(Engine):
    def __init__(self, weights: Tensors, meeting: Meeting, pause: Pause, every: bool) -> None:
        self._live, self._pause, self._every = list(weights.values()), pause, every
        self._theirs: list[torch.Tensor] = []
        self._line = Line.connect(meeting)

    def take(self, version: int) -> None:
        assert self._line.hear() == (version,)
        if self._every or version == 1:
            self._theirs = opened(hear_bytes(self._line))
        with self._pause():
            torch._foreach_copy_(self._live, self._theirs, non_blocking=True)
        if self._every:
            self._theirs = []
        self._line.say(version)


class Packer(Trainer):
    def __init__(self, weights: Tensors, meeting: Meeting) -> None:
        tensors = list(weights.values())
        self._buckets = buckets(tensors, BUCKET)
        self._device = device_of(weights)
        size = max(map(length, self._buckets))
        self._buffers = [
            torch.zeros(size, dtype=torch.uint8, device=tensors[0].device) for _ in range(BUFFERS)
        ]
        self._line = Line.listen(meeting)

    def send(self, version: int) -> None:
        self._line.say(version)
        if version == 1:
            say_bytes(self._line, handles(self._buffers))
        for number, bucket in enumerate(self._buckets):
            if number >= BUFFERS:
                self._line.hear()
            buffer = self._buffers[number % BUFFERS]
            places = [buffer[at : at + piece.numel()] for piece, at in bucket]
            torch._foreach_copy_(places, [piece for piece, _ in bucket], non_blocking=True)
            self._device.wait_stream()
            self._line.say(number)
        for _ in self._buckets[-BUFFERS:]:
            self._line.hear()


class Unpacker(Engine):
    def __init__(self, weights: Tensors, meeting: Meeting, pause: Pause) -> None:
        self._buckets = buckets(weights.values(), BUCKET)
        self._device, self._pause = device_of(weights), pause
        self._buffers: list[torch.Tensor] = []
        self._line = Line.connect(meeting)

    def take(self, version: int) -> None:
        assert self._line.hear() == (version,)
        if version == 1:
            self._buffers = opened(hear_bytes(self._line))
        with self._pause():
            for number, bucket in enumerate(self._buckets):
                assert self._line.hear() == (number,)
                buffer = self._buffers[number % BUFFERS]
                places = [buffer[at : at + piece.numel()] for piece, at in bucket]
                torch._foreach_copy_([piece for piece, _ in bucket], places, non_blocking=True)
                self._device.wait_stream()
                self._line.say(number)


class Ipc(Peer):
    packages = ("torch",)

    def __init__(self, every: bool) -> None:
        self._every = every
        self.name = "CUDA IPC, handles " + ("each version" if every else "once")
        self.what = "torch's reductions of all parameters; the engine copies them on the device, in the pause"
        self.settings = "one call of torch._foreach_copy_"

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        return Lender(weights, meeting, self._every)

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Borrower(weights, meeting, pause, self._every)


class Packed(Peer):
    name = "CUDA IPC, packed"
    what = "the trainer packs buckets into two buffers of its own, the engine unpacks the other one meanwhile"
    settings = f"buckets of {BUCKET >> 30} GiB; handles once"
    packages = ("torch",)

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        return Packer(weights, meeting)

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Unpacker(weights, meeting, pause)


PEERS: list[Peer] = [Ipc(every=False), Packed(), Ipc(every=True)]
