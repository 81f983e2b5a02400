"""Memory that one process exports and others on the same host open by a handle.

Owns: the small interface behind the IPC strategies, and its implementation over shared memory of the host. Must not:
know of requests. Device memory is behind the same interface (:mod:`windlass.transfer.ipc.device`).

An arena of the host is one file in ``/dev/shm`` with two halves, kept for the life of a sender: while engines read one half, the
next bucket is packed into the other. Its layout::

    0      8 bytes   "WNDLARN1"
    8      8 bytes   turn of the first half, little endian
    16     8 bytes   turn of the second half
    4096   first half, then second half, each rounded up to pages

A **turn** counts how often a half was filled. It is raised before the half is written again, and stands in every
handle to it, so a reader that comes late, or is too slow, finds another number than it was given and says so instead
of taking bytes of two buckets for one.

A **handle** is the JSON text ``{"arena": path, "half": 0, "turn": 3}``, of kind ``vmm_fd``: it says where the
descriptor is to be had. Nothing in it can be executed.

The **owner** holds an exclusive ``flock`` on the file. It ends with the process, however that ends, so whoever opens
the file can tell whether somebody still owns it: a reader refuses an arena without an owner, and the next owner
removes those that a killed one left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import mmap
import os
import stat
import struct
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from windlass.errors import (
    WindlassDenied,
    WindlassExhausted,
    WindlassInvalid,
    WindlassNotFound,
    WindlassPeerLost,
    WindlassStale,
    WindlassUnsupported,
)
from windlass.transfer.ipc.lending import Look
from windlass.transfer.request import IpcHandle

if TYPE_CHECKING:
    import torch

    from windlass.extract.chunk import WeightChunk
    from windlass.transfer.request import PackedTensor

__all__ = ["Arena", "HostArena", "HostOpener", "Opener", "arena_for", "host_device", "opener_for"]

log = logging.getLogger("windlass")

MAGIC = b"WNDLARN1"
HEAD = 4096
PREFIX = "windlass-arena-"
WHERE = Path("/dev/shm")


class Arena(ABC):
    """Two halves of exported memory, owned by a sender."""

    #: Which device the memory is on: the key of its handles.
    device: str

    def look(self, chunk: WeightChunk, *, all_: bool) -> Look:
        """What of a chunk can be lent where it is; with ``all_`` also what will lie elsewhere in the next sync. Each chunk
        is looked at once, in its order, and stays as it is until it was put out."""
        return Look()

    @abstractmethod
    def whole(self, chunk: WeightChunk, layout: Sequence[PackedTensor], total: int, look: Look) -> IpcHandle:
        """Puts a chunk of ``total`` bytes out, in the half whose turn it is or where it lies; a handle to all of it, by
        its layout.

        The other half stays as it is. May move the arena if it is too small; handles to the other half stay valid
        until the next call.
        """

    @abstractmethod
    def lend(
        self, chunk: WeightChunk, layout: Sequence[PackedTensor], total: int, look: Look
    ) -> list[IpcHandle]:
        """The same, with a handle for each tensor of a chunk."""

    def follow(self) -> None:
        """Called where chunks are made, before one is packed elsewhere."""

    def finish(self) -> None:
        """Waits until nobody reads any more. Called at the end of a sync, when all have answered."""

    def release(self) -> None:
        """Gives the memory back until the next chunk: for engines and trainers that sleep in turn."""
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Gives the memory back. Those who have it open keep what they have mapped."""


class Opener(ABC):
    """Opens handles to memory of one device. Keeps what it has opened, for the next handle to the same memory."""

    device: str

    @abstractmethod
    def open(self, handle: IpcHandle) -> torch.Tensor:
        """The exported bytes as a flat tensor, not copied. Only valid until the request is answered."""

    def parts(self, handle: IpcHandle, layout: Sequence[PackedTensor]) -> list[torch.Tensor]:
        """The bytes of each tensor of a layout that the handle is to."""
        data = self.open(handle)
        return [data[record.offset : record.offset + record.bytes] for record in layout]

    def done(self, handle: IpcHandle) -> None:
        """Called when everything that reads the handle's half has been started."""

    @abstractmethod
    def check(self, handle: IpcHandle) -> None:
        """Raises if the memory was written again since the handle was made: what was read may be of two buckets."""

    def release(self) -> None:
        """Lets go of everything until the next handle."""
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Lets go of everything."""


def host_device() -> str:
    """The key of this host's memory among handles: the kernel's boot id, which every process on the host sees.

    >>> host_device() == host_device() and host_device().startswith("GPU-")
    True
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"GPU-{uuid.UUID(boot)}"
    except (OSError, ValueError):
        return f"GPU-{uuid.UUID(int=uuid.getnode())}"


def arena_for(device: str, timeout: float) -> Arena:
    """The arena of this process: of its GPU, or of the host. ``device`` is auto, cpu or cuda."""
    ordinal = _gpu(device)
    if ordinal is None:
        return HostArena()
    from windlass.transfer.ipc.device import DeviceArena

    return DeviceArena(ordinal, timeout=timeout)


def opener_for(device: str, timeout: float) -> Opener:
    """The opener of this process, as in :func:`arena_for`."""
    ordinal = _gpu(device)
    if ordinal is None:
        return HostOpener()
    from windlass.transfer.ipc.device import DeviceOpener

    return DeviceOpener(ordinal, timeout=timeout)


def _gpu(device: str) -> int | None:
    """The number of this process's GPU, unless the host's memory is meant."""
    import torch

    if device == "cpu":
        return None
    if device == "auto" and not torch.cuda.is_available():
        log.info("torch sees no CUDA device: weights go through shared memory of the host")
        return None
    if not torch.cuda.is_available():
        raise WindlassUnsupported(
            "device is 'cuda', and torch sees no CUDA device", "install a driver, or leave device at 'auto'"
        )
    return int(torch.cuda.current_device())


def _require_host(tensor: torch.Tensor, name: str) -> None:
    if tensor.device.type != "cpu":
        raise WindlassUnsupported(
            f"{name!r} is on {tensor.device}, and this arena is of the host's memory",
            "leave the setting device at 'auto', or use the strategy broadcast or tcp",
        )


class HostArena(Arena):
    """An arena in shared memory of the host."""

    def __init__(self, folder: Path = WHERE) -> None:
        self.device = host_device()
        self._folder = folder
        self._turns = [0, 0]
        self._next = 0
        self._file: _File | None = None
        #: The file before, while a half of it may still be read.
        self._old: _File | None = None
        _sweep(folder)

    @property
    def path(self) -> Path | None:
        """The arena's file, once there is one."""
        return None if self._file is None else self._file.path

    def whole(self, chunk: WeightChunk, layout: Sequence[PackedTensor], total: int, look: Look) -> IpcHandle:
        """Copies the chunk. See :meth:`Arena.whole`."""
        return self.handle(self._pack(chunk, layout, total), total)

    def lend(
        self, chunk: WeightChunk, layout: Sequence[PackedTensor], total: int, look: Look
    ) -> list[IpcHandle]:
        """Copies the chunk: a tensor of a process is its own. See :meth:`Arena.lend`."""
        half = self._pack(chunk, layout, total)
        return [self.handle(half, record.bytes, record.offset) for record in layout]

    def _pack(self, chunk: WeightChunk, layout: Sequence[PackedTensor], total: int) -> int:
        for name, tensor in chunk:
            _require_host(tensor, name)
        memory, half = self.fill(total)
        for tensor, record in zip(chunk.tensors, layout, strict=True):
            if record.bytes:
                place = memory[record.offset : record.offset + record.bytes]
                place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        return half

    def fill(self, size: int) -> tuple[torch.Tensor, int]:
        """At least ``size`` bytes of the half whose turn it is, as a flat tensor of bytes, and the half's number."""
        if self._old is not None:
            self._old.close()
            self._old = None
        half = self._next
        self._next = 1 - half
        if self._file is None or self._file.half < size:
            # Twice what is needed now, so that it does not grow again with the next bucket.
            wanted = max(size, 2 * self._file.half if self._file is not None else 0)
            self._old, self._file = self._file, _File(self._folder, wanted)
        self._turns[half] += 1
        self._file.set_turn(half, self._turns[half])
        return self._file.view(half), half

    def handle(self, half: int, size: int, offset: int = 0) -> IpcHandle:
        """A handle to what the half holds now."""
        if self._file is None:
            raise WindlassInvalid("nothing was filled yet")
        where = {"arena": str(self._file.path), "half": half, "turn": self._turns[half]}
        return IpcHandle("vmm_fd", json.dumps(where).encode(), size, HEAD + half * self._file.half + offset)

    def close(self) -> None:
        """Removes the files."""
        for file in (self._old, self._file):
            if file is not None:
                file.close()
        self._old = self._file = None


class _File:
    """One file of an arena, reserved, locked and mapped by its owner."""

    def __init__(self, folder: Path, half: int) -> None:
        self.half = -(-max(half, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.path = folder / f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:16]}"
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = HEAD + 2 * self.half
            try:
                # Reserved now: memory that is missing later would be SIGBUS and not an error.
                os.posix_fallocate(self._descriptor, 0, size)
            except OSError as e:
                raise WindlassExhausted(
                    f"{folder} has no room for an arena of {size} bytes: {e.strerror}",
                    "make it larger (docker: --shm-size), or lower weight_transfer_threshold_cuda_ipc_GB",
                ) from e
            self._map = mmap.mmap(self._descriptor, size)
            self._map[: len(MAGIC)] = MAGIC
        except BaseException:
            os.close(self._descriptor)
            self.path.unlink(missing_ok=True)
            raise

    def set_turn(self, half: int, turn: int) -> None:
        struct.pack_into("<Q", self._map, 8 + 8 * half, turn)

    def view(self, half: int) -> torch.Tensor:
        import torch

        return torch.frombuffer(self._map, dtype=torch.uint8, offset=HEAD + half * self.half, count=self.half)

    def close(self) -> None:
        # Unlinked before it is unlocked: whoever finds it unlocked may take it for a dead owner's.
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


class _Place(NamedTuple):
    """What a handle says."""

    arena: str
    half: int
    turn: int


class HostOpener(Opener):
    """Opens arenas in shared memory of the host."""

    def __init__(self, folder: Path = WHERE) -> None:
        self.device = host_device()
        self._folder = folder
        self._path: str | None = None
        self._map: mmap.mmap | None = None
        self._descriptor = -1

    def open(self, handle: IpcHandle) -> torch.Tensor:
        """The bytes of the handle."""
        import torch

        mapped = self._mapped(self._read(handle).arena)
        self.check(handle)
        if handle.offset < HEAD or handle.offset + handle.size > len(mapped):
            raise WindlassInvalid(
                f"a handle covers {handle.size} bytes from {handle.offset}, and the arena has {len(mapped)}"
            )
        if handle.size == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mapped, dtype=torch.uint8, offset=handle.offset, count=handle.size)

    def check(self, handle: IpcHandle) -> None:
        """Whether the half still has the handle's turn, and its owner lives."""
        place = self._read(handle)
        (turn,) = struct.unpack_from("<Q", self._mapped(place.arena), 8 + 8 * place.half)
        if turn != place.turn:
            raise WindlassStale(
                f"half {place.half} of {place.arena} holds turn {turn}, and turn {place.turn} was announced",
                "the trainer wrote it again before this engine had answered; sync again",
            )

    def _read(self, handle: IpcHandle) -> _Place:
        """What the handle says, checked: it comes from outside."""
        try:
            told = json.loads(handle.handle)
            place = _Place(str(told["arena"]), int(told["half"]), int(told["turn"]))
        except (ValueError, KeyError, TypeError) as e:
            raise WindlassInvalid(f"a handle of kind {handle.kind} says nothing of an arena: {e}") from e
        path = Path(place.arena)
        if path.parent != self._folder or not path.name.startswith(PREFIX) or place.half not in (0, 1):
            raise WindlassInvalid(f"a handle names {place.arena!r}, which is no arena in {self._folder}")
        return place

    def _mapped(self, path: str) -> mmap.mmap:
        if self._map is None or self._path != path:
            self.close()
            self._descriptor = _open(path)
            # A private mapping: torch wants memory that can be written, and what a loader writes must not get out.
            mapped = mmap.mmap(
                self._descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
            if len(mapped) < HEAD or mapped[: len(MAGIC)] != MAGIC:
                raise WindlassInvalid(f"{path} is no arena")
            self._path, self._map = path, mapped
        if not _owned(self._descriptor):
            raise WindlassPeerLost(
                f"nobody owns {path} any more: the trainer that exported it is gone",
                "sync again when it is back",
            )
        return self._map

    def close(self) -> None:
        """Lets go of the arena; what was handed out stays mapped until it is let go of as well."""
        self._path, self._map = None, None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _open(path: str) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as e:
        raise WindlassNotFound(
            f"there is no arena {path}: the trainer has closed it, or has another /dev/shm",
            "engines in containers need the trainer's /dev/shm (docker: --ipc)",
        ) from e
    except OSError as e:
        raise WindlassInvalid(f"the arena {path} cannot be opened: {e.strerror}") from e
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        os.close(descriptor)
        raise WindlassInvalid(f"{path} is no file")
    if about.st_uid not in (os.geteuid(), 0):
        os.close(descriptor)
        raise WindlassDenied(
            f"{path} is of user {about.st_uid}, and this is user {os.geteuid()}",
            "run trainers and engines as the same user",
        )
    return descriptor


def _owned(descriptor: int) -> bool:
    """Whether somebody else holds the owner's lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _sweep(folder: Path) -> None:
    """Removes arenas that nobody owns, of senders that were killed."""
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, WindlassDenied, WindlassInvalid, WindlassNotFound):
            descriptor = _open(str(path))
            try:
                # An arena that is being made is not locked yet, but it is empty.
                if os.fstat(descriptor).st_size > 0 and not _owned(descriptor):
                    path.unlink()
            finally:
                os.close(descriptor)
