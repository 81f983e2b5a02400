"""Boxes of tensors: where they meet, and how the ranks that hold the same one divide it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from windlass.publish.placement import Box

__all__ = ["boxes_overlap", "intersect", "slice_of", "volume"]

#: A box smaller than this is written by one of its holders, not by all.
SMALL = 1 << 20


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes share."""
    out = tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b, strict=True))
    return None if any(s >= e for s, e in out) else out


def volume(box: Box) -> int:
    """Elements in a box."""
    return math.prod(e - s for s, e in box)


def boxes_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, if there are any."""
    if len(boxes) < 2:
        return None
    if len(set(boxes)) < len(boxes):
        twice = next(b for i, b in enumerate(boxes) if b in boxes[:i])
        return twice, twice
    rank = len(boxes[0])
    varying = [d for d in range(rank) if any(b[d] != boxes[0][d] for b in boxes)]
    if len(varying) == 1:
        # Sharded along one dimension, the usual case: neighbours tell.
        d = varying[0]
        ordered = sorted(boxes, key=lambda b: b[d])
        for a, b in zip(ordered, ordered[1:], strict=False):
            if a[d][1] > b[d][0]:
                return a, b
        return None
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            if intersect(a, b) is not None:
                return a, b
    return None


def slice_of(box: Box, index: int, count: int, element: int, turn: int) -> Box | None:
    """The part of a box that the holder ``index`` of ``count`` writes."""
    if count == 1:
        return box
    if volume(box) * element < SMALL or not box:
        return box if index == turn % count else None
    # Along the first dimension that has a row for each: those rows are contiguous in the image.
    dim = next((d for d, (s, e) in enumerate(box) if e - s >= count), None)
    if dim is None:
        return box if index == turn % count else None
    start, stop = box[dim]
    size = stop - start
    low, high = start + size * index // count, start + size * (index + 1) // count
    return (*box[:dim], (low, high), *box[dim + 1 :])
