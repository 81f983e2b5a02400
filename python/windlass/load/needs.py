"""What of an image an engine's worker reads.

Owns: :func:`needs_of`, which turns a rehearsal (:mod:`windlass.load.trace`) into a selection, and :func:`blank`, tensors of
a layout for a rehearsal before there is an image. Called by :mod:`windlass.load.live`. Must
not: know where an image is.

A box that the worker reads by strides is rounded up to whole rows where it cannot be told otherwise, never down.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from windlass.receive.reading import Selection, distinct
from windlass.receive.receiver import Tensors

if TYPE_CHECKING:
    from windlass._windlass import Layout
    from windlass.load.trace import Copy, Trace

__all__ = ["blank", "needs_of"]

#: Memory that is only read costs none: every page of it is the kernel's page of zeros.
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)


def blank(layout: Layout) -> Tensors:
    """Tensors of a layout that are all zeros, and take no memory while they are only read."""
    return Tensors.laid(layout, mmap.mmap(-1, max(1, layout.data_bytes), flags=_PRIVATE))


def needs_of(found: Trace, layout: Layout) -> Selection:
    """What a worker reads of an image of this layout, by the rehearsal of its loader."""
    rows = {name: (dtype, shape) for name, dtype, shape, _, _ in layout.tensors()}
    aliases = layout.aliases()
    copies: dict[str, list[Copy]] = {}
    for copy in found.copies:
        copies.setdefault(copy.source, []).append(copy)
    out: Selection = {}
    for name in sorted(found.reached):
        dtype, shape = rows[aliases.get(name, name)]
        # Where an operation lies between a tensor and a parameter, it is not known what of the tensor it reads.
        # Of a packed dtype torch counts pairs.
        seen = (
            found.refusal is None
            and name not in found.written_sources
            and not found.reached[name] & found.reasons.keys()
            and dtype != "float4_e2m1fn_x2"
            and 0 not in shape
        )
        boxes = [_box(copy, shape) for copy in copies.get(name, [])] if seen else []
        out[name] = distinct(boxes or [[[0, size] for size in shape]])
    return out


def _box(copy: Copy, shape: list[int]) -> list[list[int]]:
    """The smallest box of a tensor that has all that a copy reads; whole rows if the copy cuts across them."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    first = _at(copy.source_offset, strides)
    last = list(first)
    for size, stride in zip(copy.sizes, copy.source_strides, strict=True):
        for dim, step in enumerate(_at(stride, strides)):
            last[dim] += step * (size - 1)
    if all(end < size for end, size in zip(last, shape)):
        return [[begin, end + 1] for begin, end in zip(first, last)]
    end = copy.source_offset + sum((n - 1) * s for n, s in zip(copy.sizes, copy.source_strides))
    rows = [copy.source_offset // strides[0], end // strides[0] + 1] if shape else []
    return [rows, *([0, size] for size in shape[1:])] if shape else []


def _at(element: int, strides: list[int]) -> list[int]:
    """The coordinates of an element, or of a step, in a tensor with these strides."""
    out = []
    for stride in strides:
        out.append(element // stride)
        element %= stride
    return out
