"""What this rank holds of a parameter, and where that lies in the whole tensor.

Owns: the knowledge of how trainers shard (:class:`Share`). A share is a list of boxes of the global tensor, each with
its place in this rank's local memory, so that every rank can write its own part of an image without any network:

========================  =====================================================================================
plain tensor              one box, the whole tensor
``DTensor``               any mix of ``Shard`` (uneven too), strided shards (FSDP2 over TP) and ``Replicate``
FSDP1 flat parameter      the run of elements of each original parameter that falls into this rank's shard
ZeRO-3 partition          the run of elements that DeepSpeed keeps here
everything else           gathered, one tensor at a time, by all ranks together (``Partial`` and the like)
========================  =====================================================================================

Called by :mod:`windlass.publish.division`. Must not: move data, or know names of checkpoints.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from windlass.errors import WindlassInvalid, WindlassUnsupported
from windlass.extract.fsdp import reshard

__all__ = ["Box", "Piece", "Share", "describe", "flat_boxes", "named_of"]

#: (start, stop) for each dimension.
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Piece:
    """A box of the global tensor, and where it begins in local memory."""

    box: Box
    #: In elements, from the first element of the local tensor.
    offset: int
    #: Of the local memory, in elements, for each dimension of the global tensor.
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """What this rank holds of one parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    #: Nothing for a parameter that is gathered, or of which nothing is here.
    pieces: tuple[Piece, ...]
    #: Gives the local tensor of the parameter, as it is now; the gathered one if ``gathered``.
    fetch: Callable[[Any], torch.Tensor]
    #: Whether all ranks must take part in ``fetch``, which then gives the whole tensor.
    gathered: bool = False
    #: Why it is done this way, for the log.
    reason: str = "whole"


def strided_pieces(box: Box, strides: Iterable[int]) -> tuple[Piece, ...]:
    """One piece, or none if the box is empty."""
    if any(start >= stop for start, stop in box):
        return ()
    return (Piece(box, 0, tuple(strides)),)


def whole(shape: Iterable[int]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, n) for n in shape)


def check(name: str, tensor: torch.Tensor) -> None:
    """Refuses tensors that have no bytes of their own to publish."""
    if torch.nn.parameter.is_lazy(tensor):
        raise WindlassInvalid(f"{name!r} is not initialised; run a lazy module once before publishing it")
    if tensor.is_nested:
        raise WindlassInvalid(f"{name!r} is a nested tensor; publish its parts under names of their own")
    if tensor.is_meta:
        raise WindlassInvalid(
            f"{name!r} is on the meta device and has no values; materialise it (to_empty and load, or reset) first"
        )
    if tensor.layout != torch.strided:
        raise WindlassInvalid(
            f"{name!r} is sparse ({tensor.layout}); engines load dense tensors: publish {name}.to_dense()"
        )
    if tensor.is_quantized:
        raise WindlassInvalid(f"{name!r} is a quantized tensor; publish its int_repr() and its scales")
    if is_traceable_wrapper_subclass(tensor):
        raise WindlassUnsupported(
            f"{name!r} is a {type(tensor).__name__}, a tensor made of other tensors; publish those, or a dense copy"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise WindlassInvalid(f"{name!r} is a lazy view; publish {name}.resolve_conj().resolve_neg()")


def runs(indices: torch.Tensor) -> list[tuple[int, int, int]]:
    """Consecutive indices as (start, stop, place in the list)."""
    if indices.numel() == 0:
        return []
    breaks = (indices[1:] != indices[:-1] + 1).nonzero().flatten().add_(1).tolist()
    edges = [0, *breaks, indices.numel()]
    first = indices.tolist() if len(edges) > 64 else None
    out = []
    for a, b in itertools.pairwise(edges):
        start = first[a] if first is not None else int(indices[a])
        out.append((start, start + b - a, a))
    return out


def dtensor(name: str, tensor: Any) -> Share:
    """A DTensor by its placements."""
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements = tensor.device_mesh, tensor.placements
    shape = tuple(tensor.shape)
    check(name, tensor._local_tensor)

    def gathered(why: str) -> Share:
        return Share(name, shape, tensor.dtype, (), _full, gathered=True, reason=why)

    coordinate = mesh.get_coordinate()
    reason = "shards" if any(not isinstance(p, Replicate) for p in placements) else "replicas"
    # The global indices of each dimension that are here. Only sharded dimensions are looked at one by one.
    indices: dict[int, torch.Tensor] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        # Strided shards (FSDP2 on top of tensor parallelism) are not always a subclass of Shard.
        if not isinstance(placement, Shard) and type(placement).__name__ != "_StridedShard":
            return gathered(f"placement {placement} is neither Shard nor Replicate")
        if coordinate is None:
            continue
        dim = placement.dim
        have = indices.get(dim)
        if have is None:
            have = torch.arange(shape[dim])
        try:
            chunks = _split(placement, have, mesh.size(axis))
        except (AttributeError, TypeError) as e:  # Another torch, whose ways are not known here.
            return gathered(f"placement {placement} cannot be divided here ({e})")
        indices[dim] = chunks[coordinate[axis]] if coordinate[axis] < len(chunks) else have[:0]
    if coordinate is None:
        # This rank is not part of the mesh and holds nothing.
        return Share(name, shape, tensor.dtype, (), _local, reason=reason)
    local = tensor._local_tensor
    axes = [runs(indices[d]) if d in indices else [(0, n, 0)] for d, n in enumerate(shape)]
    expected = tuple(sum(b - a for a, b, _ in axis) for axis in axes)
    if tuple(local.shape) != expected and local.numel() + _volume(expected) > 0:
        return gathered(f"the local shard has shape {tuple(local.shape)} where {expected} was expected")
    strides = local.stride()
    pieces = tuple(
        Piece(
            tuple((a, b) for a, b, _ in parts),
            sum(at * s for (_, _, at), s in zip(parts, strides, strict=True)),
            tuple(strides),
        )
        for parts in itertools.product(*axes)
        if all(a < b for a, b, _ in parts)
    )
    return Share(name, shape, tensor.dtype, pieces, _local, reason=reason)


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor._local_tensor
    return local


def _full(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor()
    return full.contiguous()


def itself(tensor: Any) -> torch.Tensor:
    itself: torch.Tensor = tensor
    return itself


def _split(placement: Any, indices: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """The placement's own division, of a tensor that has its dimension."""
    like = indices.reshape([-1 if d == placement.dim else 1 for d in range(placement.dim + 1)])
    chunks, _ = placement._split_tensor(like, parts, with_padding=False, contiguous=True)
    return [c.flatten() for c in chunks]


def _volume(shape: Iterable[int]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """The elements ``start..stop`` of a contiguous tensor as boxes, each with its first element's number.

    >>> list(flat_boxes((4, 3), 2, 8))
    [(((0, 1), (2, 3)), 2), (((1, 2), (0, 3)), 3), (((2, 3), (0, 2)), 6)]
    """
    if start >= stop:
        return
    if not shape:
        yield (), start
        return
    row = _volume(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        # Within one row.
        base = (start // row) * row
        for box, at in flat_boxes(shape[1:], start - base, stop - base):
            yield ((start // row, start // row + 1), *box), at + base
        return
    if start < first * row:
        base = (first - 1) * row
        for box, at in flat_boxes(shape[1:], start - base, row):
            yield ((first - 1, first), *box), at + base
    if first < last:
        yield ((first, last), *whole(shape[1:])), first * row
    if last * row < stop:
        base = last * row
        for box, at in flat_boxes(shape[1:], 0, stop - base):
            yield ((last, last + 1), *box), at + base


def contiguous_strides(shape: Iterable[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    out: list[int] = []
    step = 1
    for n in reversed(tuple(shape)):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


def flat_pieces(shape: tuple[int, ...], start: int, stop: int, offset: int) -> tuple[Piece, ...]:
    """The elements ``start..stop`` of a tensor that lie one after another at ``offset`` of local memory."""
    strides = contiguous_strides(shape)
    boxes = flat_boxes(shape, start, min(stop, _volume(shape)))
    return tuple(Piece(box, offset + at - start, strides) for box, at in boxes)


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether it is a flat parameter of FSDP1."""
    return hasattr(tensor, "_shard_param_infos") and hasattr(tensor, "_fqns")


def flat_parameter(prefix: str, flat: Any) -> Iterator[Share]:
    """The original parameters inside a flat parameter of FSDP1."""

    rows = zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)
    for fqn, shape, info in rows:
        pieces: tuple[Piece, ...] = ()
        if info.in_shard:
            stop = info.intra_param_end_idx + 1
            pieces = flat_pieces(tuple(shape), info.intra_param_start_idx, stop, info.offset_in_shard)
        yield Share(prefix + fqn, tuple(shape), flat.dtype, pieces, _flat_shard, reason="FSDP1 shards")


def _flat_shard(flat: Any) -> torch.Tensor:
    # While a unit is unsharded its parameter has other storage; the shard is kept beside it.
    local = getattr(flat, "_local_shard", None)
    return local if isinstance(local, torch.Tensor) and local.numel() else flat.detach()


def is_zero(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter that ZeRO-3 has partitioned."""
    return hasattr(tensor, "ds_tensor") and hasattr(tensor, "ds_shape")


def zero_parameter(name: str, param: Any) -> Share:
    """A ZeRO-3 parameter by its partition."""
    import torch.distributed as dist

    shape, part = tuple(param.ds_shape), param.ds_tensor
    group = getattr(param, "ds_process_group", None)
    here = str(getattr(part, "status", "")).endswith("NOT_AVAILABLE") is False

    if not here or part.numel() == 0 or getattr(param, "ds_secondary_tensor", None) is not None:
        why = (
            "its partition is swapped out" if not here else "ZeRO-3 keeps it in a way that is not known here"
        )
        return Share(name, shape, param.dtype, (), _gathered_zero, gathered=True, reason=why)
    rank = dist.get_rank(group)
    size = int(part.numel())
    pieces = flat_pieces(shape, rank * size, (rank + 1) * size, 0)
    return Share(name, shape, part.dtype, pieces, _zero_partition, reason="ZeRO-3 shards")


def _zero_partition(param: Any) -> torch.Tensor:
    part: torch.Tensor = param.ds_tensor
    return part


def _gathered_zero(param: Any) -> torch.Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters([param]):
        out: torch.Tensor = param.detach().clone()
    return out


def describe(name: str, tensor: torch.Tensor) -> Iterator[Share]:
    """What this rank holds of one named parameter. Flat parameters of FSDP1 hold several."""
    if not isinstance(tensor, torch.Tensor):
        raise WindlassInvalid(f"parameter {name!r} is a {type(tensor).__name__}, not a tensor")
    if is_flat(tensor):
        yield from flat_parameter(name.removesuffix("_flat_param"), tensor)
        return
    if is_zero(tensor):
        yield zero_parameter(name, tensor)
        return
    if hasattr(tensor, "device_mesh") and hasattr(tensor, "placements"):
        yield dtensor(name, tensor)
        return
    if getattr(tensor, "_fsdp_flattened", False):
        raise WindlassUnsupported(
            f"{name!r} is a slice of an FSDP1 flat parameter, and its place is known only to its module: "
            "pass the model itself to offload() instead of its named_parameters()"
        )
    if type(tensor).__name__ == "ShardedTensor":
        raise WindlassUnsupported(
            f"{name!r} is a ShardedTensor: pass the model itself to offload(), or gather it"
        )
    check(name, tensor)
    shape = tuple(tensor.shape)
    pieces = strided_pieces(whole(shape), tensor.stride())
    yield Share(name, shape, tensor.dtype, pieces, itself)


def named_of(model: torch.nn.Module, buffers: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of a module, under FSDP1 the flat ones, and its buffers of these names."""
    reshard(model)
    flat: dict[int, str] = {}
    inside: set[int] = set()
    for prefix, module in model.named_modules():
        handle = getattr(module, "_handle", None)
        original = getattr(handle, "flat_param", None)
        if original is None or not is_flat(original):
            continue
        if id(original) not in flat:
            # Names inside are counted from the wrapped module.
            wrapped = f"{prefix}." if prefix else ""
            flat[id(original)] = wrapped
            yield f"{wrapped}_flat_param", original
        inside.update(id(p) for p in getattr(original, "_params", None) or ())
    for name, parameter in model.named_parameters():
        if id(parameter) in inside or is_flat(parameter) or getattr(parameter, "_fsdp_flattened", False):
            continue
        yield name, parameter
    if buffers:
        yield from ((name, buffer) for name, buffer in model.named_buffers() if name in buffers)
