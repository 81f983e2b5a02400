"""Colocated transfer: engines read the trainer's memory, in place or from packed buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass._lazy import lazily

if TYPE_CHECKING:
    from windlass.transfer.ipc.strategy import (
        AddressLoader,
        CudaIpcTransferReceiver,
        CudaIpcTransferSender,
        CudaIpcTransferStrategy,
        IpcReceiver,
        IpcSender,
        IpcSettings,
    )

__all__ = [
    "AddressLoader",
    "CudaIpcTransferReceiver",
    "CudaIpcTransferSender",
    "CudaIpcTransferStrategy",
    "IpcReceiver",
    "IpcSender",
    "IpcSettings",
]

__getattr__ = lazily(__name__, dict.fromkeys(__all__, "windlass.transfer.ipc.strategy"))
