"""Weights into an engine's parameters by copies that are known, without the engine's loader.

Owns: :class:`PlannedLoader`: the copies of a rehearsed load (:func:`windlass.load.trace.trace`) for tensors that come in
requests. Where source and parameters are on one GPU, all copies of a request are one launch, fused parameters included;
anywhere else they are copied one by one. Called by receivers. Must not: judge whether a model can be loaded this
way (:mod:`windlass.load.qualify`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from windlass import _windlass
from windlass.dtypes import torch_dtype
from windlass.errors import WindlassInvalid, WindlassNotFound
from windlass.transfer.base import WeightLoader, each_tensor
from windlass.transfer.ipc.device import Row, strided

if TYPE_CHECKING:
    from windlass.load.trace import Copy
    from windlass.transfer.base import NamedTensors

__all__ = ["PlannedLoader"]

#: Tables that are kept: one for each bucket and half of an arena.
TABLES = 256
#: Tensors of a request from which on a table is worth it.
WORTH = 4


class PlannedLoader(WeightLoader):
    """Copies sources into ``targets`` by ``copies``, which name their target by its place in the list.

    Targets stay where they are for the life of the loader, and are of the sources' dtype. Copies are started on torch's
    current stream, as an engine's own loader would start them.
    """

    def __init__(self, targets: Sequence[torch.Tensor], copies: Iterable[Copy]) -> None:
        self._targets = list(targets)
        self._copies: dict[str, list[Copy]] = {}
        for copy in copies:
            self._copies.setdefault(copy.source, []).append(copy)
        self._tables: OrderedDict[tuple[tuple[str, int], ...], Any] = OrderedDict()
        devices = {target.device for target in self._targets if target.numel()}
        self._gpu: Any = None
        if len(devices) == 1 and (device := devices.pop()).type == "cuda":
            self._gpu = _windlass.Gpu.open(device.index or 0)
            self._device = device

    async def load_weights(self, named_tensors: NamedTensors) -> None:
        """The tensors of one request."""
        self.load([(name, tensor) async for name, tensor in each_tensor(named_tensors)])

    def load(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        """:meth:`load_weights` without an event loop."""
        # One by one for few: tensors that come singly lie elsewhere each time, and a table would be of no use again.
        if (
            self._gpu is not None
            and len(pairs) >= WORTH
            and all(tensor.device == self._device and tensor.is_contiguous() for _, tensor in pairs)
        ):
            names = [name for name, _ in pairs]
            dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in pairs]
            shapes = [tensor.shape for _, tensor in pairs]
            self.load_at(names, dtypes, shapes, [tensor.data_ptr() for _, tensor in pairs])
            return
        with torch.no_grad():
            for name, tensor in pairs:
                for copy in self._of(name):
                    target = self._targets[copy.target]
                    _same_dtype(name, tensor.dtype, target)
                    at = target.storage_offset() + copy.target_offset
                    into = target.as_strided(copy.sizes, copy.target_strides, at)
                    flat = tensor.contiguous()
                    begin = flat.storage_offset() + copy.source_offset
                    into.copy_(flat.as_strided(copy.sizes, copy.source_strides, begin))

    def fits(self, *_: object) -> bool:
        """Whether the parameters are on one GPU, so that :meth:`load_at` can be used."""
        return self._gpu is not None

    def wait(self) -> None:
        """Until what was started is done."""
        if self._gpu is not None:
            torch.cuda.current_stream(self._device).synchronize()

    def load_at(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        addresses: Sequence[int],
    ) -> int:
        """Contiguous tensors at addresses of this loader's GPU, in one launch; how many bytes."""
        key = tuple(zip(names, addresses, strict=True))
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self._table(names, dtypes, addresses)
            if len(self._tables) > TABLES:
                self._tables.popitem(last=False)
        else:
            self._tables.move_to_end(key)
        table.start(None, None, int(torch.cuda.current_stream(self._device).cuda_stream))
        return int(table.bytes)

    def _table(self, names: Sequence[str], dtypes: Sequence[str], addresses: Sequence[int]) -> Any:
        if self._gpu is None:
            raise WindlassInvalid("the parameters are not on one GPU")
        rows: list[Row] = []
        for name, dtype, address in zip(names, dtypes, addresses, strict=True):
            kind = torch_dtype(dtype)
            for copy in self._of(name):
                target, item = self._targets[copy.target], kind.itemsize
                _same_dtype(name, kind, target)
                read = address + copy.source_offset * item
                write = target.data_ptr() + copy.target_offset * item
                rows.append(strided(read, write, copy.sizes, copy.target_strides, copy.source_strides, item))
        plain = [(read, write, run, list(dims)) for read, write, run, dims in rows]
        there = [target.data_ptr() for target in self._targets]
        return _windlass.CopyTable(self._gpu, plain, [*addresses, *there])

    def _of(self, name: str) -> list[Copy]:
        if name not in self._copies:
            raise WindlassNotFound(
                f"the plan has no copies of {name!r}", "trace the load again, with this tensor"
            )
        return self._copies[name]


def _same_dtype(name: str, dtype: torch.dtype, target: torch.Tensor) -> None:
    if target.dtype != dtype:
        raise WindlassInvalid(
            f"{name!r} comes as {dtype}, and its parameter is {target.dtype}",
            "publish it in the dtype of the engine (model_dtype)",
        )
