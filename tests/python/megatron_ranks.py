"""What the ranks of the Megatron test do: real tensor-parallel layers, and a bridge that gathers their shards.

megatron-bridge does not import without a GPU build of its dependencies. The bridge here has the same members, and
gathers what megatron-core really laid out: by ``partition_dim`` over the tensor-parallel group, from the pipeline
rank that owns a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models import differences

HIDDEN, INNER, VOCABULARY, LAYERS = 8, 12, 24, 4


@dataclass
class Mapping:
    tp_size: int
    hf: str
    is_expert: bool = False


@dataclass
class Task:
    global_param_name: str
    mapping: Mapping
    param_weight: Tensor | None
    stage: int


def whole(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Bridge:
    """Tensor and pipeline shards to checkpoint tensors, one task at a time."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.exports: list[int] = []

    def get_conversion_tasks(self, model: Any) -> list[Task | None]:
        from megatron.core import parallel_state as mpu

        tp = mpu.get_tensor_model_parallel_world_size()
        parts = [("fc1", "mlp.gate_up"), ("fc2", "mlp.down_proj.weight")]
        tasks: list[Task | None] = [None]
        embed = model.embed.weight if hasattr(model, "embed") else None
        tasks.append(Task("embed", Mapping(tp, "model.embed_tokens.weight"), embed, 0))
        for number in range(LAYERS):
            stage = number * self.stages // LAYERS
            for part, name in parts:
                layer = getattr(model, f"layer{number}_{part}", None)
                weight = None if layer is None else layer.weight
                tasks.append(
                    Task(f"{number}.{part}", Mapping(tp, f"model.layers.{number}.{name}"), weight, stage)
                )
        return tasks

    def export_hf_weights(
        self, model: Any, cpu: bool, show_progress: bool, conversion_tasks: list[Task] | None
    ) -> Iterator[tuple[str, Tensor, str]]:
        chosen = self.get_conversion_tasks(model) if conversion_tasks is None else conversion_tasks
        self.exports.append(len(chosen))
        for task in chosen:
            if task is not None:
                for name, weight in self._convert(task):
                    yield name, weight, task.global_param_name

    def _convert(self, task: Task) -> list[tuple[str, Tensor]]:
        shards = self._shards(task)
        name = task.mapping.hf
        if name.endswith("gate_up"):
            # Each rank holds its part of the gate above its part of the other.
            halves = [shard.chunk(2) for shard in shards]
            gate, up = (torch.cat([half[side] for half in halves]) for side in (0, 1))
            base = name.removesuffix("gate_up")
            return [(f"{base}gate_proj.weight", gate), (f"{base}up_proj.weight", up)]
        return [(name, torch.cat(shards, dim=1 if name.endswith("down_proj.weight") else 0))]

    def _shards(self, task: Task) -> list[Tensor]:
        from megatron.core import parallel_state as mpu

        group = mpu.get_pipeline_model_parallel_group()
        held: list[Any] = [
            task.param_weight if task.param_weight is None else task.param_weight.detach().clone()
        ]
        dist.broadcast_object_list(held, dist.get_global_rank(group, task.stage), group)
        tp = mpu.get_tensor_model_parallel_group()
        shards = [torch.empty_like(held[0]) for _ in range(dist.get_world_size(tp))]
        dist.all_gather(shards, held[0].contiguous(), group=tp)
        return shards


def build(stages: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """This rank's part of the model, filled from whole tensors, and those."""
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        use_cpu_initialization=True,
        tensor_model_parallel_size=mpu.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
    )
    stage, rank = mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank()
    init: Any = nn.init.zeros_
    model = nn.Module()
    want = {"model.embed_tokens.weight": whole(0, VOCABULARY, HIDDEN)}
    if stage == 0:
        model.embed = VocabParallelEmbedding(VOCABULARY, HIDDEN, init_method=init, config=config)
        fill(model.embed.weight, want["model.embed_tokens.weight"], rank)
    for number in range(LAYERS):
        gate, up, down = (
            whole(10 * number + k, *shape)
            for k, shape in enumerate([(INNER, HIDDEN)] * 2 + [(HIDDEN, INNER)], 1)
        )
        base = f"model.layers.{number}.mlp."
        want |= {
            f"{base}gate_proj.weight": gate,
            f"{base}up_proj.weight": up,
            f"{base}down_proj.weight": down,
        }
        if number * stages // LAYERS != stage:
            continue
        fc1 = ColumnParallelLinear(HIDDEN, 2 * INNER, config=config, init_method=init, bias=False)
        fc2 = RowParallelLinear(
            INNER,
            HIDDEN,
            config=config,
            init_method=init,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
        )
        tp = mpu.get_tensor_model_parallel_world_size()
        together = torch.cat([half for r in range(tp) for half in (gate.chunk(tp)[r], up.chunk(tp)[r])])
        fill(fc1.weight, together, rank)
        fill(fc2.weight, down, rank)
        setattr(model, f"layer{number}_fc1", fc1)
        setattr(model, f"layer{number}_fc2", fc2)
    return model, want


def fill(parameter: Any, tensor: Tensor, rank: int) -> None:
    """This rank's part, cut where megatron-core says that it cuts."""
    assert parameter.tensor_model_parallel, "megatron-core did not shard this parameter"
    with torch.no_grad():
        size = parameter.shape[parameter.partition_dim]
        parameter.copy_(tensor.narrow(parameter.partition_dim, rank * size, size))


def bit_by_bit(stages: int) -> list[str]:
    from megatron.core import parallel_state as mpu

    from windlass.extract import MegatronWeightExtractor

    mpu.initialize_model_parallel(2, pipeline_model_parallel_size=stages)
    try:
        model, want = build(stages)
        return _faults(model, want, stages, MegatronWeightExtractor)
    finally:
        mpu.destroy_model_parallel()


def _faults(model: nn.Module, want: dict[str, Tensor], stages: int, extractor: Any) -> list[str]:
    faults = []
    for dtype in (None, torch.bfloat16):
        cast = {name: tensor.to(dtype or tensor.dtype) for name, tensor in want.items()}
        # Weights one by one.
        chunks = list(extractor(Bridge(stages), model).extract_weights(model, dtype))
        got = {name: tensor for chunk in chunks for name, tensor in chunk}
        faults += [f"{dtype}: {name}" for name in differences(got, cast)]
        if any(len(chunk) != 1 for chunk in chunks):
            faults.append("a chunk of several weights without a threshold")
        # Buckets of about two layers' worth, known before anything is exported.
        bridge = Bridge(stages)
        bucketed = extractor(bridge, model, threshold_gb=2 * 3 * HIDDEN * INNER * 4 / (1 << 30))
        sizes = [len(bucket) for bucket in bucketed.buckets]
        if bridge.exports or len(sizes) < 2 or sum(sizes) != 1 + 2 * LAYERS:
            faults.append(f"buckets {sizes}, exports {bridge.exports}")
        got = {}
        for count, chunk in enumerate(bucketed.extract_weights(model, dtype), 1):
            got.update(chunk)
            if bridge.exports != sizes[:count]:
                faults.append(f"after chunk {count} {bridge.exports} tasks were exported")
        faults += [f"{dtype} in buckets: {name}" for name in differences(got, cast)]
        # Rank 0 alone.
        alone = list(
            extractor(Bridge(stages), model, threshold_gb=1e-6, only_rank0=True).extract_weights(model, dtype)
        )
        if bool(alone) != (dist.get_rank() == 0):
            faults.append(f"rank {dist.get_rank()} got {len(alone)} chunks")
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, sizes)
    return (
        faults
        if len({tuple(those) for those in everywhere}) == 1
        else [*faults, f"buckets differ: {everywhere}"]
    )
