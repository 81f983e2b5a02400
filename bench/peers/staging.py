"""Bytes of a device's tensors by way of page-locked host memory, for transports that send from the host.

Owns: buckets, the two rings, and copies that go on while other buckets are on their way. Works on tensors of the host, too. Must not:
know a transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

Bucket = list[tuple[torch.Tensor, int]]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def buckets(tensors: Iterable[torch.Tensor], size: int) -> list[Bucket]:
    """Pieces of the tensors with their places in buckets of at most so many bytes. Tensors of the same shapes give the same ones."""
    found: list[Bucket] = [[]]
    filled = 0
    for tensor in tensors:
        for piece in bytes_of(tensor).split(size):
            if filled + piece.numel() > size:
                found.append([])
                filled = 0
            found[-1].append((piece, filled))
            filled += piece.numel()
    return [bucket for bucket in found if bucket]


def length(bucket: Bucket) -> int:
    piece, at = bucket[-1]
    return at + piece.numel()


def pinned(size: int, device: torch.device) -> torch.Tensor:
    """Page-locked memory. It is memory of the process, registered, so that it is counted as such."""
    host = torch.zeros(size, dtype=torch.uint8)
    if device.type == "cuda":
        cudart: Any = torch.cuda.cudart()
        if int(cudart.cudaHostRegister(host.data_ptr(), size, 0)) != 0:
            return host.pin_memory()
    return host


class Ring:
    """Some buckets in host memory, and where the device has got to with each."""

    def __init__(self, device: torch.device, size: int, count: int) -> None:
        self.size, self.count = size, count
        self._hosts = [pinned(size, device) for _ in range(count)]
        untyped: Any = torch.cuda.Event
        self._done = [untyped() if device.type == "cuda" else None for _ in range(count)]

    def host(self, number: int, bucket: Bucket) -> torch.Tensor:
        return self._hosts[number % self.count][: length(bucket)]

    def mark(self, number: int) -> None:
        """After copies of a bucket were started."""
        if (event := self._done[number % self.count]) is not None:
            event.record()

    def wait(self, number: int) -> None:
        """Until they are done."""
        if (event := self._done[number % self.count]) is not None:
            event.synchronize()


class Outgoing(Ring):
    """From the device. Copies are ahead of what is handed out."""

    def each(self, all_of_them: Sequence[Bucket], free: Callable[[int], object]) -> Iterator[torch.Tensor]:
        """Each bucket in host memory. ``free(number)`` returns when that bucket's memory may be written again."""
        started, ahead = 0, max(1, self.count // 2)
        for number, bucket in enumerate(all_of_them):
            while started < min(len(all_of_them), number + ahead):
                if started >= self.count:
                    free(started - self.count)
                host = self.host(started, all_of_them[started])
                for piece, at in all_of_them[started]:
                    host[at : at + piece.numel()].copy_(piece, non_blocking=True)
                self.mark(started)
                started += 1
            self.wait(number)
            yield self.host(number, bucket)


class Incoming(Ring):
    """To the device."""

    def room(self, number: int, bucket: Bucket) -> torch.Tensor:
        """Host memory for a bucket; what was there before is on the device."""
        if number >= self.count:
            self.wait(number)
        return self.host(number, bucket)

    def put(self, number: int, bucket: Bucket) -> None:
        """Starts to copy what is there."""
        host = self.host(number, bucket)
        for piece, at in bucket:
            piece.copy_(host[at : at + piece.numel()], non_blocking=True)
        self.mark(number)
