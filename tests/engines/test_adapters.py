"""The strategies for adapters and for pulled versions into real servers, by the HTTP adapters."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import servers
import tiny
from windlass import WeightSyncManager, strategy_from_config
from windlass.engines.remote import RemoteWeightLoader, SglangEngine, VllmEngine
from windlass.extract import ModuleWeightExtractor
from windlass.transfer.client import InferenceEngine, InferenceEngineClient
from windlass.transfer.request import parse_request
from windlass.transfer.sync_info import WeightSyncInfo


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="engine-") as folder:
        yield Path(folder)


@pytest.mark.timeout(600)
def test_vllm_answers_with_every_adapter_that_was_written(
    checkpoint: Callable[[tiny.Kind], Path], home: Path
) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny.model("qwen3"), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    settings = {"strategy": "lora", "lora_sync_path": str(home / "adapters")}
    options = ("--enable-lora", "--max-lora-rank", "8")
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    with servers.Vllm(checkpoint("qwen3"), options=options, env=env) as server:
        base = server.answers()
        client = InferenceEngineClient([VllmEngine(server.url, strategy=settings, lora_name="actor")])

        async def sync() -> None:
            manager = WeightSyncManager(strategy_from_config(settings), ModuleWeightExtractor(), client)
            await manager.initialize()
            for version in range(1, 4):
                torch.manual_seed(version)
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        if "lora_" in name:
                            parameter.normal_(std=0.3)
                assert await manager.sync_weights(model) == version
                want = tiny.answers(model)
                got = [server.generate(prompt, 24, model="actor") for prompt in tiny.PROMPTS]
                assert got == want != base
                # The base is where it was.
                assert server.answers() == base
            await client.aclose()
            manager.close()

        asyncio.run(sync())


class Beside(InferenceEngine):
    """A server that knows nothing of us, and a receiver beside it that has it read the image."""

    def __init__(self, settings: dict[str, Any], loader: RemoteWeightLoader) -> None:
        self.settings, self.loader = settings, loader

    async def init_weight_transfer(self, sync_info: WeightSyncInfo, rank_offset: int) -> None:
        self.receiver = strategy_from_config(self.settings).create_receiver(sync_info, rank=rank_offset)

    async def update_weights(self, request: Any) -> None:
        await self.receiver.receive_and_load_weights(parse_request(request.to_dict()), self.loader)

    async def close(self) -> None:
        self.receiver.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_server_reads_the_image_that_was_pulled_beside_it(
    checkpoint: Callable[[tiny.Kind], Path], home: Path, kind: Any
) -> None:
    engine: Any = servers.Sglang if kind == "sglang" else servers.Vllm
    trainer, path = tiny.model("qwen3"), checkpoint("qwen3")
    settings = {
        "strategy": "tcp",
        "link": "shm",
        "image_dir": str(home / "images"),
        "manager": {"region_dir": str(home)},
        "timeout": 60.0,
    }
    with engine(path) as server:
        loader = RemoteWeightLoader(kind, server.url, path, scratch=home)
        client = InferenceEngineClient([Beside(settings, loader)])

        async def sync() -> None:
            manager = WeightSyncManager(strategy_from_config(settings), ModuleWeightExtractor(), client)
            await manager.initialize()
            for version in range(1, 4):
                tiny.stir(trainer, version)
                await manager.sync_weights(trainer)
                assert server.answers() == tiny.answers(trainer)
            # Tensors one by one are a file of their own.
            tiny.stir(trainer, 4)
            await loader.load_weights(dict(trainer.named_parameters()))
            assert server.answers() == tiny.answers(trainer)
            await client.aclose()
            manager.close()

        asyncio.run(sync())


@pytest.mark.timeout(600)
def test_an_sglang_server_beside_its_trainer_follows_by_shared_memory(
    checkpoint: Callable[[tiny.Kind], Path], home: Path
) -> None:
    """What a colocated SGLang gets unless IPC is asked for: ``tcp`` over shared memory, by the adapter alone."""
    trainer = tiny.model("qwen3")
    settings = {
        "strategy": "tcp",
        "link": "shm",
        "image_dir": str(home / "images"),
        "manager": {"region_dir": str(home)},
        "timeout": 60.0,
    }
    with servers.Sglang(checkpoint("qwen3")) as server:
        before = server.answers()
        client = InferenceEngineClient([SglangEngine(server.url, strategy=settings)], pause=True)

        async def sync() -> None:
            manager = WeightSyncManager(strategy_from_config(settings), ModuleWeightExtractor(), client)
            await manager.initialize()
            for version in (1, 2, 3):
                tiny.stir_some(trainer, version)
                assert await manager.sync_weights(trainer) == version
                assert server.answers() == tiny.answers(trainer) != before
                assert server.get("/model_info")["weight_version"] == str(version)
            await client.aclose()
            manager.close()

        asyncio.run(sync())
        assert server.answers() == tiny.answers(trainer)
