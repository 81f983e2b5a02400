"""The names of the source documents, for readers who type what those say.

Owns: no behaviour. Every name of the weight-sync interface, of its migration plan and of the WeightManager page is here
once, as the class of ours that does it or as a subclass that takes the arguments of the document. Where a document asks
for something that cannot work, the error says what to type instead.

| there | here |
|---|---|
| ``BroadcastWeightTransferSender(process_group)``, ``...Receiver(process_group)`` | :class:`~windlass.transfer.broadcast.BroadcastTransferSender`, ``...Receiver`` |
| ``CudaIpcWeightTransferSender()``, ``PackedCudaIpcWeightTransferSender()``, ``...Receiver()`` | those of :mod:`windlass.transfer.ipc.strategy` and :mod:`windlass.transfer.ipc.packed` |
| ``sender.get_request()`` after sending | ``sender.create_request(chunk)``: each chunk is announced before it is sent |
| ``TransferAgent`` | :class:`~windlass.publish.supervise.AgentSupervisor`, which runs the agent as a subprocess |
| ``TCPTransferEngine`` | :class:`~windlass.transfer.TcpTransferStrategy`: both ends of a transfer |
| ``TransferBuffer`` | :class:`~windlass.Receiver`: the image at the engine's host |
| ``RaaSPool.notify_version(model_id, version, sender_endpoint)`` | :class:`~windlass.Controller`, which tells all receivers |

Everything else has the name that it has in :mod:`windlass`.

>>> from windlass.compat import TCPTransferEngine, TransferEngineConfig
>>> TCPTransferEngine(TransferEngineConfig(streams=8)).settings.config().engine.streams
8
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from windlass import (
    SenderAgentConfig,
    WeightExtractor,
    WeightLoader,
    WeightManager,
    WeightManagerConfig,
    WeightSyncManager,
)
from windlass.config import ReceiverAgentConfig, ReceiverInfo, TransferEngineConfig, TransferStatus
from windlass.controller import Controller, Notified
from windlass.dtypes import torch_dtype as parse_dtype
from windlass.engines.remote import RemoteWeightLoader
from windlass.errors import WindlassInvalid, WindlassUnsupported
from windlass.extract import DeepSpeedWeightExtractor, FSDPWeightExtractor, MegatronWeightExtractor
from windlass.extract.chunk import WeightChunk
from windlass.identity import Identity
from windlass.publish.supervise import AgentSupervisor
from windlass.receive.receiver import Receiver
from windlass.transfer import BroadcastTransferStrategy as _Broadcast
from windlass.transfer import CudaIpcTransferStrategy, PackedCudaIpcTransferStrategy
from windlass.transfer import TcpTransferStrategy as _Tcp
from windlass.transfer.base import WeightTransferReceiver, WeightTransferSender, WeightTransferStrategy
from windlass.transfer.broadcast import BroadcastTransferReceiver, BroadcastTransferSender
from windlass.transfer.client import InferenceEngineClient
from windlass.transfer.group import UpdateGroup, open_store
from windlass.transfer.ipc.packed import PackedCudaIpcTransferReceiver, PackedCudaIpcTransferSender
from windlass.transfer.ipc.strategy import CudaIpcTransferReceiver, CudaIpcTransferSender
from windlass.transfer.request import (
    BroadcastWeightUpdateRequest,
    CudaIpcWeightUpdateRequest,
    PackedCudaIpcWeightUpdateRequest,
    WeightUpdateRequest,
)
from windlass.transfer.sync_info import (
    EmptyWeightSyncInfo,
    EmptyWeightSyncInitInfo,
    TorchDistributedWeightSyncInfo,
    TorchDistributedWeightSyncInitInfo,
    WeightSyncInfo,
    WeightSyncInitInfo,
)
from windlass.transfer.trainer import TrainerRanks

if TYPE_CHECKING:
    import torch.distributed as dist

    from windlass.engines.sglang.loader import SGLangWeightLoader
    from windlass.engines.vllm.loader import VLLMWeightLoader
    from windlass.transfer.base import InferenceClient

__all__ = [
    "BroadcastTransferReceiver",
    "BroadcastTransferSender",
    "BroadcastTransferStrategy",
    "BroadcastWeightTransferReceiver",
    "BroadcastWeightTransferSender",
    "BroadcastWeightUpdateRequest",
    "CudaIpcTransferReceiver",
    "CudaIpcTransferSender",
    "CudaIpcTransferStrategy",
    "CudaIpcWeightTransferReceiver",
    "CudaIpcWeightTransferSender",
    "CudaIpcWeightUpdateRequest",
    "DeepSpeedWeightExtractor",
    "EmptyWeightSyncInfo",
    "EmptyWeightSyncInitInfo",
    "FSDPWeightExtractor",
    "InferenceEngineClient",
    "MegatronWeightExtractor",
    "PackedCudaIpcTransferReceiver",
    "PackedCudaIpcTransferSender",
    "PackedCudaIpcTransferStrategy",
    "PackedCudaIpcWeightTransferReceiver",
    "PackedCudaIpcWeightTransferSender",
    "PackedCudaIpcWeightUpdateRequest",
    "RaaSPool",
    "ReceiverAgentConfig",
    "ReceiverInfo",
    "RemoteWeightLoader",
    "SGLangWeightLoader",
    "SenderAgentConfig",
    "TCPTransferEngine",
    "TorchDistributedWeightSyncInfo",
    "TorchDistributedWeightSyncInitInfo",
    "TransferAgent",
    "TransferBuffer",
    "TransferEngineConfig",
    "TransferStatus",
    "VLLMWeightLoader",
    "WeightChunk",
    "WeightExtractor",
    "WeightLoader",
    "WeightManager",
    "WeightManagerConfig",
    "WeightSyncInfo",
    "WeightSyncInitInfo",
    "WeightSyncManager",
    "WeightTransferReceiver",
    "WeightTransferSender",
    "WeightTransferStrategy",
    "WeightUpdateRequest",
    "init_custom_process_group",
    "parse_dtype",
]

#: What needs more than torch, and where it is.
_LAZY = {
    "SGLangWeightLoader": "windlass.engines.sglang.loader",
    "VLLMWeightLoader": "windlass.engines.vllm.loader",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def init_custom_process_group(
    master_addr: str,
    master_port: int,
    world_size: int,
    rank: int,
    group_name: str = "weight_update_group",
    backend: str = "nccl",
    timeout: float = 120.0,
) -> UpdateGroup:
    """This process's place in an update group. Rank 0 opens the meeting point at ``master_port``; all join at once."""
    info = TorchDistributedWeightSyncInfo(
        master_addr,
        master_port,
        world_size,
        group_name,
        backend,  # type: ignore[arg-type]
    )
    store = open_store(master_addr, timeout, master_port) if rank == 0 else None
    return UpdateGroup(info, rank, store=store, timeout=timeout)


class _Sends(WeightTransferSender):
    """What the plan's senders have in common."""

    async def send_chunks(
        self,
        chunks: Iterable[WeightChunk] | AsyncIterable[WeightChunk],
        inference_client: InferenceClient | None = None,
    ) -> None:
        """Sends chunk by chunk. Engines are told of each before it moves, and so the client is needed here."""
        if inference_client is None:
            raise WindlassInvalid(
                "send_chunks() needs the client: engines that are told afterwards have not joined the transfer, and it "
                "waits for them for ever",
                "send_chunks(chunks, inference_client), and no request after it",
            )
        await super().send_chunks(chunks, inference_client)  # type: ignore[safe-super]

    def get_request(self) -> WeightUpdateRequest:
        """Not there: requests go out chunk by chunk, before the bytes."""
        raise WindlassUnsupported(
            f"{type(self).__name__} has announced every chunk already, and there is no request after sending",
            "leave update_weights(request) out; create_request(chunk) gives the request of one chunk",
        )


class BroadcastWeightTransferSender(_Sends, BroadcastTransferSender):
    """A sender over a process group that is there: one of torch's, or that of :func:`init_custom_process_group`."""

    def __init__(self, process_group: dist.ProcessGroup | UpdateGroup, timeout: float = 120.0) -> None:
        group = UpdateGroup.given(process_group)
        super().__init__(lambda: group, TrainerRanks(), timeout)


class BroadcastWeightTransferReceiver(BroadcastTransferReceiver):
    """A receiver over a process group that is there."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | UpdateGroup,
        timeout: float = 120.0,
        device: str | None = None,
    ) -> None:
        super().__init__(UpdateGroup.given(process_group), timeout, device)


class CudaIpcWeightTransferSender(_Sends, CudaIpcTransferSender):
    """A sender of a handle for each parameter; ``config`` is that of :class:`windlass.transfer.CudaIpcTransferStrategy`."""

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        strategy = CudaIpcTransferStrategy(config)
        super().__init__(TrainerRanks(), strategy._arena(), strategy.settings.timeout)


class CudaIpcWeightTransferReceiver(CudaIpcTransferReceiver):
    """A receiver of a handle for each parameter."""

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        super().__init__(CudaIpcTransferStrategy(config)._opener())


class PackedCudaIpcWeightTransferSender(_Sends, PackedCudaIpcTransferSender):
    """A sender of one handle for each chunk."""

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        strategy = PackedCudaIpcTransferStrategy(config)
        super().__init__(TrainerRanks(), strategy._arena(), strategy.settings.timeout)


class PackedCudaIpcWeightTransferReceiver(PackedCudaIpcTransferReceiver):
    """A receiver of one handle for each chunk."""

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        super().__init__(PackedCudaIpcTransferStrategy(config)._opener())


class BroadcastTransferStrategy(_Broadcast):
    """:class:`windlass.transfer.BroadcastTransferStrategy`, which also takes a process group that is there."""

    def create_init_info(self, *given: Any, **named: Any) -> WeightSyncInfo:
        """The sync info; of these values, ``(master_addr, master_port, world_size, group_name, backend)``, if they are given.
        Then the group is the caller's, and :meth:`create_sender` takes it."""
        if named.keys() & {"master_addr", "master_port"} or (given and isinstance(given[0], str)):
            return TorchDistributedWeightSyncInfo(*given, **named)
        return super().create_init_info(*given, **named)

    def create_sender(self, *given: Any, **named: Any) -> BroadcastTransferSender:
        """The trainer's end, of the sync info or of a process group."""
        if "process_group" in named:
            return BroadcastWeightTransferSender(named["process_group"], self.settings.timeout)
        if len(given) == 1 and not isinstance(given[0], WeightSyncInfo) and hasattr(given[0], "rank"):
            return BroadcastWeightTransferSender(given[0], self.settings.timeout)
        return super().create_sender(*given, **named)


class TCPTransferEngine(_Tcp):
    """Both ends of transfers over TCP, made on both sides of the same configuration: a :class:`windlass.config.TransferEngineConfig`,
    or what :class:`windlass.transfer.TcpTransferStrategy` takes."""

    def __init__(self, config: TransferEngineConfig | Mapping[str, object] | None = None) -> None:
        if isinstance(config, TransferEngineConfig):
            engine = config.to_dict()
            config = {"manager": {"engine": engine}, "mode": config.mode, "timeout": config.timeout}
        super().__init__(config)


class TransferAgent(AgentSupervisor):
    """The agent of a region, as ``config`` has it; other options are those of :class:`windlass.publish.supervise.AgentSupervisor`."""

    def __init__(
        self,
        region: str | os.PathLike[str],
        config: SenderAgentConfig | None = None,
        engine: TransferEngineConfig | None = None,
        **options: Any,
    ) -> None:
        said = {} if config is None else config.to_dict()
        if not said.pop("enabled", True):
            raise WindlassInvalid("SenderAgentConfig.enabled is False, and this starts the agent")
        if engine is not None:
            said |= {"streams": engine.streams, "timeout": engine.timeout}
        super().__init__(region, **{**said, **options})


class TransferBuffer(Receiver):
    """The image at an engine's host, as ``config`` has it; other options are those of :class:`windlass.Receiver`."""

    def __init__(self, config: ReceiverAgentConfig | str | os.PathLike[str], **options: Any) -> None:
        if not isinstance(config, ReceiverAgentConfig):
            super().__init__(os.fspath(config), **options)
            return
        said: dict[str, Any] = {
            "endpoint": config.endpoint,
            "token_file": config.token_file,
            "tls_ca": config.tls_ca,
            "group_readable": config.group,
            "mode": config.engine.mode,
            "streams": config.engine.streams,
            "transfer_timeout": config.engine.timeout,
        }
        said |= {} if config.name is None else {"name": config.name}
        said |= {} if config.threads is None else {"threads": config.threads}
        super().__init__(config.image_dir, **{**said, **options})


class RaaSPool(Controller):
    """All receivers, behind the controller."""

    def notify_version(self, *given: Any, **named: Any) -> Notified:
        """``(model_id, version, sender_endpoint, incarnation=wm.incarnation)``, or what
        :meth:`windlass.Controller.notify_version` takes."""
        if (given and isinstance(given[0], Identity)) or "identity" in named:
            return super().notify_version(*given, **named)
        keys = ("model_id", "version", "sender_endpoint", "incarnation")
        named |= dict(zip(keys, given))
        missing = [key for key in keys if key not in named]
        if missing:
            raise WindlassInvalid(
                f"notify_version() lacks {', '.join(missing)}",
                "notify_version(model_id, version, sender_endpoint, incarnation=wm.incarnation); "
                "WeightManager.notify_version() knows all of it by itself",
            )
        model_id, version, endpoint, incarnation = (named.pop(key) for key in keys)
        number = int(incarnation, 16) if isinstance(incarnation, str) else incarnation
        return super().notify_version(Identity(model_id, number, version), endpoint, **named)
