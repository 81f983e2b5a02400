"""Parameters that travel together.

Extractors make chunks, senders take them; nothing else is assumed about either. This module needs no torch: a
tensor is whatever has a dtype, a shape and a size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.errors import WindlassInvalid

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
    packed: bool = False

    def __post_init__(self) -> None:
        columns = {"names": self.names, "tensors": self.tensors, "dtypes": self.dtypes, "shapes": self.shapes}
        for column, values in columns.items():
            # Column by column a caller may hand over tuples; requests are written from lists.
            object.__setattr__(self, column, list(values))
        object.__setattr__(self, "shapes", [[int(size) for size in shape] for shape in self.shapes])
        lengths = {column: len(values) for column, values in columns.items()}
        if len(set(lengths.values())) != 1:
            raise WindlassInvalid(f"a chunk's columns differ in length: {lengths}", "give one entry per parameter")
        if len(set(self.names)) != len(self.names):
            twice = sorted({name for name in self.names if self.names.count(name) > 1})
            raise WindlassInvalid(f"a chunk names {twice[0]!r} twice", "names are keys at the receiver")
        for position in range(len(self.names)):
            self._check(position)

    def _check(self, position: int) -> None:
        name, tensor = self.names[position], self.tensors[position]
        dtype, shape = _dtype_name(tensor.dtype), list(tensor.shape)
        # Every spelling that requests accept names the same dtype; a chunk keeps the canonical one.
        given = _dtype_name(self.dtypes[position])
        if given != dtype:
            raise WindlassInvalid(f"{name!r} is {dtype}, but its chunk says {given}", "take it from the tensor")
        self.dtypes[position] = given
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
            dtypes=[_dtype_name(tensor.dtype) for _, tensor in pairs],
            shapes=[list(tensor.shape) for _, tensor in pairs],
            module_name=module_name,
            packed=packed,
        )

    @property
    def total_size_bytes(self) -> int:
        """Bytes of all tensors, as they would lie without gaps."""
        return sum(_numel(tensor.shape) * tensor.element_size() for tensor in self.tensors)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return zip(self.names, self.tensors)


def _numel(shape: Sequence[int]) -> int:
    return math.prod(shape)


def _dtype_name(dtype: Any) -> str:
    """``bfloat16`` for ``torch.bfloat16`` and for either spelling of it."""
    return str(dtype).removeprefix("torch.")
