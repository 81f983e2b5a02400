"""Weights that pass by once: a generator of whole tensors that every rank drains, with nothing said beforehand.

Owns: :class:`WeightStream`, which learns what a model consists of while its first version passes by, and gives
:class:`windlass.WeightManager` each version as a :class:`~windlass.publish.inputs.WeightSource`. Called by the adapters of
frameworks. Must not: do anything between two tensors but copy; each of them is a collective of all ranks, and one that waits
for something else there stops the others.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from windlass.dtypes import dtype_name, torch_dtype
from windlass.errors import WindlassCorrupt, WindlassInvalid
from windlass.names import SourceMap
from windlass.names.checkpoint import Stored, stored_tensors
from windlass.names.selection import is_usual_extra
from windlass.publish.sources import pair_of
from windlass.receive.memory import tensor_at

__all__ = ["OnePass", "WeightStream"]

log = logging.getLogger("windlass")

Pairs = Iterable[tuple[str, Any]]


@dataclass(frozen=True)
class _Known:
    dtype: torch.dtype
    shape: tuple[int, ...]
    #: Whether this rank writes it.
    mine: bool
    #: Where it is read, if it never comes by.
    stored: Stored | None = None


class WeightStream:
    """What a model consists of, as its versions pass by.

    >>> stream = WeightStream()
    >>> with stream.version([("norm.weight", torch.ones(4))]) as source:
    ...     list(source.metadata())
    [('norm.weight', torch.float32, (4,))]

    Of the first version each rank keeps the share that it writes, in host memory; tensors are dealt out by their bytes, in the
    same way on all ranks, so that nobody has to be asked. Later versions must have the same names, dtypes and shapes.

    With ``checkpoint``, tensors that are in it and do not pass by are published as they are there: frozen weights, which some
    frameworks never send. What passes by must be in it then, by the names that ``names`` gives it.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        *,
        checkpoint: str | None = None,
        names: SourceMap | None = None,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._checkpoint, self._names = checkpoint, names or SourceMap()
        self._known: dict[str, _Known] | None = None

    def version(self, pairs: Pairs) -> OnePass:
        """One version, as it passes by."""
        return OnePass(self, pairs)

    def forget(self) -> None:
        """The next version may be of another model."""
        self._known = None

    def _learn(self, pairs: Iterator[Any]) -> dict[str, torch.Tensor]:
        """The first version: what there is, and this rank's share of it."""
        known: dict[str, _Known] = {}
        kept: dict[str, torch.Tensor] = {}
        dealt = [0] * self._world_size

        def deal(size: int) -> bool:
            to = min(range(self._world_size), key=dealt.__getitem__)
            dealt[to] += size
            return to == self._rank

        for item in pairs:
            name, tensor = _checked(item)
            if name in known:
                raise WindlassInvalid(f"{name!r} comes twice; every tensor of a model has one name")
            mine = deal(tensor.nbytes)
            known[name] = _Known(tensor.dtype, tuple(tensor.shape), mine)
            if mine:
                # A copy: many exporters write the next tensor into the same memory.
                kept[name] = tensor.detach().to("cpu", copy=True)
        if self._checkpoint is not None:
            for name, stored in self._missing(self._checkpoint, known).items():
                known[name] = _Known(torch_dtype(stored.dtype), stored.shape, deal(stored.size), stored)
        self._known = known
        return kept

    def _missing(self, checkpoint: str, came: dict[str, _Known]) -> dict[str, Stored]:
        """What the checkpoint has and the stream has not."""
        stored = stored_tensors(checkpoint)
        # It is what the tensor that came is, not what the file says.
        tied = _tied(checkpoint)
        sent = {view.name: name for name, row in came.items() for view in self._names.views(name, row.shape)}
        unknown = [
            image for image in sent if image not in stored and image not in tied and not is_usual_extra(image)
        ]
        if unknown:
            # Left out, it would be published as it is in the checkpoint, untrained and under another name.
            raise WindlassInvalid(
                f"{len(unknown)} tensors that were sent are not in the checkpoint {checkpoint!r}, first {sent[unknown[0]]!r}: it is "
                "of another model, or calls them by other names",
                "name the checkpoint of the model that is trained, or give none and say which dtype engines compute in",
            )
        missing = {name: entry for name, entry in stored.items() if name not in sent and name not in tied}
        if missing:
            size, first = sum(entry.size for entry in missing.values()), next(iter(missing))
            log.warning(
                "%d tensors (%d bytes) of the checkpoint %s were not sent, and are published as they are there (%s, ...)",
                len(missing),
                size,
                checkpoint,
                first,
            )
        return missing


class OnePass:
    """One version. It is a :class:`~windlass.publish.inputs.WeightSource`; at the end of the ``with`` block everything has passed
    by, also after an error: the other ranks take part in every tensor."""

    def __init__(self, stream: WeightStream, pairs: Pairs) -> None:
        self._stream = stream
        self._pairs = iter(pairs)
        #: This rank's share of the first version.
        self._kept: dict[str, torch.Tensor] | None = None

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(name, dtype, shape) of everything. If this is the first version, it has passed by then."""
        return [(name, row.dtype, row.shape) for name, row in self._learned().items()]

    def held_names(self) -> list[str]:
        """What this rank writes."""
        return [name for name, row in self._learned().items() if row.mine]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        known, kept = self._learned(), self._kept
        if kept is not None:
            for name in list(kept):
                yield name, kept.pop(name)
        else:
            yield from self._pass_by(known)
        for name, row in known.items():
            if row.stored is not None and row.mine:
                yield name, _read(row.stored)

    def __enter__(self) -> OnePass:
        return self

    def __exit__(self, *exception: object) -> None:
        for _ in self._pairs:
            pass
        self._kept = None

    def _learned(self) -> dict[str, _Known]:
        if self._stream._known is None:
            self._kept = self._stream._learn(self._pairs)
        assert self._stream._known is not None
        return self._stream._known

    def _pass_by(self, known: dict[str, _Known]) -> Iterator[tuple[str, torch.Tensor | None]]:
        came = set()
        for item in self._pairs:
            name, tensor = _checked(item)
            row = known.get(name)
            if row is None or row.stored is not None:
                raise WindlassInvalid(
                    f"{name!r} was not sent with the first version and is now; the tensors of a model do not change"
                )
            if (tensor.dtype, tuple(tensor.shape)) != (row.dtype, row.shape):
                raise WindlassInvalid(
                    f"{name!r} was {dtype_name(row.dtype)} {list(row.shape)} in the first version and is now "
                    f"{dtype_name(tensor.dtype)} {list(tensor.shape)}; the tensors of a model do not change"
                )
            if name in came:
                raise WindlassInvalid(f"{name!r} comes twice; every tensor of a model has one name")
            came.add(name)
            yield name, tensor if row.mine else None
        missing = [name for name, row in known.items() if row.stored is None and name not in came]
        if missing:
            raise WindlassInvalid(
                f"{len(missing)} tensors of the first version did not come, first {missing[0]!r}; the tensors of a model "
                "do not change"
            )


def _checked(item: Any) -> tuple[str, torch.Tensor]:
    name, tensor = pair_of(item)
    if not isinstance(tensor, torch.Tensor):
        raise WindlassInvalid(f"{name!r} came as a {type(tensor).__name__}; a stream has whole tensors")
    if hasattr(tensor, "full_tensor"):
        raise WindlassInvalid(
            f"{name!r} came as a DTensor; a stream has whole tensors",
            "call full_tensor(), or offload the model itself, which needs no gathering",
        )
    return name, tensor


def _read(stored: Stored) -> torch.Tensor:
    """A tensor of a file. The file is not kept open: it may be on a disk that goes away."""
    data = bytearray(stored.size)
    with stored.file.open("rb") as file:
        file.seek(stored.offset)
        if file.readinto(data) != stored.size:
            raise WindlassCorrupt(f"{str(stored.file)!r} ended early: it has changed since training began")
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return tensor_at(flat, 0, stored.size, stored.dtype, stored.shape)


def _tied(checkpoint: str) -> list[str]:
    """Names that stand for another tensor by the model's configuration."""
    where = Path(checkpoint)
    config = (where if where.is_dir() else where.parent) / "config.json"
    try:
        said = json.loads(config.read_text())
    except (OSError, ValueError):
        return []
    return ["lm_head.weight"] if isinstance(said, dict) and said.get("tie_word_embeddings") else []
