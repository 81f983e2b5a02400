"""Windlass: weight sync for RL post-training, bit-exact, versioned, at hardware speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from windlass._moved import install as _install
from windlass._windlass import __version__
from windlass.config import (
    ReceiverAgentConfig,
    ReceiverInfo,
    SenderAgentConfig,
    TransferEngineConfig,
    TransferStatus,
    WeightManagerConfig,
)
from windlass.errors import (
    WindlassBug,
    WindlassCancelled,
    WindlassCorrupt,
    WindlassDenied,
    WindlassError,
    WindlassExhausted,
    WindlassInvalid,
    WindlassNotFound,
    WindlassPeerLost,
    WindlassStale,
    WindlassTimeout,
    WindlassUnsupported,
)
from windlass.extract.chunk import WeightChunk
from windlass.names import DtypeRules, Selection, SourceMap, View
from windlass.receive.follow import Follower, Loaded
from windlass.receive.receiver import Image, Receiver, Synced, open_image
from windlass.transfer.base import (
    InferenceClient,
    WeightLoader,
    WeightTransferReceiver,
    WeightTransferSender,
    WeightTransferStrategy,
    choose,
    each_tensor,
    register_strategy,
    strategy_from_config,
)
from windlass.transfer.request import (
    BroadcastWeightUpdateRequest,
    CudaIpcWeightUpdateRequest,
    Identity,
    IpcHandle,
    LoraDiskWeightUpdateRequest,
    PackedCudaIpcWeightUpdateRequest,
    PackedTensor,
    PullWeightUpdateRequest,
    StoreWeightUpdateRequest,
    WeightUpdateRequest,
    packed_layout,
    parse_request,
)
from windlass.transfer.sync_info import (
    AgentWeightSyncInfo,
    EmptyWeightSyncInfo,
    EmptyWeightSyncInitInfo,
    EngineShape,
    StoreWeightSyncInfo,
    TorchDistributedWeightSyncInfo,
    TorchDistributedWeightSyncInitInfo,
    WeightSyncInfo,
    WeightSyncInitInfo,
    engine_rank,
    parse_sync_info,
    rank_offsets,
    world_size,
)

_install()

if TYPE_CHECKING:
    from windlass.controller import Controller, EvalTask, Notified, Served, gate, serve_evals
    from windlass.engines.remote import RemoteWeightLoader
    from windlass.extract import (
        DeepSpeedWeightExtractor,
        FSDPWeightExtractor,
        MegatronWeightExtractor,
        ModuleWeightExtractor,
        WeightExtractor,
    )
    from windlass.extract.lora import LoraState, collect_lora, is_lora, save_lora
    from windlass.publish.inputs import WeightSource
    from windlass.publish.manager import Offloaded, WeightManager
    from windlass.transfer.broadcast import BroadcastTransferStrategy
    from windlass.transfer.client import EnginesFailed, InferenceEngine, InferenceEngineClient
    from windlass.transfer.facts import facts_between, gpu_facts
    from windlass.transfer.ipc.packed import PackedCudaIpcTransferStrategy
    from windlass.transfer.ipc.strategy import CudaIpcTransferStrategy
    from windlass.transfer.lora import LoraTransferStrategy
    from windlass.transfer.sync import WeightSyncManager
    from windlass.transfer.tcp import TcpTransferStrategy

__all__ = [
    "AgentWeightSyncInfo",
    "BroadcastTransferStrategy",
    "BroadcastWeightUpdateRequest",
    "Controller",
    "CudaIpcTransferStrategy",
    "CudaIpcWeightUpdateRequest",
    "DeepSpeedWeightExtractor",
    "DtypeRules",
    "EmptyWeightSyncInfo",
    "EmptyWeightSyncInitInfo",
    "EngineShape",
    "EnginesFailed",
    "EvalTask",
    "FSDPWeightExtractor",
    "Follower",
    "Identity",
    "Image",
    "InferenceClient",
    "InferenceEngine",
    "InferenceEngineClient",
    "IpcHandle",
    "Loaded",
    "LoraDiskWeightUpdateRequest",
    "LoraState",
    "LoraTransferStrategy",
    "MegatronWeightExtractor",
    "ModuleWeightExtractor",
    "Notified",
    "Offloaded",
    "PackedCudaIpcTransferStrategy",
    "PackedCudaIpcWeightUpdateRequest",
    "PackedTensor",
    "PullWeightUpdateRequest",
    "Receiver",
    "ReceiverAgentConfig",
    "ReceiverInfo",
    "RemoteWeightLoader",
    "Selection",
    "SenderAgentConfig",
    "Served",
    "SourceMap",
    "StoreWeightSyncInfo",
    "StoreWeightUpdateRequest",
    "Synced",
    "TcpTransferStrategy",
    "TorchDistributedWeightSyncInfo",
    "TorchDistributedWeightSyncInitInfo",
    "TransferEngineConfig",
    "TransferStatus",
    "View",
    "WeightChunk",
    "WeightExtractor",
    "WeightLoader",
    "WeightManager",
    "WeightManagerConfig",
    "WeightSource",
    "WeightSyncInfo",
    "WeightSyncInitInfo",
    "WeightSyncManager",
    "WeightTransferReceiver",
    "WeightTransferSender",
    "WeightTransferStrategy",
    "WeightUpdateRequest",
    "WindlassBug",
    "WindlassCancelled",
    "WindlassCorrupt",
    "WindlassDenied",
    "WindlassError",
    "WindlassExhausted",
    "WindlassInvalid",
    "WindlassNotFound",
    "WindlassPeerLost",
    "WindlassStale",
    "WindlassTimeout",
    "WindlassUnsupported",
    "__version__",
    "choose",
    "collect_lora",
    "each_tensor",
    "engine_rank",
    "facts_between",
    "gate",
    "gpu_facts",
    "is_lora",
    "open_image",
    "packed_layout",
    "parse_request",
    "parse_sync_info",
    "rank_offsets",
    "register_strategy",
    "save_lora",
    "serve_evals",
    "strategy_from_config",
    "world_size",
]

#: What needs torch or is not needed by everybody, and where it is: imported when it is first asked for.
_LAZY = {
    "BroadcastTransferStrategy": "windlass.transfer.broadcast",
    "Controller": "windlass.controller",
    "CudaIpcTransferStrategy": "windlass.transfer.ipc.strategy",
    "DeepSpeedWeightExtractor": "windlass.extract",
    "EnginesFailed": "windlass.transfer.client",
    "EvalTask": "windlass.controller",
    "FSDPWeightExtractor": "windlass.extract",
    "InferenceEngine": "windlass.transfer.client",
    "InferenceEngineClient": "windlass.transfer.client",
    "LoraState": "windlass.extract.lora",
    "LoraTransferStrategy": "windlass.transfer.lora",
    "MegatronWeightExtractor": "windlass.extract",
    "ModuleWeightExtractor": "windlass.extract",
    "Notified": "windlass.controller",
    "Offloaded": "windlass.publish.manager",
    "PackedCudaIpcTransferStrategy": "windlass.transfer.ipc.packed",
    "RemoteWeightLoader": "windlass.engines.remote",
    "Served": "windlass.controller",
    "TcpTransferStrategy": "windlass.transfer.tcp",
    "WeightExtractor": "windlass.extract",
    "WeightManager": "windlass.publish.manager",
    "WeightSource": "windlass.publish.inputs",
    "WeightSyncManager": "windlass.transfer.sync",
    "collect_lora": "windlass.extract.lora",
    "facts_between": "windlass.transfer.facts",
    "gate": "windlass.controller",
    "gpu_facts": "windlass.transfer.facts",
    "is_lora": "windlass.extract.lora",
    "save_lora": "windlass.extract.lora",
    "serve_evals": "windlass.controller",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
