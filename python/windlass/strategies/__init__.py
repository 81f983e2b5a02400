"""The strategies that come with Windlass, by the names that configurations use.

``broadcast``, ``cuda_ipc``, ``packed_cuda_ipc``, ``tcp``, ``lora``. Each is imported when it is first asked for.
``docs/strategies.md`` says which of them works with which backend and engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.strategies.broadcast import BroadcastTransferStrategy
    from windlass.strategies.ipc import CudaIpcTransferStrategy
    from windlass.strategies.lora import LoraTransferStrategy
    from windlass.strategies.packed import PackedCudaIpcTransferStrategy
    from windlass.strategies.tcp import TcpTransferStrategy

__all__ = [
    "OWN",
    "BroadcastTransferStrategy",
    "CudaIpcTransferStrategy",
    "LoraTransferStrategy",
    "PackedCudaIpcTransferStrategy",
    "TcpTransferStrategy",
]

#: Where each strategy is, by its name. The same table stands in ``pyproject.toml``, for those who list entry points.
OWN = {
    "broadcast": ("windlass.strategies.broadcast", "BroadcastTransferStrategy"),
    "cuda_ipc": ("windlass.strategies.ipc", "CudaIpcTransferStrategy"),
    "packed_cuda_ipc": ("windlass.strategies.packed", "PackedCudaIpcTransferStrategy"),
    "tcp": ("windlass.strategies.tcp", "TcpTransferStrategy"),
    "lora": ("windlass.strategies.lora", "LoraTransferStrategy"),
}


def __getattr__(name: str) -> Any:
    for module, kind in OWN.values():
        if kind == name:
            from importlib import import_module

            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
