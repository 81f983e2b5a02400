"""verl with two FSDP2 actors and real vLLM replicas, synced by Windlass: a program that test_verl.py starts in verl's environment.

    end_to_end.py TRAINED SERVED IMAGES RESULT

TRAINED and SERVED are checkpoints: what the actors begin with, and what the replicas do. Every answer of a replica is compared with the
actors' weights of that moment.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import patient_ray
import ray
import tests.checkpoint_engine.test_utils as harness
import torch
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.single_controller.ray.base import RayResourcePool
from verl.workers.config import CheckpointEngineConfig, FSDPEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.engine_workers import TrainingWorkerConfig
from verl.workers.rollout.replica import get_rollout_replica_class

PASSED_ON = ("PYTHONPATH", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE")
PASSED_ON += ("VERL_PLATFORM", "VERL_ENGINE_DEVICE", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND")
PROMPT = [10, 20, 30, 40, 50]
TOKENS = 16


class Actor(harness.TrainingWorkerTest):
    """verl's worker for such tests, which gives its engine to backends that want it, as the real one does."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        if mode == "delta_sharded":
            return await self.checkpoint_engine.send_weights(self.engine, global_steps=global_steps)
        return await super().update_weights(global_steps=global_steps)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change(self, share: float) -> None:
        """As a step of the optimizer does: another value for some elements, the same whatever the sharding."""
        with torch.no_grad():
            for parameter in self.engine.module.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                rows = max(1, int(local.shape[0] * share)) if local.dim() > 0 else None
                local[:rows].mul_(1.25) if rows else local.mul_(1.25)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whole(self) -> Any:
        """The weights, on the first rank."""
        pairs, _ = self.engine.get_per_tensor_param()
        state = {name: tensor.detach().cpu().clone() for name, tensor in pairs}
        return state if torch.distributed.get_rank() == 0 else None


def actors(model: HFModelConfig, backend: CheckpointEngineConfig) -> Any:
    pool = RayResourcePool(process_on_nodes=[2], max_colocate_count=3)
    engine = FSDPEngineConfig(forward_only=True, fsdp_size=2, strategy="fsdp2")
    config = TrainingWorkerConfig(model_type="language_model", model_config=model, engine_config=engine)
    how = RayClassWithInitArgs(cls=ray.remote(Actor), config=config, checkpoint_engine_config=backend)
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=how, device_name="cpu")
    group.reset()
    return group


async def replica(rank: int, config: RolloutConfig, model: HFModelConfig) -> Any:
    made = get_rollout_replica_class("vllm")(
        replica_rank=rank, config=config, model_config=model, gpus_per_node=1
    )
    await made.init_standalone()
    return made


async def answer(replica: Any) -> list[int]:
    sampling = {"temperature": 0.0, "max_tokens": TOKENS, "logprobs": False, "ignore_eos": True}
    told = await replica.server_handle.generate.remote(
        prompt_ids=PROMPT, sampling_params=sampling, request_id=f"{time.time()}"
    )
    return list(told.token_ids)


def expected(checkpoint: str, state: dict[str, torch.Tensor] | None = None) -> list[int]:
    """What a model answers by transformers. verl masks tokens that the tokenizer does not have."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if state is not None:
        model.load_state_dict(state)
    known = len(AutoTokenizer.from_pretrained(checkpoint))
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=-1,
        suppress_tokens=list(range(known, model.config.vocab_size)) or None,
    )
    return [int(token) for token in out[0, len(PROMPT) :]]


async def main(trained: str, served: str, images: str, result: str) -> None:
    told: dict[str, Any] = {"seconds": {}, "metrics": []}
    begun = time.monotonic()

    def mark(what: str) -> None:
        told["seconds"][what] = round(time.monotonic() - begun, 1)
        sys.stderr.write(f"{what}: {told['seconds'][what]} s\n")

    patient_ray.start(
        num_cpus=64,
        num_gpus=16,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": {name: os.environ[name] for name in PASSED_ON if name in os.environ}},
    )
    settings = {
        "image_dir": images,
        "model_id": "verl",
        "timeout": 120.0,
        "manager": {"agent": {"bind": "127.0.0.1"}},
    }
    backend = CheckpointEngineConfig(backend="windlass", engine_kwargs={"windlass": settings})
    models = [
        HFModelConfig(path=path, use_remove_padding=False, override_config={"attn_implementation": "sdpa"})
        for path in (trained, served)
    ]
    rollout = RolloutConfig(
        name="vllm",
        checkpoint_engine=backend,
        tensor_model_parallel_size=1,
        dtype="float32",
        load_format="auto",
        enforce_eager=True,
        free_cache_engine=False,
        enable_sleep_mode=False,
        prompt_length=64,
        response_length=64,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        gpu_memory_utilization=0.3,
        n_gpus_per_node=1,
        nnodes=1,
    )
    group = actors(models[0], backend)
    mark("actors")
    first = await replica(0, rollout, models[1])
    mark("replica")
    assert await answer(first) == expected(served), "the replica does not serve its checkpoint"
    manager = CheckpointEngineManager(config=backend, actor_wg=group, replicas=[first])

    async def sync(step: int) -> None:
        told["metrics"].append(await manager.update_weights(global_steps=step))
        wanted = expected(trained, group.whole()[0])
        for one in manager.replicas:
            assert await answer(one) == wanted, f"step {step}"
        mark(f"step {step}")

    await sync(7)
    assert expected(trained) != expected(served)
    group.change(0.02)
    await sync(8)

    late = await replica(1, rollout, models[1])
    mark("late replica")
    manager.add_replicas([late])
    group.change(0.02)
    await sync(9)

    # A replica is killed; another takes its place.
    manager.remove_replicas([first])
    ray.kill(first.server_handle)
    for worker in first.workers:
        ray.kill(worker)
    mark("killed")
    group.change(0.5)
    await sync(10)

    # The actors are killed, and begin again from their checkpoint.
    for worker in group.workers:
        ray.kill(worker)
    group = actors(models[0], backend)
    mark("actors again")
    manager = CheckpointEngineManager(config=backend, actor_wg=group, replicas=[late])
    await sync(11)
    for worker in group.workers:
        ray.kill(worker)

    # verl's own check of a checkpoint engine: an adapter that takes tensors, from a stream that all actors gather.
    settings = {**settings, "model_id": "harness", "shards": False}
    backend = CheckpointEngineConfig(backend="windlass", engine_kwargs={"windlass": settings})
    pool = RayResourcePool(process_on_nodes=[2], max_colocate_count=3)
    rollout = RolloutConfig(name="vllm", checkpoint_engine=backend)
    workers, replicas = await harness.create_rollout_worker_group(pool, models[0], rollout)
    manager = CheckpointEngineManager(config=backend, actor_wg=actors(models[0], backend), replicas=replicas)
    for _ in range(3):
        told["metrics"].append(await manager.update_weights())
        workers.check_weights()
    mark("verl's own check")
    Path(result).write_text(json.dumps(told))
    ray.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    asyncio.run(main(*sys.argv[1:]))
