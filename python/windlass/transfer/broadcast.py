"""Broadcast: tensors go from training rank 0 to all engine ranks over one process group, NCCL or gloo.

Owns: :class:`BroadcastTransferStrategy`, its sender and its receiver. For a fixed set of engines: a group cannot gain
members. Order, for each chunk:

1. rank 0 announces the request to all engines, and does not wait for their answers;
2. while those are under way, it broadcasts the tensors in the order of the names;
3. it waits for the answers: an engine answers when it has received *and* loaded;
4. training ranks meet, once.

An engine that does not take part shows in two ways, and whichever comes first ends the sync: its answer to the
announcement is an error, or the broadcast breaks or runs into its deadline. The error names the engine where it is
known. The group is then broken, and both sides join again with new sync info.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from windlass.config import Config
from windlass.errors import WindlassError, WindlassInvalid
from windlass.transfer.base import WeightTransferReceiver, WeightTransferSender, WeightTransferStrategy
from windlass.transfer.group import UpdateGroup, node_address, open_store
from windlass.transfer.request import BroadcastWeightUpdateRequest
from windlass.transfer.sync_info import EngineShape, TorchDistributedWeightSyncInfo, info_for, world_size
from windlass.transfer.trainer import TrainerRanks, each_chunk

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import TCPStore

    from windlass.extract.chunk import WeightChunk
    from windlass.transfer.base import InferenceClient
    from windlass.transfer.request import WeightUpdateRequest
    from windlass.transfer.sync_info import WeightSyncInfo

__all__ = [
    "BroadcastSettings",
    "BroadcastTransferReceiver",
    "BroadcastTransferSender",
    "BroadcastTransferStrategy",
]

#: How many turns of the event loop an announcement has to be under way.
TURNS = 4


@dataclass(frozen=True, kw_only=True)
class BroadcastSettings(Config):
    """``engines`` are the shapes of all engines, in the order of the client. ``timeout`` bounds each broadcast and each
    meeting of training ranks, ``join_timeout`` the joining. ``device`` is where receivers put tensors: by default the
    current GPU with nccl, and the host with gloo."""

    engines: Sequence[EngineShape] = ()
    weight_sync_backend: Literal["nccl", "gloo"] = "nccl"
    group_name: str = "weight_update_group"
    master_addr: str | None = None
    override_existing_update_group: bool = False
    timeout: float = 120.0
    join_timeout: float = 120.0
    device: str | None = None
    link: str | None = None
    codec: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "engines", tuple(_shape(engine) for engine in self.engines))
        self._choice("weight_sync_backend", "nccl", "gloo")
        self._text("group_name")
        self._text("master_addr", "device", optional=True)
        self._carries(
            "broadcast is", ("collective",), ("full",), "deltas and other links need strategy 'tcp'"
        )
        self._flag("override_existing_update_group")
        self._seconds("timeout", "join_timeout")


def _shape(value: Any) -> EngineShape:
    if isinstance(value, EngineShape):
        return value
    if not isinstance(value, Mapping) or not set(value) <= {"tp", "pp", "dp"}:
        raise WindlassInvalid(
            f"engines has {value!r}: expected a shape such as {{'tp': 2, 'pp': 1, 'dp': 1}}"
        )
    return EngineShape(**value)


class BroadcastTransferStrategy(WeightTransferStrategy):
    """Training rank 0 broadcasts to all engine ranks.

    >>> strategy = BroadcastTransferStrategy(
    ...     {"engines": [{"tp": 2}, {}], "weight_sync_backend": "gloo", "master_addr": "127.0.0.1"}
    ... )
    >>> info = strategy.create_sync_info()
    >>> info.world_size, info.backend
    (4, 'gloo')
    """

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        super().__init__(config)
        self.settings = BroadcastSettings.from_dict(self._config)
        self._store: TCPStore | None = None

    def create_sync_info(self) -> TorchDistributedWeightSyncInfo:
        """Opens the meeting point on a free port of this host. The port stays bound until the group ends."""
        settings = self.settings
        if not settings.engines:
            raise WindlassInvalid(
                "the configuration names no engines, and a process group has a fixed size",
                "list their shapes under 'engines', such as [{'tp': 2}]; for engines that come and go, use tcp",
            )
        address = settings.master_addr or node_address()
        self._store = open_store(address, settings.join_timeout)
        return TorchDistributedWeightSyncInfo(
            master_addr=address,
            master_port=self._store.port,
            world_size=world_size(settings.engines),
            group_name=settings.group_name,
            backend=settings.weight_sync_backend,
        )

    def create_sender(self, sync_info: WeightSyncInfo) -> BroadcastTransferSender:
        """Joins as rank 0, in the process that made the sync info; other training ranks join nothing."""
        sender = self._begin_sender(sync_info)
        try:
            sender.wait_joined()
        except BaseException:
            sender.close()
            raise
        return sender

    def _begin_sender(self, sync_info: WeightSyncInfo) -> BroadcastTransferSender:
        """Joins in the background; the first chunk waits for the engines."""
        info = info_for("broadcast", sync_info, TorchDistributedWeightSyncInfo)
        ranks = TrainerRanks()
        if ranks.rank != 0:
            return BroadcastTransferSender(None, ranks, self.settings.timeout)
        store, self._store = self._store, None
        if store is None or store.port != info.master_port:
            raise WindlassInvalid(
                f"this strategy does not hold the store at port {info.master_port}",
                "the sync info is made by the same object on training rank 0, once for each sender",
            )
        settings = self.settings

        def join() -> UpdateGroup:
            override = settings.override_existing_update_group
            return UpdateGroup(info, 0, store=store, timeout=settings.join_timeout, override=override)

        return BroadcastTransferSender(join, ranks, settings.timeout)

    def create_receiver(self, sync_info: WeightSyncInfo, *, rank: int = 1) -> BroadcastTransferReceiver:
        """Joins as ``rank``, which is 1 or more: an engine's rank offset plus its local rank."""
        info, settings = info_for("broadcast", sync_info, TorchDistributedWeightSyncInfo), self.settings
        if rank == 0:
            raise WindlassInvalid("rank 0 of the update group is the trainer; engines begin at rank_offset 1")
        group = UpdateGroup(
            info,
            rank,
            timeout=settings.join_timeout,
            override=settings.override_existing_update_group,
        )
        return BroadcastTransferReceiver(group, settings.timeout, settings.device)

    def get_request_type(self) -> type[BroadcastWeightUpdateRequest]:
        """Broadcast requests."""
        return BroadcastWeightUpdateRequest


class BroadcastTransferSender(WeightTransferSender):
    """Announces and broadcasts on rank 0; on other training ranks, walks along."""

    def __init__(self, join: Callable[[], UpdateGroup] | None, ranks: TrainerRanks, timeout: float) -> None:
        self._ranks = ranks
        self._timeout = timeout
        # Collectives block, and those of one group come from one thread. Training ranks meet on another one: a failure
        # is told at once, not when the broadcast that nobody takes part in reaches its deadline.
        device = (_current_device(),)
        self._thread = ThreadPoolExecutor(1, "windlass-broadcast", _use_device, device)
        self._meeting = ThreadPoolExecutor(1, "windlass-meeting", _use_device, device)
        self._joined = None if join is None else self._thread.submit(join)

    def wait_joined(self) -> None:
        """Waits until all engines have joined, or raises why they have not."""
        if self._joined is not None:
            self._joined.result()

    def create_request(self, chunk: WeightChunk) -> BroadcastWeightUpdateRequest:
        """The announcement of a chunk."""
        return BroadcastWeightUpdateRequest(chunk.names, chunk.dtypes, chunk.shapes)

    async def send_chunks(
        self, chunks: Iterable[WeightChunk] | AsyncIterable[WeightChunk], inference_client: InferenceClient
    ) -> None:
        """Announces each chunk, broadcasts it while the engines receive, and waits until they have loaded it."""
        loop = asyncio.get_running_loop()
        number = 0
        async with contextlib.aclosing(each_chunk(chunks)) as walk:
            async for chunk in walk:
                number += 1
                failure: BaseException | None = None
                try:
                    if self._joined is not None:
                        # Shielded: a sync that is cancelled leaves the joining alone.
                        group = await asyncio.shield(asyncio.wrap_future(self._joined))
                        await self._send(group, chunk, inference_client)
                except Exception as e:
                    failure = e
                del chunk
                await loop.run_in_executor(
                    self._meeting, self._ranks.meet, failure, self._timeout, f"send chunk {number}"
                )

    async def _send(self, group: UpdateGroup, chunk: WeightChunk, client: InferenceClient) -> None:
        loop = asyncio.get_running_loop()
        # Engines that are told of a broadcast wait for it.
        group.check()
        announced = asyncio.ensure_future(_told(client, self.create_request(chunk)))
        # The announcement leaves before the collective begins, which would wait for those who do not know of it: a
        # turn of the loop for each task on its way, which are this one, the client's and the engine's.
        for _ in range(TURNS):
            await asyncio.sleep(0)
        if announced.done() and announced.exception() is not None:
            group.abandon(f"engines refused: {announced.exception()}")
            await announced
        sent = loop.run_in_executor(self._thread, self._broadcast, group, chunk)
        both: set[asyncio.Future[Any]] = {announced, sent}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            group.abandon("the sync was cancelled")
            announced.cancel()
            sent.add_done_callback(_ignored)
            raise
        if announced.done() and announced.exception() is not None:
            # The broadcast ends at its own deadline; what it still sends is for nobody.
            group.abandon(f"engines refused: {announced.exception()}")
            sent.add_done_callback(_ignored)
            raise announced.exception()  # type: ignore[misc]
        failure = sent.exception() if sent.done() else None
        if failure is None:
            await asyncio.gather(announced, sent)
            return
        # Whoever is to blame may say so itself, and names it better than a broken collective does.
        done, _ = await asyncio.wait({announced}, timeout=min(5.0, self._timeout))
        if done and announced.exception() is not None:
            engines = announced.exception()
            if isinstance(failure, WindlassError):
                raise type(failure)(f"{failure}; engines say: {engines}", failure.advice) from engines
        announced.cancel()
        raise failure

    def _broadcast(self, group: UpdateGroup, chunk: WeightChunk) -> None:
        for name, tensor in chunk:
            group.broadcast(tensor.contiguous(), self._timeout, name)

    def close(self) -> None:
        """Leaves the group."""
        # The thread may be in a broadcast that nobody takes part in; leaving does not wait for its deadline.
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._meeting.shutdown(wait=False, cancel_futures=True)
        if self._joined is not None:
            # Also one that comes about later: engines that join then learn that nobody is there.
            self._joined.add_done_callback(_left)


def _left(joined: Future[UpdateGroup]) -> None:
    if not joined.cancelled() and joined.exception() is None:
        joined.result().close()


async def _told(client: InferenceClient, request: WeightUpdateRequest) -> object:
    return await client.update_weights(request)


def _ignored(future: asyncio.Future[Any]) -> None:
    # Asked for, so that asyncio does not complain that nobody did.
    if not future.cancelled():
        future.exception()


class BroadcastTransferReceiver(WeightTransferReceiver):
    """Receives what rank 0 broadcasts; a tensor is freed when its consumer lets go of it."""

    request_type = BroadcastWeightUpdateRequest

    def __init__(self, group: UpdateGroup, timeout: float, device: str | None) -> None:
        import torch

        self._group = group
        self._timeout = timeout
        if device is None:
            device = f"cuda:{torch.cuda.current_device()}" if group.info.backend == "nccl" else "cpu"
        self._device = torch.device(device)
        index = self._device.index if self._device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "windlass-broadcast", _use_device, (index,))

    async def receive_weights(self, request: WeightUpdateRequest) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The tensors in the order of the request, each in memory of its own."""
        import torch

        from windlass.dtypes import torch_dtype

        if not isinstance(request, BroadcastWeightUpdateRequest):
            raise WindlassInvalid(
                f"the request is {type(request).__name__}: this engine joined an update group and takes broadcasts"
            )
        # All of them are made before the first is waited for: what this torch cannot hold must fail here, not midway.
        dtypes = [torch_dtype(dtype) for dtype in request.dtypes]
        loop = asyncio.get_running_loop()
        for name, dtype, shape in zip(request.names, dtypes, request.shapes, strict=True):
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            await loop.run_in_executor(self._thread, self._group.broadcast, tensor, self._timeout, name)
            yield name, tensor
            del tensor

    def close(self) -> None:
        """Leaves the group."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._group.close()


def _current_device() -> int | None:
    import torch

    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def _use_device(device: int | None) -> None:
    if device is not None:
        import torch

        torch.cuda.set_device(device)
