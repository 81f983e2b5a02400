"""What a trainer gives to be published, as pieces of an image.

Owns: :class:`WeightSource`, the buffers that a model itself tells, and the pieces that torch copies: what is cast,
gathered, exported or on a device that only torch reads. Called by :class:`windlass.WeightManager`. Must not: plan who
writes what (:mod:`windlass.publish.division`), or know a region.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast, runtime_checkable

import torch

from windlass.dtypes import dtype_name, torch_dtype
from windlass.errors import WindlassInvalid
from windlass.extract.adapters import Adapted, adapters_of
from windlass.names import (
    AsTheyAre,
    DtypeRules,
    Selection,
    SourceMap,
    canonical_dtype,
    checkpoint_layout,
    names_of,
)
from windlass.names.conversion import persistent_buffers
from windlass.names.quantised import scales_among
from windlass.publish import placement
from windlass.publish.derived import stream_value
from windlass.publish.merged import Merging, is_trained
from windlass.publish.plan import Plan, each_cast
from windlass.publish.sources import NOTHING, Naming, Source, Target, not_pairs, taken

if TYPE_CHECKING:
    from windlass.config import WeightManagerConfig

__all__ = [
    "Inputs",
    "WeightSource",
    "Weights",
    "buffers_of",
    "copy",
    "everything",
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


#: What :meth:`windlass.WeightManager.offload` takes.
Weights: TypeAlias = torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, Any]] | WeightSource


class Inputs:
    """What a trainer gives to be published, as the configuration says to read it."""

    def __init__(self, config: WeightManagerConfig, names: SourceMap | None) -> None:
        self._config, self._names = config, names
        #: From the model, where no names were given; and its buffers that belong to the image.
        self._found: SourceMap | AsTheyAre | None = None
        self._buffers: frozenset[str] = frozenset()
        #: What PEFT adapts in the model.
        self.adapted: Adapted | None = None

    def pairs(
        self, given: Weights, merging: Merging | None
    ) -> tuple[Iterable[tuple[str, Any]] | None, WeightSource | None]:
        """What was given as pairs, or as a source that is asked for them."""
        if self._config.lora == "adapter":
            return self._adapter(given), None
        if isinstance(given, torch.nn.Module):
            if self._found is None:
                found = self._names or names_of(given)
                if self._config.lora == "merged":
                    self.adapted = adapters_of(given)
                    if self.adapted.saved is not None and hasattr(found, "with_saved_modules"):
                        found = found.with_saved_modules(self.adapted.saved)
                self._buffers = buffers_of(given, found, self._config.buffers)
                self._found = found
            elif merging is not None:
                merging.follow(given)
            return placement.named_of(given, self._buffers), None
        if isinstance(given, Mapping):
            return given.items(), None
        if hasattr(given, "metadata") and hasattr(given, "__iter__"):
            return None, cast(WeightSource, given)
        if isinstance(given, (torch.Tensor, str, bytes)) or not hasattr(given, "__iter__"):
            raise not_pairs(given)
        return given, None

    def _adapter(self, given: Weights) -> Iterable[tuple[str, Any]]:
        """The adapter of a model, as a file of PEFT's has it; whole on every rank."""
        from windlass.extract.lora import collect_lora

        if not isinstance(given, torch.nn.Module):
            raise WindlassInvalid(
                f'lora="adapter" is set, and offload() was given a {type(given).__name__}',
                "give offload() the model itself, which knows what belongs to its adapter",
            )
        tensors = collect_lora(given).tensors
        self._found = AsTheyAre({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        return tensors.items()

    def naming(self, sources: list[Source]) -> Naming:
        """What the sources are called in the image, and which of them belong to it."""
        config = self._config
        stored = None if config.checkpoint is None else checkpoint_layout(config.checkpoint)
        dtypes = None if stored is None else {name: dtype for name, (dtype, _) in stored.items()}
        rules = DtypeRules(config.generator_dtype, config.dtypes, dtypes)
        selection = Selection(config.include, config.exclude, config.extras)

        names = self._found or self._names or SourceMap()
        known: Collection[str] | None = names.written() if stored is None else stored
        if rules.schemes and known is not None:
            # Scales come and go with their weights.
            known = frozenset(known) - scales_among(known)

        trained = {
            view.name
            for source in sources
            for index, share in enumerate(source.shares)
            if is_trained(source, index)
            for view in names.views(share.name, share.shape)
        }

        def keep(every: Iterable[str]) -> frozenset[str]:
            return frozenset(selection.choose(every, known, trained).kept)

        return Naming(names, keep, rules.dtype_of, rules)


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
            name, tuple(shape), kind, (), placement.itself, gathered=here, reason="exported"
        )
        out.append(Source(name, None, [share]))
    return out


def pieces(plan: Plan, stream: WeightSource | None) -> Iterable[tuple[Target, torch.Tensor]]:
    """What torch copies: boxes and values, at most one gathered tensor at a time."""
    if stream is None:
        yield from each_cast(plan, plan.casts)
        yield from each_cast(plan, plan.gathered)
        return
    targets: dict[str, list[tuple[Target, Callable[[torch.Tensor], torch.Tensor]]]] = {}
    for piece in plan.gathered:
        name, make = stream_value(plan.sources[piece.source])
        targets.setdefault(name, []).append((piece.target, make))
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
            if target is not NOTHING:
                yield target, taken(make(whole), target)
    missing = [name for name, share in known.items() if share.gathered and name not in seen]
    if missing:
        raise WindlassInvalid(f"{len(missing)} tensors of metadata() did not come, first {missing[0]!r}")


def everything(plan: Plan, stream: WeightSource | None) -> Iterable[tuple[Target, torch.Tensor]]:
    """All that this rank writes, also what Rust copies."""
    if stream is None:
        for source in plan.sources:
            for share, targets in zip(source.shares, source.targets, strict=True):
                if not share.gathered:
                    for target in targets:
                        yield target, taken(share.fetch(source.given), target)
        yield from each_cast(plan, plan.gathered)
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
