"""What a checkpoint holds and where, from the headers of its safetensors files. No tensor is read.

Format: eight bytes, little-endian, give the length of a JSON object, which follows; it maps each tensor's
name to its dtype, shape and byte range behind the header, and `__metadata__` to strings. A checkpoint is one
such file, or a directory of several, usually with an index (`model.safetensors.index.json`) whose
`weight_map` says which file has which tensor. Every number is checked before it is used.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass import _windlass
from windlass.errors import WindlassCorrupt, WindlassInvalid, WindlassNotFound
from windlass.names.dtypes import canonical_dtype
from windlass.names.view import Shape

if TYPE_CHECKING:
    from typing import TypeGuard

__all__ = ["Layout", "Stored", "checkpoint_layout", "stored_tensors"]

#: By name: canonical dtype and shape.
Layout = dict[str, tuple[str, Shape]]


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file."""

    file: Path
    #: Where its bytes begin in the file, and how many they are.
    offset: int
    size: int
    #: Its canonical dtype.
    dtype: str
    shape: Shape


#: The limit of the safetensors library itself.
_HEADER_LIMIT = 100_000_000
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def checkpoint_layout(path: str | os.PathLike[str]) -> Layout:
    """The names, dtypes and shapes of a checkpoint: a safetensors file, an index, or a directory.

    In a directory an index counts first, then `model.safetensors`, then all safetensors files but adapters' and a
    `consolidated.safetensors` that holds the same in another format.
    """
    return {name: (stored.dtype, stored.shape) for name, stored in stored_tensors(path).items()}


def stored_tensors(path: str | os.PathLike[str]) -> dict[str, Stored]:
    """Where the tensors of a checkpoint are, by name; see :func:`checkpoint_layout`."""
    where = Path(path)
    if where.is_dir():
        if (where / _INDEX).is_file():
            return _indexed(where / _INDEX)
        if (where / _SINGLE).is_file():
            return _header(where / _SINGLE)
        files = sorted(file for file in where.glob("*.safetensors") if not file.name.startswith("adapter_"))
        files = [file for file in files if file.name != "consolidated.safetensors"] or files
        if not files:
            raise WindlassNotFound(f"there is no safetensors file in {str(where)!r}")
        return _union(files)
    if not where.is_file():
        raise WindlassNotFound(f"there is no checkpoint at {str(where)!r}")
    return _indexed(where) if where.suffix == ".json" else _header(where)


def _union(files: Iterable[Path]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for file in files:
        for name, stored in _header(file).items():
            if name in found:
                raise WindlassInvalid(
                    f"tensor {name!r} is in both {found[name].file.name} and {file.name}",
                    "name one file, or an index that says which of them counts",
                )
            found[name] = stored
    return found


def _indexed(index: Path) -> dict[str, Stored]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = dict(weight_map)
    except (ValueError, KeyError, TypeError) as error:
        raise WindlassCorrupt(f"{str(index)!r} is no index of safetensors files: {error}") from error
    headers: dict[str, dict[str, Stored]] = {}
    found: dict[str, Stored] = {}
    for name, file in names.items():
        # An index must not lead out of its own directory: nobody loads by it what lies elsewhere.
        if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file:
            raise WindlassCorrupt(
                f"{str(index)!r} names the file {file!r} for {name!r}, which is no plain file name"
            )
        if file not in headers:
            if not (index.parent / file).is_file():
                raise WindlassNotFound(f"{str(index)!r} names {file!r}, which is not there")
            headers[file] = _header(index.parent / file)
        if name not in headers[file]:
            raise WindlassCorrupt(f"{str(index)!r} says that {name!r} is in {file!r}, but it is not")
        found[name] = headers[file][name]
    return found


def _header(file: Path) -> dict[str, Stored]:
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise WindlassCorrupt(f"{str(file)!r} is no safetensors file: it has only {size} bytes")
        length = int.from_bytes(prefix, "little")
        if length > min(_HEADER_LIMIT, size - 8):
            raise WindlassCorrupt(
                f"{str(file)!r} announces a header of {length} bytes, but has {size} in all"
            )
        text = stream.read(length)
    try:
        entries = json.loads(text, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise WindlassCorrupt(f"the header of {str(file)!r} is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise WindlassCorrupt(f"the header of {str(file)!r} is no JSON object")
    entries.pop("__metadata__", None)
    return {name: _entry(file, name, entry, 8 + length, size) for name, entry in entries.items()}


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name occurs twice")
    return made


def _entry(file: Path, name: str, entry: Any, begins: int, size: int) -> Stored:
    if not isinstance(entry, dict):
        raise WindlassCorrupt(f"the entry of {name!r} in {str(file)!r} is no JSON object")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise WindlassCorrupt(
            f"the entry of {name!r} in {str(file)!r} lacks a shape or a byte range: {entry}"
        )
    dtype = canonical_dtype(entry.get("dtype"))
    bits = math.prod(shape) * _windlass.dtype_bits(dtype)
    data = size - begins
    begin, end = offsets
    if begin > end or end > data or bits % 8 or end - begin != bits // 8:
        raise WindlassCorrupt(
            f"{name!r} in {str(file)!r} has the byte range {begin}..{end} of {data}, "
            f"but {dtype} of shape {shape} needs {bits} bits"
        )
    return Stored(file, begins + begin, end - begin, dtype, tuple(shape))


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
