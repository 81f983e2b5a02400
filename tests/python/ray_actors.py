"""Actors for the tests of Ray: tiny models, real process groups, and a record of what crosses."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from models import policy
from windlass import WeightLoader
from windlass.engines.ray import EngineActor, TrainerActor
from windlass.extract import ModuleWeightExtractor
from windlass.transfer.base import NamedTensors, each_tensor
from windlass.transfer.sync_info import EngineShape


class Into(WeightLoader):
    """Loads into a model's own parameters, and checks that all of them came."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.calls = model, list[str]()

    async def load_weights(self, named_tensors: NamedTensors) -> None:
        with torch.no_grad():
            async for name, tensor in each_tensor(named_tensors):
                self.model.get_parameter(name).copy_(tensor)

    async def pause(self) -> None:
        self.calls.append("pause")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def finish_update(self, version: str | None) -> None:
        self.calls.append(f"finished {version}")


class Engine(EngineActor):
    """An engine rank. Its weights are others than the trainer's until they are synced."""

    def __init__(self, config: dict[str, Any], local_rank: int = 0, tp: int = 1) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self.model = policy()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.loader = Into(self.model)
        self.crossed: list[str] = []
        self.attach_weights(config, self.loader, local_rank=local_rank, shape=EngineShape(tp=tp))

    async def windlass(self, call: Any) -> Any:
        # Nothing but JSON comes and goes, or this raises.
        assert type(call) is dict
        self.crossed.append(str(call.get("step")))
        assert json.loads(json.dumps(call)) == call
        said = await super().windlass(call)
        assert json.loads(json.dumps(said)) == said
        return said

    def weights(self) -> dict[str, list[float]]:
        return {name: p.detach().flatten().tolist() for name, p in self.model.named_parameters()}

    def told(self) -> tuple[list[str], list[str]]:
        return self.crossed, self.loader.calls

    def pid(self) -> int:
        return os.getpid()


class Trainer(TrainerActor):
    """A training rank in a group of its own."""

    def __init__(self, config: dict[str, Any], rank: int, world: int, folder: str, **how: Any) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if world > 1:
            import torch.distributed as dist

            store = dist.FileStore(f"{folder}/store", world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        self.model = policy()
        self.attach_model(config, self.model, ModuleWeightExtractor(), timeout=60.0, **how)

    def step(self, by: float) -> dict[str, list[float]]:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(by)
        return {name: p.detach().flatten().tolist() for name, p in self.model.named_parameters()}

    def pid(self) -> int:
        return os.getpid()
