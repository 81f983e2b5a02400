"""Which tensors of a trainer engines read where they are, and how that is told.

Owns: :class:`Ledger`, the judgement of each tensor, and the tables by which engines find what was lent
(:func:`table_file`, :class:`Table`). Called by :mod:`windlass.transfer.ipc.device`. Must not: ask a driver.

**Lending** a tensor spares the copy into the arena, and costs an engine the opening of its allocation, once. So a tensor
is *settled*, and lent, when it lies where it lay in the sync before, in an allocation that is still the same one, and no
other tensor lay in any part of it: parameters are, and what is gathered or cast for a sync is not, because the next one
has its memory. Tensors that are not settled are packed, or, where a strategy lends all that it can, kept until the engine
is done with them.

**A table** has a row for each tensor of a request: where it begins in the request's layout, the number of its
allocation (0 is the half of the arena that the handle names), the offset there, and its bytes. Engines ask for it at the
door by its number when they first meet it, and have it as a file in memory. The same tensors in the same places have the
same table in every sync, so that a request says no more than its number.
"""

from __future__ import annotations

import array
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from windlass.errors import WindlassInvalid

if TYPE_CHECKING:
    import torch

__all__ = ["Ledger", "Look", "Rows", "Table", "table_file"]

#: Columns of a table's row.
WIDTH = 4
#: A table of more rows is no table.
MOST = 1 << 22

#: Offset in the layout, number of the allocation, offset there, bytes.
Rows = tuple[tuple[int, int, int, int], ...]


@dataclass
class Look:
    """What was found of a chunk's tensors: the memory of each that is lent, and whether all are settled."""

    settled: bool = False
    memories: list[Any] = field(default_factory=list)
    #: Which are settled, one by one.
    firm: list[bool] = field(default_factory=list)

    def __add__(self, other: Look) -> Look:
        return Look(self.settled and other.settled, self.memories + other.memories, self.firm + other.firm)


class _Seen(NamedTuple):
    """Where a tensor was."""

    address: int
    bytes: int
    memory: Any
    sync: int


class Ledger:
    """Remembers where tensors were.

    ``export`` answers what the driver says of a tensor's memory (``base``, ``size``, ``is_there()``), or ``None`` where others
    cannot have it.
    """

    def __init__(self, export: Callable[[torch.Tensor], Any]) -> None:
        self._export = export
        self._seen: dict[str, _Seen] = {}
        #: Those that lay in the same memory as another one, by the sync before.
        self._shared: set[str] = set()
        #: The sync that is looked at, and whether anything lies elsewhere in it.
        self._sync, self._moved = -1, False
        #: How often the driver was asked in this sync, and said yes; whether it never did in the one before.
        self._tries = self._successes = 0
        self._hopeless = False
        #: One object for each allocation.
        self._memories: dict[tuple[int, int], Any] = {}

    def look(self, names: Sequence[str], tensors: Sequence[torch.Tensor], sync: int, *, all_: bool) -> Look:
        """Judges the tensors of a chunk in sync number ``sync``. With ``all_``, what can be lent is, settled or not."""
        if sync != self._sync:
            if self._moved:
                self._shared, self._moved = _overlapping(self._seen, self._sync), False
            self._hopeless = self._tries > 0 and not self._successes
            self._sync, self._tries, self._successes = sync, 0, 0
        found = Look(settled=True)
        there: dict[int, bool] = {}
        for name, tensor in zip(names, tensors, strict=True):
            address, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
            seen = self._seen.get(name)
            same = (
                seen is not None and (seen.address, seen.bytes) == (address, size) and seen.sync >= sync - 1
            )
            firm = (
                same
                and seen is not None
                and seen.memory is not None
                and name not in self._shared
                and tensor.is_contiguous()
                and self._is_there(seen.memory, there)
            )
            if firm:
                assert seen is not None
                memory = seen.memory
            elif same and seen is not None and seen.memory is None:
                # It could not be lent, and will not be.
                memory = None
            else:
                memory = self._one(self._tried(tensor))
                self._moved = True
            self._seen[name] = _Seen(address, size, memory, sync)
            # Nothing is nowhere, and need not be anywhere.
            empty = size == 0
            found.settled = found.settled and (firm or empty)
            found.firm.append(firm)
            found.memories.append(memory if firm or all_ else None)
        return found

    def forget(self) -> None:
        """Nothing is settled any more."""
        self._seen.clear()
        self._shared.clear()
        self._memories.clear()

    def _tried(self, tensor: torch.Tensor) -> Any:
        """Asks the driver; only once in a sync where it said no to everything, as with an allocator that does not share."""
        if self._hopeless and self._tries and not self._successes:
            return None
        self._tries += 1
        memory = self._export(tensor)
        self._successes += memory is not None
        return memory

    def _one(self, memory: Any) -> Any:
        """The same object for the same allocation, and another one for a later allocation in its place."""
        if memory is None:
            return None
        key = (memory.base, memory.size)
        known = self._memories.get(key)
        if known is None or not known.is_there():
            known = self._memories[key] = memory
        return known

    @staticmethod
    def _is_there(memory: Any, asked: dict[int, bool]) -> bool:
        """Once for an allocation of many tensors: while they are held, it stays."""
        key = id(memory)
        if key not in asked:
            asked[key] = memory.is_there()
        return asked[key]


def _overlapping(seen: dict[str, _Seen], sync: int) -> set[str]:
    """The tensors of a sync of which a part is a part of another one."""
    spans = sorted(
        (s.address, s.address + s.bytes, name) for name, s in seen.items() if s.sync == sync and s.bytes
    )
    found: set[str] = set()
    end, last = -1, ""
    for begin, stop, name in spans:
        if begin < end:
            found |= {name, last}
        if stop > end:
            end, last = stop, name
    return found


def table_file(rows: Rows) -> int:
    """A file in memory with the rows, read by :meth:`Table.read`; the caller closes it."""
    flat = array.array("Q", [number for row in rows for number in row])
    file = os.memfd_create("windlass-table", os.MFD_CLOEXEC)
    try:
        data = memoryview(flat.tobytes())
        while data:
            data = data[os.write(file, data) :]
    except BaseException:
        os.close(file)
        raise
    return file


class Table:
    """A table as an engine has it.

    >>> file = table_file(((0, 0, 64, 8), (8, 3, 4096, 100)))
    >>> table = Table.read(file)
    >>> table.begins, table.sizes, table.allocations
    ([0, 8], [8, 100], [3])
    >>> table.addresses(1 << 20, {3: 5 << 20})
    [1048640, 5246976]
    >>> os.close(file)
    """

    def __init__(self, rows: list[tuple[int, int, int, int]]) -> None:
        self._rows = rows
        self.begins = [row[0] for row in rows]
        self.sizes = [row[3] for row in rows]
        #: Numbers of the allocations that it needs, besides the arena.
        self.allocations = sorted({row[1] for row in rows if row[1]})
        self._index = {row[0]: i for i, row in enumerate(rows) if row[3]}
        self._reach: dict[int, int] = {}
        for _, number, offset, size in rows:
            self._reach[number] = max(self._reach.get(number, 0), offset + size)

    @classmethod
    def read(cls, file: int) -> Table:
        """The table in a file. What comes from outside is checked."""
        size = os.fstat(file).st_size
        if size % (8 * WIDTH) or size > 8 * WIDTH * MOST:
            raise WindlassInvalid(f"a table of {size} bytes is none: a row has {8 * WIDTH}")
        flat = array.array("Q")
        flat.frombytes(os.pread(file, size, 0))
        numbers = flat.tolist()
        return cls(list(zip(*(numbers[i::WIDTH] for i in range(WIDTH)))))

    def addresses(self, half: int, bases: dict[int, int]) -> list[int]:
        """Where each tensor is: ``half`` is the address of the arena's half, ``bases`` those of allocations."""
        return [(bases[number] if number else half) + offset for _, number, offset, _ in self._rows]

    def reach(self, number: int) -> int:
        """How many bytes of an allocation, or with 0 of a half, it needs."""
        return self._reach.get(number, 0)

    def row(self, begin: int, size: int) -> int:
        """The row of the tensor that begins there in the layout."""
        at = self._index.get(begin)
        if at is None or self.sizes[at] < size:
            raise WindlassInvalid(f"a handle covers {size} bytes from {begin}, which its table does not have")
        return at
