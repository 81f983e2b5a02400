"""What the ranks of the extractor tests do. Each function runs on every rank and returns what went wrong."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models import differences, lora_policy, policy, reference
from windlass.extract import WeightExtractor, extractor_for

#: Casts that every framework is tried with.
DTYPES = [None, "bfloat16"]


def collected(extractor: WeightExtractor, model: Any, dtype: Any = None) -> dict[str, Tensor]:
    return {
        name: tensor.clone() for chunk in extractor.extract_weights(model, dtype) for name, tensor in chunk
    }


def compared(model: Any, plain: Any, **options: Any) -> list[str]:
    """How the wrapped model differs from the plain one, in any dtype and any cutting."""
    faults = []
    for dtype in DTYPES:
        for cutting in ({}, {"group_by_module": True}, {"threshold_gb": 2e-7}):
            got = collected(extractor_for(model, **cutting, **options), model, dtype)
            faults += [f"{dtype} {cutting} {name}" for name in differences(got, reference(plain, dtype))]
    return faults


def step(model: Any, optimizer: Any) -> None:
    """One step of training, the same on all ranks. Token 0, whose embedding is infinite, is not among them."""
    torch.manual_seed(5)
    loss = model(torch.randint(1, 11, (4, 6))).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# --- FSDP2


def shard(model: Any, mesh: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def mesh_of(*shape: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def fsdp2(*shape: int) -> list[str]:
    model = shard(policy(), mesh_of(*shape))
    faults = compared(model, policy())
    # A forward pass without a backward one leaves the root unsharded.
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.int64))
    return faults + [f"after forward: {fault}" for fault in compared(model, policy())]


def fsdp2_mixed_precision() -> list[str]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = shard(
        policy(), mesh_of(dist.get_world_size()), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.int64))
    return differences(collected(extractor_for(model), model), reference(policy()))


def fsdp2_follows_training() -> list[str]:
    """Three steps of training; torch's own full state dictionary is the measure of each."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = shard(policy(), mesh_of(dist.get_world_size()))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    faults, seen = [], [reference(policy())]
    for number in range(3):
        step(model, optimizer)
        got = collected(extractor_for(model), model)
        want = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        del want["steps"]
        faults += [f"step {number}: {name}" for name in differences(got, want)]
        if not differences(got, seen[-1]):
            faults.append(f"step {number} changed nothing")
        seen.append(got)
    return faults


def fsdp2_mixed_placements() -> list[str]:
    """Tensor parallel by columns and rows inside, plain and replicated parameters outside, in one model."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    model, mesh = policy(), mesh_of(dist.get_world_size())
    spread = [
        (model.embed, "weight", Shard(1)),
        (model.head, "weight", Shard(0)),
        (model.layers[0].norm, "weight", Replicate()),
    ]
    for module, name, placement in spread:
        tensor = distribute_tensor(getattr(module, name).data, mesh, [placement])
        setattr(module, name, torch.nn.Parameter(tensor))
    assert isinstance(model.embed.weight, DTensor)
    return compared(model, policy())


def fsdp2_transformers(kind: str, folder: str) -> list[str]:
    """A transformers model under FSDP2 comes out as ``save_pretrained`` writes the plain one."""
    import transformers
    from safetensors.torch import load_file
    from torch.distributed.fsdp import fully_shard

    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    if kind == "qwen3_moe":
        sizes |= {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    sizes["tie_word_embeddings"] = kind == "qwen3"

    def build() -> Any:
        torch.manual_seed(1)
        config = transformers.AutoConfig.for_model(kind, **sizes)
        return transformers.AutoModelForCausalLM.from_config(config)

    # Of several ranks only the first one writes.
    build().save_pretrained(folder)
    dist.barrier()
    want = load_file(pathlib.Path(folder) / "model.safetensors")
    model = build()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return differences(collected(extractor_for(model, threshold_gb=1e-5), model), want)


# --- FSDP1


def fsdp1(strategy: str, original: bool, mixed: bool = False) -> list[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from models import Block

    plain = policy()
    for parameter in plain.parameters():
        parameter.requires_grad_(True)
    options: dict[str, Any] = {}
    if strategy == "HYBRID_SHARD":
        options["device_mesh"] = mesh_of(dist.get_world_size() // 2, 2)
    model = FullyShardedDataParallel(
        policy().requires_grad_(True),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=original,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16) if mixed else None,
        device_id=torch.device("cpu"),
        **options,
    )
    faults = [f"before: {fault}" for fault in compared(model, plain)]
    step(model, torch.optim.SGD(model.parameters(), lr=0.25))
    # What torch itself gathers is the measure now.
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        inner = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in model.named_parameters()}
        want = {name: value.detach().clone() for name, value in inner.items()}
    assert differences(want, reference(plain)), "nothing was trained"
    faults += [f"after a step: {name}" for name in differences(collected(extractor_for(model), model), want)]
    # Some strategies leave their units unsharded, in low precision, for a backward pass that does not come.
    model(torch.zeros(1, 2, dtype=torch.int64))
    return faults + [
        f"after forward: {name}" for name in differences(collected(extractor_for(model), model), want)
    ]


# --- DDP, and who gets what


def ddp() -> list[str]:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(policy())
    return compared(model, policy())


def only_rank0() -> tuple[int, list[str]]:
    model = shard(policy(), mesh_of(dist.get_world_size()))
    got = collected(extractor_for(model, only_rank0=True, group_by_module=True), model, "bfloat16")
    dist.barrier()
    return len(got), differences(got, reference(policy(), "bfloat16")) if dist.get_rank() == 0 else []


def stop_early() -> list[str]:
    """All ranks take two chunks; what was gathered by then is seen by counting collectives."""
    from torch.distributed.tensor import DTensor

    model = shard(policy(), mesh_of(dist.get_world_size()))
    calls: list[int] = []
    whole = DTensor.full_tensor

    def counted(self: Any, **options: Any) -> Tensor:
        calls.append(1)
        return whole(self, **options)

    DTensor.full_tensor = counted  # type: ignore[method-assign]
    try:
        chunks = extractor_for(model, group_by_module=True).extract_weights(model)
        sizes = [len(next(chunks)), len(next(chunks))]
        chunks.close()
    finally:
        DTensor.full_tensor = whole  # type: ignore[method-assign]
    # The group still works: nobody is left inside a collective.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == dist.get_world_size()
    return [] if len(calls) == sum(sizes) else [f"{len(calls)} gathered for chunks of {sizes}"]


def asynchronous() -> list[str]:
    import asyncio

    model = shard(policy(), mesh_of(dist.get_world_size()))

    async def extract() -> dict[str, Tensor]:
        got: dict[str, Tensor] = {}
        async for chunk in extractor_for(model).aextract_weights(model, "bfloat16"):
            got.update(chunk)
        return got

    return differences(asyncio.run(extract()), reference(policy(), "bfloat16"))


# --- DeepSpeed


def engine_of(model: Any, stage: int, dtype: str = "fp32") -> Any:
    import deepspeed

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return deepspeed.initialize(
        model=model, config=config, model_parameters=[p for p in model.parameters() if p.requires_grad]
    )[0]


def deepspeed_stage(stage: int) -> list[str]:
    from windlass.extract import DeepSpeedWeightExtractor

    engine = engine_of(policy(), stage)
    assert type(extractor_for(engine)) is DeepSpeedWeightExtractor
    if stage == 3:
        assert engine.module.head.weight.numel() == 0, "ZeRO-3 did not partition"
    faults = compared(engine, policy())
    if stage == 3:
        for _ in extractor_for(engine, group_by_module=True).extract_weights(engine):
            whole = [name for name, parameter in engine.module.named_parameters() if parameter.numel()]
            faults += [f"left gathered: {name}" for name in whole]
    torch.manual_seed(5)
    loss = engine(torch.randint(1, 11, (4, 6))).square().mean()
    engine.backward(loss)
    engine.step()
    got = collected(extractor_for(engine), engine)
    want = deepspeed_state(engine, stage)
    changed = [name for name, value in policy().named_parameters() if not torch.equal(value, want[name])]
    assert changed, "nothing was trained"
    if stage == 3:
        assert engine.module.head.weight.numel() == 0, "the parameter was not given back"
    return faults + [f"after a step: {name}" for name in differences(got, want)]


def deepspeed_state(engine: Any, stage: int) -> dict[str, Tensor]:
    """DeepSpeed's own way to the whole: all parameters at once."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        return {name: value.detach().clone() for name, value in engine.module.named_parameters()}


# --- LoRA


def wrapped_lora(kind: str) -> Any:
    model = lora_policy()
    if kind == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model)
    if kind == "fsdp2":
        inner = model.base_model.model
        from torch.distributed.fsdp import fully_shard

        for layer in inner.layers:
            fully_shard(layer)
        return fully_shard(model)
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        from models import Block

        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    if kind == "zero3":
        return engine_of(model, 3)
    return model


def lora(kind: str, folder: str) -> list[str]:
    """Adapters as PEFT itself writes those of the plain model, by collecting and by extracting."""
    from safetensors.torch import load_file

    from windlass.extract.lora import collect_lora, is_lora, save_lora

    rank = dist.get_rank()
    own = pathlib.Path(folder) / f"peft-{rank}"
    lora_policy().save_pretrained(own)
    want = load_file(own / "adapter_model.safetensors")
    assert len(want) == 2 * 2 * 2 + 1, sorted(want)

    model = wrapped_lora(kind)
    assert is_lora(model) and not is_lora(policy())
    state = collect_lora(model)
    faults = [f"collected: {name}" for name in differences(state.tensors, want)]
    got = collected(extractor_for(model), model)
    faults += [f"extracted: {name}" for name in differences(got, want)]
    base = collected(extractor_for(model, lora=False), model)
    plain = reference(policy(width=16))
    faults += [f"base: {name}" for name in differences(base, plain)]

    path = save_lora(state, pathlib.Path(folder) / f"ours-{rank}", 7)
    faults += [f"saved: {name}" for name in differences(load_file(path / "adapter_model.safetensors"), want)]
    import json

    ours, theirs = (json.loads((where / "adapter_config.json").read_text()) for where in (path, own))
    for field in ("target_modules", "modules_to_save"):
        ours[field], theirs[field] = sorted(ours[field]), sorted(theirs[field])
    # With which class to build the base: a wrapper's name says nothing there, and no engine reads it.
    theirs.pop("auto_mapping"), ours.pop("auto_mapping")
    faults += [f"config: {key}" for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)]

    from peft import PeftModel

    loaded = PeftModel.from_pretrained(policy(width=16), path)
    fresh = {name: value for name, value in loaded.named_parameters() if "lora_" in name}
    original = {name: value for name, value in lora_policy().named_parameters() if "lora_" in name}
    return faults + [f"loaded: {name}" for name in differences(fresh, original)]
