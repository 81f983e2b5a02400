"""What the ranks of `test_merged.py` do: shard a model with LoRA adapters, publish it, and compare what a receiver got with what
PEFT's `merge_and_unload()` leaves of a twin that is whole."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

from manager_ranks import Case, followed
from models import Block, policy


def adapted(dtype: torch.dtype = torch.float32, autocast: bool = True, **options: Any) -> Any:
    """The same on every rank; adapters are not zero. With ``autocast`` they are in float32 whatever the base is in."""
    from peft import LoraConfig, get_peft_model

    chosen = {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["head"], **options}
    config = LoraConfig(r=3, lora_alpha=7, **chosen)
    model = get_peft_model(policy(width=16).to(dtype), config, autocast_adapter_dtype=autocast)
    made = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=made).to(parameter.dtype))
    return model


def wrapped(kind: str, model: Any) -> Any:
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.base_model.model.layers:
            # The smallest unit there is: the adapters are units of their own.
            for part in (layer.attn["q_proj"].lora_A["default"], layer.attn["q_proj"], layer):
                fully_shard(part)
        return fully_shard(model)
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    from extract_ranks import engine_of

    return engine_of(model, 3)


def trained(model: Any, version: int) -> None:
    """Another value for every element that is trained, the same whatever the sharding."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                local = getattr(parameter, "ds_tensor", getattr(parameter, "_local_tensor", parameter))
                local.mul_(1 + version / 64)


def merged(kind: str, dtype: str, mode: str, options: dict[str, Any], config: Any = None) -> dict[str, int]:
    """Three versions, each compared with the merged twin; the wrapped model stays as it is."""
    Case.mode = mode
    Case.number += 1
    # A flat parameter of FSDP1 has one dtype.
    plain, model = (adapted(getattr(torch, dtype), kind != "fsdp1", **options) for _ in range(2))
    model = wrapped(kind, model)

    def step(version: int) -> None:
        trained(plain, version)
        trained(model, version)

    def expected() -> dict[str, Any]:
        return dict(copy.deepcopy(plain).merge_and_unload().named_parameters())

    more = dict(config or {})
    if "node" in more:
        more["node"] += f"-{dist.get_rank()}"
    return followed(lambda: model, expected, step, **more)


def refused(what: str) -> str:
    """What every rank is told of a model that cannot be published on one of them."""
    from windlass import WeightManager, WindlassError

    model: Any = adapted()
    if what == "pairs":
        model = dict(model.named_parameters())
    elif dist.get_rank() == 1:
        from peft import IA3Config, get_peft_model

        model = get_peft_model(policy(width=16), IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    try:
        with WeightManager(model_id=f"refused-{what}", agent={"enabled": False}, timeout=60.0) as wm:
            wm.offload(model, 1)
    except WindlassError as e:
        return f"{e}"
    return ""
