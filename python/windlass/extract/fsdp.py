"""Models under FSDP, either generation, and any module with DTensor parameters.

**FSDP2** parameters are DTensors and gather themselves (``full_tensor()``), over any mesh and with uneven shards.
A module that is unsharded at the moment (after a forward pass without a backward one) is put back first: its whole
parameters are working copies, possibly in a lower precision.

**FSDP1** keeps one flat parameter for each wrapped unit, cut evenly without regard to what lies in it. Gathering
the unit would hold a whole layer, so each parameter is collected by itself: from the layout, which is the same on
every rank, it is known which ranks hold which part, and each of them sends its part to the others. Always from the
shard, which is in full precision. The layout is not part of torch's public interface; FSDP1 is no longer developed,
and the tests hold it to what ``state_dict`` gives.

Shards that were offloaded to the CPU are moved to the device of the mesh or unit before they are gathered, one
parameter at a time, because the collectives of that device may not know the CPU.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from windlass.extract.source import GatheringExtractor, Source

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FSDPWeightExtractor", "reshard"]


class FSDPWeightExtractor(GatheringExtractor):
    """Weights of a model under ``fully_shard`` (FSDP2) or ``FullyShardedDataParallel`` (FSDP1).

    Every rank of the model's mesh iterates::

        extractor = FSDPWeightExtractor(group_by_module=True, threshold_gb=1.0, only_rank0=True)
        for chunk in extractor.extract_weights(model, "bfloat16"):
            send(chunk)                      # on rank 0; the others gather and get nothing
    """

    backends = frozenset({"fsdp", "fsdp2"})

    @classmethod
    def fits(cls, model: torch.nn.Module) -> bool:
        """Whether a unit of FSDP or a DTensor is in it."""
        from torch.distributed.tensor import DTensor

        units = any(_is_unit(module) for module in model.modules())
        return units or any(isinstance(parameter, DTensor) for parameter in model.parameters())

    def sources(self, model: torch.nn.Module) -> Iterator[Source]:
        """Units of FSDP1 in the order of the modules, and all other parameters in between."""
        from torch.distributed.tensor import DTensor

        reshard(model)
        flat = _flat_parameters(model)
        seen = {id(parameter) for parameter in flat}
        # FSDP1 may still show what it has flattened, as parameters or as views that come and go: the place decides.
        places = {
            (id(info.module), info.param_name)
            for parameter in flat
            for info in (*parameter._param_infos, *parameter._shared_param_infos)
        }
        for prefix, module in model.named_modules():
            if _is_unit(module) and module._handle is not None:
                yield from _unit(f"{prefix}." if prefix else "", module._handle)
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen or (id(module), name) in places:
                    continue
                seen.add(id(parameter))
                name = f"{prefix}.{name}" if prefix else name
                if isinstance(parameter, DTensor):
                    yield Source(name, parameter.dtype, tuple(parameter.shape), _Full(parameter))
                else:
                    yield Source.whole(name, parameter)


class _Full:
    """The whole tensor of a DTensor."""

    def __init__(self, parameter: Any) -> None:
        self.parameter = parameter

    def __call__(self) -> Tensor:
        shards = self.parameter.detach()
        device = shards.device_mesh.device_type
        if shards.device.type != device:
            shards = shards.to(device)
        whole: Tensor = shards.full_tensor()
        return whole


class _Flat:
    """One parameter of a flat one: ``size`` elements from ``start``, collected from the ranks that hold them."""

    def __init__(self, handle: Any, index: int, start: int) -> None:
        self.handle = handle
        self.index = index
        self.start = start

    def __call__(self) -> Tensor:
        handle, flat = self.handle, self.handle.flat_param
        shape, stride = flat._shapes[self.index], flat._strides[self.index]
        # Before the first forward pass the flat parameter itself is the shard, and later it may be anything.
        shard = getattr(flat, "_local_shard", flat).detach()
        size = shape.numel()
        whole = torch.empty(size, dtype=shard.dtype, device=handle.device)
        if not handle.uses_sharded_strategy:
            whole.copy_(shard[self.start : self.start + size])
            return whole.as_strided(shape, stride)
        group, each = handle.process_group, shard.numel()
        for rank in range(self.start // each, -(-(self.start + size) // each)):
            first, last = max(self.start, rank * each), min(self.start + size, (rank + 1) * each)
            part = whole[first - self.start : last - self.start]
            if rank == group.rank():
                part.copy_(shard[first - rank * each : last - rank * each])
            dist.broadcast(part, dist.get_global_rank(group, rank), group)
        return whole.as_strided(shape, stride)


def _unit(prefix: str, handle: Any) -> Iterator[Source]:
    """The parameters of one unit of FSDP1, with where each lies in the flat one."""
    flat = handle.flat_param
    ends = itertools.accumulate(flat._numels_with_padding)
    starts = [
        end - numel
        for end, numel, padding in zip(ends, flat._numels_with_padding, flat._is_padding_mask)
        if not padding
    ]
    for index, (name, start) in enumerate(zip(flat._fqns, starts)):
        name = f"{prefix}_fsdp_wrapped_module.{name}"
        yield Source(name, handle._orig_param_dtype, tuple(flat._shapes[index]), _Flat(handle, index, start))


def _flat_parameters(model: torch.nn.Module) -> list[Any]:
    units: list[Any] = [module for module in model.modules() if _is_unit(module)]
    return [unit._handle.flat_param for unit in units if unit._handle is not None]


def _is_unit(module: Any) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(module, FullyShardedDataParallel)


def reshard(model: torch.nn.Module) -> None:
    """Puts FSDP2 modules back that a forward pass without a backward one has left gathered, as sampling does."""
    # A program with such modules has imported it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is None:
        return
    for module in model.modules():
        if isinstance(module, kind):
            module.reshard()
