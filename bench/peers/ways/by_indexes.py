"""Index and value of each changed element over one stream: AstraFlow's published method, made anew from its description.

The trainer compares its parameters with the version before, and sends 32-bit positions and bf16 values of what differs; the engine writes them into
its parameters. The authors' own code is not used, so this says what the method costs here and not how fast theirs is.
"""

from __future__ import annotations

import torch

from peers.peer import Engine, Line, Meeting, Pause, Peer, Tensors, Trainer, raw


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.int16)


class Sender(Trainer):
    def __init__(self, weights: Tensors, meeting: Meeting) -> None:
        self._now = [whole(t) for t in weights.values()]
        self._before = [t.clone() for t in self._now]
        self._line = Line.listen(meeting)

    def send(self, version: int) -> None:
        self._line.say(version)
        for now, before in zip(self._now, self._before):
            # Compared as bits: floats would take zeros of both signs for equal.
            at = (now != before).nonzero().view(-1)
            values = now[at]
            before[at] = values
            self._line.say(at.numel())
            self._line.write(raw(at.to(torch.int32)))
            self._line.write(raw(values))


class Receiver(Engine):
    def __init__(self, weights: Tensors, meeting: Meeting, pause: Pause) -> None:
        self._live, self._pause = [whole(t) for t in weights.values()], pause
        self._line = Line.connect(meeting)

    def take(self, version: int) -> None:
        assert self._line.hear() == (version,)
        changes = []
        for _ in self._live:
            count = self._line.hear()[0]
            at, values = torch.empty(count, dtype=torch.int32), torch.empty(count, dtype=torch.int16)
            self._line.read(raw(at))
            self._line.read(raw(values))
            changes.append((at.long(), values))
        with self._pause():
            for live, (at, values) in zip(self._live, changes):
                live[at] = values


class Indexes(Peer):
    name = "index + value (AstraFlow's method)"
    what = "positions and values of the changed elements, one TCP stream; written in the pause"
    settings = "positions of 32 bits; made anew from the published description"
    packages = ("torch",)

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        return Sender(weights, meeting)

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Receiver(weights, meeting, pause)


PEERS = [Indexes()]
