"""zstd by the system's library, from and into memory that is there: machines without a package index have no package for it."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import torch


@functools.cache
def library() -> Any:
    found = ctypes.CDLL("libzstd.so.1")
    found.ZSTD_versionString.restype = ctypes.c_char_p
    found.ZSTD_getErrorName.restype = ctypes.c_char_p
    found.ZSTD_getErrorName.argtypes = [ctypes.c_size_t]
    found.ZSTD_compressBound.restype = ctypes.c_size_t
    found.ZSTD_compressBound.argtypes = [ctypes.c_size_t]
    for end, letter in (("compress", "C"), ("decompress", "D")):
        make, use = getattr(found, f"ZSTD_create{letter}Ctx"), getattr(found, f"ZSTD_{end}{letter}Ctx")
        make.restype, make.argtypes = ctypes.c_void_p, []
        use.restype = ctypes.c_size_t
        use.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t]
    found.ZSTD_compressCCtx.argtypes = [*found.ZSTD_compressCCtx.argtypes, ctypes.c_int]
    return found


def version() -> str:
    return str(library().ZSTD_versionString().decode())


def room(size: int) -> int:
    """How much so many bytes take compressed, at the most."""
    return int(library().ZSTD_compressBound(size))


_own = threading.local()


def _context(kind: str) -> Any:
    """Of this thread, for its life."""
    if not hasattr(_own, kind):
        setattr(_own, kind, getattr(library(), f"ZSTD_create{kind}")())
    return getattr(_own, kind)


def _checked(code: int) -> int:
    if library().ZSTD_isError(ctypes.c_size_t(code)):
        raise RuntimeError(f"zstd: {library().ZSTD_getErrorName(code).decode()}")
    return code


def compress(data: torch.Tensor, into: torch.Tensor, level: int) -> int:
    """Bytes into others; how many these are."""
    words = (into.data_ptr(), into.numel(), data.data_ptr(), data.numel(), level)
    return _checked(library().ZSTD_compressCCtx(_context("CCtx"), *words))


def decompress(data: torch.Tensor, into: torch.Tensor) -> None:
    """All of what was compressed, which must fill its place."""
    words = (into.data_ptr(), into.numel(), data.data_ptr(), data.numel())
    size = _checked(library().ZSTD_decompressDCtx(_context("DCtx"), *words))
    if size != into.numel():
        raise RuntimeError(f"zstd: {size} bytes came where {into.numel()} were expected")
