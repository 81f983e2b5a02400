"""SkyRL's FSDP policy workers, synced by Windlass: a program that test_skyrl.py starts in SkyRL's environment.

    policy.py MODEL URLS IMAGES STEPS

Two ranks, each with SkyRL's own worker and client. After each sync the first rank writes STEPS/done-N.json, with the answers of the policy,
and waits for STEPS/go-N, which names the servers of the next one. The sequence ends when that file says so.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
import typing
from pathlib import Path
from typing import Any

import typing_extensions

# SkyRL declares Python 3.11 and needs 3.12 for this.
typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc]


def without_a_gpu() -> None:
    """What SkyRL asks of CUDA, in the words of a CPU."""
    import torch
    import torch.distributed as dist
    import torch.distributed.device_mesh as meshes

    for name in ("set_device", "synchronize", "empty_cache", "manual_seed_all"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    init, mesh, empty = dist.init_process_group, meshes.init_device_mesh, torch.empty

    def on_host(*args: Any, **kwargs: Any) -> Any:
        return empty(*args, **{**kwargs, **({"device": "cpu"} if kwargs.get("device") == "cuda" else {})})

    def init_device_mesh(device: str, *args: Any, **kwargs: Any) -> Any:
        return mesh("cpu", *args, **kwargs)

    dist.init_process_group = lambda backend=None, *args, **kwargs: init("gloo", *args, **kwargs)
    for module in (meshes, dist, dist.device_mesh):
        module.init_device_mesh = init_device_mesh  # type: ignore[attr-defined]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    torch.empty = on_host


def rank_main(rank: int, world: int, port: int, model: str, urls: list[str], images: str, steps: str) -> None:
    without_a_gpu()
    import torch
    import torch.distributed as dist
    import torch.distributed.device_mesh as meshes

    import windlass.skyrl

    how: dict[str, Any] = {"image_dir": images, "model_id": "skyrl", "timeout": 240}
    windlass.skyrl.install(**how)

    import skyrl.backends.skyrl_train.distributed.fsdp_utils as fsdp_utils
    import skyrl.backends.skyrl_train.inference_servers.utils as server_utils
    import skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker as fsdp_worker
    import skyrl.train.utils.ray_logging as ray_logging
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.train.config import SkyRLTrainConfig

    import tiny

    # What SkyRL starts its servers with took the name over before.
    for backend, colocated, wanted in [
        ("windlass", False, "windlass"),
        ("nccl", False, "nccl"),
        ("nccl", True, "ipc"),
    ]:
        assert server_utils.get_transfer_strategy(backend, colocated) == wanted
    try:
        server_utils.get_transfer_strategy("windlass", True)
    except windlass.WindlassUnsupported as e:
        assert "colocate_all" in str(e)
    else:
        raise AssertionError("colocated engines were not refused")
    fsdp_utils.init_device_mesh = meshes.init_device_mesh
    ray_logging.redirect_actor_output_to_file = lambda *_, **__: None
    cfg = SkyRLTrainConfig()
    trainer, engine = cfg.trainer, cfg.generator.inference_engine
    trainer.policy.model.path = model
    trainer.placement.colocate_all = False
    trainer.flash_attn = False
    trainer.algorithm.temperature = 1.0
    trainer.policy.inference_only_init = True
    trainer.gradient_checkpointing = False
    trainer.use_expandable_segments = False
    trainer.remove_microbatch_padding = False
    engine.weight_sync_backend = "windlass"
    engine.model_dtype = "float32"
    place = {"rank": rank, "local_rank": rank, "world_size": world}
    place |= {"master_addr": "127.0.0.1", "master_port": port, "sequence_parallel_size": 1}
    worker = fsdp_worker.FSDPPolicyWorkerBase(cfg=trainer, **place)
    worker.init_worker_process_group()
    worker.init_model(model)
    policy = worker.model.model

    def answers() -> Any:
        state = {
            name: parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            for name, parameter in policy.named_parameters()
        }
        if rank != 0:
            return None
        whole = tiny.model("qwen3")
        whole.load_state_dict(state, strict=False)
        return tiny.answers(whole)

    async def run() -> None:
        client = RemoteInferenceClient(
            proxy_url=urls[0], server_urls=list(urls), data_parallel_size=1, model_name="tiny"
        )
        await worker.init_weight_sync_state(client, engine)
        for step in range(1, 100):
            await worker.broadcast_to_inference_engines(client, engine)
            if rank == 0:
                # As SkyRL's dispatch does.
                await client.resume_generation()
            expected = answers()
            said: list[Any] = [None]
            if rank == 0:
                metrics = worker._weight_transfer_sender._sending.metrics
                note = Path(steps) / f"done-{step}.json"
                note.with_suffix(".new").write_text(json.dumps({"answers": expected, "metrics": metrics}))
                note.with_suffix(".new").rename(note)
                said = [await told(Path(steps) / f"go-{step}")]
            dist.broadcast_object_list(said)
            if said[0] == ["end"]:
                worker._weight_transfer_sender.teardown()
                return
            client.server_urls[:] = said[0]
            with torch.no_grad():
                for parameter in policy.parameters():
                    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                    local[: max(1, local.shape[0] // 20)].mul_(1.5)

    asyncio.run(run())


async def told(path: Path) -> list[str]:
    until = time.monotonic() + 600
    while not path.exists():
        assert time.monotonic() < until, f"nobody wrote {path}"
        await asyncio.sleep(0.02)
    words: list[str] = json.loads(path.read_text())
    return words


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    import torch.multiprocessing as multiprocessing

    checkpoint, servers, image_dir, notes = sys.argv[1:]
    arguments = (2, free_port(), checkpoint, servers.split(","), image_dir, notes)
    multiprocessing.spawn(rank_main, args=arguments, nprocs=2)
