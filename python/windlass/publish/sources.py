"""What a rank was given to publish: parameters, what it holds of them, and the boxes of the image that they cover.

Owns: :class:`Source` and :class:`Naming`. Called by :mod:`windlass.publish.division` and :mod:`windlass.publish.plan`. Must
not: know other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from windlass.dtypes import dtype_name
from windlass.errors import WindlassInvalid, WindlassPeerLost
from windlass.publish import placement
from windlass.publish.boxes import intersect
from windlass.publish.placement import Box, Share

if TYPE_CHECKING:
    from windlass.names import DtypeRules, View
    from windlass.publish.derived import Derived
    from windlass.publish.merged import Merged

__all__ = ["NOTHING", "Names", "Naming", "Source", "Target", "describe_sources", "rebind", "targets_of"]


class Names(Protocol):
    """What parameters are called, as :class:`windlass.SourceMap` knows it."""

    def views(self, name: str, shape: tuple[int, ...]) -> tuple[View, ...]:
        """The tensors of the image that a parameter becomes."""
        ...


@dataclass(frozen=True)
class Naming:
    """How parameters become tensors of the image."""

    names: Names
    #: Which of these tensors belong to the image.
    keep: Callable[[Iterable[str]], frozenset[str]]
    #: The dtype of a tensor by its name and the trainer's dtype.
    dtype: Callable[[str, str], str]
    #: Which of them are quantised, and how.
    rules: DtypeRules | None = None
    #: Quantised weights of which elements of one scale are on several ranks, and how many scales each has.
    shared: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """A box of an image tensor that this rank could write, and the elements that it comes from."""

    tensor: str
    box: Box
    #: Of the source, in elements, for each dimension of the image tensor.
    strides: tuple[int, ...]
    offset: int


#: What a rank writes of a parameter that it only helps to gather.
NOTHING = Target("", (), (), 0)


@dataclass(slots=True)
class Source:
    """A parameter as it was given."""

    name: str
    #: The object of the last call; the same one needs no second look.
    given: Any
    shares: list[Share]
    #: By share: what this rank holds, then what it writes.
    targets: list[list[Target]] = field(default_factory=list)
    #: What the copies were computed for: shape, strides, dtype and device of the local memory.
    form: tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device] | None = None
    #: Where that memory was when it was last looked at closely, and its shape, strides and dtype.
    address: int = 0
    looked: tuple[tuple[int, ...], tuple[int, ...], torch.dtype | None] = ((), (), None)
    #: What is made of other sources here (:mod:`windlass.publish.derived`, :mod:`windlass.publish.merged`), and which of it this is.
    derived: Derived | Merged | None = None
    what: str = ""
    #: Whether all of it is published as something that is made of it.
    spent: bool = False


def not_pairs(given: object) -> WindlassInvalid:
    """The error for something that holds no named tensors."""
    return WindlassInvalid(
        f"offload() was given {_short(given)}; it takes a model, (name, tensor) pairs such as "
        "model.named_parameters(), a mapping, or a WeightSource"
    )


def _short(given: object) -> str:
    return (
        f"a {type(given).__name__} of shape {list(given.shape)}"
        if isinstance(given, torch.Tensor)
        else (
            repr(given)
            if isinstance(given, (str, bytes, int, float, type(None)))
            else f"a {type(given).__name__}"
        )
    )


def pair_of(item: object) -> tuple[str, Any]:
    """A name and its tensor."""
    if isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], str):
        return item[0], item[1]
    raise WindlassInvalid(
        f"offload() takes (name, tensor) pairs, and one item was {_short(item)}: pass model.named_parameters(), "
        "not model.parameters()"
    )


def describe_sources(named: Iterable[tuple[str, Any]]) -> list[Source]:
    """What this rank holds of everything that was given."""
    out: list[Source] = []
    seen: set[str] = set()
    for item in named:
        name, given = pair_of(item)
        shares = list(placement.describe(name, given))
        for share in shares:
            if not share.name:
                raise WindlassInvalid(f"a {_short(given)} has an empty name; every parameter needs one")
            if share.name in seen:
                raise WindlassInvalid(f"parameter {share.name!r} comes twice; every parameter has one name")
            seen.add(share.name)
        out.append(Source(name, given, shares))
    return out


def targets_of(share: Share, views: Sequence[View]) -> list[Target]:
    """The boxes of image tensors that a share covers."""
    if share.gathered:
        pieces: tuple[placement.Piece, ...] = placement.strided_pieces(
            placement.whole(share.shape), placement.contiguous_strides(share.shape)
        )
    else:
        pieces = share.pieces
    out = []
    for view in views:
        for piece in pieces:
            common = intersect(piece.box, view.box)
            if common is None:
                continue
            offset = piece.offset
            for (start, _), (first, _), stride in zip(common, piece.box, piece.strides, strict=True):
                offset += (start - first) * stride
            box = tuple(
                (common[d][0] - view.box[d][0] + at, common[d][1] - view.box[d][0] + at)
                for d, at in zip(view.dims, view.at, strict=True)
            )
            out.append(Target(view.name, box, tuple(piece.strides[d] for d in view.dims), offset))
    return out


def taken(local: torch.Tensor, target: Target) -> torch.Tensor:
    """The same box in this rank's memory."""
    size = tuple(e - s for s, e in target.box)
    local = local.detach()
    return torch.as_strided(local, size, target.strides, local.storage_offset() + target.offset)


def identity_of(source: Source, share: Share) -> Any:
    """What tied parameters have in common; nothing where nothing of them is here."""
    flat = share.reason.startswith(("FSDP1", "ZeRO"))
    if share.gathered or source.given is None or source.derived is not None or flat:
        return id(source.given), share.name
    local = share.fetch(source.given)
    if local.numel() == 0 or local.device.type == "meta":
        return None
    return local.data_ptr(), tuple(local.shape), local.stride(), local.dtype


def rebind(source: Source, index: int, name: Any, given: Any) -> None:
    """Takes a new object for a parameter, if it is placed as the old one was."""
    if name != source.name:
        raise WindlassInvalid(
            f"parameter {index} was called {source.name!r} and is now called {name!r}; the tensors of a model and "
            "their order do not change: make another WeightManager for another model, or call resume()"
        )
    if hasattr(source.given, "full_tensor") and not hasattr(given, "full_tensor"):
        raise WindlassInvalid(
            f"parameter {name!r} was sharded when the first version was offloaded and is whole now: FSDP2 leaves "
            "parameters gathered after a forward pass without a backward one. Offload the model itself instead of its "
            "parameters, or call reshard() on its FSDP modules first"
        )
    shares = list(placement.describe(name, given))
    for new, old in zip(shares, source.shares, strict=False):
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise WindlassInvalid(
                f"parameter {new.name!r} was {dtype_name(old.dtype)} {list(old.shape)} when the first version was "
                f"offloaded and is now {new.dtype} {list(new.shape)}; call resume() after changing a model"
            )
    before = [(s.name, s.pieces, s.gathered) for s in source.shares]
    if [(s.name, s.pieces, s.gathered) for s in shares] != before:
        raise WindlassInvalid(
            f"parameter {name!r} has another placement or other strides than when the first version was offloaded; "
            "call resume() after changing how a model is placed"
        )
    source.given, source.shares = given, shares


def moved(
    name: str, form: tuple[tuple[int, ...], tuple[int, ...], torch.dtype], local: torch.Tensor
) -> WindlassInvalid:
    """The error for memory that is not what a plan was made for."""
    shape, strides, dtype = form
    return WindlassInvalid(
        f"the local memory of {name!r} was {dtype_name(dtype)} {list(shape)} with strides {list(strides)} "
        f"when the first version was offloaded, and is now {local.dtype} {list(local.shape)} with strides "
        f"{list(local.stride())} on {local.device}; call resume() after moving or casting a model"
    )


def freed(name: str) -> WindlassInvalid:
    """The error for memory that is not there any more."""
    return WindlassInvalid(
        f"the memory of {name!r} was freed (its storage has no bytes); offload() before that, or after it is there again"
    )


def lost(what: str, error: Exception) -> WindlassPeerLost:
    """An error of the trainer's own collectives, with what was being done."""
    return WindlassPeerLost(f"{what}: {error}", "see whether all ranks are alive and call offload() in step")
