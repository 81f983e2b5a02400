"""IPC: engines on the trainer's devices open its memory by handles that the requests carry.

Owns: :class:`CudaIpcTransferStrategy`, one handle for each parameter, and what it shares with the packed one
(:mod:`windlass.transfer.ipc.packed`). No update group: the trainer's own process group is enough, and there is nothing to
join. For each chunk:

1. every training rank that is the first on its device puts the chunk into its arena (:mod:`windlass.transfer.ipc.arena`),
   or exports the parameters where they are (:mod:`windlass.transfer.ipc.lending`);
2. handles of all ranks are gathered as plain data and merged by device;
3. rank 0 announces the request to all engines, each of which opens the handle of its own device, loads and answers;
4. meanwhile the next chunk goes into the other half of the arena. A half is written again only after every engine has
   answered the request that was in it.

Chunks that need no arena, because all of their tensors are where they were in the sync before on every rank, share
requests: the first is one by itself, so that engines begin at once, the next two go together, then four, eight, and
sixteen at a time.

Memory is that of this process's GPU (:mod:`windlass.transfer.ipc.device`), or of the host where there is none or the
setting ``device`` says ``cpu``.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from windlass.config import Config
from windlass.errors import WindlassInvalid, WindlassNotFound
from windlass.transfer.base import WeightTransferReceiver, WeightTransferSender, WeightTransferStrategy
from windlass.transfer.ipc.arena import Arena, Opener, arena_for, opener_for
from windlass.transfer.ipc.lending import Look
from windlass.transfer.request import CudaIpcWeightUpdateRequest, IpcHandle, PackedTensor, packed_layout
from windlass.transfer.sync_info import EmptyWeightSyncInfo, info_for
from windlass.transfer.trainer import TrainerRanks, each_chunk

if TYPE_CHECKING:
    import torch

    from windlass.extract.chunk import WeightChunk
    from windlass.transfer.base import InferenceClient, WeightLoader
    from windlass.transfer.request import WeightUpdateRequest
    from windlass.transfer.sync_info import WeightSyncInfo

__all__ = [
    "AddressLoader",
    "CudaIpcTransferReceiver",
    "CudaIpcTransferSender",
    "CudaIpcTransferStrategy",
    "IpcReceiver",
    "IpcSender",
    "IpcSettings",
]

#: The most chunks in one request.
MOST_TOGETHER = 16
#: Requests that a sender remembers.
REQUESTS = 1024


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
        self._carries("IPC is", ("cuda_ipc", "shm"), ("full",), "deltas and other links need strategy 'tcp'")
        if self.device not in ("auto", "cuda", "cpu"):
            raise WindlassInvalid(f"device is {self.device!r}: expected 'auto', 'cuda' or 'cpu'")


class IpcStrategy(WeightTransferStrategy):
    """What both IPC strategies are."""

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        super().__init__(config)
        self.settings = IpcSettings.from_dict(self._config)

    def create_sync_info(self) -> EmptyWeightSyncInfo:
        """Nothing: the requests carry everything."""
        return EmptyWeightSyncInfo()

    def _arena(self) -> Arena:
        return arena_for(self.settings.device, self.settings.timeout)

    def _opener(self) -> Opener:
        return opener_for(self.settings.device, self.settings.timeout)


class CudaIpcTransferStrategy(IpcStrategy):
    """A handle for each parameter.

    >>> CudaIpcTransferStrategy().create_sync_info()
    EmptyWeightSyncInfo()
    """

    def create_sender(self, sync_info: WeightSyncInfo) -> CudaIpcTransferSender:
        """Every training rank makes one, at the same time."""
        info_for("IPC", sync_info, EmptyWeightSyncInfo)
        return CudaIpcTransferSender(TrainerRanks(), self._arena(), self.settings.timeout)

    def create_receiver(self, sync_info: WeightSyncInfo, *, rank: int = 1) -> CudaIpcTransferReceiver:
        """Opens handles of this process's device."""
        info_for("IPC", sync_info, EmptyWeightSyncInfo)
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
        self._requests: OrderedDict[tuple[str, ...], _Announced] = OrderedDict()
        #: One copy on a device is enough for all engines there.
        self._exports = devices.index(arena.device) == ranks.rank

    #: Whether tensors are lent that lie elsewhere in each sync, too.
    lends_all = False

    @abstractmethod
    def _handles(
        self, chunk: WeightChunk, layout: Sequence[PackedTensor], total: int, look: Look
    ) -> list[IpcHandle]:
        """Exports the chunk, and answers handles to it."""

    @abstractmethod
    def _request(
        self, chunk: WeightChunk, layout: Sequence[PackedTensor], handles: Sequence[Mapping[str, IpcHandle]]
    ) -> WeightUpdateRequest:
        """The announcement, with the handles of all devices."""

    @abstractmethod
    def _again(
        self, request: WeightUpdateRequest, handles: Sequence[Mapping[str, IpcHandle]]
    ) -> WeightUpdateRequest:
        """The same announcement with other handles."""

    def create_request(self, chunk: WeightChunk) -> WeightUpdateRequest:
        """Puts a chunk out, and answers the announcement with the handles of all ranks. Engines must have answered the
        request before the last one: its half is written again."""
        self._arena.follow()
        look = self._arena.look(chunk, all_=self.lends_all) if self._exports else Look()
        return self._export(chunk, look, _Sync(None))

    async def send_chunks(
        self, chunks: Iterable[WeightChunk] | AsyncIterable[WeightChunk], inference_client: InferenceClient
    ) -> None:
        """Puts a chunk out while engines load the one before."""
        sync = _Sync(inference_client)
        try:
            async with contextlib.aclosing(each_chunk(chunks)) as walk:
                async for chunk in walk:
                    sync.number += 1
                    self._arena.follow()
                    look = await self._look(chunk, sync)
                    if not (look.settled and sync.names.isdisjoint(chunk.names)):
                        await self._put_out(sync)
                    sync.held.append((chunk, look))
                    sync.names.update(chunk.names)
                    del chunk
                    if not look.settled or len(sync.held) >= sync.room:
                        await self._put_out(sync)
            await self._put_out(sync)
            failure = await self._answered(sync)
            try:
                await asyncio.to_thread(self._arena.finish)
            except Exception as e:
                failure = failure or e
            await self._meet(failure, f"end after chunk {sync.number}")
        finally:
            if sync.before is not None:
                # Another failure ends the sync; engines still read the half, which stays as it is.
                await asyncio.wait({sync.before})
                sync.before.cancelled() or sync.before.exception()

    async def _look(self, chunk: WeightChunk, sync: _Sync) -> Look:
        """What of a chunk can be lent; settled only if it is so on all ranks."""
        look = Look()
        failure: Exception | None = None
        try:
            if self._exports:
                look = self._arena.look(chunk, all_=self.lends_all)
            else:
                look.settled = True
        except Exception as e:
            failure = e
        what = f"look at chunk {sync.number}"
        if self._ranks.count == 1:
            if failure is not None:
                raise failure
        elif sync.together:
            # Ranks agree for as long as all of them had only such chunks.
            loose = await asyncio.to_thread(
                self._ranks.most, int(not look.settled), failure, self._timeout, what
            )
            sync.together = look.settled = not loose
        else:
            # The others are told when handles are gathered.
            look.settled, sync.failure = False, failure
        return look

    async def _answered(self, sync: _Sync) -> Exception | None:
        """Waits for the answers to the request before."""
        failure: Exception | None = None
        try:
            if sync.before is not None:
                await sync.before
        except Exception as e:
            failure = e
        sync.before = None
        return failure

    async def _put_out(self, sync: _Sync) -> None:
        """Exports the chunks that are held, and announces them when the request before is answered."""
        if not sync.held:
            return
        held, sync.held, sync.names = sync.held, [], set()
        chunk, look = held[0] if len(held) == 1 else _together(held)
        del held
        if look.settled:
            sync.room = min(2 * sync.room, MOST_TOGETHER)
        if self._ranks.count == 1 and look.settled:
            # Nothing is waited for.
            request = self._export(chunk, look, sync)
        else:
            request = await asyncio.to_thread(self._export, chunk, look, sync)
        del chunk, look
        failure = await self._answered(sync)
        if failure is None and self._ranks.rank == 0:
            sync.before = asyncio.ensure_future(_told(sync.client, request))
        # Whoever leaves this meeting knows that the other half is free.
        await self._meet(failure, f"send chunk {sync.number}")

    async def _meet(self, failure: Exception | None, what: str) -> None:
        if self._ranks.count > 1:
            await asyncio.to_thread(self._ranks.meet, failure, self._timeout, what)
        elif failure is not None:
            raise failure

    def _export(self, chunk: WeightChunk, look: Look, sync: _Sync) -> WeightUpdateRequest:
        """Puts the chunk out and gathers the handles of all ranks."""
        number = sync.number
        known = self._known(chunk)
        layout, total = known.layout, known.total
        if self._ranks.count == 1:
            handles = self._handles(chunk, layout, total, look)
            return self._announced(chunk, known, [{self._arena.device: handle} for handle in handles])
        mine: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            if sync.failure is not None:
                raise sync.failure
            if self._exports:
                handles = self._handles(chunk, layout, total, look)
                mine = {"device": self._arena.device, "handles": _plain(handles)}
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
        by_device = {words["device"]: _handles(words["handles"]) for words in said if words}
        count = len(next(iter(by_device.values())))
        merged = [{device: handles[i] for device, handles in by_device.items()} for i in range(count)]
        return self._announced(chunk, known, merged)

    def _known(self, chunk: WeightChunk) -> _Announced:
        """What is the same as in the sync before, if the chunk is: its layout and its request."""
        key = tuple(chunk.names)
        known = self._requests.get(key)
        if known is not None and (known.dtypes, known.shapes) == (chunk.dtypes, chunk.shapes):
            self._requests.move_to_end(key)
            return known
        layout = packed_layout(chunk.names, chunk.dtypes, chunk.shapes)
        total = max((record.offset + record.bytes for record in layout), default=0)
        known = self._requests[key] = _Announced(chunk.dtypes, chunk.shapes, layout, total)
        if len(self._requests) > REQUESTS:
            self._requests.popitem(last=False)
        return known

    def _announced(
        self, chunk: WeightChunk, known: _Announced, handles: Sequence[Mapping[str, IpcHandle]]
    ) -> WeightUpdateRequest:
        """The request, judged by the core when it is first made; later only what its handles say differs."""
        plain = [
            {device: (handle.size, handle.offset) for device, handle in each.items()} for each in handles
        ]
        if known.request is None or known.places != plain:
            known.request, known.places = self._request(chunk, known.layout, handles), plain
            return known.request
        return self._again(known.request, handles)

    def release(self) -> None:
        """Gives the arena's memory back until the next sync. Not during one."""
        self._arena.release()

    def close(self) -> None:
        """Gives the arena back."""
        self._arena.close()


async def _told(client: InferenceClient | None, request: WeightUpdateRequest) -> object:
    assert client is not None
    return await client.update_weights(request)


@dataclass
class _Announced:
    """What requests with the same parameters have in common."""

    dtypes: list[str]
    shapes: list[list[int]]
    layout: list[PackedTensor]
    total: int
    request: WeightUpdateRequest | None = None
    #: Sizes and offsets of its handles.
    places: list[dict[str, tuple[int, int]]] = field(default_factory=list)


@dataclass
class _Sync:
    """One sync under way."""

    client: InferenceClient | None
    number: int = 0
    #: Chunks that were looked at and not put out yet; how many may be.
    held: list[tuple[WeightChunk, Look]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    room: int = 1
    #: Whether all ranks found every chunk so far settled.
    together: bool = True
    #: Why this rank cannot go on, which the others do not know yet.
    failure: Exception | None = None
    #: The answers to the request before.
    before: asyncio.Future[object] | None = None


def _together(held: Sequence[tuple[WeightChunk, Look]]) -> tuple[WeightChunk, Look]:
    """Several chunks as one."""
    from windlass.extract.chunk import WeightChunk

    looks = [look for _, look in held]
    return WeightChunk.joined([chunk for chunk, _ in held]), sum(looks[1:], looks[0])


def _plain(handles: Sequence[IpcHandle]) -> dict[str, Any]:
    """Handles of one export as plain data. They say the same, and differ in what of it they are to."""
    first = handles[0]
    assert all((handle.kind, handle.handle) == (first.kind, first.handle) for handle in handles)
    return {
        "kind": first.kind,
        "handle": first.handle.decode("latin-1"),
        "places": [(handle.size, handle.offset) for handle in handles],
    }


def _handles(plain: Mapping[str, Any]) -> list[IpcHandle]:
    words = plain["handle"].encode("latin-1")
    return [IpcHandle(plain["kind"], words, size, offset) for size, offset in plain["places"]]


class CudaIpcTransferSender(IpcSender):
    """A handle for each parameter."""

    lends_all = True

    def _handles(
        self, chunk: WeightChunk, layout: Sequence[PackedTensor], total: int, look: Look
    ) -> list[IpcHandle]:
        return self._arena.lend(chunk, layout, total, look)

    def _request(
        self, chunk: WeightChunk, layout: Sequence[PackedTensor], handles: Sequence[Mapping[str, IpcHandle]]
    ) -> CudaIpcWeightUpdateRequest:
        return CudaIpcWeightUpdateRequest(
            chunk.names, chunk.dtypes, chunk.shapes, [dict(by_device) for by_device in handles]
        )

    def _again(
        self, request: WeightUpdateRequest, handles: Sequence[Mapping[str, IpcHandle]]
    ) -> WeightUpdateRequest:
        return request.again(ipc_handles=list(handles))


class AddressLoader(Protocol):
    """A loader that need not see tensors: their addresses on its GPU are enough."""

    def fits(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> bool:
        """Whether this request can be loaded so."""

    def load_at(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        addresses: Sequence[int],
    ) -> object:
        """Starts to load contiguous tensors."""


class Rows(NamedTuple):
    """The parameters of a request, and what a handle says of where they begin, and how long they are."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    handle: IpcHandle
    begins: list[int]
    sizes: list[int]


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

    @abstractmethod
    def _rows(self, request: WeightUpdateRequest) -> Rows | None:
        """The parameters of a request in columns; ``None`` if there are none."""

    async def _planned(self, request: WeightUpdateRequest, loader: WeightLoader) -> bool:
        """Whether the loader could be given addresses, and was."""
        from windlass.transfer.ipc.device import DeviceOpener

        opener = self._opener
        if not (isinstance(opener, DeviceOpener) and hasattr(loader, "fits") and hasattr(loader, "load_at")):
            return False
        given: AddressLoader = loader
        rows = self._rows(request)
        if rows is None:
            return True
        # What cannot be read is refused before anything is begun.
        addresses = opener.addresses(rows.handle, rows.begins, rows.sizes)
        if not given.fits(rows.names, rows.dtypes, rows.shapes):
            return False
        try:
            given.load_at(rows.names, rows.dtypes, rows.shapes, addresses)
        finally:
            opener.done(rows.handle)
        opener.check(rows.handle)
        return True

    def release(self) -> None:
        """Lets go of the trainer's memory until the next request, for an engine that sleeps."""
        self._opener.release()

    def close(self) -> None:
        """Lets go of the trainer's memory."""
        self._opener.close()


class CudaIpcTransferReceiver(IpcReceiver):
    """Opens a handle for each parameter."""

    request_type = CudaIpcWeightUpdateRequest

    def _checked(self, request: WeightUpdateRequest) -> CudaIpcWeightUpdateRequest:
        if not isinstance(request, CudaIpcWeightUpdateRequest):
            raise WindlassInvalid(
                f"the request is {type(request).__name__}: this engine opens a handle per parameter"
            )
        return request

    def _rows(self, request: WeightUpdateRequest) -> Rows | None:
        request = self._checked(request)
        handles = zip(request.names, request.ipc_handles, strict=True)
        own = [self._own(handle, repr(name)) for name, handle in handles]
        if not own:
            return None
        first = own[0]
        if any(handle.handle != first.handle for handle in own):
            raise WindlassInvalid(
                "the handles of a request are of several exports: a sender has one for each"
            )
        begins, sizes = [handle.offset for handle in own], [handle.size for handle in own]
        return Rows(request.names, request.dtypes, request.shapes, first, begins, sizes)

    def _opened(self, request: WeightUpdateRequest) -> Iterator[tuple[str, torch.Tensor, IpcHandle]]:
        from windlass.receive.memory import tensor_at

        request = self._checked(request)
        rows = zip(request.names, request.dtypes, request.shapes, request.ipc_handles, strict=True)
        for name, dtype, shape, handles in rows:
            handle = self._own(handles, repr(name))
            data = self._opener.open(handle)
            yield name, tensor_at(data, 0, _bytes(dtype, shape), dtype, shape), handle


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    return packed_layout(["w"], [dtype], [shape])[0].bytes
