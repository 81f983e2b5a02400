"""Adapters: by files on a shared path, and as versions of their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models import differences, lora_policy, policy
from windlass import WeightLoader, WeightSyncManager, WindlassInvalid, WindlassNotFound, strategy_from_config
from windlass.extract import ModuleWeightExtractor
from windlass.extract.lora import collect_lora
from windlass.transfer.base import each_tensor
from windlass.transfer.client import InferenceEngine, InferenceEngineClient
from windlass.transfer.request import LoraDiskWeightUpdateRequest, parse_request
from windlass.transfer.sync_info import EmptyWeightSyncInfo, WeightSyncInfo


class Peft(WeightLoader):
    """Reads what it is given as PEFT would."""

    def __init__(self) -> None:
        self.loaded: list[dict[str, Any]] = []

    async def load_weights(self, named_tensors: Any) -> None:
        raise AssertionError("an adapter is loaded from its directory")

    async def load_lora(self, path: Path) -> None:
        from peft import PeftConfig
        from peft.utils import load_peft_weights

        assert sorted(file.name for file in path.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        weights = {name: t.clone() for name, t in load_peft_weights(str(path), device="cpu").items()}
        self.loaded.append({"path": path, "r": PeftConfig.from_pretrained(str(path)).r, "weights": weights})


class Tensors(WeightLoader):
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    async def load_weights(self, named_tensors: Any) -> None:
        self.tensors = {name: t.clone() async for name, t in each_tensor(named_tensors)}


class Engine(InferenceEngine):
    def __init__(self, config: dict[str, Any], loader: WeightLoader) -> None:
        self.config, self.loader = config, loader
        self.requests: list[dict[str, Any]] = []

    async def init_weight_transfer(self, sync_info: WeightSyncInfo, rank_offset: int) -> None:
        info = WeightSyncInfo.from_json(sync_info.to_json())
        self.receiver = strategy_from_config(self.config).create_receiver(info, rank=rank_offset)

    async def update_weights(self, request: Any) -> None:
        self.requests.append(request.to_dict())
        await self.receiver.receive_and_load_weights(parse_request(self.requests[-1]), self.loader)

    async def close(self) -> None:
        self.receiver.close()


async def sync(config: dict[str, Any], loaders: list[WeightLoader], steps: int) -> list[Engine]:
    engines = [Engine(config, loader) for loader in loaders]
    client = InferenceEngineClient(engines, prefix_cache="keep")
    manager = WeightSyncManager(strategy_from_config(config), ModuleWeightExtractor(), client)
    await manager.initialize()
    model = lora_policy()
    wants = []
    for _ in range(steps):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.add_(1.0)
        await manager.sync_weights(model)
        wants.append(collect_lora(model).tensors)
    for loader in loaders:
        if isinstance(loader, Peft):
            assert len(loader.loaded) == steps
            for loaded, want in zip(loader.loaded, wants, strict=True):
                assert not differences(loaded["weights"], want)
                assert loaded["r"] == 3
        else:
            assert isinstance(loader, Tensors)
            assert not differences(loader.tensors, wants[-1])
    await client.aclose()
    manager.close()
    return engines


def test_adapters_go_by_versioned_directories_and_the_base_is_not_sent(tmp_path: Path) -> None:
    config = {"strategy": "lora", "lora_sync_path": str(tmp_path / "adapters"), "keep": 2}
    engines = asyncio.run(sync(config, [Peft(), Tensors()], 4))
    paths = [request["lora_disk_path"] for request in engines[0].requests]
    assert paths == [str(tmp_path / "adapters" / f"adapter-{version}") for version in (1, 2, 3, 4)]
    # The last two are kept, whole, and there are no drafts.
    assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == ["adapter-3", "adapter-4"]
    assert all("lora_" in name or "head" in name for name in engines[0].loader.loaded[0]["weights"])  # type: ignore[attr-defined]


def test_adapters_in_memory_have_versions_and_digests_of_their_own(tmp_path: Path) -> None:
    config = {
        "strategy": "lora",
        "link": "shm",
        "model_id": "actor",
        "image_dir": str(tmp_path / "images"),
        "manager": {"region_dir": str(tmp_path)},
        "adapter_config": collect_lora(lora_policy()).config,
    }
    engines = asyncio.run(sync(json.loads(json.dumps(config)), [Peft(), Tensors()], 3))
    assert [request["type"] for request in engines[0].requests] == ["pull"] * 3
    assert {request["identity"]["model_id"] for request in engines[0].requests} == {"actor.lora"}
    assert [request["identity"]["version"] for request in engines[0].requests] == [1, 2, 3]


def test_adapters_as_chunks_need_their_configuration_and_are_nothing_else(tmp_path: Path) -> None:
    path = str(tmp_path / "adapters")
    model = lora_policy()
    told: list[LoraDiskWeightUpdateRequest] = []

    class Client:
        async def update_weights(self, request: Any) -> None:
            told.append(request)

    def send(config: dict[str, Any], extractor: ModuleWeightExtractor, of: Any) -> None:
        with strategy_from_config({"strategy": "lora", **config}).create_sender(
            EmptyWeightSyncInfo()
        ) as sender:
            asyncio.run(sender.send_chunks(extractor.extract_weights(of), Client()))  # type: ignore[arg-type]

    with pytest.raises(WindlassInvalid, match="chunks have no adapter_config"):
        send({"lora_sync_path": path}, ModuleWeightExtractor(), model)
    known = {"lora_sync_path": path, "adapter_config": collect_lora(model).config}
    send(known, ModuleWeightExtractor(lora=True), model)
    assert told[0].to_legacy_dict()["names"] == ["lora_disk_load"]
    with pytest.raises(WindlassInvalid, match="none of the .* tensors belongs to an adapter"):
        send(known, ModuleWeightExtractor(), policy())


def test_a_model_without_adapters_and_a_path_that_is_not_seen_are_named(tmp_path: Path) -> None:
    strategy = strategy_from_config({"strategy": "lora", "lora_sync_path": str(tmp_path)})
    sender: Any = strategy.create_sender(EmptyWeightSyncInfo())
    with pytest.raises(WindlassInvalid, match="no LoRA adapters"):
        asyncio.run(sender.send_model(policy(), None, 1, None))
    receiver = strategy.create_receiver(EmptyWeightSyncInfo())
    request = LoraDiskWeightUpdateRequest(str(tmp_path / "adapter-1"))
    with pytest.raises(WindlassNotFound, match="has no adapter_model.safetensors and no adapter_config.json"):
        asyncio.run(receiver.receive_and_load_weights(request, Peft()))
    with pytest.raises(WindlassInvalid, match="adapter_config in the configuration"):
        strategy_from_config({"strategy": "lora", "link": "tcp"})


def test_an_adapter_that_is_not_what_engines_were_told_is_refused(tmp_path: Path) -> None:
    config = dict(collect_lora(lora_policy()).config)
    config["r"] = 4
    strategy = strategy_from_config(
        {
            "strategy": "lora",
            "link": "shm",
            "adapter_config": config,
            "manager": {"region_dir": str(tmp_path)},
        }
    )
    info = strategy.create_sync_info()
    with strategy.create_sender(info) as sender, pytest.raises(WindlassInvalid, match="engines were told"):
        asyncio.run(sender.send_model(lora_policy(), None, 1, None))  # type: ignore[attr-defined]


def test_a_version_left_by_a_run_before_is_replaced_whole(tmp_path: Path) -> None:
    config = {"strategy": "lora", "lora_sync_path": str(tmp_path)}
    for _ in range(2):
        asyncio.run(sync(config, [Peft()], 1))
    assert [path.name for path in tmp_path.iterdir()] == ["adapter-1"]
