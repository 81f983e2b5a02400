"""IPC: engines on the trainer's devices open its memory by handles that the requests carry.

Owns: :class:`CudaIpcTransferStrategy`, one handle for each parameter, and what it shares with the packed one
(:mod:`windlass.strategies.packed`). No update group: the trainer's own process group is enough, and there is nothing to
join. For each chunk:

1. every training rank that is the first on its device puts the chunk into its arena (:mod:`windlass.strategies.arena`),
   or exports the parameters where they are;
2. handles of all ranks are gathered as plain data and merged by device;
3. rank 0 announces the request to all engines, each of which opens the handle of its own device, loads and answers;
4. meanwhile the next chunk goes into the other half of the arena. A half is written again only after every engine has
   answered the request that was in it.

Memory is that of this process's GPU (:mod:`windlass.strategies.device`), or of the host where there is none or the
setting ``device`` says ``cpu``.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from windlass.config import Config
from windlass.errors import WindlassInvalid, WindlassNotFound
from windlass.request import CudaIpcWeightUpdateRequest, IpcHandle, PackedTensor, packed_layout
from windlass.strategies.arena import Arena, Opener, arena_for, opener_for
from windlass.strategies.trainer import TrainerRanks, each_chunk
from windlass.strategy import WeightTransferReceiver, WeightTransferSender, WeightTransferStrategy
from windlass.sync_info import EmptyWeightSyncInfo

if TYPE_CHECKING:
    import torch

    from windlass.chunk import WeightChunk
    from windlass.request import WeightUpdateRequest
    from windlass.strategy import InferenceClient, WeightLoader
    from windlass.sync_info import WeightSyncInfo

__all__ = [
    "CudaIpcTransferReceiver",
    "CudaIpcTransferSender",
    "CudaIpcTransferStrategy",
    "IpcReceiver",
    "IpcSender",
    "IpcSettings",
]


@dataclass(frozen=True, kw_only=True)
class IpcSettings(Config):
    """``weight_transfer_threshold_cuda_ipc_GB`` is the size of a bucket, which the extractor makes
    (:func:`windlass.extract.settings`); a parameter that is larger is a bucket of its own. ``timeout`` bounds the
    meetings of training ranks and the waits for what GPUs do. ``device`` is ``auto`` (this process's GPU, where there is
    one), ``cuda`` or ``cpu``."""

    weight_transfer_threshold_cuda_ipc_GB: float = 1.0
    timeout: float = 120.0
    device: str = "auto"
    link: str | None = None
    codec: str | None = None

    def __post_init__(self) -> None:
        self._seconds("timeout")
        self._above_zero("a size in GB", "weight_transfer_threshold_cuda_ipc_GB")
        self._text("link", "codec", optional=True)
        if self.device not in ("auto", "cuda", "cpu"):
            raise WindlassInvalid(f"device is {self.device!r}: expected 'auto', 'cuda' or 'cpu'")


class IpcStrategy(WeightTransferStrategy):
    """What both IPC strategies are."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self.settings = IpcSettings.from_dict(self._config)

    def create_sync_info(self) -> EmptyWeightSyncInfo:
        """Nothing: the requests carry everything."""
        return EmptyWeightSyncInfo()

    def _arena(self) -> Arena:
        return arena_for(self.settings.device, self.settings.timeout)

    def _opener(self) -> Opener:
        return opener_for(self.settings.device, self.settings.timeout)


def empty(info: WeightSyncInfo) -> None:
    """Refuses the sync info of another strategy."""
    if not isinstance(info, EmptyWeightSyncInfo):
        raise WindlassInvalid(
            f"the sync info is {type(info).__name__}: IPC needs none; both sides must be built from the same "
            "configuration"
        )


class CudaIpcTransferStrategy(IpcStrategy):
    """A handle for each parameter.

    >>> CudaIpcTransferStrategy().create_sync_info()
    EmptyWeightSyncInfo()
    """

    def create_sender(self, sync_info: WeightSyncInfo) -> CudaIpcTransferSender:
        """Every training rank makes one, at the same time."""
        empty(sync_info)
        return CudaIpcTransferSender(TrainerRanks(), self._arena(), self.settings.timeout)

    def create_receiver(self, sync_info: WeightSyncInfo, *, rank: int = 1) -> CudaIpcTransferReceiver:
        """Opens handles of this process's device."""
        empty(sync_info)
        return CudaIpcTransferReceiver(self._opener())

    def get_request_type(self) -> type[CudaIpcWeightUpdateRequest]:
        """IPC requests."""
        return CudaIpcWeightUpdateRequest


class IpcSender(WeightTransferSender):
    """Fills an arena and announces handles to it; on other ranks than 0, gives its handles to rank 0."""

    def __init__(self, ranks: TrainerRanks, arena: Arena, timeout: float) -> None:
        self._ranks, self._arena, self._timeout = ranks, arena, timeout
        try:
            devices = ranks.tell(arena.device, timeout, "tell each other their devices")
        except BaseException:
            arena.close()
            raise
        #: One copy on a device is enough for all engines there.
        self._exports = devices.index(arena.device) == ranks.rank

    @abstractmethod
    def _handles(self, chunk: WeightChunk, layout: Sequence[PackedTensor], total: int) -> list[IpcHandle]:
        """Exports the chunk, and answers handles to it."""

    @abstractmethod
    def _request(
        self, chunk: WeightChunk, layout: Sequence[PackedTensor], handles: Sequence[Mapping[str, IpcHandle]]
    ) -> WeightUpdateRequest:
        """The announcement, with the handles of all devices."""

    async def send_chunks(
        self, chunks: Iterable[WeightChunk] | AsyncIterable[WeightChunk], inference_client: InferenceClient
    ) -> None:
        """Packs a chunk while engines load the one before."""
        before: asyncio.Future[object] | None = None
        number = 0
        try:
            async with contextlib.aclosing(each_chunk(chunks)) as walk:
                async for chunk in walk:
                    number += 1
                    self._arena.follow()
                    request = await asyncio.to_thread(self._export, chunk, number)
                    del chunk
                    failure: BaseException | None = None
                    try:
                        if before is not None:
                            await before
                        if self._ranks.rank == 0:
                            before = asyncio.ensure_future(_told(inference_client, request))
                    except Exception as e:
                        failure, before = e, None
                    # Whoever leaves this meeting knows that the other half is free.
                    await asyncio.to_thread(self._ranks.meet, failure, self._timeout, f"send chunk {number}")
            failure = None
            try:
                if before is not None:
                    await before
            except Exception as e:
                failure = e
            before = None
            try:
                await asyncio.to_thread(self._arena.finish)
            except Exception as e:
                failure = failure or e
            await asyncio.to_thread(self._ranks.meet, failure, self._timeout, f"end after chunk {number}")
        finally:
            if before is not None:
                # Another failure ends the sync; engines still read the half, which stays as it is.
                await asyncio.wait({before})
                before.cancelled() or before.exception()

    def _export(self, chunk: WeightChunk, number: int) -> WeightUpdateRequest:
        """Puts the chunk into the arena and gathers the handles of all ranks."""
        layout = packed_layout(chunk.names, chunk.dtypes, chunk.shapes)
        mine: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            if self._exports:
                total = max((record.offset + record.bytes for record in layout), default=0)
                handles = self._handles(chunk, layout, total)
                mine = {"device": self._arena.device, "handles": [_plain(handle) for handle in handles]}
        except Exception as e:
            failure, mine = e, {"error": f"{type(e).__name__}: {e}"}
        said = self._ranks.tell(mine, self._timeout, f"gather the handles of chunk {number}")
        if failure is not None:
            failure._windlass_told = True  # type: ignore[attr-defined]
            raise failure
        for rank, words in enumerate(said):
            if "error" in words:
                lost = WindlassInvalid(
                    f"training rank {rank} could not export chunk {number}: {words['error']}"
                )
                lost._windlass_told = True  # type: ignore[attr-defined]
                raise lost
        exported = [words for words in said if words]
        merged = [
            {words["device"]: _handle(words["handles"][place]) for words in exported}
            for place in range(len(exported[0]["handles"]))
        ]
        return self._request(chunk, layout, merged)

    def release(self) -> None:
        """Gives the arena's memory back until the next sync. Not during one."""
        self._arena.release()

    def close(self) -> None:
        """Gives the arena back."""
        self._arena.close()


async def _told(client: InferenceClient, request: WeightUpdateRequest) -> object:
    return await client.update_weights(request)


def _plain(handle: IpcHandle) -> dict[str, Any]:
    return {**asdict(handle), "handle": handle.handle.decode("latin-1")}


def _handle(plain: Mapping[str, Any]) -> IpcHandle:
    return IpcHandle(**{**plain, "handle": plain["handle"].encode("latin-1")})


class CudaIpcTransferSender(IpcSender):
    """A handle for each parameter."""

    def _handles(self, chunk: WeightChunk, layout: Sequence[PackedTensor], total: int) -> list[IpcHandle]:
        return self._arena.lend(chunk, layout, total)

    def _request(
        self, chunk: WeightChunk, layout: Sequence[PackedTensor], handles: Sequence[Mapping[str, IpcHandle]]
    ) -> CudaIpcWeightUpdateRequest:
        return CudaIpcWeightUpdateRequest(
            chunk.names, chunk.dtypes, chunk.shapes, [dict(by_device) for by_device in handles]
        )


#: Names and dtypes.
_Columns = tuple[list[str], list[str]]


class IpcReceiver(WeightTransferReceiver):
    """Opens handles of its own device. Tensors are the trainer's memory: valid until the request is answered."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener

    @abstractmethod
    def _opened(self, request: WeightUpdateRequest) -> Iterator[tuple[str, torch.Tensor, IpcHandle]]:
        """Each parameter with the handle that it is in."""

    def _own(self, handles: Mapping[str, IpcHandle], what: str) -> IpcHandle:
        handle = handles.get(self._opener.device)
        if handle is None:
            raise WindlassNotFound(
                f"{what} has handles for {', '.join(sorted(handles)) or 'no device'}, and this engine is on "
                f"{self._opener.device}",
                "no training rank is on this engine's device: colocate them, or use broadcast or tcp",
            )
        return handle

    async def receive_weights(self, request: WeightUpdateRequest) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The tensors in place, not copied."""
        last: IpcHandle | None = None
        try:
            for name, tensor, handle in self._opened(request):
                last = handle
                yield name, tensor
                del tensor
        finally:
            if last is not None:
                self._opener.done(last)
        if last is not None:
            self._opener.check(last)

    async def receive_and_load_weights(self, request: WeightUpdateRequest, loader: WeightLoader) -> None:
        """Loads, and makes sure that what was loaded had not changed meanwhile.

        A loader that has copies in place of code gets addresses, without a view for each tensor.
        """
        if await self._planned(request, loader):
            return
        held = [(name, tensor, handle) for name, tensor, handle in self._opened(request)]
        try:
            await loader.load_weights([(name, tensor) for name, tensor, _ in held])
        finally:
            # All handles of a request are of one half. What was started counts, also if the loader failed; and only
            # a turn that is right after that says that the trainer will wait for it.
            if held:
                self._opener.done(held[0][2])
        if held:
            self._opener.check(held[0][2])

    def _rows(self, request: WeightUpdateRequest) -> tuple[_Columns, list[tuple[IpcHandle, int]]]:
        """The names and dtypes of a request, and for each parameter its handle and where it begins in that."""
        raise NotImplementedError

    async def _planned(self, request: WeightUpdateRequest, loader: WeightLoader) -> bool:
        """Whether the loader could be given addresses, and was."""
        from windlass.load.planned import PlannedLoader
        from windlass.strategies.device import DeviceOpener

        opener = self._opener
        if not (isinstance(loader, PlannedLoader) and isinstance(opener, DeviceOpener)):
            return False
        (names, dtypes), places = self._rows(request)
        if not places:
            return True
        addresses, base, last = [], 0, None
        for handle, offset in places:
            if handle is not last:
                base, last = opener.locate(handle)[0], handle
            addresses.append(base + offset)
        try:
            loader.load_at(names, dtypes, addresses)
        finally:
            opener.done(places[0][0])
        opener.check(places[0][0])
        return True

    def release(self) -> None:
        """Lets go of the trainer's memory until the next request, for an engine that sleeps."""
        self._opener.release()

    def close(self) -> None:
        """Lets go of the trainer's memory."""
        self._opener.close()


class CudaIpcTransferReceiver(IpcReceiver):
    """Opens a handle for each parameter."""

    def _checked(self, request: WeightUpdateRequest) -> CudaIpcWeightUpdateRequest:
        if not isinstance(request, CudaIpcWeightUpdateRequest):
            raise WindlassInvalid(
                f"the request is {type(request).__name__}: this engine opens a handle per parameter"
            )
        return request

    def _rows(self, request: WeightUpdateRequest) -> tuple[_Columns, list[tuple[IpcHandle, int]]]:
        request = self._checked(request)
        handles = zip(request.names, request.ipc_handles, strict=True)
        return (request.names, request.dtypes), [(self._own(h, name), 0) for name, h in handles]

    def _opened(self, request: WeightUpdateRequest) -> Iterator[tuple[str, torch.Tensor, IpcHandle]]:
        from windlass.memory import tensor_at

        request = self._checked(request)
        rows = zip(request.names, request.dtypes, request.shapes, request.ipc_handles, strict=True)
        for name, dtype, shape, handles in rows:
            handle = self._own(handles, repr(name))
            data = self._opener.open(handle)
            yield name, tensor_at(data, 0, _bytes(dtype, shape), dtype, shape), handle


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    return packed_layout(["w"], [dtype], [shape])[0].bytes
