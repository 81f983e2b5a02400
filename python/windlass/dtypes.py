"""torch dtypes and their names.

One table for both directions. Names are the canonical ones (``"bfloat16"``); other spellings are understood by
``windlass._windlass``. Must not be imported by ``import windlass``: it needs torch.
"""

from __future__ import annotations

import torch

from windlass.errors import WindlassUnsupported

__all__ = ["dtype_name", "torch_dtype"]

_NAMES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "uint16",
    "float16",
    "bfloat16",
    "int32",
    "uint32",
    "float32",
    "int64",
    "uint64",
    "float64",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float4_e2m1fn_x2",
]
#: Those that this torch has.
_BY_NAME: dict[str, torch.dtype] = {n: getattr(torch, n) for n in _NAMES if hasattr(torch, n)}
_BY_DTYPE = {dtype: name for name, dtype in _BY_NAME.items()}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of this name.

    >>> torch_dtype("bfloat16")
    torch.bfloat16
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise WindlassUnsupported(f"this torch ({torch.__version__}) has no dtype {name!r}") from None


def dtype_name(dtype: torch.dtype) -> str:
    """The canonical name of a torch dtype.

    >>> dtype_name(torch.float8_e4m3fn)
    'float8_e4m3fn'
    """
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        raise WindlassUnsupported(
            f"{dtype} has no place in a safetensors file; cast it, or exclude the tensor"
        ) from None
