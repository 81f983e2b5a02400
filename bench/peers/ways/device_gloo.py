"""Broadcast by torch.distributed over gloo, which needs tensors of the host: by pinned buffers, in buckets (``by_gloo`` on the host)."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

from peers.peer import Engine, Landing, Meeting, Pause, Peer, Tensors, Trainer
from peers.staging import Incoming, Outgoing, buckets
from peers.ways.by_gloo import AT_ONCE, join

#: Bytes of a broadcast.
BUCKET = 64 << 20


def started(host: torch.Tensor) -> dist.Work:
    work = dist.broadcast(host, 0, async_op=True)
    assert work is not None
    return work


class Sender(Trainer):
    def __init__(self, weights: Tensors, meeting: Meeting) -> None:
        self._buckets = buckets(weights.values(), BUCKET)
        self._out = Outgoing(next(iter(weights.values())).device, BUCKET, 2 * AT_ONCE)
        join(meeting, 0)

    def send(self, version: int) -> None:
        dist.broadcast(torch.tensor([version]), 0)
        works: list[dist.Work] = []
        for host in self._out.each(self._buckets, lambda number: works[number].wait()):
            works.append(started(host))
        for work in works[-self._out.count :]:
            work.wait()


class Receiver(Engine):
    def __init__(self, landing: Landing, meeting: Meeting) -> None:
        self._landing = landing
        self._buckets = buckets(landing.tensors.values(), BUCKET)
        self._in = Incoming(next(iter(landing.tensors.values())).device, BUCKET, 2 * AT_ONCE)
        join(meeting, 1)

    def take(self, version: int) -> None:
        heard = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(heard, 0)
        assert heard.item() == version
        with self._landing.open():
            waiting: deque[tuple[int, dist.Work]] = deque()
            for number, bucket in enumerate(self._buckets):
                if len(waiting) == AT_ONCE:
                    self._put_first(waiting)
                waiting.append((number, started(self._in.room(number, bucket))))
            while waiting:
                self._put_first(waiting)

    def _put_first(self, waiting: deque[tuple[int, dist.Work]]) -> None:
        number, work = waiting.popleft()
        work.wait()
        self._in.put(number, self._buckets[number])


class Gloo(Peer):
    packages = ("torch",)
    settings = f"pinned buffers of {BUCKET >> 20} MiB, {AT_ONCE} broadcasts under way at once"

    def __init__(self, staged: bool) -> None:
        self._staged = staged
        self.name = "gloo broadcast" + (", staged" if staged else "")
        self.what = "torch.distributed.broadcast of buckets in host memory, and from there " + (
            "into a second copy of the model, then one copy" if staged else "into the live parameters"
        )

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        return Sender(weights, meeting)

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Receiver(Landing(weights, pause, self._staged), meeting)


PEERS = [Gloo(staged=False), Gloo(staged=True)]
