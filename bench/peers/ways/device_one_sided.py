"""NIXL and Mooncake between registered memory of the device, where they are installed. The code is that of the host."""

from __future__ import annotations

from peers.peer import Peer
from peers.ways.by_mooncake import Mooncake
from peers.ways.by_nixl import Nixl


class DeviceNixl(Nixl):
    settings = (
        "UCX chooses among its transports for one host; memory is registered and the transfer prepared once"
    )

    def __init__(self, staged: bool) -> None:
        super().__init__(staged)
        self.name = "NIXL" + (", staged" if staged else "")


class DeviceMooncake(Mooncake):
    packages = ("mooncake-transfer-engine", "torch")


PEERS: list[Peer] = [DeviceNixl(staged=False), DeviceMooncake(staged=False)]
