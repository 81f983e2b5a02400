"""Broadcast by torch.distributed over gloo, one call per tensor, as frameworks do it on NCCL."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from peers.peer import PATIENCE, Engine, Landing, Meeting, Pause, Peer, Tensors, Trainer

#: Broadcasts that are under way at once.
AT_ONCE = 8


def join(meeting: Meeting, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    where = f"tcp://127.0.0.1:{meeting.port}"
    dist.init_process_group(
        "gloo", init_method=where, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE)
    )


def broadcast(tensors: Tensors) -> None:
    """All of them from rank 0, in the same order on both sides."""
    under_way: list[dist.Work] = []
    for tensor in tensors.values():
        if len(under_way) == AT_ONCE:
            under_way.pop(0).wait()
        work = dist.broadcast(tensor, 0, async_op=True)
        assert work is not None
        under_way.append(work)
    for work in under_way:
        work.wait()


class Sender(Trainer):
    def __init__(self, weights: Tensors, meeting: Meeting) -> None:
        self._weights = weights
        join(meeting, 0)

    def send(self, version: int) -> None:
        dist.broadcast(torch.tensor([version]), 0)
        broadcast(self._weights)


class Receiver(Engine):
    def __init__(self, landing: Landing, meeting: Meeting) -> None:
        self._landing = landing
        join(meeting, 1)

    def take(self, version: int) -> None:
        heard = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(heard, 0)
        assert heard.item() == version
        with self._landing.open() as tensors:
            broadcast(tensors)


class Gloo(Peer):
    packages = ("torch",)
    settings = f"{AT_ONCE} broadcasts under way at once"

    def __init__(self, staged: bool) -> None:
        self._staged = staged
        self.name = "gloo broadcast" + (", staged" if staged else "")
        self.what = "torch.distributed.broadcast of each tensor " + (
            "into a second copy of the model, then one copy" if staged else "into the live parameters"
        )

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        return Sender(weights, meeting)

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Receiver(Landing(weights, pause, self._staged), meeting)


PEERS = [Gloo(staged=False), Gloo(staged=True)]
