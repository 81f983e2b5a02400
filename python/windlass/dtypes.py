"""torch dtypes and their names.

Names are the canonical ones (``"bfloat16"``), which are torch's own; the table of those that a safetensors file can
hold is the core's. Must not be imported by ``import windlass``: it needs torch.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from windlass import _windlass
from windlass.errors import WindlassInvalid, WindlassUnsupported
from windlass.names.dtypes import canonical_dtype

__all__ = ["Dtype", "dtype_name", "torch_dtype"]

#: A dtype as torch knows it, or its name.
Dtype: TypeAlias = torch.dtype | str


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """torch's own dtype for any spelling of it.

    >>> torch_dtype("BF16"), torch_dtype("bf16"), torch_dtype("torch.float32"), torch_dtype(torch.int8)
    (torch.bfloat16, torch.bfloat16, torch.float32, torch.int8)
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, canonical_dtype(dtype), None)
    if not isinstance(found, torch.dtype):
        raise WindlassUnsupported(f"this torch ({torch.__version__}) has no dtype {dtype!r}; use a newer one")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """The canonical name of a torch dtype.

    >>> dtype_name(torch.float8_e4m3fn)
    'float8_e4m3fn'
    """
    try:
        return _windlass.dtype_name(str(dtype))
    except WindlassInvalid as e:
        raise WindlassUnsupported(
            f"{dtype} has no place in a safetensors file; cast it, or exclude the tensor"
        ) from e
