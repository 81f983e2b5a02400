"""A policy that syncs as SkyRL's main branch does, by the trainer's half of vLLM's weight transfer: a program that test_skyrl.py starts
in vLLM's environment.

    factory_policy.py MODEL URLS IMAGES STEPS

Two ranks with an FSDP2 model; vLLM's factory and servers are real, the calls are those of SkyRL's worker (see interface/). The notes
are those of policy.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def rank_main(rank: int, world: int, port: int, model: str, urls: list[str], images: str, steps: str) -> None:
    import torch
    import torch.distributed as dist
    from policy import told
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer.base import ModuleSource

    import tiny
    import windlass.skyrl

    torch.set_num_threads(1)
    how: dict[str, Any] = {"image_dir": images, "model_id": "factory", "timeout": 240}
    windlass.skyrl.install(**how)
    from skyrl.backends.skyrl_train import weight_sync
    from skyrl.backends.skyrl_train.weight_sync import register, weight_senders

    # What SkyRL starts its servers with.
    wanted = {("windlass", False): "windlass", ("nccl", False): "skyrl_nccl", ("nccl", True): "skyrl_ipc"}
    assert {key: weight_sync.get_vllm_receive_backend(*key) for key in wanted} == wanted
    try:
        weight_sync.get_vllm_receive_backend("windlass", True)
    except windlass.WindlassUnsupported as e:
        assert "colocate_all" in str(e)
    else:
        raise AssertionError("colocated engines were not refused")
    register.register_receive_engines()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    assert "windlass" in WeightTransferEngineFactory._registry

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (world,))
    for layer in policy.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)

    class Source(ModuleSource):
        """What FsdpWeightSource shows besides vLLM's own interface."""

        model, weight_prefix = policy, ""

    class Gathered(ModuleSource):
        """As Megatron's source: an export, with no model that could be read."""

    def answers() -> Any:
        state = {name: parameter.full_tensor() for name, parameter in policy.named_parameters()}
        if rank != 0:
            return None
        whole = tiny.model("qwen3")
        whole.load_state_dict(state, strict=False)
        return tiny.answers(whole)

    async def run() -> None:
        gathered = bool(os.environ.get("GATHERED"))
        engine = await asyncio.to_thread(
            weight_senders.build_trainer_engine,
            ie_cfg=SimpleNamespace(weight_sync_backend="windlass", model_dtype="float32"),
            colocate_all=False,
            rank=rank,
            inference_world_size=len(urls),
            source_factory=lambda dtype, backend: (Gathered if gathered else Source)(policy),
            server_urls=urls,
            data_parallel_size=1,
            base_model_path=model,
        )
        flags = ("handles_prefix_cache_reset", "force_disable_expandable_segments", "empty_cache_after_send")
        assert [getattr(engine, f"skyrl_{flag}") for flag in flags] == [True, False, True]
        for step in range(1, 100):
            weight_senders.maybe_set_reset_prefix_cache(engine, True)
            await asyncio.to_thread(engine.send_weights)
            expected = answers()
            said: list[Any] = [None]
            if rank == 0:
                note = Path(steps) / f"done-{step}.json"
                text = json.dumps({"answers": expected, "metrics": engine.metrics})
                note.with_suffix(".new").write_text(text)
                note.with_suffix(".new").rename(note)
                said = [await told(Path(steps) / f"go-{step}")]
            dist.broadcast_object_list(said)
            if said[0] == ["end"]:
                engine.shutdown()
                return
            with torch.no_grad():
                for parameter in policy.parameters():
                    local = parameter.to_local()
                    local[: max(1, local.shape[0] // 20)].mul_(1.5)

    asyncio.run(run())


if __name__ == "__main__":
    import torch.multiprocessing as multiprocessing
    from policy import free_port

    checkpoint, servers, image_dir, notes = sys.argv[1:]
    arguments = (2, free_port(), checkpoint, servers.split(","), image_dir, notes)
    multiprocessing.spawn(rank_main, args=arguments, nprocs=2)
