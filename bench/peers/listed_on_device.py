"""The list of peers with weights on a GPU, in the order in which they run and of the table."""

from __future__ import annotations

from peers.peer import Peer
from peers.ways import (
    by_files,
    device_gloo,
    device_indexes,
    device_ipc,
    device_one_sided,
    device_windlass,
    device_xor,
    device_zmq,
    not_here,
)


class Nccl(Peer):
    name = "NCCL broadcast"
    what = "torch.distributed.broadcast between two processes"

    def missing(self) -> str | None:
        return "trainer and engine share one GPU, and NCCL refuses two ranks on one (Duplicate GPU detected)"


#: Staged ones come last: a run that is short of time leaves them out.
GLOO, ZMQ = device_gloo.PEERS, device_zmq.PEERS
PEERS: list[Peer] = [
    device_windlass.DELTAS,
    *device_ipc.PEERS,
    *device_indexes.PEERS,
    *device_xor.PEERS,
    *GLOO[:1],
    *ZMQ[:1],
    *by_files.PEERS,
    device_windlass.PACKED,
    *device_one_sided.PEERS,
    *GLOO[1:],
    *ZMQ[1:],
    Nccl(),
    *not_here.PEERS,
]
