"""What the trainer side hands to the engine side before the first sync.

A strategy on training rank 0 creates one info; whoever orchestrates carries it to every engine as plain JSON; both
sides then join concurrently. The class says what there is to join. The rules are those of the Rust core, and so is the
arithmetic of ranks: training is rank 0, the engines follow in order, each with ``tp * pp * dp`` ranks.

>>> info = TorchDistributedWeightSyncInfo("10.0.0.7", 29500, world_size([EngineShape(tp=2)]))
>>> WeightSyncInfo.from_dict(info.to_dict()) == info
True
>>> rank_offsets([EngineShape(tp=2), EngineShape(dp=4)])
[1, 3]
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from windlass import _windlass
from windlass.errors import WindlassInvalid
from windlass.plain import Record

__all__ = [
    "AgentWeightSyncInfo",
    "EmptyWeightSyncInfo",
    "EmptyWeightSyncInitInfo",
    "EngineShape",
    "StoreWeightSyncInfo",
    "TorchDistributedWeightSyncInfo",
    "TorchDistributedWeightSyncInitInfo",
    "WeightSyncInfo",
    "WeightSyncInitInfo",
    "engine_rank",
    "info_for",
    "parse_sync_info",
    "rank_offsets",
    "world_size",
]


Info = TypeVar("Info", bound="WeightSyncInfo")


class WeightSyncInfo(Record):
    """What one side of a strategy tells the other before the first sync. That of an agent contains its token.

    A strategy from outside may have infos of its own: a subclass with :meth:`to_dict` and :meth:`from_dict`.
    """

    _what = "sync info"
    _judge = _windlass.parse_sync_info

    def __await__(self) -> Generator[Any, None, WeightSyncInfo]:
        # For callers that await what makes it, as the interface design does. There is nothing to wait for.
        return self
        yield


def info_for(strategy: str, info: WeightSyncInfo, kind: type[Info]) -> Info:
    """The sync info of a strategy; that of another one is refused."""
    if not isinstance(info, kind):
        needed = "none" if kind is EmptyWeightSyncInfo else kind.__name__
        raise WindlassInvalid(
            f"the sync info is {type(info).__name__}: {strategy} needs {needed}; both sides must be built from the same "
            "configuration"
        )
    return info


@dataclass(frozen=True)
class TorchDistributedWeightSyncInfo(WeightSyncInfo):
    """How to join a ``torch.distributed`` update group of training rank 0 and all engine ranks."""

    master_addr: str
    master_port: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: Literal["nccl", "gloo"] = "nccl"

    type_name = "torch_distributed"

    def joined_at(self, rank_offset: int) -> dict[str, str | int]:
        """What the routes of vLLM and SGLang are told to have an engine join, whose ranks begin at ``rank_offset``."""
        return {
            "master_address": self.master_addr,
            "master_port": self.master_port,
            "rank_offset": rank_offset,
            "world_size": self.world_size,
            "group_name": self.group_name,
            "backend": self.backend,
        }


@dataclass(frozen=True)
class EmptyWeightSyncInfo(WeightSyncInfo):
    """Nothing to join: the requests carry everything."""

    type_name = "empty"


@dataclass(frozen=True)
class AgentWeightSyncInfo(WeightSyncInfo):
    """How to pull from a trainer's agents, one per trainer node, the lead agent first."""

    endpoints: list[str]
    token: str = field(repr=False)
    model_id: str
    incarnation: int | None = None

    type_name = "agent"


@dataclass(frozen=True)
class StoreWeightSyncInfo(WeightSyncInfo):
    """Where versions are stored."""

    url: str

    type_name = "store"


#: The names by which some callers know these classes.
WeightSyncInitInfo: TypeAlias = WeightSyncInfo
TorchDistributedWeightSyncInitInfo: TypeAlias = TorchDistributedWeightSyncInfo
EmptyWeightSyncInitInfo: TypeAlias = EmptyWeightSyncInfo

WeightSyncInfo._types = {
    info.type_name: info
    for info in (
        TorchDistributedWeightSyncInfo,
        EmptyWeightSyncInfo,
        AgentWeightSyncInfo,
        StoreWeightSyncInfo,
    )
}


def parse_sync_info(data: Mapping[str, object] | str | bytes) -> WeightSyncInfo:
    """Reads a sync info in its plain form, given as such or as JSON text.

    >>> parse_sync_info('{"type": "empty"}')
    EmptyWeightSyncInfo()
    """
    return WeightSyncInfo._parse(data)


@dataclass(frozen=True)
class EngineShape:
    """How many ranks an engine has, by kind of parallelism; ``dp`` counts the replicas inside this one engine."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    def _counts(self) -> tuple[int, int, int]:
        counts = (self.tp, self.pp, self.dp)
        for name, count in zip(("tp", "pp", "dp"), counts, strict=True):
            if not 0 <= count < 2**32:
                raise WindlassInvalid(
                    f"{name} of an engine is {count}: expected 1 or more", name="bad_engine_shape"
                )
        return counts


def world_size(engines: Sequence[EngineShape]) -> int:
    """Ranks of the update group: training rank 0 and every rank of every engine."""
    return _windlass.world_size([engine._counts() for engine in engines])


def rank_offsets(engines: Sequence[EngineShape]) -> list[int]:
    """Each engine's rank offset: 1 for the first, then advancing by the ranks of the engine before."""
    return _windlass.rank_offsets([engine._counts() for engine in engines])


def engine_rank(local_rank: int, rank_offset: int, engine: EngineShape) -> int:
    """The rank in the update group of rank ``local_rank`` of an engine at ``rank_offset``.

    >>> engine_rank(1, 3, EngineShape(tp=2))
    4
    """
    return _windlass.engine_rank(local_rank, rank_offset, engine._counts())
