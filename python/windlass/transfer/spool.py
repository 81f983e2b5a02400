"""Weights on disk, until it is known how many there are.

Owns: :class:`Spool`. An image and an adapter's file begin with a table of all their tensors, and chunks say only what is in
each of them. So where nobody has seen them before, they go through a file without a name. Each tensor is mapped by itself, so
that those that nobody reads are not in the memory of this process. The file is in the directory for temporary files
(``TMPDIR``) and goes away with the process.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from windlass.errors import WindlassExhausted, WindlassInvalid

if TYPE_CHECKING:
    import torch

    from windlass.extract.chunk import WeightChunk

__all__ = ["Spool"]

#: Where tensors begin: at any dtype's alignment.
ALIGN = 64


class Spool(Mapping[str, Any]):
    """Tensors by name, in the order in which they came. Those that are read are views of the file.

    >>> import torch
    >>> from windlass.extract.chunk import WeightChunk
    >>> with Spool() as spool:
    ...     spool.add(WeightChunk.of([("w", torch.arange(3))]))
    ...     spool["w"].tolist()
    [0, 1, 2]
    """

    def __init__(self, *, holds: bool = True) -> None:
        #: Whether bytes are kept, or only what they are.
        self._holds = holds
        self._file = tempfile.TemporaryFile(prefix="windlass-spool-")  # noqa: SIM115
        self._rows: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self._size = 0
        #: Whether the file is as long as its tensors.
        self._whole = False

    def add(self, chunk: WeightChunk) -> None:
        """Appends a chunk."""
        import torch

        for name, tensor in chunk:
            if name in self._rows:
                raise WindlassInvalid(f"{name!r} came twice", "names are keys at the receiver")
            self._rows[name] = (self._size, tensor.dtype, tuple(tensor.shape))
            if not self._holds:
                continue
            flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
            try:
                self._file.seek(self._size)
                self._file.write(flat.numpy().data)
            except OSError as e:
                raise WindlassExhausted(
                    f"{name!r} cannot be put aside in {tempfile.gettempdir()}: {e.strerror}",
                    "set TMPDIR to a directory with room for the weights, or send the model itself",
                ) from e
            self._size += -(-flat.numel() // ALIGN) * ALIGN
            self._whole = False

    def metadata(self) -> list[tuple[str, Any, Any]]:
        """Name, dtype and shape of each."""
        return [(name, dtype, shape) for name, (_, dtype, shape) in self._rows.items()]

    def __getitem__(self, name: str) -> Any:
        import torch

        from windlass.receive.memory import tensor_at

        at, dtype, shape = self._rows[name]
        if not self._holds:
            return None
        size = torch.Size(shape).numel() * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        if not self._whole:
            try:
                self._file.truncate(self._size)
                self._file.flush()
            except OSError as e:
                raise WindlassExhausted(
                    f"weights cannot be put aside in {tempfile.gettempdir()}: {e.strerror}",
                    "set TMPDIR to a directory with room for the weights, or send the model itself",
                ) from e
            self._whole = True
        before = at % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self._file.fileno(), before + size, offset=at - before)
        return tensor_at(torch.frombuffer(mapped, dtype=torch.uint8), before, size, str(dtype), shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
