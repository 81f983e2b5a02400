"""Messages between the ranks of a trainer.

Ranks agree once on which of them writes what. They send each other a few bytes of JSON, over the trainer's own process
group if there is one. Nothing is pickled, and every wait has a deadline.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from windlass.errors import WindlassCorrupt, WindlassInvalid, WindlassPeerLost, WindlassTimeout

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = ["Alone", "Arrivals", "Exchange", "OverGroup", "agree_on_all_ranks", "attempt", "exchange_for"]

#: The most that one rank may tell the others.
MAX_MESSAGE = 1 << 30
#: How long the store of a process group may take to say who is missing.
ROLL_S = 2.0

T = TypeVar("T")


class Exchange(Protocol):
    """How ranks tell each other something."""

    def all(self, mine: object, timeout: float) -> list[Any]:
        """What each rank said, in the order of ranks. Every rank calls it."""
        ...

    def largest(self, mine: torch.Tensor, timeout: float, what: str) -> torch.Tensor:
        """The largest of what ranks have at each place, on the device of ``mine``. Every rank calls it; ``what`` is what it is
        for, in words."""
        ...


class Alone:
    """For one rank, and for several that share no process group: all are taken to say the same."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def all(self, mine: object, timeout: float) -> list[Any]:
        """The same from each."""
        return [mine] * self._ranks

    def largest(self, mine: torch.Tensor, timeout: float, what: str) -> torch.Tensor:
        """That of this rank."""
        return mine


class OverGroup:
    """Over a process group of torch."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def all(self, mine: object, timeout: float) -> list[Any]:
        """What each rank of the group said."""
        import torch
        import torch.distributed as dist

        device = self._device()
        data = zlib.compress(json.dumps(mine).encode(), 1)
        size = dist.get_world_size(self._group)
        arrivals = Arrivals.count(self._group)
        until = time.monotonic() + timeout

        def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
            parts = [torch.empty_like(tensor) for _ in range(size)]

            def begin() -> Any:
                return dist.all_gather(parts, tensor, group=self._group, async_op=True)

            _finish(begin, "agree on who writes what", until, timeout, arrivals)
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
                part = part.cpu()
                text = zlib.decompressobj().decompress(ctypes.string_at(part.data_ptr(), length), MAX_MESSAGE)
                out.append(json.loads(text))
            except (zlib.error, ValueError) as e:
                raise WindlassCorrupt(f"what rank {rank} said cannot be read: {e}") from e
        return out

    def largest(self, mine: torch.Tensor, timeout: float, what: str) -> torch.Tensor:
        """Over the ranks of the group."""
        import torch.distributed as dist

        until = time.monotonic() + timeout
        arrivals = Arrivals.count(self._group)
        there = mine.to(self._device(), copy=True)

        def begin() -> Any:
            return dist.all_reduce(there, dist.ReduceOp.MAX, group=self._group, async_op=True)

        _finish(begin, what, until, timeout, arrivals)
        return there.to(mine.device)

    def _device(self) -> torch.device:
        import torch
        import torch.distributed as dist

        if dist.get_backend(self._group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def _finish(begin: Callable[[], Any], what: str, until: float, timeout: float, arrivals: Arrivals) -> None:
    """Waits for a collective, and not inside torch, which Ctrl-C cannot end."""
    nap = 0.0005
    try:
        work = begin()
        while not work.is_completed():
            if time.monotonic() >= until:
                raise WindlassTimeout(
                    f"ranks did not {what} within {timeout:g} s{arrivals.absent()}",
                    "see whether every rank calls offload() and is alive",
                )
            time.sleep(nap)
            nap = min(nap * 2, 0.02)
        work.wait()
    except RuntimeError as e:
        raise WindlassPeerLost(
            f"a rank was lost before ranks could {what}{arrivals.absent()}: {e}",
            "see whether every rank is alive",
        ) from e


class Arrivals:
    """The ranks that have arrived: each counts its exchanges in the group's store, so that an error can name the missing ones."""

    def __init__(self, store: Any, keys: list[str], mine: int) -> None:
        self._store, self._keys, self._mine = store, keys, mine

    @staticmethod
    def count(group: dist.ProcessGroup | None) -> Arrivals:
        """Counts this rank in."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        keys = [f"windlass/{'-'.join(map(str, ranks))}/{rank}" for rank in ranks]
        key = keys[dist.get_rank(group)]

        def add() -> tuple[Any, int]:
            store = c10d._get_default_store()
            return store, store.add(key, 1)

        store, mine = attempt(ROLL_S, add) or (None, 0)
        return Arrivals(store, keys, mine)

    def absent(self) -> str:
        """The ranks that have not come this far, in words."""
        if self._store is None:
            return ""
        counts = attempt(ROLL_S, lambda: [self._store.add(key, 0) for key in self._keys])
        if counts is None:
            return " (the store of the process group, which knows who is missing, does not answer)"
        missing = [str(rank) for rank, count in enumerate(counts) if count < self._mine]
        if not missing:
            return ""
        return f": rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} did not come"


def attempt(seconds: float, work: Callable[[], T]) -> T | None:
    """The result of ``work``, or ``None`` if it fails or takes longer: torch's stores have no timeout for it."""
    out: list[T] = []

    def run() -> None:
        try:
            out.append(work())
        except Exception:  # It only serves to say more in an error.
            return

    thread = threading.Thread(target=run, name="windlass-arrivals", daemon=True)
    thread.start()
    thread.join(seconds)
    return out[0] if out else None


def agree_on_all_ranks(exchange: Exchange, work: Callable[[], T], what: str, timeout: float) -> list[T]:
    """Does ``work`` on every rank and returns all results. If it fails on any rank, all of them get an error."""
    until = time.monotonic() + timeout
    failure: Exception | None = None
    mine: dict[str, Any]
    try:
        mine = {"value": work()}
    except Exception as e:
        failure, mine = e, {"error": f"{type(e).__name__}: {e}"}
    try:
        said = exchange.all(mine, max(0.0, until - time.monotonic()))
    except Exception:
        if failure is not None:
            # It is why this rank failed; that the others are gone may well be its consequence.
            raise failure from None
        raise
    if failure is not None:
        raise failure
    for rank, words in enumerate(said):
        if "error" in words:
            raise WindlassInvalid(f"rank {rank} could not {what}: {words['error']}")
    return [words["value"] for words in said]


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
