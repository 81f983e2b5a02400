"""Tensors without elements that remember where each block of theirs comes from.

A :class:`Traced` tensor has a shape and a list of blocks. A block is a box of the tensor which is, element by
element, a box of one source: along each axis of the tensor at most one dimension of the source runs, and the
source's other dimensions stand still. Slicing, permuting, squeezing, concatenating and reshaping take blocks
to blocks; a permutation of rows takes them apart row by row, which is why there is a limit on their number.
Any other operation gives a tensor that is opaque: it knows its shape, its sources and the operation's name.

Invariants (property-tested against real tensors): the blocks of a tensor that is not opaque cover it exactly
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from windlass.names.view import Shape, View

__all__ = ["BLOCK_LIMIT", "Traced"]

#: More blocks than this for one tensor are not worth planning; gathering is cheaper.
BLOCK_LIMIT = 1 << 16


@dataclass(frozen=True, slots=True)
class Block:
    """A box of a tensor that is a box of a source."""

    source: str
    #: For each dimension of the source, where the box starts in it, and the axis that runs along it (None: it
    #: stands).
    origin: tuple[tuple[int, int | None], ...]
    #: Where the box starts in the tensor, and its extent, for each axis.
    at: tuple[int, ...]
    extent: tuple[int, ...]

    def narrow(self, axis: int, low: int, high: int) -> Block | None:
        """The part within a range of an axis, which then starts at zero."""
        start = max(self.at[axis], low)
        stop = min(self.at[axis] + self.extent[axis], high)
        if start >= stop:
            return None
        moved = start - self.at[axis]
        origin = tuple((at + moved, a) if a == axis else (at, a) for at, a in self.origin)
        return Block(
            self.source, origin, _put(self.at, axis, start - low), _put(self.extent, axis, stop - start)
        )

    def without(self, axis: int) -> Block:
        """An axis of extent one taken out."""
        origin = tuple((at, None if a is None or a == axis else a - (a > axis)) for at, a in self.origin)
        return Block(self.source, origin, _cut(self.at, axis), _cut(self.extent, axis))

    def with_axis(self, axis: int, at: int = 0) -> Block:
        """An axis of extent one put in."""
        origin = tuple((o, None if a is None else a + (a >= axis)) for o, a in self.origin)
        return Block(
            self.source,
            origin,
            (*self.at[:axis], at, *self.at[axis:]),
            (*self.extent[:axis], 1, *self.extent[axis:]),
        )

    def permuted(self, order: Sequence[int]) -> Block:
        """Axes in another order."""
        origin = tuple((at, None if a is None else order.index(a)) for at, a in self.origin)
        return Block(
            self.source, origin, tuple(self.at[a] for a in order), tuple(self.extent[a] for a in order)
        )

    def shifted(self, axis: int, by: int) -> Block:
        """The same block further along an axis."""
        return replace(self, at=_put(self.at, axis, self.at[axis] + by))

    def merged(self, axis: int, size: int) -> Iterator[Block]:
        """The axis and the next, of the given size, taken as one."""
        if size == 1:
            yield self.without(axis + 1)
            return
        for step in range(self.extent[axis]):
            row = self.narrow(axis, self.at[axis] + step, self.at[axis] + step + 1)
            assert row is not None, "a step within the extent"
            # The outer axis now has extent one, and its position moves into the inner.
            position = (self.at[axis] + step) * size + self.at[axis + 1]
            inner = row.without(axis)
            yield replace(inner, at=_put(inner.at, axis, position))

    def divided(self, axis: int, size: int) -> Iterator[Block]:
        """The axis taken as two, the inner of the given size."""
        if size == 1:
            yield self.with_axis(axis + 1)
            return
        first = self.at[axis] // size
        last = (self.at[axis] + self.extent[axis] - 1) // size
        for outer in range(first, last + 1):
            part = self.narrow(axis, outer * size, (outer + 1) * size)
            assert part is not None, "the block reaches into each of these"
            yield part.with_axis(axis, outer)


class Traced(torch.Tensor):
    """A tensor of shape and origin, without elements."""

    blocks: list[Block]
    #: For an opaque tensor, by source, the operations that made it so.
    reasons: dict[str, str]

    @staticmethod
    def __new__(
        cls: type[Traced],
        shape: Sequence[int],
        dtype: torch.dtype,
        blocks: list[Block],
        reasons: dict[str, str],
    ) -> Traced:
        made: Traced = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=torch.device("meta")
        )
        made.blocks = blocks
        made.reasons = reasons
        if not reasons and len(blocks) > BLOCK_LIMIT:
            made.reasons = {
                block.source: f"a permutation into more than {BLOCK_LIMIT} pieces" for block in blocks
            }
            made.blocks = []
        return made

    @classmethod
    def source(cls, name: str, shape: Shape, dtype: torch.dtype) -> Traced:
        """A parameter, as it stands."""
        origin = tuple((0, axis) for axis in range(len(shape)))
        blocks = [] if 0 in shape else [Block(name, origin, (0,) * len(shape), shape)]
        return cls(shape, dtype, blocks, {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Traced({tuple(self.shape)}, {len(self.blocks)} blocks, {self.reasons})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Traced)]
        opaque = any(tensor.reasons for tensor in inputs)
        handler = _HANDLERS.get(func.overloadpacket)
        if handler is not None and not opaque and all(isinstance(a, Traced) for a in inputs):
            made = handler(*args, **kwargs)
            if made is not NotImplemented:
                return made
        return _opaque(func, inputs, args, kwargs)

    def views(self, name: str) -> Iterator[tuple[str, View]]:
        """(source, view) for each block, taking this tensor as an image tensor of the given name."""
        shape = tuple(self.shape)
        for block in _coalesced(self.blocks):
            dims: list[int | None] = [None] * len(shape)
            box = []
            for dimension, (at, axis) in enumerate(block.origin):
                extent = 1 if axis is None else block.extent[axis]
                box.append((at, at + extent))
                if axis is not None:
                    dims[axis] = dimension
            if self._fill_free(dims, block):
                yield (
                    block.source,
                    View(tuple(box), name, shape, block.at, tuple(d for d in dims if d is not None)),
                )
            else:
                self.reasons[block.source] = "a reshape that adds dimensions"

    @staticmethod
    def _fill_free(dims: list[int | None], block: Block) -> bool:
        """Give axes of extent one along which nothing runs a dimension of the source that stands still."""
        spare = [dimension for dimension, (_, axis) in enumerate(block.origin) if axis is None]
        for axis, dimension in enumerate(dims):
            if dimension is None:
                if not spare:
                    return False
                dims[axis] = spare.pop(0)
        return True


def _opaque(func: Any, inputs: list[Traced], args: Any, kwargs: Any) -> Any:
    """The result's shapes from torch's own shape functions, and the reason why there are no blocks."""
    reasons: dict[str, str] = {}
    for tensor in inputs:
        reasons.update(tensor.reasons)
        reasons.update(dict.fromkeys((block.source for block in tensor.blocks), str(func)))
    plain_args, plain_kwargs = pytree.tree_map_only(
        Traced, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), (args, kwargs)
    )
    made = func(*plain_args, **plain_kwargs)
    return pytree.tree_map_only(torch.Tensor, lambda t: Traced(t.shape, t.dtype, [], dict(reasons)), made)


def _put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _cut(values: tuple[int, ...], index: int) -> tuple[int, ...]:
    return (*values[:index], *values[index + 1 :])


def _coalesced(blocks: list[Block]) -> list[Block]:
    """Neighbours that continue each other in both the tensor and the source, joined."""
    if len(blocks) < 2:
        return blocks
    for axis in reversed(range(len(blocks[0].at))):
        blocks = _joined(blocks, axis)
    return blocks


def _joined(blocks: list[Block], axis: int) -> list[Block]:
    def elsewhere(block: Block) -> tuple[Any, ...]:
        origin = tuple((-1 if a == axis else at, -1 if a is None else a) for at, a in block.origin)
        return (block.source, origin, _cut(block.at, axis), _cut(block.extent, axis))

    done: list[Block] = []
    for block in sorted(blocks, key=lambda b: (elsewhere(b), b.at[axis])):
        last = done[-1] if done else None
        if last is not None and elsewhere(last) == elsewhere(block) and _continues(last, block, axis):
            done[-1] = replace(last, extent=_put(last.extent, axis, last.extent[axis] + block.extent[axis]))
        else:
            done.append(block)
    return done


def _continues(first: Block, second: Block, axis: int) -> bool:
    length = first.extent[axis]
    runs = [(a, b) for (a, along), (b, _) in zip(first.origin, second.origin, strict=True) if along == axis]
    return first.at[axis] + length == second.at[axis] and len(runs) == 1 and runs[0][0] + length == runs[0][1]


# Operations


def _made(like: Traced, shape: Sequence[int], blocks: Iterable[Block]) -> Traced:
    return Traced(shape, like.dtype, list(blocks), {})


def _narrow(tensor: Traced, axis: int, low: int, high: int) -> Traced:
    parts = (block.narrow(axis, low, high) for block in tensor.blocks)
    return _made(tensor, _put(tuple(tensor.shape), axis, high - low), (part for part in parts if part))


def _same(tensor: Traced, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("dtype") not in (None, tensor.dtype):
        return NotImplemented
    return _made(tensor, tensor.shape, tensor.blocks)


def _slice(
    tensor: Traced, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    if step != 1:
        return NotImplemented
    axis = dim % tensor.dim()
    low, high, _ = slice(start, end).indices(tensor.shape[axis])
    return _narrow(tensor, axis, low, max(low, high))


def _select(tensor: Traced, dim: int, index: int) -> Traced:
    axis = dim % tensor.dim()
    index %= tensor.shape[axis]
    one = _narrow(tensor, axis, index, index + 1)
    return _made(tensor, _cut(tuple(tensor.shape), axis), (block.without(axis) for block in one.blocks))


def _unbind(tensor: Traced, dim: int = 0) -> list[Traced]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _split_sizes(tensor: Traced, sizes: Sequence[int], dim: int = 0) -> list[Traced]:
    axis, start, parts = dim % tensor.dim(), 0, []
    for size in sizes:
        parts.append(_narrow(tensor, axis, start, start + size))
        start += size
    return parts


def _split(tensor: Traced, size: int, dim: int = 0) -> list[Traced]:
    total = tensor.shape[dim]
    return _split_sizes(tensor, [min(size, total - at) for at in range(0, total, size)] or [0], dim)


def _permute(tensor: Traced, dims: Sequence[int]) -> Traced:
    order = [dim % tensor.dim() for dim in dims]
    return _made(tensor, [tensor.shape[a] for a in order], (block.permuted(order) for block in tensor.blocks))


def _transpose(tensor: Traced, dim0: int = 0, dim1: int = 1) -> Traced:
    order = list(range(tensor.dim()))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(tensor, order)


def _squeeze(tensor: Traced, dim: int | Sequence[int] | None = None) -> Any:
    wanted = range(tensor.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    for axis in sorted({axis % tensor.dim() for axis in wanted}, reverse=True):
        if tensor.shape[axis] == 1:
            tensor = _select(tensor, axis, 0)
    # torch does not accept its argument back as the result of a view.
    return _same(tensor)


def _unsqueeze(tensor: Traced, dim: int) -> Traced:
    axis = dim % (tensor.dim() + 1)
    shape = (*tensor.shape[:axis], 1, *tensor.shape[axis:])
    return _made(tensor, shape, (block.with_axis(axis) for block in tensor.blocks))


def _cat(tensors: Sequence[Traced], dim: int = 0) -> Any:
    first = tensors[0]
    if any(not isinstance(tensor, Traced) or tensor.dtype != first.dtype for tensor in tensors):
        return NotImplemented
    axis, start, blocks = dim % first.dim(), 0, []
    for tensor in tensors:
        blocks += [block.shifted(axis, start) for block in tensor.blocks]
        start += tensor.shape[axis]
    return _made(first, _put(tuple(first.shape), axis, start), blocks)


def _stack(tensors: Sequence[Traced], dim: int = 0) -> Any:
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim % (tensors[0].dim() + 1))


def _reshape(tensor: Traced, shape: Sequence[int]) -> Any:
    target = list(shape)
    if -1 in target:
        known = -math.prod(target)
        target[target.index(-1)] = tensor.numel() // known if known else 0
    if tensor.numel() == 0:
        return _made(tensor, target, ())
    blocks, sizes = tensor.blocks, list(tensor.shape)
    # From left to right: merge axes until a target size divides what is there, then divide it off.
    for axis, size in enumerate(target):
        if axis == len(sizes):
            blocks, sizes = [block.with_axis(axis) for block in blocks], [*sizes, 1]
        while sizes[axis] % size or sizes[axis] < size:
            if sizes[axis + 1] != 1 and sum(block.extent[axis] for block in blocks) > BLOCK_LIMIT:
                return NotImplemented
            blocks = [row for block in blocks for row in block.merged(axis, sizes[axis + 1])]
            sizes[axis : axis + 2] = [sizes[axis] * sizes[axis + 1]]
        if sizes[axis] != size:
            inner = sizes[axis] // size
            blocks = [part for block in blocks for part in block.divided(axis, inner)]
            sizes[axis : axis + 1] = [size, inner]
        if len(blocks) > BLOCK_LIMIT:
            break
    # What is left are axes of extent one.
    while len(sizes) > len(target) and len(blocks) <= BLOCK_LIMIT:
        blocks = [block.without(len(target)) for block in blocks]
        del sizes[len(target)]
    return _made(tensor, target, _coalesced(blocks) if len(blocks) <= BLOCK_LIMIT else blocks)


_aten = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.alias: _same,
    _aten.clone: _same,
    _aten.contiguous: _same,
    _aten.detach: _same,
    _aten._to_copy: _same,
    _aten.lift_fresh: _same,
    _aten.slice: _slice,
    _aten.select: _select,
    _aten.unbind: _unbind,
    _aten.split: _split,
    _aten.split_with_sizes: _split_sizes,
    _aten.permute: _permute,
    _aten.transpose: _transpose,
    _aten.t: _transpose,
    _aten.squeeze: _squeeze,
    _aten.unsqueeze: _unsqueeze,
    _aten.cat: _cat,
    _aten.stack: _stack,
    _aten.view: _reshape,
    _aten.reshape: _reshape,
    _aten._unsafe_view: _reshape,
    _aten._reshape_alias: lambda tensor, shape, stride: _reshape(tensor, shape),
}
