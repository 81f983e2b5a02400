"""The strategies that come with Windlass, by the names that configurations use.

``broadcast``, ``cuda_ipc``, ``packed_cuda_ipc``, ``tcp``, ``store``, ``lora``. Each is imported when it is first asked for.
``docs/strategies.md`` says which of them works with which backend and engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass._lazy import lazily

if TYPE_CHECKING:
    from windlass.transfer.broadcast import BroadcastTransferStrategy
    from windlass.transfer.ipc.packed import PackedCudaIpcTransferStrategy
    from windlass.transfer.ipc.strategy import CudaIpcTransferStrategy
    from windlass.transfer.lora import LoraTransferStrategy
    from windlass.transfer.store import StoreTransferStrategy
    from windlass.transfer.tcp import TcpTransferStrategy

__all__ = [
    "OWN",
    "BroadcastTransferStrategy",
    "CudaIpcTransferStrategy",
    "LoraTransferStrategy",
    "PackedCudaIpcTransferStrategy",
    "StoreTransferStrategy",
    "TcpTransferStrategy",
]

#: Where each strategy is, by its name. The same table stands in ``pyproject.toml``, for those who list entry points.
OWN = {
    "broadcast": ("windlass.transfer.broadcast", "BroadcastTransferStrategy"),
    "cuda_ipc": ("windlass.transfer.ipc.strategy", "CudaIpcTransferStrategy"),
    "packed_cuda_ipc": ("windlass.transfer.ipc.packed", "PackedCudaIpcTransferStrategy"),
    "tcp": ("windlass.transfer.tcp", "TcpTransferStrategy"),
    "store": ("windlass.transfer.store", "StoreTransferStrategy"),
    "lora": ("windlass.transfer.lora", "LoraTransferStrategy"),
}


__getattr__ = lazily(__name__, {kind: module for module, kind in OWN.values()})
