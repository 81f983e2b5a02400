"""Index and value of each changed element, found and written on the device, over one stream (``by_indexes`` on the host)."""

from __future__ import annotations

import torch

from peers.peer import Engine, Line, Meeting, Pause, Peer, Tensors, Trainer
from peers.staging import Incoming, Outgoing, buckets
from peers.ways.by_indexes import whole

#: Bytes that are copied and sent at once, and how many of these are under way.
BUCKET, AT_ONCE = 32 << 20, 4


class Sender(Trainer):
    def __init__(self, weights: Tensors, meeting: Meeting) -> None:
        self._now = [whole(t) for t in weights.values()]
        self._before = [t.clone() for t in self._now]
        self._out = Outgoing(self._now[0].device, BUCKET, AT_ONCE)
        self._line = Line.listen(meeting)

    def send(self, version: int) -> None:
        places, values = [], []
        for now, before in zip(self._now, self._before):
            # Compared as bits: floats would take zeros of both signs for equal.
            at = (now != before).nonzero().view(-1)
            found = now[at]
            before[at] = found
            places.append(at.to(torch.int32))
            values.append(found)
        self._line.say(version, *(found.numel() for found in values))
        # Every write has ended when it returns, so a bucket is free when the next one is asked for.
        for host in self._out.each(buckets((torch.cat(places), torch.cat(values)), BUCKET), lambda _: None):
            self._line.write(host.numpy())


class Receiver(Engine):
    def __init__(self, weights: Tensors, meeting: Meeting, pause: Pause) -> None:
        self._live, self._pause = [whole(t) for t in weights.values()], pause
        self._in = Incoming(self._live[0].device, BUCKET, AT_ONCE)
        self._line = Line.connect(meeting)

    def take(self, version: int) -> None:
        heard, *counts = self._line.hear(1 + len(self._live))
        assert heard == version
        device = self._live[0].device
        places = torch.empty(sum(counts), dtype=torch.int32, device=device)
        values = torch.empty(sum(counts), dtype=torch.int16, device=device)
        for number, bucket in enumerate(buckets((places, values), BUCKET)):
            self._line.read(self._in.room(number, bucket).numpy())
            self._in.put(number, bucket)
        changes = list(zip(self._live, places.long().split(counts), values.split(counts)))
        with self._pause():
            for live, at, value in changes:
                live[at] = value


class Indexes(Peer):
    name = "index + value (AstraFlow's method)"
    what = "positions and values of the changed elements, found on the device, one TCP stream; written in the pause"
    settings = "positions of 32 bits; pinned buffers; made anew from the published description"
    packages = ("torch",)

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        return Sender(weights, meeting)

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Receiver(weights, meeting, pause)


PEERS = [Indexes()]
