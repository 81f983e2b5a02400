"""Systems that are looked for and for which there is no way to run them on a CPU yet. Each says what stops it, as it was found."""

from __future__ import annotations

from peers.peer import Peer, lacks, why_not


def device() -> None:
    from checkpoint_engine.device_utils import DeviceManager

    DeviceManager()


class CheckpointEngine(Peer):
    name = "checkpoint-engine"
    what = "ParameterServer: pinned host memory, buckets on the device, CUDA IPC into the engine"
    packages = ("checkpoint-engine",)

    def missing(self) -> str | None:
        return (
            lacks("checkpoint_engine.ps")
            or why_not(device)
            or "it has a device: no measurement is written for one"
        )


class TorchStore(Peer):
    name = "torchstore"
    what = "put and get of a state dict, over Monarch"
    packages = ("torchstore", "torchmonarch")

    def missing(self) -> str | None:
        return lacks("torchstore") or "it can be imported: no measurement is written for it"


PEERS: list[Peer] = [CheckpointEngine(), TorchStore()]
