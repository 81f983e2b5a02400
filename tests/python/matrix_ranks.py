"""Extractors of the frameworks through senders, between real processes: ranks 0 and 1 train over gloo, rank 2 is the engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import broadcast_ranks as mail
import extract_ranks
import megatron_ranks
from broadcast_ranks import Posted, board, digests, rank
from models import policy
from windlass import WeightSyncManager, strategy_from_config
from windlass.extract import DeepSpeedWeightExtractor, FSDPWeightExtractor, MegatronWeightExtractor
from windlass.transfer.client import InferenceEngineClient
from windlass.transfer.sync_info import EngineShape

TRAINERS = 2


@dataclass
class Trained:
    """A model under a framework: how it comes out, a step of training, and the whole weights by the framework's own means."""

    model: Any
    extractor: Any
    step: Callable[[], object]
    whole: Callable[[], dict[str, Tensor]]
    end: Callable[[], object] = lambda: None


def fsdp2() -> Trained:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = extract_ranks.shard(policy(), extract_ranks.mesh_of(TRAINERS))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def whole() -> dict[str, Tensor]:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        del state["steps"]
        return state

    return Trained(
        model,
        FSDPWeightExtractor(group_by_module=True),
        lambda: extract_ranks.step(model, optimizer),
        whole,
    )


def zero3() -> Trained:
    engine = extract_ranks.engine_of(policy(), 3)
    assert engine.module.head.weight.numel() == 0, "ZeRO-3 did not partition"

    def step() -> None:
        torch.manual_seed(5)
        engine.backward(engine(torch.randint(1, 11, (4, 6))).square().mean())
        engine.step()

    extractor = DeepSpeedWeightExtractor(group_by_module=True)
    return Trained(engine, extractor, step, lambda: extract_ranks.deepspeed_state(engine, 3))


def megatron() -> Trained:
    from megatron.core import parallel_state as mpu

    mpu.initialize_model_parallel(TRAINERS, pipeline_model_parallel_size=1)
    model, want = megatron_ranks.build(1)
    threshold = 2 * 3 * megatron_ranks.HIDDEN * megatron_ranks.INNER * 4 / (1 << 30)

    def step() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-3)
        for tensor in want.values():
            tensor.mul_(-3)

    extractor = MegatronWeightExtractor(megatron_ranks.Bridge(1), model, threshold_gb=threshold)
    return Trained(model, extractor, step, lambda: want, mpu.destroy_model_parallel)


def sync(framework: str, strategy: str, versions: int) -> Any:
    """Digests of what was trained last, and of what the engine has."""
    shapes: list[dict[str, int]] = [{}]
    conf = mail.config(shapes) if strategy == "broadcast" else {"strategy": strategy, "timeout": 60.0}
    if rank(f"{framework} {strategy}") == TRAINERS:
        return mail.serve(conf, 0, EngineShape())
    if not dist.is_initialized():
        # The engine is none of them.
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(TRAINERS)
        store = dist.PrefixStore("trainers", board())
        dist.init_process_group("gloo", store=store, rank=rank(), world_size=TRAINERS)
    trained: Trained = {"fsdp2": fsdp2, "zero3": zero3, "megatron": megatron}[framework]()

    async def train() -> list[dict[str, str]]:
        client = (
            InferenceEngineClient([Posted(TRAINERS)], timeout=60.0, prefix_cache="keep")
            if rank() == 0
            else None
        )
        manager = WeightSyncManager(strategy_from_config(conf), trained.extractor, client, timeout=60.0)
        await manager.initialize()
        seen = []
        for _ in range(versions):
            trained.step()
            await manager.sync_weights(trained.model)
            seen.append(digests(trained.whole()))
        if client is not None:
            await client.aclose()
        manager.close()
        return seen

    try:
        return asyncio.run(train())
    finally:
        trained.end()
