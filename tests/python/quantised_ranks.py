"""What the ranks of `test_quantised.py` do: shard weights in every way, publish them quantised, and compare what a receiver
got with what the library makes of the gathered weight."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import quantisers
from manager_ranks import Case, Export, change, followed, mesh_of, reference

#: Whole blocks on every rank, blocks across ranks, columns that are no whole block, and fewer rows than ranks.
SHAPES = {"even": (768, 128), "across": (320, 256), "narrow": (384, 130), "few": (1, 200), "norm": (300,)}


class Layers(nn.Module):
    """A weight of each shape, as a module has it."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(5)
        for name, shape in SHAPES.items():
            module = nn.Module()
            value = torch.randn(shape, generator=made) * torch.logspace(-3, 1, shape[-1])
            module.weight = nn.Parameter(value.to(getattr(torch, dtype)))
            self.add_module(name, module)


def published(scheme: str, given: Any, wanted: Any, step: Any, **config: Any) -> dict[str, int]:
    Case.number += 1
    return followed(
        given,
        lambda: quantisers.checkpoint(scheme, wanted()),
        step,
        dtypes={"*.weight": scheme},
        **config,
    )


def sharded(scheme: str, dtype: str, cast: str | None, mode: str, hosts: int = 1) -> dict[str, int]:
    """FSDP2; on two pretended hosts, each has a part."""
    from torch.distributed.fsdp import fully_shard

    Case.mode = mode
    model = Layers(dtype)
    fully_shard(model, mesh=mesh_of((dist.get_world_size(),), ("shard",)))
    more: dict[str, Any] = {}
    if hosts > 1:
        more = {"node": f"host-{dist.get_rank() % hosts}", "whole": False}
    return published(
        scheme,
        model.named_parameters,
        lambda: reference(model, None if cast is None else getattr(torch, cast)),
        lambda v: change(model.parameters(), v),
        generator_dtype=cast,
        **more,
    )


def hybrid(scheme: str) -> dict[str, int]:
    """HSDP over two pretended hosts: one writes nothing, and takes part in what ranks tell each other."""
    from torch.distributed.fsdp import fully_shard

    Case.mode = "copy"
    model = Layers("bfloat16")
    half = dist.get_world_size() // 2
    fully_shard(model, mesh=mesh_of((2, half), ("replicate", "shard")))
    return published(
        scheme,
        model.named_parameters,
        lambda: reference(model),
        lambda v: change(model.parameters(), v),
        node=f"host-{dist.get_rank() // half}",
    )


def placed(scheme: str) -> dict[str, int]:
    """Shards of columns, replicas, and one that can only be gathered."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    Case.mode = "copy"
    mesh = mesh_of((dist.get_world_size(),), ("a",))
    made = torch.Generator().manual_seed(3)
    tensors: dict[str, Any] = {}
    for name, kind in {"columns": Shard(1), "rows": Shard(0), "replica": Replicate()}.items():
        value = torch.randn((200, 300), generator=made).bfloat16()
        tensors[f"{name}.weight"] = distribute_tensor(value, mesh, [kind])
    value = torch.randn((130, 140), generator=made).bfloat16()
    tensors["partial.weight"] = DTensor.from_local(value, mesh, [Partial()])
    return published(
        scheme,
        lambda: tensors,
        lambda: {n: t.full_tensor() for n, t in tensors.items()},
        lambda v: change(tensors.values(), v),
    )


def flat(scheme: str) -> dict[str, int]:
    """FSDP1: runs of elements that begin and end anywhere."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    Case.mode = "copy"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(150, 133), nn.Linear(133, 3, bias=False))
    outer = FSDP(model, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)

    def step(version: int) -> None:
        optimizer.zero_grad()
        outer(torch.ones(2, 150) * version).square().sum().backward()
        optimizer.step()

    def gathered() -> dict[str, torch.Tensor]:
        with FSDP.summon_full_params(outer, writeback=False):
            named = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in outer.named_parameters()}
            return {n: p.detach().clone() for n, p in named.items()}

    return published(scheme, lambda: outer, gathered, step)


def exported(scheme: str) -> dict[str, int]:
    """Each rank exports some of the weights whole, and all ranks the first."""
    Case.mode = "copy"
    source = Export()

    def step(version: int) -> None:
        source.version = version

    return published(scheme, lambda: source, lambda: {n: source.value(n) for n in source.names}, step)


def unused_here_and_there() -> str:
    """A rule that applies on no rank is an error on all of them."""
    from windlass import WeightManager, WindlassInvalid

    with WeightManager(
        model_id="unused", dtypes={"*.weight": "fp8_block128", "*.proj": "int8_channel"}
    ) as wm:
        try:
            wm.offload({"a.weight": torch.randn(8, 8)}, 1)
        except WindlassInvalid as e:
            return str(e)
    return "nothing was raised"
