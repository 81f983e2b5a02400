"""IPC strategies between real processes over shared memory: trainers are the first ranks, engines the last."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import broadcast_ranks as mail
from broadcast_ranks import Mail, Posted, board, digests, rank
from models import policy, reference
from windlass import WeightLoader, WeightSyncManager, strategy_from_config
from windlass.extract import ModuleWeightExtractor
from windlass.transfer.base import NamedTensors
from windlass.transfer.client import InferenceEngineClient
from windlass.transfer.ipc import arena
from windlass.transfer.ipc.arena import PREFIX
from windlass.transfer.ipc.lending import Look
from windlass.transfer.sync_info import EngineShape


def arenas() -> list[str]:
    """Those that trainers of this test's processes have."""
    return sorted(str(path) for path in Path("/dev/shm").glob(f"{PREFIX}{os.getpid()}-*"))


def sync(kind: str, trainers: int, versions: int, settled: bool = False) -> Any:
    """Trainers with a device each, and an engine that is on the device of the last one. With ``settled`` their arenas
    say so of every chunk but one of the last trainer's in the last version."""
    scene = f"{kind} {trainers} {settled}"
    conf = {"strategy": kind, "timeout": 30.0}
    here = f"GPU-{rank(scene):08d}-0000-0000-0000-000000000000"
    if rank() > trainers:
        return None
    if rank() == trainers:
        arena.host_device = lambda: f"GPU-{trainers - 1:08d}-0000-0000-0000-000000000000"
        return mail.serve(conf, 0, EngineShape())
    arena.host_device = lambda: here
    if trainers > 1:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", store=dist.PrefixStore(scene, board()), rank=rank(), world_size=trainers
        )
    requests: list[Any] = []
    files: list[list[str]] = []
    counts: list[int] = []
    if settled:

        def look(self: Any, chunk: Any, *, all_: bool) -> Look:
            last = rank() == trainers - 1 and len(files) == versions - 1
            firm = not (last and chunk.names[0].startswith("layers.1.attn.q_proj"))
            return Look(firm, [None] * len(chunk), [firm] * len(chunk))

        arena.HostArena.look = look  # type: ignore[method-assign]

    class Noted(Posted):
        async def update_weights(self, request: Any) -> None:
            requests.append(json.loads(json.dumps(request.to_dict())))
            await super().update_weights(request)

    async def train() -> Any:
        client = (
            InferenceEngineClient([Noted(trainers)], timeout=60.0, prefix_cache="keep")
            if rank() == 0
            else None
        )
        extractor = ModuleWeightExtractor(
            group_by_module=True, threshold_gb=(60 if settled else 600) / (1 << 30)
        )
        manager = WeightSyncManager(strategy_from_config(conf), extractor, client, timeout=60.0)
        await manager.initialize()
        model = policy()
        for _ in range(versions):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
            await manager.sync_weights(model, "bfloat16")
            files.append(arenas())
            counts.append(len(requests) - sum(counts))
        if client is not None:
            await client.aclose()
        manager.close()
        return {
            "digests": digests(reference(model, "bfloat16")),
            "files": files,
            "counts": counts,
            "after": arenas(),
            "requests": requests,
        }

    return asyncio.run(train())


class Slow(WeightLoader):
    """Keeps views, and copies them only when it has all of them: the trainer's memory must last as long."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    async def load_weights(self, named_tensors: NamedTensors) -> None:
        from windlass.transfer.base import each_tensor

        views = [(name, tensor) async for name, tensor in each_tensor(named_tensors)]
        await asyncio.sleep(0.2)
        for name, tensor in views:
            self.tensors[name] = tensor.clone()


def slow_engine() -> Any:
    """The trainer packs the next chunk while the engine still reads the one before."""
    from windlass.extract.chunk import WeightChunk

    conf = {"strategy": "packed_cuda_ipc"}
    if rank("slow") > 1:
        return None
    if rank() == 1:
        return _serve_slow(conf)
    strategy = strategy_from_config(conf)

    async def train() -> Any:
        engine = Posted(1)
        client = InferenceEngineClient([engine], timeout=60.0, prefix_cache="keep")
        info = strategy.create_sync_info()
        await client.init_weight_transfer(info)
        sender = strategy.create_sender(info)
        tensors = {f"w{i}": torch.full((1000,), float(i)) for i in range(6)}
        packed: list[float] = []

        def chunks() -> Any:
            for name, tensor in tensors.items():
                packed.append(time.monotonic())
                yield WeightChunk.of([(name, tensor)])

        begun = time.monotonic()
        await sender.send_chunks(chunks(), client)
        took = time.monotonic() - begun
        await client.aclose()
        sender.close()
        return {"digests": digests(tensors), "took": took, "second": packed[1] - begun}

    return asyncio.run(train())


def _serve_slow(conf: dict[str, Any]) -> Any:
    from windlass.transfer.request import parse_request
    from windlass.transfer.sync_info import WeightSyncInfo

    strategy, letters, loader = strategy_from_config(conf), Mail(1), Slow()
    _, value = letters.asked()
    receiver = strategy.create_receiver(WeightSyncInfo.from_dict(value[0]), rank=1)
    letters.answer("ok")
    while True:
        what, value = letters.asked()
        if what == "close":
            receiver.close()
            letters.answer("ok")
            return digests(loader.tensors)
        asyncio.run(receiver.receive_and_load_weights(parse_request(value), loader))
        letters.answer("ok")


PROGRAM = """
import asyncio, json, sys, time, torch
from windlass import strategy_from_config
from windlass.extract.chunk import WeightChunk
strategy = strategy_from_config({"strategy": "packed_cuda_ipc"})
class Client:
    async def update_weights(self, request):
        sys.stdout.write(json.dumps(request.to_dict()) + "\\n")
        sys.stdout.flush()
        await asyncio.sleep(600)
sender = strategy.create_sender(strategy.create_sync_info())
asyncio.run(sender.send_chunks([WeightChunk.of([("w", torch.arange(9.0))])], Client()))
"""


def killed_trainer() -> subprocess.Popen[str]:
    """A trainer that announces one chunk and waits for ever."""
    return subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
