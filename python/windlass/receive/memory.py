"""Memory of a slot or an image as torch tensors, without a copy.

Called by the manager and by tests; users meet it as :attr:`windlass.Image.tensors`. A tensor keeps the memory
mapped. What the memory holds may change once the lease or the attempt that it came from has ended.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from windlass.dtypes import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from windlass._windlass import Memory


def flat(memory: Memory | Buffer) -> torch.Tensor:
    """All of ``memory`` as one tensor of bytes."""
    from windlass import _windlass

    if not isinstance(memory, _windlass.Memory):
        return torch.frombuffer(memory, dtype=torch.uint8)
    if memory.length == 0:
        return torch.empty(0, dtype=torch.uint8)
    array = (ctypes.c_uint8 * memory.length).from_address(memory.address)
    # torch keeps the array, and the array keeps the mapping.
    array._windlass_owner = memory  # type: ignore[attr-defined]
    return torch.frombuffer(array, dtype=torch.uint8)


def tensor_at(data: torch.Tensor, offset: int, size: int, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """The tensor that lies at ``offset`` of ``data`` (see :func:`flat`)."""
    kind = torch_dtype(dtype)
    if size == 0:
        return torch.empty(tuple(shape), dtype=kind)
    return data[offset : offset + size].view(kind).view(tuple(shape))
