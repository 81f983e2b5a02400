"""A policy that was sampled from between its step and its offload: FSDP2 has left its parameters gathered."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manager_ranks import followed, reference
from windlass import WeightManager, WindlassError


def sharded() -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    # In another dtype while they are gathered, as in mixed precision.
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    for layer in (*model, model):
        fully_shard(layer, mp_policy=policy, reshard_after_forward=False)
    return model


def sample(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(2, 7))
    assert next(model.parameters()).dtype == torch.float16, "gathered"


def offloaded_after_sampling() -> None:
    """A model given as a whole is put back, for the first version and for all others."""
    model = sharded()

    def step(version: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + version / 64)
        sample(model)

    def expected() -> dict[str, torch.Tensor]:
        return reference(model, torch.bfloat16)

    followed(lambda: model, expected, step, generator_dtype="bfloat16")


def parameters_after_sampling(home: str) -> None:
    """Parameters given one by one cannot be put back; the error says what to do, and the next version comes."""
    model = sharded()
    rank, world = dist.get_rank(), dist.get_world_size()
    with WeightManager(region_dir=home, timeout=60.0) as wm:
        wm.offload(model.named_parameters(), 0, rank, world)
        sample(model)
        with pytest.raises(WindlassError) as error:
            wm.offload(model.named_parameters(), 1, rank, world)
        # The first rank to see it calls the attempt off, which may be all that the others hear of it. All are done
        # with the first attempt before one begins another.
        said: list[str] = [""] * world
        dist.all_gather_object(said, f"{type(error.value).__name__}: {error.value}")
        assert any(words.startswith("WindlassInvalid") and "reshard()" in words for words in said), said
        for layer in (*model, model):
            layer.reshard()  # type: ignore[operator]
        assert wm.offload(model.named_parameters(), 1, rank, world).new
