"""Words between ranks, before the first version.

Ranks must agree once on who writes what. They do so by telling each other a few bytes of JSON, over the trainer's own
process group where there is one. Nothing is pickled, and every wait has a deadline.
"""

from __future__ import annotations

import json
import zlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from windlass.errors import WindlassCorrupt, WindlassInvalid, WindlassPeerLost

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Alone", "Exchange", "OverGroup", "exchange_for"]

#: The most that one rank may tell the others.
MAX_MESSAGE = 1 << 30


class Exchange(Protocol):
    """How ranks tell each other something."""

    def all(self, mine: Any, timeout: float) -> list[Any]:
        """What each rank said, in the order of ranks. Every rank calls it."""
        ...


class Alone:
    """For one rank, and for several that share no process group: all are taken to say the same."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def all(self, mine: Any, timeout: float) -> list[Any]:
        """The same from each."""
        return [mine] * self._ranks


class OverGroup:
    """Over a process group of torch."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def all(self, mine: Any, timeout: float) -> list[Any]:
        """What each rank of the group said."""
        import torch
        import torch.distributed as dist

        backend = dist.get_backend(self._group)
        device = (
            torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        )
        data = zlib.compress(json.dumps(mine).encode(), 1)
        size = dist.get_world_size(self._group)

        def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
            parts = [torch.empty_like(tensor) for _ in range(size)]
            work = dist.all_gather(parts, tensor, group=self._group, async_op=True)
            try:
                # Gloo raises when the time is over or a peer is gone.
                work.wait(timedelta(seconds=timeout))
            except RuntimeError as e:
                raise WindlassPeerLost(
                    f"ranks could not agree on who writes what within {timeout:g} s: {e}",
                    "see whether every rank calls offload() and is alive",
                ) from e
            return parts

        lengths = [int(n) for n in gather(torch.tensor([len(data)], dtype=torch.int64, device=device))]
        longest = max(lengths)
        if not 0 < longest <= MAX_MESSAGE:
            raise WindlassCorrupt(f"a rank announced {longest} bytes")
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = gather(padded.to(device))
        out = []
        for rank, (part, length) in enumerate(zip(parts, lengths, strict=True)):
            try:
                text = zlib.decompressobj().decompress(bytes(part[:length].cpu().tolist()), MAX_MESSAGE)
                out.append(json.loads(text))
            except (zlib.error, ValueError) as e:
                raise WindlassCorrupt(f"what rank {rank} said cannot be read: {e}") from e
        return out


def exchange_for(rank: int, world_size: int, group: dist.ProcessGroup | None) -> Exchange:
    """The way that the ranks of this trainer have."""
    if world_size == 1:
        return Alone(1)
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return Alone(world_size)
    if dist.get_world_size(group) != world_size or dist.get_rank(group) != rank:
        where = "the given process group" if group is not None else "the default process group"
        raise WindlassInvalid(
            f"offload() was told rank {rank} of {world_size}, but {where} says rank {dist.get_rank(group)} of "
            f"{dist.get_world_size(group)}; pass WeightManager(group=...) the group of the ranks that publish"
        )
    return OverGroup(group)
