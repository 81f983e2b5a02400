"""Device memory behind the interface of arenas (:mod:`windlass.transfer.ipc.arena`): CUDA IPC.

Owns: :class:`DeviceArena` of a sender and :class:`DeviceOpener` of an engine. The driver's part is in the extension
(``windlass_data::cuda::ipc``); handles and descriptors travel over a unix socket (:mod:`windlass.transfer.ipc.handle_server`).

**The arena** is one allocation of two halves, exported once. A bucket is gathered into a half by one launch on the
trainer's stream, a *ready* signal is recorded behind it, and the request goes out at once; no process waits for the GPU. The
engine waits for the signal, starts its copies, records its own *done* signal behind them, and answers. Before a half is
written again the sender

1. raises its turn, in a page of memory that engines map as well,
2. waits for the *done* signals of all engines that are connected,

and only then writes. An engine records its signal first and looks at the turn afterwards: if the turn is the one it was
given, the sender is bound to find the signal, and to wait for the copies. If not, they may be of two buckets, and the
engine says so. An engine that dies takes its copies with it; a trainer that dies is seen by the end of the
connection.

**A handle** is ``{"arena": path of the socket, "half": 0, "turn": 3, "sync": 1, "table": 7}``. The table says where each
tensor of the request is: in that half, or in memory of the trainer's own, because a parameter that lies contiguously where it
lay before is not copied by the sender at all (:mod:`windlass.transfer.ipc.lending`). The handle server gives out a table when it is
first met, and so is an allocation, as a legacy handle or as descriptors of granules (expandable segments); it is kept open
for as long as the sync before still used it. What cannot be exported is gathered into the arena; why is logged once.
Tensors that were lent are kept until every engine is done with them: settled ones until the end of the sync, without a
wait in between, others until the next turn of their half.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass import _windlass
from windlass.errors import (
    WindlassInvalid,
    WindlassNotFound,
    WindlassPeerLost,
    WindlassStale,
    WindlassTimeout,
    WindlassUnsupported,
)
from windlass.transfer.ipc.arena import WHERE, Arena, Opener
from windlass.transfer.ipc.handle_server import PREFIX, HandleClient, HandleServer, HandleSession
from windlass.transfer.ipc.lending import Ledger, Look, Rows, Table, table_file
from windlass.transfer.request import IpcHandle

if TYPE_CHECKING:
    import torch

    from windlass.extract.chunk import WeightChunk
    from windlass.transfer.request import PackedTensor

__all__ = ["DeviceArena", "DeviceOpener", "strided"]

log = logging.getLogger("windlass")

#: A row of a table of copies: where it reads, where it writes, bytes of a run, (count, stride to, stride from).
Row = tuple[int, int, int, tuple[tuple[int, int, int], ...]]

ROUND = 2 << 20
#: Tables, of copies and of tensors, that each side keeps; a sync has one for each request.
TABLES = 256
ALIGN = 256


def strided(
    read: int, write: int, sizes: Sequence[int], to: Sequence[int], source: Sequence[int], item: int
) -> Row:
    """The row of a box of elements, by sizes and strides on both sides, counted in elements.

    >>> strided(100, 0, [4, 8], [8, 1], [8, 1], 2)
    (100, 0, 64, ())
    >>> strided(0, 0, [4, 8], [8, 1], [20, 1], 2)
    (0, 0, 16, ((4, 16, 40),))
    >>> strided(0, 0, [2, 3], [3, 1], [1, 2], 4)
    (0, 0, 4, ((2, 12, 4), (3, 4, 8)))
    """
    run, dims = 1, [(n, t, f) for n, t, f in zip(sizes, to, source, strict=True) if n != 1]
    if any(n == 0 for n, _, _ in dims):
        return read, write, 0, ()
    while dims and dims[-1][1:] == (run, run):
        run *= dims.pop()[0]
    return read, write, run * item, tuple((n, t * item, f * item) for n, t, f in dims)


def _dense(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def view(gpu: int, address: int, size: int, owner: object) -> torch.Tensor:
    """Device memory as a flat tensor of bytes."""
    import torch

    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device=f"cuda:{gpu}")
    return torch.as_tensor(_Array(address, size, owner), device=f"cuda:{gpu}")


class _Array:
    """What torch takes for memory of a device. torch keeps it, and it keeps the owner."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def namespaces() -> dict[str, int]:
    """What must be the same for handles to be opened: the IPC and PID namespaces of this process."""
    found = {}
    for kind in ("ipc", "pid"):
        with contextlib.suppress(OSError):
            found[kind] = os.stat(f"/proc/self/ns/{kind}").st_ino
    return found


class DeviceArena(Arena):
    """Two halves of device memory. See the module."""

    def __init__(self, ordinal: int, folder: Path = WHERE, timeout: float = 120.0) -> None:
        self._gpu = _windlass.Gpu.open(ordinal)
        self.device = self._gpu.uuid
        self._folder, self._timeout = folder, timeout
        self._turns = [0, 0]
        self._next = 0
        self._sync = 0
        self._stream = 0
        self._share: _Share | None = None
        #: The one before, while a half of it may still be read.
        self._old: _Share | None = None
        self._tables: OrderedDict[tuple[Row, ...], Any] = OrderedDict()
        self._ledger = Ledger(self._export)
        #: What was lent by a half and lies elsewhere in the next sync, and what does not.
        self._kept: list[list[torch.Tensor]] = [[], []]
        self._settled: list[torch.Tensor] = []
        self._told = False

    def follow(self) -> None:
        """What is packed from now on comes after what the caller's stream of torch holds."""
        import torch

        with torch.cuda.device(self._gpu.ordinal):
            self._stream = int(torch.cuda.current_stream().cuda_stream)

    def _turn(self, size: int, settled: bool) -> tuple[_Share, int]:
        """The half whose turn it is, with room for ``size`` bytes; free, unless everything is ``settled`` and nothing of
        it is written."""
        if self._old is not None:
            self._old.close(self._timeout)
            self._old = None
        half = self._next
        self._next = 1 - half
        if self._share is None or self._share.half < size:
            wanted = 0 if size == 0 else -(-size // ROUND) * ROUND
            self._old, self._share = self._share, _Share(self._gpu, self._folder, wanted)
            for number in (0, 1):
                self._share.set_turn(number, self._turns[number])
        self._turns[half] += 1
        self._share.set_turn(half, self._turns[half])
        if not settled:
            self._share.wait(half, self._timeout)
            if self._old is not None:
                self._old.wait(half, self._timeout)
            self._kept[half] = []
        return self._share, half

    def look(self, chunk: WeightChunk, *, all_: bool) -> Look:
        """What of a chunk is read where it is."""
        return self._ledger.look(chunk.names, chunk.tensors, self._sync, all_=all_)

    def whole(self, chunk: WeightChunk, layout: Sequence[PackedTensor], total: int, look: Look) -> IpcHandle:
        """One handle to everything."""
        return IpcHandle("vmm_fd", self._put_out(chunk, layout, look), total)

    def lend(
        self, chunk: WeightChunk, layout: Sequence[PackedTensor], total: int, look: Look
    ) -> list[IpcHandle]:
        """A handle to each tensor. They differ in what of the layout they are to."""
        words = self._put_out(chunk, layout, look)
        return [IpcHandle("vmm_fd", words, record.bytes, record.offset) for record in layout]

    def _put_out(self, chunk: WeightChunk, layout: Sequence[PackedTensor], look: Look) -> bytes:
        """Gathers by one launch what is not lent; what handles say."""
        tensors, memories = chunk.tensors, look.memories
        apart = [i for i, memory in enumerate(memories) if memory is None and layout[i].bytes]
        at, end = {}, 0
        for i in apart:
            at[i] = end
            end += -(-layout[i].bytes // ALIGN) * ALIGN
        share, half = self._turn(end, look.settled)
        self._gather(share, half, [tensors[i] for i in apart], [at[i] for i in apart])
        rows = []
        for i, (record, tensor, memory) in enumerate(zip(layout, tensors, memories, strict=True)):
            if memory is None or record.bytes == 0:
                rows.append((record.offset, 0, at.get(i, 0), record.bytes))
                continue
            number = share.allocation(memory)
            rows.append((record.offset, number, tensor.data_ptr() - memory.base, record.bytes))
            (self._settled if look.firm[i] else self._kept[half]).append(tensor)
        share.ready[half].record(self._stream)
        where = {"arena": str(share.path), "half": half, "turn": self._turns[half], "sync": self._sync}
        return json.dumps({**where, "table": share.table(tuple(rows))}).encode()

    def _gather(self, share: _Share, half: int, tensors: Sequence[torch.Tensor], at: Sequence[int]) -> None:
        rows: list[Row] = []
        addresses, far = [], []
        for tensor, offset in zip(tensors, at, strict=True):
            if tensor.numel() == 0:
                continue
            if tensor.device.type != "cuda":
                far.append((tensor, offset))
                continue
            if tensor.device.index != self._gpu.ordinal:
                raise WindlassInvalid(
                    f"a tensor is on {tensor.device}, and this rank exports memory of cuda:{self._gpu.ordinal}",
                    "each training rank publishes tensors of its own device",
                )
            address, item = tensor.data_ptr(), tensor.element_size()
            if tensor.is_contiguous():
                rows.append((address, offset, tensor.numel() * item, ()))
            else:
                shape = tuple(tensor.shape)
                rows.append(strided(address, offset, shape, _dense(shape), tensor.stride(), item))
            addresses.append(address)
        if rows:
            table = self._table(tuple(rows), addresses)
            table.start(None, share.place(half), self._stream, self._timeout)
        if far:
            import torch

            external: Any = torch.cuda.ExternalStream
            stream = external(self._stream) if self._stream else torch.cuda.default_stream()
            address, size = share.place(half)
            memory = view(self._gpu.ordinal, address, size, share)
            with torch.cuda.stream(stream):
                for tensor, offset in far:
                    place = memory[offset : offset + tensor.numel() * tensor.element_size()]
                    place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())

    def _table(self, rows: tuple[Row, ...], addresses: list[int]) -> Any:
        """The table of these rows, made when they are first met."""
        if rows in self._tables:
            self._tables.move_to_end(rows)
            return self._tables[rows]
        plain = [(read, write, run, list(dims)) for read, write, run, dims in rows]
        table = self._tables[rows] = _windlass.CopyTable(self._gpu, plain, addresses)
        if len(self._tables) > TABLES:
            self._tables.popitem(last=False)
        return table

    def _export(self, tensor: torch.Tensor) -> Any:
        if tensor.device.type != "cuda" or tensor.numel() == 0 or not tensor.is_contiguous():
            return None
        try:
            size = tensor.numel() * tensor.element_size()
            return _windlass.Exported(self._gpu, tensor.data_ptr(), size)
        except WindlassUnsupported as e:
            if not self._told:
                self._told = True
                log.info("parameters are copied into an arena before engines read them: %s", e)
            return None

    def finish(self) -> None:
        """Waits until no engine reads what was lent, and lets go of it."""
        for share in (self._old, self._share):
            if share is not None:
                for half in (0, 1):
                    share.wait(half, self._timeout)
        self._kept, self._settled = [[], []], []
        self._sync += 1

    def release(self) -> None:
        """Frees the memory; the next bucket makes it anew. Engines let go of theirs by their own ``release``."""
        self._tables.clear()
        for share in (self._old, self._share):
            if share is not None:
                share.close(self._timeout)
        self._old = self._share = None
        self._kept, self._settled = [[], []], []
        self._ledger.forget()

    def close(self) -> None:
        """Frees everything."""
        self.release()


class _Share:
    """What one process exports: memory, signals, turns, and the server that gives them out."""

    def __init__(self, gpu: Any, folder: Path, half: int) -> None:
        self.half = half
        self._gpu = gpu
        self._memory = _windlass.SharedMemory(gpu, 2 * half) if half else None
        self._base = self._memory.address if self._memory is not None else 0
        self.ready = [_windlass.Signal(gpu), _windlass.Signal(gpu)]
        self._page = os.memfd_create("windlass-turns", os.MFD_CLOEXEC)
        os.ftruncate(self._page, mmap.PAGESIZE)
        self._turns = mmap.mmap(self._page, mmap.PAGESIZE)
        #: By their numbers, which begin with 1.
        self._allocations: list[Any] = [None]
        self._numbers: dict[tuple[int, int], int] = {}
        self._known: dict[Any, int] = {}
        #: Tables by what they say and by their numbers, the ones used last at the end.
        self._tables: OrderedDict[Rows, int] = OrderedDict()
        self._rows: dict[int, Rows] = {}
        self._made = 0
        try:
            self._server = HandleServer(folder, self._answer, self._left)
        except BaseException:
            os.close(self._page)
            raise
        self.path = self._server.path

    def place(self, half: int) -> tuple[int, int]:
        """Address and bytes of a half."""
        return self._base + half * self.half, self.half

    def set_turn(self, half: int, turn: int) -> None:
        struct.pack_into("<Q", self._turns, 8 * half, turn)

    def wait(self, half: int, timeout: float) -> None:
        """Until every engine is done with the half."""
        with self._server.sessions() as sessions:
            for session, descriptor in sessions:
                done = session.kept.get("done")
                if done is None:
                    continue
                try:
                    done[half].wait(descriptor, timeout)
                except (WindlassPeerLost, WindlassInvalid):
                    # It is gone, and its copies with it.
                    log.info("process %d, which read from %s, is gone", session.pid, self.path)
                except WindlassTimeout as e:
                    raise WindlassTimeout(
                        f"process {session.pid} still reads half {half} of {self.path} after {timeout:.0f} s"
                    ) from e

    def allocation(self, exported: Any) -> int:
        """The number of an allocation, the same for as long as it is there. The caller knows that it is there now."""
        number = self._known.get(exported)
        if number is not None:
            return number
        key = (exported.base, exported.size)
        number = self._numbers.get(key)
        if number is None or not self._allocations[number].is_there():
            if number is not None:
                self._allocations[number] = None
                self._known = {held: n for held, n in self._known.items() if n != number}
            number = self._numbers[key] = len(self._allocations)
            self._allocations.append(exported)
        self._known[exported] = number
        return number

    def table(self, rows: Rows) -> int:
        """The number of a table, the same for the same rows."""
        number = self._tables.get(rows)
        if number is not None:
            self._tables.move_to_end(rows)
            return number
        self._made += 1
        self._tables[rows] = self._made
        self._rows[self._made] = rows
        if len(self._tables) > TABLES:
            _, old = self._tables.popitem(last=False)
            self._rows.pop(old, None)
        return self._made

    def _answer(self, session: HandleSession, words: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        if "done" in words:
            return self._introduce(session, words)
        if "table" in words:
            asked = words["table"]
            rows = self._rows.get(asked) if isinstance(asked, int) else None
            if rows is None:
                raise WindlassStale(f"there is no table {asked!r} any more", "sync again")
            return {}, [table_file(rows)]
        number = words.get("allocation")
        if not isinstance(number, int) or not 0 < number < len(self._allocations):
            raise WindlassInvalid(f"there is no allocation {number!r}")
        exported = self._allocations[number]
        if exported is None or not exported.is_there():
            raise WindlassStale(f"allocation {number} was freed", "sync again")
        if exported.handle is not None:
            return {"handle": exported.handle.hex()}, []
        return {"granules": exported.granules}, exported.descriptors()

    def _introduce(self, session: HandleSession, words: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        if words.get("gpu") != self._gpu.uuid:
            raise WindlassInvalid(
                f"this memory is on {self._gpu.uuid}, and the engine on {words.get('gpu')!r}"
            )
        try:
            handles = [bytes.fromhex(handle) for handle in words["done"]]
        except (TypeError, ValueError) as e:
            raise WindlassInvalid(f"signals of an engine: {e}") from e
        if len(handles) != 2:
            raise WindlassInvalid(f"an engine has {len(handles)} signals, expected 2")
        session.kept["done"] = [_windlass.Signal(self._gpu, handle) for handle in handles]
        answer = {
            "memory": self._memory.handle.hex() if self._memory is not None else None,
            "half": self.half,
            "ready": [signal.handle.hex() for signal in self.ready],
            "spaces": namespaces(),
        }
        return answer, [os.dup(self._page)]

    def _left(self, session: HandleSession) -> None:
        for signal in session.kept.pop("done", ()):
            signal.close()

    def close(self, timeout: float) -> None:
        """Ends all sessions once no process reads, and frees the memory."""
        try:
            for half in (0, 1):
                self.wait(half, timeout)
        finally:
            self._server.close()
            for signal in self.ready:
                signal.close()
            if self._memory is not None:
                self._memory.close()
            os.close(self._page)
            self._allocations.clear()
            self._known.clear()


@dataclass(frozen=True)
class _Place:
    """What a handle says."""

    arena: str
    half: int
    turn: int
    sync: int
    table: int


@dataclass
class _Allocation:
    """Memory of the trainer that is open here."""

    opened: Any
    address: int
    bytes: int
    #: The sync that used it last.
    sync: int = 0


@dataclass
class _Known:
    """A table, and where its tensors are by each half."""

    table: Table
    addresses: dict[int, list[int]] = field(default_factory=dict)


@dataclass
class _Host:
    """A trainer's exports, as this engine has them open."""

    client: HandleClient
    memory: _Allocation | None
    ready: list[Any]
    done: list[Any]
    turns: mmap.mmap
    half: int
    allocations: dict[int, _Allocation] = field(default_factory=dict)
    tables: OrderedDict[int, _Known] = field(default_factory=OrderedDict)
    #: The stream of the last signal of each half.
    streams: list[int | None] = field(default_factory=lambda: [None, None])
    #: The turn of each half whose signal was passed.
    passed: list[int] = field(default_factory=lambda: [-1, -1])

    def close(self) -> None:
        # Own copies end before the memory goes; the trainer hears of it by the end of the connection.
        for signal in self.done:
            with contextlib.suppress(WindlassTimeout):
                signal.wait(None, 60.0)
        for allocation in (*self.allocations.values(), *([self.memory] if self.memory else [])):
            allocation.opened.close()
        self.client.close()
        for signal in (*self.ready, *self.done):
            signal.close()


@lru_cache(maxsize=1024)
def _parse(text: bytes) -> _Place:
    """Handles to one allocation say the same, parameter after parameter."""
    try:
        told = json.loads(text)
        place = _Place(
            str(told["arena"]), int(told["half"]), int(told["turn"]), int(told["sync"]), int(told["table"])
        )
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise WindlassInvalid(f"a handle says nothing of an arena: {e}") from e
    if place.half not in (0, 1):
        raise WindlassInvalid(f"a handle names half {place.half} of an arena, which has two")
    return place


class DeviceOpener(Opener):
    """Opens memory that a :class:`DeviceArena` of another process on this device exports."""

    def __init__(self, ordinal: int, folder: Path = WHERE, timeout: float = 120.0) -> None:
        self._gpu = _windlass.Gpu.open(ordinal)
        self.device = self._gpu.uuid
        self._folder, self._timeout = folder, timeout
        self._host: _Host | None = None

    def addresses(self, handle: IpcHandle, begins: list[int], sizes: list[int]) -> list[int]:
        """Where the tensors of a request are, once the trainer's GPU has filled what it gathered. ``begins`` and ``sizes``
        are those of its layout."""
        place = self._read(handle)
        known = self._ready(place)
        if (begins, sizes) != (known.table.begins, known.table.sizes):
            raise WindlassInvalid(f"a request has another layout than table {place.table} of {place.arena}")
        return known.addresses[place.half]

    def _ready(self, place: _Place) -> _Known:
        """The table of a handle, with everything open that it needs, and passed."""
        host = self._host
        # Once for a request: its handles are of the same turn.
        if host is None or host.client.path != place.arena or host.passed[place.half] != place.turn:
            host = self._met(place.arena)
        self._check_turn(host, place)
        known = host.tables.get(place.table)
        if known is None:
            known = host.tables[place.table] = _Known(self._fetch_table(host.client, place.table))
            if len(host.tables) > TABLES:
                host.tables.popitem(last=False)
        if host.passed[place.half] != place.turn or place.half not in known.addresses:
            host.tables.move_to_end(place.table)
            self._open_all(host, place, known)
            host.ready[place.half].wait(host.client.fileno(), self._timeout)
            host.passed[place.half] = place.turn
        return known

    def _open_all(self, host: _Host, place: _Place, known: _Known) -> None:
        """Opens the allocations of a table, where they are not open."""
        table, bases = known.table, {}
        for number in table.allocations:
            memory = host.allocations.get(number) or self._allocation(host, place, number)
            memory.sync = place.sync
            bases[number] = memory.address
        if place.half in known.addresses:
            return
        room = [(number, host.allocations[number].bytes) for number in table.allocations]
        for number, has in [*room, (0, host.half)]:
            if table.reach(number) > has:
                what = f"allocation {number}" if number else "a half"
                raise WindlassInvalid(
                    f"a table reaches {table.reach(number)} bytes into {what}, which has {has}"
                )
        base = 0 if host.memory is None else host.memory.address + place.half * host.half
        known.addresses[place.half] = table.addresses(base, bases)

    def open(self, handle: IpcHandle) -> torch.Tensor:
        """The bytes of the tensor that the handle is to."""
        place = self._read(handle)
        known = self._ready(place)
        if handle.size == 0:
            return view(self._gpu.ordinal, 0, 0, self._host)
        row = known.table.row(handle.offset, handle.size)
        return view(self._gpu.ordinal, known.addresses[place.half][row], handle.size, self._host)

    def parts(self, handle: IpcHandle, layout: Sequence[PackedTensor]) -> list[torch.Tensor]:
        """The bytes of each tensor."""
        sizes = [record.bytes for record in layout]
        found = self.addresses(handle, [record.offset for record in layout], sizes)
        return [view(self._gpu.ordinal, at, size, self._host) for at, size in zip(found, sizes)]

    def done(self, handle: IpcHandle) -> None:
        """Tells the trainer that what torch's stream holds now is all that reads the handle's half."""
        import torch

        place = self._read(handle)
        if self._host is not None and self._host.client.path == place.arena:
            host, stream = self._host, int(torch.cuda.current_stream(self._gpu.ordinal).cuda_stream)
            if host.streams[place.half] not in (None, stream):
                # The trainer may still have to wait for what the signal stood for, and sees the last one only.
                host.done[place.half].wait(None, self._timeout)
            host.streams[place.half] = stream
            host.done[place.half].record(stream)

    def check(self, handle: IpcHandle) -> None:
        """Whether the half still has the handle's turn."""
        place = self._read(handle)
        if self._host is None or self._host.client.path != place.arena:
            raise WindlassStale(f"{place.arena} was closed meanwhile")
        self._check_turn(self._host, place)

    def _check_turn(self, host: _Host, place: _Place) -> None:
        (turn,) = struct.unpack_from("<Q", host.turns, 8 * place.half)
        if turn != place.turn:
            raise WindlassStale(
                f"half {place.half} of {place.arena} holds turn {turn}, and turn {place.turn} was announced",
                "the trainer wrote it again before this engine had answered; sync again",
            )

    def _read(self, handle: IpcHandle) -> _Place:
        """What the handle says, checked: it comes from outside."""
        if handle.kind != "vmm_fd":
            raise WindlassUnsupported(
                f"a handle of kind {handle.kind!r} says nothing of when its memory is ready, or whose it is",
                "both sides must use windlass",
            )
        place = _parse(handle.handle)
        if (
            not place.arena.startswith(f"{self._folder}/{PREFIX}")
            or "/" in place.arena[len(str(self._folder)) + 1 :]
        ):
            raise WindlassInvalid(
                f"a handle names {place.arena!r}, which is no handle server in {self._folder}"
            )
        return place

    def _met(self, path: str) -> _Host:
        if self._host is not None and self._host.client.path != path:
            self.close()
        if self._host is None:
            self._host = self._meet(path)
        if not self._host.client.is_there():
            self.close()
            raise WindlassPeerLost(
                f"no process answers at {path}: the trainer that exported it is gone",
                "sync again when it is back",
            )
        return self._host

    def _meet(self, path: str) -> _Host:
        client = HandleClient(path)
        signals: list[Any] = []
        try:
            done = [_windlass.Signal(self._gpu), _windlass.Signal(self._gpu)]
            signals += done
            words = {"gpu": self.device, "done": [signal.handle.hex() for signal in done]}
            answer, descriptors = client.ask(words)
            try:
                turns = mmap.mmap(descriptors[0], mmap.PAGESIZE, prot=mmap.PROT_READ)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            with self._explained(answer):
                ready = [_windlass.Signal(self._gpu, bytes.fromhex(handle)) for handle in answer["ready"]]
                signals += ready
                memory = None
                if answer["memory"] is not None:
                    memory = _allocation(_windlass.Opened.legacy(self._gpu, bytes.fromhex(answer["memory"])))
            half = int(answer["half"])
            if half < 0 or 2 * half > (0 if memory is None else memory.bytes):
                raise WindlassInvalid(f"{path} says that a half has {half} bytes, and the arena has less")
            return _Host(client, memory, ready, done, turns, half)
        except BaseException as e:
            for signal in signals:
                signal.close()
            client.close()
            if isinstance(e, (KeyError, IndexError, TypeError, ValueError)) and not isinstance(
                e, WindlassInvalid
            ):
                raise WindlassInvalid(f"{path} answered what makes no sense: {e!r}") from e
            raise

    @contextlib.contextmanager
    def _explained(self, answer: dict[str, Any]) -> Iterator[None]:
        """Names the namespaces that differ where something cannot be opened."""
        try:
            yield
        except WindlassNotFound as e:
            mine, theirs = namespaces(), answer.get("spaces") or {}
            apart = [kind.upper() for kind in mine if kind in theirs and theirs[kind] != mine[kind]]
            if not apart:
                raise
            raise WindlassUnsupported(
                f"trainer and engine have different {' and '.join(apart)} namespaces, and CUDA IPC needs shared ones",
                "start the containers with --ipc and --pid of each other (or host), or use the strategy tcp",
            ) from e

    def _allocation(self, host: _Host, place: _Place, number: int) -> _Allocation:
        for old in [n for n, a in host.allocations.items() if a.sync < place.sync - 1]:
            for known in host.tables.values():
                if old in known.table.allocations:
                    known.addresses.clear()
            host.allocations.pop(old).opened.close()
        found = host.allocations[number] = self._fetch(host.client, number)
        # Needed now: the next one that is fetched for the same table leaves it open.
        found.sync = place.sync
        return found

    def _fetch_table(self, client: HandleClient, number: int) -> Table:
        _, descriptors = client.ask({"table": number})
        try:
            if len(descriptors) != 1:
                raise WindlassInvalid(
                    f"{client.path} gave {len(descriptors)} files for a table, expected one"
                )
            return Table.read(descriptors[0])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _fetch(self, client: HandleClient, number: int) -> _Allocation:
        answer, descriptors = client.ask({"allocation": number})
        try:
            if "handle" in answer:
                return _allocation(_windlass.Opened.legacy(self._gpu, bytes.fromhex(answer["handle"])))
            sizes = [int(size) for size in answer["granules"]]
            return _allocation(_windlass.Opened.granules(self._gpu, descriptors, sizes))
        except (KeyError, TypeError) as e:
            raise WindlassInvalid(f"{client.path} answered what makes no sense: {e!r}") from e
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def release(self) -> None:
        """Closes what is open; the next request opens it again."""
        self.close()

    def close(self) -> None:
        """Lets go of everything."""
        if self._host is not None:
            host, self._host = self._host, None
            host.close()


def _allocation(opened: Any) -> _Allocation:
    return _Allocation(opened, opened.address, opened.size)
