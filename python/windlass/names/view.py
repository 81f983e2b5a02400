"""Views: which box of a parameter stands where in which tensor of the image.

Pure arithmetic on names and shapes; nothing here reads a tensor. Positions are half-open ranges of a
parameter's *global* shape, so that a rank may intersect them with whatever it holds and copy without asking
anybody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from windlass.errors import WindlassInvalid

__all__ = ["AsTheyAre", "Box", "Shape", "View", "compose", "split_rows", "tile_exactly", "transpose", "whole"]

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class View:
    """A box of a parameter, and where it stands in a tensor of the image.

    >>> box = ((3, 4), (0, 8), (0, 16))
    >>> View(box, name="experts.3.gate.weight", shape=(8, 16), at=(0, 0), dims=(1, 2)).extent
    (8, 16)
    """

    #: (start, stop) for each dimension of the parameter's global shape.
    box: Box
    #: The tensor of the image: a Hugging Face checkpoint name.
    name: str
    #: The whole shape of that tensor.
    shape: Shape
    #: Where the box starts in that tensor.
    at: Shape
    #: For each dimension of the image tensor, the parameter's dimension. A parameter's dimension that is left
    #: out has extent 1 in the box.
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise WindlassInvalid(f"the view of {self.name!r} is malformed: {problem} ({self!r})")

    def _problem(self) -> str | None:
        if len(self.at) != len(self.shape) or len(self.dims) != len(self.shape):
            return f"shape, at and dims must have {len(self.shape)} entries each"
        if len(set(self.dims)) != len(self.dims) or any(not 0 <= dim < len(self.box) for dim in self.dims):
            return f"dims must be distinct dimensions of a parameter that has {len(self.box)}"
        if any(start < 0 or stop < start for start, stop in self.box):
            return "a range of the box is negative or ends before it starts"
        used = set(self.dims)
        if any(stop - start != 1 for dim, (start, stop) in enumerate(self.box) if dim not in used):
            return "a dimension that is left out must have extent 1 in the box"
        for start, extent, size in zip(self.at, self.extent, self.shape, strict=True):
            if start < 0 or start + extent > size:
                return "the box does not fit into the image tensor"
        return None

    @property
    def extent(self) -> Shape:
        """The box's sizes in the order of the image tensor's dimensions."""
        return tuple(self.box[dim][1] - self.box[dim][0] for dim in self.dims)

    @property
    def image_box(self) -> Box:
        """The range that the box fills in each dimension of the image tensor."""
        return tuple((at, at + extent) for at, extent in zip(self.at, self.extent, strict=True))


class AsTheyAre:
    """Names that are those of the image already, in place of a :class:`windlass.SourceMap`."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = dict(shapes)

    def views(self, name: str, shape: Iterable[int]) -> tuple[View, ...]:
        """The tensor itself."""
        return (whole(name, tuple(shape)),)

    def written(self) -> dict[str, Shape]:
        """All of them belong to the image."""
        return self._shapes


def whole(name: str, shape: Shape) -> View:
    """The view of a parameter that is an image tensor as it stands.

    >>> whole("norm.weight", (16,)).box
    ((0, 16),)
    """
    return View(tuple((0, size) for size in shape), name, shape, (0,) * len(shape), tuple(range(len(shape))))


def transpose(name: str, shape: Shape, dims: Sequence[int] | None = None) -> list[View]:
    """The view of a parameter whose dimensions the image holds in another order (reversed without `dims`).

    >>> [view] = transpose("proj.weight", (4, 6))
    >>> view.shape, view.dims
    ((6, 4), (1, 0))
    """
    order = tuple(reversed(range(len(shape)))) if dims is None else tuple(dims)
    if sorted(order) != list(range(len(shape))):
        raise WindlassInvalid(f"{name!r} has {len(shape)} dimensions; {order} is no permutation of them")
    box = tuple((0, size) for size in shape)
    return [View(box, name, tuple(shape[dim] for dim in order), (0,) * len(shape), order)]


def split_rows(name: str, shape: Shape, sizes: Mapping[str, int], dim: int = 0) -> list[View]:
    """The views of a fused parameter: `sizes` gives the image tensors (whole names) and their rows, in order.

    `dim` cuts along another dimension than the first.

    >>> views = split_rows("qkv", (12, 8), {"q": 8, "k": 2, "v": 2})
    >>> [(view.name, view.box[0], view.shape) for view in views]
    [('q', (0, 8), (8, 8)), ('k', (8, 10), (2, 8)), ('v', (10, 12), (2, 8))]
    """
    if not -len(shape) <= dim < len(shape):
        raise WindlassInvalid(f"parameter {name!r} of shape {list(shape)} has no dimension {dim} to split")
    dim %= len(shape)
    total = sum(sizes.values())
    if total != shape[dim] or any(size < 0 for size in sizes.values()):
        parts = ", ".join(f"{part} {size}" for part, size in sizes.items())
        raise WindlassInvalid(
            f"parameter {name!r} has {shape[dim]} rows in dimension {dim}, its parts {total} ({parts})",
            "give sizes that add up to the parameter's",
        )
    views, start = [], 0
    for part, size in sizes.items():
        box = tuple((start, start + size) if d == dim else (0, n) for d, n in enumerate(shape))
        part_shape = tuple(size if d == dim else n for d, n in enumerate(shape))
        views.append(View(box, part, part_shape, (0,) * len(shape), tuple(range(len(shape)))))
        start += size
    return views


def compose(first: View, then: Iterable[View]) -> Iterator[View]:
    """The views of a parameter on what `then` makes of the image tensor that `first` leads to.

    Parts of that tensor which `first` does not fill are skipped.
    """
    for second in then:
        box = list(first.box)
        at = list(second.at)
        empty = False
        for dim, ((a, b), (c, d)) in enumerate(zip(first.image_box, second.box, strict=True)):
            low, high = max(a, c), min(b, d)
            # A dimension without elements is still a dimension: only a real miss is a miss.
            if high < low or (high == low and a < b and c < d):
                empty = True
                break
            source = first.dims[dim]
            start = first.box[source][0] + low - a
            box[source] = (start, start + high - low)
            if dim in second.dims:
                at[second.dims.index(dim)] += low - c
        if not empty:
            dims = tuple(first.dims[dim] for dim in second.dims)
            yield View(tuple(box), second.name, second.shape, tuple(at), dims)


def tile_exactly(boxes: Sequence[Box], shape: Shape) -> bool:
    """Whether the boxes cover every element of the shape exactly once.

    >>> tile_exactly([((0, 2), (0, 3)), ((2, 4), (0, 3))], (4, 3))
    True
    >>> tile_exactly([((0, 2), (0, 3)), ((1, 4), (0, 3))], (4, 3))
    False
    """
    if math.prod(shape) == 0:
        return all(math.prod(stop - start for start, stop in box) == 0 for box in boxes)
    # Equal volumes rule out most mistakes for little.
    if sum(math.prod(stop - start for start, stop in box) for box in boxes) != math.prod(shape):
        return False
    return _tiles(boxes, shape, 0)


def _tiles(boxes: Sequence[Box], shape: Shape, dim: int) -> bool:
    if dim == len(shape):
        return len(boxes) == 1
    if len(boxes) == 1:
        return all(boxes[0][d] == (0, shape[d]) for d in range(dim, len(shape)))
    marks = sorted({mark for box in boxes for mark in box[dim]})
    if not marks or marks[0] != 0 or marks[-1] != shape[dim]:
        return False
    position = {mark: index for index, mark in enumerate(marks)}
    strips: list[list[Box]] = [[] for _ in marks[1:]]
    for box in boxes:
        for index in range(position[box[dim][0]], position[box[dim][1]]):
            strips[index].append(box)
    return all(_tiles(strip, shape, dim + 1) for strip in strips)
