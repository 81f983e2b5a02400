"""Windlass: weight sync for RL post-training, bit-exact, versioned, at hardware speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from windlass._windlass import __version__
from windlass.chunk import WeightChunk
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
from windlass.follow import Follower, Loaded
from windlass.names import DtypeRules, Selection, SourceMap, View
from windlass.receiver import Image, Receiver, Synced, open_image
from windlass.request import (
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
from windlass.strategy import (
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
from windlass.sync_info import (
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

if TYPE_CHECKING:
    from windlass.client import EnginesFailed, InferenceEngine, InferenceEngineClient
    from windlass.controller import Controller, EvalTask, Notified, Served, gate, serve_evals
    from windlass.extract import (
        DeepSpeedWeightExtractor,
        FSDPWeightExtractor,
        MegatronWeightExtractor,
        ModuleWeightExtractor,
        WeightExtractor,
    )
    from windlass.facts import facts_between, gpu_facts
    from windlass.given import WeightSource
    from windlass.lora import LoraState, collect_lora, is_lora, save_lora
    from windlass.manager import Offloaded, WeightManager
    from windlass.remote import RemoteWeightLoader
    from windlass.strategies.broadcast import BroadcastTransferStrategy
    from windlass.strategies.ipc import CudaIpcTransferStrategy
    from windlass.strategies.lora import LoraTransferStrategy
    from windlass.strategies.packed import PackedCudaIpcTransferStrategy
    from windlass.strategies.tcp import TcpTransferStrategy
    from windlass.sync import WeightSyncManager

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
    "BroadcastTransferStrategy": "windlass.strategies.broadcast",
    "Controller": "windlass.controller",
    "CudaIpcTransferStrategy": "windlass.strategies.ipc",
    "DeepSpeedWeightExtractor": "windlass.extract",
    "EnginesFailed": "windlass.client",
    "EvalTask": "windlass.controller",
    "FSDPWeightExtractor": "windlass.extract",
    "InferenceEngine": "windlass.client",
    "InferenceEngineClient": "windlass.client",
    "LoraState": "windlass.lora",
    "LoraTransferStrategy": "windlass.strategies.lora",
    "MegatronWeightExtractor": "windlass.extract",
    "ModuleWeightExtractor": "windlass.extract",
    "Notified": "windlass.controller",
    "Offloaded": "windlass.manager",
    "PackedCudaIpcTransferStrategy": "windlass.strategies.packed",
    "RemoteWeightLoader": "windlass.remote",
    "Served": "windlass.controller",
    "TcpTransferStrategy": "windlass.strategies.tcp",
    "WeightExtractor": "windlass.extract",
    "WeightManager": "windlass.manager",
    "WeightSource": "windlass.given",
    "WeightSyncManager": "windlass.sync",
    "collect_lora": "windlass.lora",
    "facts_between": "windlass.facts",
    "gate": "windlass.controller",
    "gpu_facts": "windlass.facts",
    "is_lora": "windlass.lora",
    "save_lora": "windlass.lora",
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
