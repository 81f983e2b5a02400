"""Old names of modules, and old names of ``windlass`` itself.

Owns: :func:`install`, called once by ``import windlass``, and :func:`old_name`. Users write ``windlass.vllm``,
``windlass.sglang`` and ``windlass.ray`` in flags and programs, so these names stay. The others go with 0.2: using one of
them warns and names the new place.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder

    class _Finder(MetaPathFinder, Loader): ...
else:
    # Importing importlib.abc would import tempfile and random into every program.
    _Finder = object

#: Names that stay.
ALIASES = {name: f"engines.{name}" for name in ("ray", "sglang", "vllm")}
#: Names that go.
MOVED = {
    **{
        name: f"publish.{name}"
        for name in (
            "announce",
            "derived",
            "manager",
            "merged",
            "placement",
            "quantise",
            "supervise",
        )
    },
    "given": "publish.inputs",
    "leave": "publish.teardown",
    "on_gpu": "publish.gpu",
    "plan": "publish.plan",
    "chunk": "extract.chunk",
    "lora": "extract.lora",
    **{name: f"transfer.{name}" for name in ("client", "facts", "request", "sync", "sync_info")},
    "strategy": "transfer.base",
    "strategies": "transfer",
    "strategies.door": "transfer.ipc.handle_server",
    "strategies.document": "document",
    **{f"strategies.{name}": f"transfer.ipc.{name}" for name in ("arena", "device", "lending", "packed")},
    "follow": "receive.follow",
    "memory": "receive.memory",
    "receiver": "receive.receiver",
    "remote": "engines.remote",
}

#: Names that ``windlass`` itself had, and the module of each.
NAMES = {
    name: f"windlass.{module}"
    for module, names in {
        "config": "ReceiverAgentConfig ReceiverInfo TransferEngineConfig TransferStatus",
        "controller": "EvalTask Notified Served",
        "engines.remote": "RemoteWeightLoader",
        "extract": "DeepSpeedWeightExtractor FSDPWeightExtractor MegatronWeightExtractor ModuleWeightExtractor",
        "extract.chunk": "WeightChunk",
        "extract.lora": "LoraState collect_lora is_lora save_lora",
        "identity": "Identity",
        "names": "DtypeRules Selection View",
        "receive.follow": "Loaded",
        "receive.receiver": "Synced",
        "transfer": "BroadcastTransferStrategy CudaIpcTransferStrategy LoraTransferStrategy PackedCudaIpcTransferStrategy TcpTransferStrategy",
        "transfer.base": "InferenceClient WeightTransferReceiver WeightTransferSender WeightTransferStrategy each_tensor",
        "transfer.client": "EnginesFailed InferenceEngine InferenceEngineClient",
        "transfer.facts": "facts_between gpu_facts",
        "transfer.request": "BroadcastWeightUpdateRequest CudaIpcWeightUpdateRequest IpcHandle LoraDiskWeightUpdateRequest PackedCudaIpcWeightUpdateRequest PackedTensor PullWeightUpdateRequest StoreWeightUpdateRequest WeightUpdateRequest packed_layout parse_request",
        "transfer.sync_info": "AgentWeightSyncInfo EmptyWeightSyncInfo EmptyWeightSyncInitInfo EngineShape StoreWeightSyncInfo TorchDistributedWeightSyncInfo TorchDistributedWeightSyncInitInfo WeightSyncInfo WeightSyncInitInfo engine_rank parse_sync_info rank_offsets world_size",
    }.items()
    for name in names.split()
}


def old_name(name: str) -> Any:
    """The object of an old name of ``windlass``."""
    _warn(f"windlass.{name}", f"{NAMES[name]}.{name}", 3)
    return getattr(import_module(NAMES[name]), name)


def _warn(old: str, new: str, depth: int) -> None:
    warnings.warn(f"{old} is {new} now; the old name goes with 0.2", DeprecationWarning, stacklevel=depth + 1)


class _Moved(_Finder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        head, _, tail = fullname.partition(".")
        place = _place(tail) if head == "windlass" else None
        return (
            None if place is None else ModuleSpec(fullname, self, origin=f"windlass.{place}", is_package=True)
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        if spec.name.split(".")[1] not in ALIASES:
            _warn(spec.name, spec.origin, 2)
        module = import_module(spec.origin)
        # The import system sets `__spec__` to that of the old name; `exec_module` puts the module's own back.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _place(name: str) -> str | None:
    """Where the module of an old name is, below ``windlass``."""
    known = ALIASES.get(name) or MOVED.get(name)
    if known is not None or "." not in name:
        return known
    parent, _, leaf = name.rpartition(".")
    place = _place(parent)
    return None if place is None else f"{place}.{leaf}"


def install() -> None:
    """Makes the other names importable. The finder comes first: the parent of `windlass.vllm.x` has a path of its own."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Moved())
