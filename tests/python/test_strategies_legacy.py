"""The four dictionaries that trainers sent before requests had types: emitted by our senders, taken by our receivers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models import lora_policy
from ranks import run_ranks
from windlass import WeightLoader, strategy_from_config
from windlass.extract.chunk import WeightChunk
from windlass.transfer.base import each_tensor
from windlass.transfer.client import InferenceEngine, InferenceEngineClient
from windlass.transfer.request import LoraDiskWeightUpdateRequest, WeightUpdateRequest, parse_request
from windlass.transfer.sync_info import EmptyWeightSyncInfo

WEIGHTS = {"a.q.weight": torch.randn(4, 3), "a.k.weight": torch.randn(2, 3)}


class Kept(WeightLoader):
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.adapters: list[str] = []

    async def load_weights(self, named_tensors: Any) -> None:
        self.tensors |= {name: t.clone() async for name, t in each_tensor(named_tensors)}


class Adapted(Kept):
    async def load_lora(self, path: Path) -> None:
        self.adapters.append(str(path))


class Legacy(InferenceEngine):
    """An engine that is told by the older dictionaries, as JSON text, and reads them back."""

    def __init__(self, config: dict[str, Any], loader: Kept) -> None:
        self.receiver = strategy_from_config(config).create_receiver(EmptyWeightSyncInfo())
        self.loader = loader
        self.read: list[dict[str, Any]] = []

    async def init_weight_transfer(self, sync_info: Any, rank_offset: int) -> None: ...

    async def update_weights(self, request: WeightUpdateRequest) -> None:
        for plain in request.to_legacy_dicts():
            self.read.append(json.loads(json.dumps(plain)))
            await self.receiver.receive_and_load_weights(parse_request(self.read[-1]), self.loader)


def send(config: dict[str, Any], loader: Kept, weights: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    engine = Legacy(config, loader)
    with strategy_from_config(config).create_sender(EmptyWeightSyncInfo()) as sender:
        client = InferenceEngineClient([engine])
        asyncio.run(sender.send_chunks([WeightChunk.of(weights.items())], client))
    engine.receiver.close()
    return engine.read


def test_legacy_broadcasts_of_one_parameter_each_arrive() -> None:
    trainer, engine = run_ranks(2, "broadcast_ranks:legacy_broadcast", timeout=60, group=False)
    assert trainer["sent"] == [
        {"names": ["a"], "dtypes": ["float32"], "shapes": [[3]]},
        {"names": ["b"], "dtypes": ["bfloat16"], "shapes": [[2, 2]]},
    ]
    assert engine["digests"] == trainer["digests"]


def test_legacy_unpacked_ipc_has_a_handle_for_each_parameter() -> None:
    loader = Kept()
    (read,) = send({"strategy": "cuda_ipc"}, loader, WEIGHTS)
    assert read["packed"] is False
    assert "sizes" not in read
    assert [list(extra) for extra in read["extras"]] == [["ipc_handles"]] * 2
    assert all(torch.equal(loader.tensors[name], tensor) for name, tensor in WEIGHTS.items())


def test_legacy_packed_ipc_has_one_handle_and_counts_elements() -> None:
    loader = Kept()
    (read,) = send({"strategy": "packed_cuda_ipc"}, loader, WEIGHTS)
    assert read["packed"] is True
    assert read["sizes"] == [12, 6]
    assert len(read["extras"]) == 1
    assert all(torch.equal(loader.tensors[name], tensor) for name, tensor in WEIGHTS.items())


def test_legacy_adapters_are_a_path(tmp_path: Path) -> None:
    config = {"strategy": "lora", "lora_sync_path": str(tmp_path)}
    loader = Adapted()
    engine = Legacy(config, loader)
    sender: Any = strategy_from_config(config).create_sender(EmptyWeightSyncInfo())
    asyncio.run(sender.send_model(lora_policy(), None, 1, InferenceEngineClient([engine])))
    path = str(tmp_path / "adapter-1")
    assert engine.read == [{"names": ["lora_disk_load"], "extras": [{"lora_disk_path": path}]}]
    assert loader.adapters == [path]
    assert parse_request(engine.read[0]) == LoraDiskWeightUpdateRequest(path)


@pytest.mark.parametrize("kind", ["cuda_ipc", "packed_cuda_ipc"])
def test_weights_of_several_dtypes_travel_in_one_chunk(kind: str) -> None:
    mixed = {
        "a": torch.randn(3, dtype=torch.float64),
        "b": torch.randn(5).to(torch.bfloat16),
        "c": torch.ones(1),
    }
    loader = Kept()

    class Typed(Legacy):
        async def update_weights(self, request: WeightUpdateRequest) -> None:
            plain = json.loads(json.dumps(request.to_dict()))
            await self.receiver.receive_and_load_weights(parse_request(plain), self.loader)

    engine = Typed({"strategy": kind}, loader)
    with strategy_from_config({"strategy": kind}).create_sender(EmptyWeightSyncInfo()) as sender:
        asyncio.run(sender.send_chunks([WeightChunk.of(mixed.items())], InferenceEngineClient([engine])))
    assert all(torch.equal(loader.tensors[name], tensor) for name, tensor in mixed.items())
