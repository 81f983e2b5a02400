"""What weights on a GPU need: waiting for it, its memory, and steps and digests that are computed there.

Owns: :class:`Device`, :func:`drift` and :func:`digest`. Everything works on tensors of the host, too, so that it can be tested without
a GPU (``--device cpu:0``). Must not: know a peer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

#: Elements that a step draws from at once, and words that are hashed at once: what is computed with takes about 100 MB.
DRAWN_AT_ONCE, HASHED_AT_ONCE = 1 << 26, 1 << 22
#: Models of up to so many bytes are copied to the host and compared by SHA-256. Larger ones are hashed on the device.
SHA_BYTES = 4 << 30
#: Keys and odd factors of :func:`fold`, as signed 64-bit numbers (those of SplitMix64).
KEYS = (0x243F6A8885A308D3, 0x13198A2E03707344)
STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


class Device:
    """The device of a process's weights. On the host there is nothing to wait for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._cuda = torch.device(name).type == "cuda"

    def use(self) -> None:
        """Makes it the current one of this process."""
        if self._cuda:
            torch.cuda.set_device(self.name)

    def wait(self) -> None:
        """Until nothing of this process is under way on it."""
        if self._cuda:
            torch.cuda.synchronize(self.name)

    def wait_stream(self) -> None:
        """Until the current stream has got to here: the next step on it would begin now."""
        if self._cuda:
            torch.cuda.current_stream(self.name).synchronize()

    def trim(self) -> None:
        """Gives back what torch keeps for later."""
        if self._cuda:
            self.wait()
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def used(self) -> int:
        """Bytes of its memory that are taken, by all processes."""
        if not self._cuda:
            return 0
        free, total = torch.cuda.mem_get_info(self.name)
        return total - free

    def free(self) -> int | None:
        """Bytes of its memory that can be had."""
        return torch.cuda.mem_get_info(self.name)[0] if self._cuda else None

    def about(self) -> str:
        """Its name, and what drives it."""
        if not self._cuda:
            return self.name
        return (
            f"{torch.cuda.get_device_name(self.name)}, torch {torch.__version__}, CUDA {torch.version.cuda}"
        )


def drift(tensors: Iterable[torch.Tensor], apart: int, small: float, random: torch.Generator) -> int:
    """A step, as ``Weights.step`` makes it, on the device of the tensors; how many elements it changed. The host is told once, at the
    end."""
    device, counts = random.device, []
    for tensor in tensors:
        for bits in tensor.view(-1).view(torch.int16).split(DRAWN_AT_ONCE):
            count = bits.numel() // apart
            # One of each few neighbours is drawn, and then changed or not.
            where = torch.arange(0, count * apart, apart, device=device)
            where += torch.randint(apart, (count,), generator=random, device=device)
            old = bits[where]
            size = ((old & 0x7FFF).to(torch.int32) << 16).view(torch.float32)
            moves = torch.rand(count, generator=random, device=device) * size < small
            kind = torch.rand(count, generator=random, device=device)
            places = torch.where(kind < 0.88, 1, torch.where(kind < 0.98, 4, 40)).to(torch.int16)
            down = torch.rand(count, generator=random, device=device) < 0.5
            # Not beyond zero.
            down &= (old & 0x7FFF) > 64
            bits[where] = old + torch.where(down, -places, places) * moves
            counts.append(moves.sum())
    return int(torch.stack(counts).sum())


def _mix(words: torch.Tensor, places: torch.Tensor, key: int) -> torch.Tensor:
    """Each word with its place, so that neither another word nor another order gives the same sum."""
    mixed = places * STRIDE
    mixed += key
    mixed ^= words
    for shift, factor in zip((30, 27), FACTORS):
        # Shifts of signed numbers repeat the sign, which the mask takes away.
        mixed ^= (mixed >> shift) & ((1 << (64 - shift)) - 1)
        mixed *= factor
    mixed ^= (mixed >> 31) & ((1 << 33) - 1)
    return mixed


def fold(pieces: Iterable[torch.Tensor]) -> torch.Tensor:
    """Two 64-bit sums over all 64-bit words of the pieces, one after the other. Every word is mixed with its place first."""
    sums, begin = None, 0
    for piece in pieces:
        words = piece.detach().contiguous().view(-1).view(torch.int64)
        for some in words.split(HASHED_AT_ONCE):
            places = torch.arange(begin, begin + some.numel(), device=some.device)
            found = torch.stack([_mix(some, places, key).sum() for key in KEYS])
            sums = found if sums is None else sums + found
            begin += some.numel()
    assert sums is not None
    return sums


def by_sha(size: int) -> bool:
    return size <= SHA_BYTES


def compared_by(size: int) -> str:
    """How a model of so many bytes on a GPU is compared."""
    if by_sha(size):
        return "SHA-256 of a copy on the host"
    return "two 64-bit sums over all words, each mixed with its place, computed on the device"


def digest(pieces: Mapping[str, Iterable[torch.Tensor]]) -> str:
    """Of tensors, each of which consists of pieces. By SHA-256 up to a size, and above it by :func:`fold`."""
    named = {name: list(pieces[name]) for name in sorted(pieces)}
    total = sum(piece.nbytes for some in named.values() for piece in some)
    whole = hashlib.sha256()

    def sha(some: list[torch.Tensor]) -> bytes:
        found = hashlib.sha256()
        for piece in some:
            found.update(piece.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy())
        return found.digest()

    if by_sha(total):
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
            found = list(pool.map(sha, named.values()))
    else:
        sums = torch.stack([fold(some) for some in named.values()]).cpu()
        found = [bytes(row.contiguous().view(torch.uint8).tolist()) for row in sums]
    for name, one in zip(named, found):
        whole.update(name.encode())
        whole.update(one)
    return whole.hexdigest()


def why_unusable(name: str) -> str | None:
    """Why there is no such device."""
    with contextlib.suppress(RuntimeError, ValueError):
        device = torch.device(name)
        if device.type == "cpu":
            return None
        if device.type == "cuda":
            if not torch.cuda.is_available():
                return f"torch {torch.__version__} finds no CUDA device"
            if (device.index or 0) < torch.cuda.device_count():
                return None
            return f"there is no {name}: torch sees {torch.cuda.device_count()}"
    return f"{name!r} is not a device: take cpu, cuda or cuda:N"
