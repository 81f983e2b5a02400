"""torch.distributed.rpc over TensorPipe: the trainer calls a function of the engine with some tensors at a time."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch.distributed import rpc

from peers.peer import PATIENCE, Engine, Landing, Meeting, Pause, Peer, Tensors, Trainer

#: Bytes of a call, and calls that are under way at once.
BUCKET, AT_ONCE = 64 << 20, 4


def join(meeting: Meeting, name: str, rank: int) -> None:
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    # As between hosts: no shared memory.
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{meeting.port}",
        rpc_timeout=PATIENCE,
        _transports=["uv"],
        _channels=["basic"],
    )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


class Inbox:
    """What the trainer calls, in the engine's process."""

    version = 0
    changed = threading.Condition()
    tensors: Tensors = {}
    entered: Any = None
    landing: Landing


def begin() -> None:
    Inbox.entered = Inbox.landing.open()
    Inbox.tensors = Inbox.entered.__enter__()


def put(names: list[str], tensors: list[torch.Tensor]) -> None:
    for name, tensor in zip(names, tensors):
        Inbox.tensors[name].copy_(tensor)


def finish(version: int) -> None:
    Inbox.entered.__exit__(None, None, None)
    with Inbox.changed:
        Inbox.version = version
        Inbox.changed.notify_all()


class Caller(Trainer):
    def __init__(self, weights: Tensors, meeting: Meeting) -> None:
        self._buckets: list[list[str]] = [[]]
        size = 0
        for name, tensor in weights.items():
            if size and size + tensor.nbytes > BUCKET:
                self._buckets.append([])
                size = 0
            self._buckets[-1].append(name)
            size += tensor.nbytes
        self._weights = weights
        join(meeting, "trainer", 0)

    def send(self, version: int) -> None:
        rpc.rpc_sync("engine", begin)
        under_way: list[Any] = []
        for names in self._buckets:
            if len(under_way) == AT_ONCE:
                under_way.pop(0).wait()
            tensors = [self._weights[name] for name in names]
            under_way.append(rpc.rpc_async("engine", put, args=(names, tensors)))
        for call in under_way:
            call.wait()
        rpc.rpc_sync("engine", finish, args=(version,))


class Callee(Engine):
    def __init__(self, landing: Landing, meeting: Meeting) -> None:
        Inbox.landing = landing
        join(meeting, "engine", 1)

    def take(self, version: int) -> None:
        with Inbox.changed:
            if not Inbox.changed.wait_for(lambda: Inbox.version >= version, PATIENCE):
                raise TimeoutError(f"version {version} did not come")


class Rpc(Peer):
    name = "torch RPC (TensorPipe)"
    what = "rpc_async with the tensors as arguments, which are copied into the live parameters"
    settings = (
        f"calls of {BUCKET >> 20} MiB, {AT_ONCE} under way at once; TCP as between hosts (no shared memory)"
    )
    packages = ("torch",)

    def missing(self) -> str | None:
        return None if rpc.is_available() else "this build of torch has no RPC"

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        return Caller(weights, meeting)

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Callee(Landing(weights, pause, staged=False), meeting)


PEERS = [Rpc()]
