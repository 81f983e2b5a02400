"""Parameters that travel together.

Extractors make chunks, senders take them; nothing else is assumed about either. This module needs no torch: a
tensor is whatever has a dtype, a shape and a size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from windlass import _windlass
from windlass.errors import WindlassInvalid
from windlass.names.dtypes import canonical_dtype

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["WeightChunk"]


@dataclass(frozen=True, eq=False)
class WeightChunk:
    """Some weights with their names, dtypes and shapes, column by column.

    The columns have one length, every name is there once, and dtypes and shapes are those of the tensors; with
    ``packed`` the tensors are slices of one buffer. ``module_name`` is there when the chunk is one module.
    Tensors may be views and need not be contiguous: a sender that wants flat bytes asks for them.

    >>> import torch
    >>> chunk = WeightChunk.of([("lm_head.weight", torch.zeros(4, 2, dtype=torch.bfloat16))])
    >>> chunk.dtypes, chunk.shapes, chunk.total_size_bytes, len(chunk)
    (['bfloat16'], [[4, 2]], 16, 1)
    """

    names: list[str]
    tensors: list[Tensor]
    dtypes: list[str]
    shapes: list[list[int]]
    module_name: str | None = None
    #: Bytes of all tensors, as they would lie without gaps. Counted; one that is given must be right.
    total_size_bytes: int | None = None
    packed: bool = False

    def __post_init__(self) -> None:
        if self.tensors is None:
            raise WindlassInvalid(
                "a chunk has no tensors",
                "what only has names, dtypes and shapes is a request: create_request(chunk)",
            )
        # Column by column a caller may hand over tuples; requests are written from lists.
        object.__setattr__(self, "names", list(self.names))
        object.__setattr__(self, "tensors", list(self.tensors))
        object.__setattr__(self, "dtypes", [canonical_dtype(dtype) for dtype in self.dtypes])
        object.__setattr__(self, "shapes", [[int(size) for size in shape] for shape in self.shapes])
        lengths = [len(self.names), len(self.tensors), len(self.dtypes), len(self.shapes)]
        if len(set(lengths)) != 1:
            of = "{} names, {} tensors, {} dtypes and {} shapes".format(*lengths)
            raise WindlassInvalid(f"a chunk has {of}", "give one of each for every parameter")
        if len(set(self.names)) != len(self.names):
            twice = sorted({name for name in self.names if self.names.count(name) > 1})
            raise WindlassInvalid(f"a chunk names {twice[0]!r} twice", "names are keys at the receiver")
        for position in range(len(self.names)):
            self._check(position)
        counted = _bytes(self.tensors)
        if self.total_size_bytes not in (None, counted):
            raise WindlassInvalid(
                f"a chunk's total_size_bytes is {self.total_size_bytes}, and its tensors have {counted} bytes",
                "leave it out: it is counted",
            )
        object.__setattr__(self, "total_size_bytes", counted)

    def _check(self, position: int) -> None:
        name, tensor = self.names[position], self.tensors[position]
        dtype, shape = _windlass.dtype_name(str(tensor.dtype)), list(tensor.shape)
        if self.dtypes[position] != dtype:
            raise WindlassInvalid(
                f"{name!r} is {dtype}, but its chunk says {self.dtypes[position]}", "take it from the tensor"
            )
        if self.shapes[position] != shape:
            raise WindlassInvalid(
                f"{name!r} has shape {shape}, but its chunk says {self.shapes[position]}",
                "take it from the tensor",
            )

    @classmethod
    def of(
        cls, weights: Iterable[tuple[str, Tensor]], *, module_name: str | None = None, packed: bool = False
    ) -> WeightChunk:
        """The chunk of these weights, with dtypes and shapes as the tensors have them."""
        pairs = list(weights)
        return cls(
            names=[name for name, _ in pairs],
            tensors=[tensor for _, tensor in pairs],
            dtypes=[str(tensor.dtype) for _, tensor in pairs],
            shapes=[list(tensor.shape) for _, tensor in pairs],
            module_name=module_name,
            packed=packed,
        )

    @classmethod
    def joined(cls, chunks: Sequence[WeightChunk]) -> WeightChunk:
        """Several chunks without a name in common as one; each was checked when it was made."""
        joined = object.__new__(cls)
        for column in ("names", "tensors", "dtypes", "shapes"):
            object.__setattr__(joined, column, [item for c in chunks for item in getattr(c, column)])
        object.__setattr__(joined, "module_name", None)
        object.__setattr__(joined, "total_size_bytes", sum(chunk.total_size_bytes for chunk in chunks))
        object.__setattr__(joined, "packed", False)
        return joined

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return zip(self.names, self.tensors)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors)
