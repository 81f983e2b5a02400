"""What a trainer gives to be published, as pieces of an image.

Owns: :class:`WeightSource`, the names and buffers that a model itself tells, and the pieces that torch copies: what is cast,
gathered, exported or on a device that nobody else reads. Called by :class:`windlass.WeightManager`. Must not: plan who
writes what (:mod:`windlass.plan`), or know a region.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch

from windlass import placement
from windlass import plan as planning
from windlass.derived import stream_value
from windlass.dtypes import dtype_name, torch_dtype
from windlass.errors import WindlassInvalid
from windlass.names import SourceMap, canonical_dtype
from windlass.names.conversion import persistent_buffers
from windlass.plan import Plan, Source

__all__ = [
    "WeightSource",
    "buffers_of",
    "copy",
    "everything",
    "names_of",
    "pieces",
    "is_same",
    "stream_sources",
]


@runtime_checkable
class WeightSource(Protocol):
    """Weights that are only known by exporting them, such as a Megatron bridge's.

    ``metadata()`` lists (name, dtype, shape) of every tensor of the model, the same on all ranks and in the order of
    iteration. Iteration yields (name, tensor), one at a time, or (name, None) for what this rank does not hold.
    ``held_names()`` names what it holds; ``None`` means everything.
    """

    def metadata(self) -> Iterable[tuple[str, Any, Any]]:
        """(name, dtype, shape) of everything."""
        ...

    def __iter__(self) -> Any:
        """A fresh pass over (name, tensor)."""
        ...

    def held_names(self) -> Iterable[str] | None:
        """What this rank holds; all if ``None``."""
        ...


def names_of(model: torch.nn.Module) -> SourceMap:
    """From the model's own configuration if transformers made it, else its names without what wrappers add."""
    # Whoever made such a model has imported the library; for all others it is not worth the time.
    transformers = sys.modules.get("transformers")
    if transformers is not None and any(isinstance(m, transformers.PreTrainedModel) for m in model.modules()):
        return SourceMap.from_model(model)
    return SourceMap()


def buffers_of(model: torch.nn.Module, names: SourceMap, every: bool) -> frozenset[str]:
    """The persistent buffers that belong to the image: those of the checkpoint, or all of them."""
    written = names.written()
    if every or written is None:
        return frozenset(name for name, _ in persistent_buffers(model)) if every else frozenset()
    return frozenset(
        name
        for name, buffer in persistent_buffers(model)
        if any(view.name in written for view in names.views(name, tuple(buffer.shape)))
    )


def stream_sources(stream: WeightSource) -> list[Source]:
    names = stream.held_names() if hasattr(stream, "held_names") else None
    held = None if names is None else set(names)
    out = []
    seen: set[str] = set()
    for name, dtype, shape in stream.metadata():
        if name in seen:
            raise WindlassInvalid(f"metadata() has {name!r} twice; every tensor has one name")
        seen.add(name)
        kind = dtype if isinstance(dtype, torch.dtype) else torch_dtype(canonical_dtype(dtype))
        here = held is None or name in held
        share = placement.Share(
            name, tuple(shape), kind, (), placement._itself, gathered=here, reason="exported"
        )
        out.append(Source(name, None, [share]))
    return out


def pieces(plan: Plan, stream: WeightSource | None) -> Iterable[tuple[planning.Target, torch.Tensor]]:
    """What torch copies: boxes and values, at most one gathered tensor at a time."""
    if stream is None:
        yield from planning.each_cast(plan, plan.casts)
        yield from planning.each_cast(plan, plan.gathered)
        return
    targets: dict[str, list[tuple[planning.Target, Callable[[torch.Tensor], torch.Tensor]]]] = {}
    for cast in plan.gathered:
        name, make = stream_value(plan.sources[cast.source])
        targets.setdefault(name, []).append((cast.target, make))
    known = {s.name: s.shares[0] for s in plan.sources[: plan.given]}
    seen = set()
    for name, tensor in stream:
        if name not in known:
            raise WindlassInvalid(f"{name!r} was exported and is not in the source's metadata()")
        seen.add(name)
        if tensor is None:
            if known[name].gathered:
                raise WindlassInvalid(f"{name!r} is among held_names() and came without a tensor")
            continue
        share = known[name]
        if tuple(tensor.shape) != share.shape or tensor.dtype != share.dtype:
            raise WindlassInvalid(
                f"{name!r} came as {dtype_name(tensor.dtype)} {list(tensor.shape)}; metadata() said "
                f"{dtype_name(share.dtype)} {list(share.shape)}"
            )
        whole = tensor.detach().contiguous()
        for target, make in targets.get(name, []):
            if target is not planning._NOTHING:
                yield target, planning.taken(make(whole), target)
    missing = [name for name, share in known.items() if share.gathered and name not in seen]
    if missing:
        raise WindlassInvalid(f"{len(missing)} tensors of metadata() did not come, first {missing[0]!r}")


def everything(plan: Plan, stream: WeightSource | None) -> Iterable[tuple[planning.Target, torch.Tensor]]:
    """All that this rank writes, also what Rust copies."""
    if stream is None:
        for source in plan.sources:
            for share, targets in zip(source.shares, source.targets, strict=True):
                if not share.gathered:
                    for target in targets:
                        yield target, planning.taken(share.fetch(source.given), target)
        yield from planning.each_cast(plan, plan.gathered)
    else:
        yield from pieces(plan, stream)


def copy(into: torch.Tensor, values: torch.Tensor) -> None:
    try:
        into.copy_(values, non_blocking=True)
    except (NotImplementedError, RuntimeError):
        if into.dtype != values.dtype:
            raise
        # A dtype that torch can hold and not copy.
        into.view(torch.uint8).copy_(values.contiguous().view(torch.uint8))


def is_same(there: torch.Tensor, values: torch.Tensor) -> bool:
    """Bit by bit: signed zeros and NaNs are bits like any others."""
    mine = values.to("cpu", there.dtype).contiguous()
    if mine.dim() == 0:
        mine, there = mine.reshape(1), there.reshape(1)
    return torch.equal(mine.view(torch.uint8), there.contiguous().view(torch.uint8))
