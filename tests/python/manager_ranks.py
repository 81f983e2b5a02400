"""What the ranks of `test_manager_ranks.py` do: train a little, offload, and compare what a receiver got.

Every function runs on all ranks of a group. `followed` is the whole check: after each of three versions the image of a
real receiver, fed by a real agent, holds the gathered state bit by bit.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from windlass import Receiver, WeightManager

VERSIONS = (1, 2, 5)
#: First dimensions that neither 2 nor 3 nor 4 divide, and one that is smaller than four ranks.
ODD = {"embed": (11, 6), "wide": (13, 7), "norm": (5,), "head": (3, 6), "few": (2, 3), "cube": (5, 3, 4)}


class Case:
    """Which case this is, for names that do not collide, and how its versions are published."""

    number = 0
    mode = "copy"


class Odd(nn.Module):
    """Parameters of awkward shapes, one frozen, one tied."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        self.inner = nn.Module()
        for name, shape in ODD.items():
            value = torch.randn(shape, generator=made).to(dtype)
            self.inner.register_parameter(name, nn.Parameter(value))
        self.inner.scale = nn.Parameter(torch.randn((), generator=made).to(dtype))
        self.inner.get_parameter("norm").requires_grad_(False)
        self.second = nn.Module()
        self.second.again = self.inner.embed


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same(got: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    assert got.dtype == wanted.dtype, (name, got.dtype, wanted.dtype)
    assert got.shape == wanted.shape, (name, got.shape, wanted.shape)
    assert torch.equal(bits(got), bits(wanted)), name


def change(parameters: Iterable[torch.Tensor], version: int) -> None:
    """Another value for every element, the same whatever the sharding."""
    with torch.no_grad():
        for p in parameters:
            local = getattr(p, "_local_tensor", p)
            values = (local.float() * (1 + version / 64)).to(local.dtype)
            if Case.mode == "delta" and local.dim() > 0:
                # Some rows, so that it is worth a delta.
                rows = slice(version % 3, None, 3)
                local[rows].copy_(values[rows])
            else:
                local.copy_(values)


def followed(
    given: Callable[[], Any],
    expected: Callable[[], Mapping[str, torch.Tensor]],
    step: Callable[[int], None],
    **config: Any,
) -> dict[str, int]:
    """Offloads three versions and compares each with `expected`; how many parameters went which way."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = config.pop("whole", True)
    name = f"test-{Case.number}"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as home:
        homes = [home]
        dist.broadcast_object_list(homes)
        options = {"names": config.pop("names", None), "node": config.pop("node", None)}
        # Hosts share no memory.
        place = os.path.join(homes[0], options["node"] or "here")
        os.makedirs(place, exist_ok=True)
        mode = {"offload_mode": Case.mode}
        fields = {"model_id": name, "region_dir": place, "timeout": 60.0, **mode, **config}
        with WeightManager(**options, **fields) as wm:
            receiver = None
            for version in VERSIONS:
                step(version)
                result = wm.offload(given(), version, rank, world)
                assert result.new
                assert result.version == version
                if wm.region is not None:
                    assert result.mode == ("copy" if version == VERSIONS[0] else Case.mode)
                wanted = expected()
                if wm.region is not None and rank == 0:
                    receiver = receiver or Receiver(os.path.join(home, "image"), region=wm.region)
                    receiver.wait(version, 60.0)
                    with receiver.hold() as image:
                        assert image.version == version
                        assert sorted(image.tensors) == sorted(wanted), (
                            sorted(image.tensors),
                            sorted(wanted),
                        )
                        for tensor, value in wanted.items():
                            same(image.tensors[tensor], value, tensor)
                        sealed = wm.wait_delta_ready(version)
                        # The digest of a part is not that of the whole.
                        assert (image.digest == sealed) == whole
                # The receiver reads the image, not the region; no rank runs ahead of the comparison.
                dist.barrier()
            if receiver is not None:
                receiver.close()
            ways = dict(wm.status()["ways"] or {})
        dist.barrier()
        assert os.listdir(place) == []
        dist.barrier()
    return ways


def reference(model: nn.Module, cast: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Every parameter gathered, by its plain name."""
    out = {}
    for name, p in model.named_parameters():
        full = p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
        out[name] = full.to(cast) if cast is not None else full
    return out


def replicated(dtype: str, cast: str | None = None) -> dict[str, int]:
    """Plain modules under DDP."""
    model = Odd(getattr(torch, dtype))
    ddp = nn.parallel.DistributedDataParallel(model) if dtype in ("float32", "bfloat16") else model
    wanted = None if cast is None else getattr(torch, cast)
    return followed(
        ddp.named_parameters,
        lambda: reference(model, wanted),
        lambda v: change(model.parameters(), v),
        generator_dtype=cast,
    )


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def fsdp2(
    dtype: str, shape: tuple[int, ...], cast: str | None = None, offload: bool = False
) -> dict[str, int]:
    """FSDP2 on a mesh of one (fully sharded) or two dimensions (HSDP)."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    model = Odd(getattr(torch, dtype))
    mesh = mesh_of(shape, ("replicate", "shard")[-len(shape) :])
    more = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    fully_shard(model, mesh=mesh, ignored_params={model.inner.scale}, **more)
    wanted = None if cast is None else getattr(torch, cast)
    return followed(
        model.named_parameters,
        lambda: reference(model, wanted),
        lambda v: change(model.parameters(), v),
        generator_dtype=cast,
    )


def placements(dtype: str) -> dict[str, int]:
    """Every mix of Shard and Replicate over a mesh of two dimensions, strided shards and one Partial."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    world = dist.get_world_size()
    mesh = mesh_of((2, world // 2), ("a", "b"))
    made = torch.Generator().manual_seed(3)
    kinds = [Replicate(), Shard(0), Shard(1), Shard(2)]
    tensors: dict[str, Any] = {}
    for i, first in enumerate(kinds):
        for j, second in enumerate(kinds):
            value = torch.randn((5, 3, 7), generator=made).to(getattr(torch, dtype))
            tensors[f"t.{i}.{j}"] = distribute_tensor(value, mesh, [first, second])
    value = torch.randn((5, 4), generator=made).to(getattr(torch, dtype))
    from torch.distributed.tensor import DTensor

    tensors["partial"] = DTensor.from_local(value, mesh, [Partial(), Shard(0)])
    # Single rows of a transposed parameter are not contiguous.
    tensors["turned"] = distribute_tensor(value.t().contiguous(), mesh, [Replicate(), Shard(0)]).t()
    return followed(
        lambda: tensors,
        lambda: {n: t.full_tensor() for n, t in tensors.items()},
        lambda v: change(tensors.values(), v),
    )


def fsdp2_over_tp() -> dict[str, int]:
    """Tensor parallelism inside FSDP2: strided shards."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 12))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return followed(model.named_parameters, lambda: reference(model), lambda v: change(model.parameters(), v))


def fsdp1(strategy: str, orig: bool, whole_model: bool) -> dict[str, int]:
    """FSDP1 with flat parameters, by units."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import ShardingStrategy

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False), nn.LayerNorm(3))
    model[1] = FSDP(
        model[1],
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=orig,
        device_id=torch.device("cpu"),
    )
    outer = FSDP(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=orig,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)

    def step(version: int) -> None:
        optimizer.zero_grad()
        outer(torch.ones(2, 7) * version).square().sum().backward()
        optimizer.step()

    def gathered() -> dict[str, torch.Tensor]:
        with FSDP.summon_full_params(outer, writeback=False):
            return {
                n.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                for n, p in outer.named_parameters()
            }

    return followed(lambda: outer if whole_model else outer.named_parameters(), gathered, step)


def zero(stage: int, dtype: str) -> dict[str, int]:
    """DeepSpeed ZeRO, through the engine's own step."""
    import deepspeed

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 3, bias=False), nn.LayerNorm(3))
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bfloat16"},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(version: int) -> None:
        loss = engine(torch.ones(1, 7, dtype=getattr(torch, dtype)) * version).square().sum()
        engine.backward(loss)
        engine.step()

    def gathered() -> dict[str, torch.Tensor]:
        out = {}
        for name, p in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([p], enabled=stage == 3):
                out[name] = p.detach().clone()
        return out

    return followed(lambda: engine.module.named_parameters(), gathered, step)


class Export:
    """A source that gathers while it is iterated, and of which each rank holds only some: a pipeline's stages."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.names = [f"layer.{i}.weight" for i in range(5)]
        self.version = 0
        self.alive = 0
        self.most = 0

    def value(self, name: str) -> torch.Tensor:
        made = torch.Generator().manual_seed(hash_of(name) + self.version)
        return torch.randn((9, 4), generator=made)

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(n, torch.float32, (9, 4)) for n in self.names]

    def held_names(self) -> list[str]:
        # The first layer is on every stage, the others on one each.
        return [n for i, n in enumerate(self.names) if i == 0 or i % self.world == self.rank]

    def __iter__(self) -> Any:
        held = set(self.held_names())
        for name in self.names:
            yield name, self.value(name) if name in held else None


def hash_of(name: str) -> int:
    return sum(name.encode())


def exported(cast: str | None) -> dict[str, int]:
    source = Export()

    def step(version: int) -> None:
        source.version = version

    wanted = torch.float32 if cast is None else getattr(torch, cast)
    return followed(
        lambda: source,
        lambda: {n: source.value(n).to(wanted) for n in source.names},
        step,
        generator_dtype=cast,
    )


def streamed(dtype: str, cast: str | None = None) -> dict[str, int]:
    """FSDP2 gathered one by one into a generator that every rank drains, as frameworks do."""
    from torch.distributed.fsdp import fully_shard

    from windlass.publish.stream import WeightStream

    model = Odd(getattr(torch, dtype))
    mesh = mesh_of((dist.get_world_size(),), ("shard",))
    fully_shard(model, mesh=mesh, ignored_params={model.inner.scale})
    stream = WeightStream(dist.get_rank(), dist.get_world_size())
    wanted = None if cast is None else getattr(torch, cast)

    def whole() -> Any:
        for name, parameter in model.named_parameters():
            yield name, parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter

    return followed(
        lambda: stream.version(whole()),
        lambda: reference(model, wanted),
        lambda v: change(model.parameters(), v),
        generator_dtype=cast,
    )


def another_host() -> dict[str, int]:
    """HSDP over two pretended hosts: the first one that holds a whole replica publishes, the other writes nothing."""
    from torch.distributed.fsdp import fully_shard

    model = Odd(torch.bfloat16)
    half = dist.get_world_size() // 2
    mesh = mesh_of((2, half), ("replicate", "shard"))
    fully_shard(model, mesh=mesh, ignored_params={model.inner.scale})
    return followed(
        model.named_parameters,
        lambda: reference(model),
        lambda v: change(model.parameters(), v),
        node=f"host-{dist.get_rank() // half}",
    )


def two_hosts(dtype: str, cast: str | None = None) -> dict[str, int]:
    """Sharded over two pretended hosts: each publishes its part, and receivers get the whole from both."""
    from torch.distributed.fsdp import fully_shard

    model = Odd(getattr(torch, dtype))
    world = dist.get_world_size()
    fully_shard(model, mesh=mesh_of((world,), ("shard",)), ignored_params={model.inner.scale})
    wanted = None if cast is None else getattr(torch, cast)
    return followed(
        model.named_parameters,
        lambda: reference(model, wanted),
        lambda v: change(model.parameters(), v),
        generator_dtype=cast,
        node=f"host-{dist.get_rank() * 2 // world}",
        whole=False,
    )


def by_delta(name: str, args: list[Any]) -> dict[str, int]:
    """Another case, with versions that are handed out by delta."""
    Case.mode = "delta"
    try:
        ways: dict[str, int] = globals()[name](*args)
        return ways
    finally:
        Case.mode = "copy"


def several(cases: list[tuple[str, list[Any]]]) -> list[dict[str, int]]:
    """Many cases in one life of the ranks: starting them costs more than the cases do."""
    out = []
    for number, (name, args) in enumerate(cases):
        Case.number = number
        sys.stderr.write(f"case {name}{tuple(args)}\n")
        out.append(globals()[name](*args))
    return out
