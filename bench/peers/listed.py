"""The list of peers, in the order of the table."""

from __future__ import annotations

from peers.peer import Peer
from peers.ways import (
    by_files,
    by_gloo,
    by_indexes,
    by_mooncake,
    by_nixl,
    by_rpc,
    by_windlass,
    by_xor,
    by_zmq,
    not_here,
)

PEERS: list[Peer] = [
    *by_windlass.PEERS,
    *by_indexes.PEERS,
    *by_xor.PEERS,
    *by_files.PEERS,
    *by_gloo.PEERS,
    *by_rpc.PEERS,
    *by_zmq.PEERS,
    *by_nixl.PEERS,
    *by_mooncake.PEERS,
    *not_here.PEERS,
]
