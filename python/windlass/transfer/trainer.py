"""What the senders of all strategies share on the trainer's side.

Owns: who this training rank is, the one meeting of training ranks per chunk, and the walk over chunks. A sender exists
on every training rank: all of them iterate the extractor, rank 0 speaks to the engines. A failure of one rank is an
error on all of them at the next meeting, and not a hang.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from typing import TYPE_CHECKING, Any

from windlass.errors import WindlassError, WindlassPeerLost, WindlassTimeout
from windlass.exchange import Alone, Exchange, OverGroup

if TYPE_CHECKING:
    import torch.distributed as dist

    from windlass.extract.chunk import WeightChunk

__all__ = ["TrainerRanks", "each_chunk"]

#: What a rank that failed says at a meeting.
FAILED = 2


async def each_chunk(
    chunks: Iterable[WeightChunk] | AsyncIterable[WeightChunk],
) -> AsyncGenerator[WeightChunk, None]:
    """Chunks one by one, from an iterable of either kind; none is kept.

    >>> import asyncio
    >>> async def count(chunks):
    ...     return [chunk async for chunk in each_chunk(chunks)]
    >>> asyncio.run(count([1, 2]))
    [1, 2]
    """
    if isinstance(chunks, AsyncIterable):
        async for chunk in chunks:
            yield chunk
            del chunk
        return
    for chunk in chunks:
        yield chunk
        del chunk


class TrainerRanks:
    """The ranks of the trainer, from the default process group or the given one; one rank where there is none."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        import torch.distributed as dist

        self._group = group
        there = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if there else 0
        self.count = dist.get_world_size(group) if there else 1

    def tell(self, mine: object, timeout: float, what: str) -> list[Any]:
        """What each rank said, as plain data. Every rank calls it."""
        exchange: Exchange = Alone(1) if self.count == 1 else OverGroup(self._group)
        try:
            return exchange.all(mine, timeout)
        except (WindlassTimeout, WindlassPeerLost) as e:
            raise type(e)(f"training ranks could not {what}: {e}", e.advice) from e

    def meet(self, failure: BaseException | None, timeout: float, what: str) -> None:
        """Waits for all ranks, once. If any of them failed, it is an error on each: its own, or that another did.

        A failure is told once: one that comes out of a meeting is raised again without another one, because the
        others have left too.
        """
        if self.count == 1 or (failure is not None and getattr(failure, "_windlass_told", False)):
            if failure is not None:
                raise failure
            return
        try:
            self._meet(failure, timeout, what)
        except Exception as e:
            e._windlass_told = True  # type: ignore[attr-defined]
            raise

    def most(self, mine: int, failure: BaseException | None, timeout: float, what: str) -> int:
        """The largest of what the ranks say, each 0 or 1; a failure of any of them as in :meth:`meet`."""
        if self.count == 1:
            if failure is not None:
                raise failure
            return mine
        try:
            return self._meet(failure, timeout, what, mine)
        except Exception as e:
            e._windlass_told = True  # type: ignore[attr-defined]
            raise

    def _meet(self, failure: BaseException | None, timeout: float, what: str, mine: int = 0) -> int:
        try:
            most = self._largest(FAILED if failure is not None else mine, timeout, what)
        except WindlassError:
            if failure is not None:
                # It is why the others are lost, or does not need them to be told.
                raise failure from None
            raise
        if failure is not None:
            raise failure
        if most == FAILED:
            raise WindlassPeerLost(
                f"another training rank failed to {what}",
                "its own error says why; rank 0 speaks to the engines",
            )
        return most

    def _largest(self, mine: int, timeout: float, what: str) -> int:
        import torch

        try:
            return int(OverGroup(self._group).largest(torch.tensor([mine]), timeout, what).item())
        except (WindlassTimeout, WindlassPeerLost) as e:
            advice = "every training rank calls the sender with the chunks of its extractor"
            raise type(e)(f"training ranks could not {what}: {e}", advice) from e
