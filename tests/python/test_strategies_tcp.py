"""The tcp strategy: an agent that engines pull from, in real processes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from models import differences, policy, reference
from windlass import (
    Image,
    WeightLoader,
    WeightSyncManager,
    WindlassDenied,
    WindlassInvalid,
    strategy_from_config,
)
from windlass.extract import ModuleWeightExtractor
from windlass.extract.chunk import WeightChunk
from windlass.identity import Identity
from windlass.transfer.base import each_tensor
from windlass.transfer.client import InferenceEngine, InferenceEngineClient
from windlass.transfer.request import PullWeightUpdateRequest, parse_request
from windlass.transfer.spool import Spool
from windlass.transfer.sync_info import AgentWeightSyncInfo, EmptyWeightSyncInfo, WeightSyncInfo
from windlass.transfer.tcp import TcpTransferReceiver


class Kept(WeightLoader):
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    async def load_weights(self, named_tensors: Any) -> None:
        self.tensors = {name: t.clone() async for name, t in each_tensor(named_tensors)}


class InPlace(Kept):
    """Takes the image itself."""

    images: list[tuple[int, str | None]]

    def __init__(self) -> None:
        super().__init__()
        self.images = []

    async def load_image(self, image: Image) -> None:
        from safetensors.torch import load_file

        self.images.append((image.version, image.digest))
        self.tensors = {name: t.clone() for name, t in load_file(image.path).items()}


class Engine(InferenceEngine):
    """An engine in this process; everything goes through plain data as it would to another."""

    def __init__(self, config: dict[str, Any], loader: Kept) -> None:
        self.name = type(loader).__name__
        self.config, self.loader = config, loader
        self.modes: list[str] = []
        self.receiver: Any = None

    async def init_weight_transfer(self, sync_info: WeightSyncInfo, rank_offset: int) -> None:
        info = WeightSyncInfo.from_json(sync_info.to_json())
        self.receiver = strategy_from_config(self.config).create_receiver(info, rank=rank_offset)

    async def update_weights(self, request: Any) -> None:
        await self.receiver.receive_and_load_weights(parse_request(request.to_dict()), self.loader)

    async def close(self) -> None:
        self.receiver.close()


def config(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "strategy": "tcp",
        "link": "shm",
        "model_id": "actor",
        "image_dir": str(tmp_path / "images"),
        "timeout": 60.0,
        "manager": {"region_dir": str(tmp_path)},
        **more,
    }


@pytest.mark.parametrize("as_model", [True, False], ids=["model", "chunks"])
def test_engines_pull_every_version_and_load_it_bit_by_bit(tmp_path: Path, as_model: bool) -> None:
    settings = config(tmp_path)

    async def run() -> None:
        loaders = [Kept(), InPlace()]
        client = InferenceEngineClient([Engine(settings, loader) for loader in loaders], prefix_cache="keep")
        strategy = strategy_from_config(settings)
        manager = WeightSyncManager(strategy, ModuleWeightExtractor(), client)
        await manager.initialize()
        model = policy()
        for version in (1, 2, 3):
            with torch.no_grad():
                model.layers[0].norm.weight.add_(1.0)
            if as_model:
                assert await manager.sync_weights(model, "bfloat16") == version
            else:
                assert manager._sender is not None
                chunks: Any = ModuleWeightExtractor().extract_weights(model, "bfloat16")
                if version == 3:
                    chunks = ModuleWeightExtractor().aextract_weights(model, "bfloat16")
                await manager._sender.send_chunks(chunks, client)
            want = reference(model, "bfloat16")
            for loader in loaders:
                assert not differences({name: loader.tensors[name] for name in want}, want)
        taker = loaders[1]
        assert isinstance(taker, InPlace)
        assert [version for version, _ in taker.images] == [1, 2, 3]
        assert len({digest for _, digest in taker.images}) == 3
        await client.aclose()
        manager.close()

    asyncio.run(run())
    left = [path.name for path in tmp_path.iterdir()]
    assert left == ["images"], left


def test_an_image_without_a_place_of_its_own_is_removed_at_the_end(tmp_path: Path) -> None:
    settings = config(tmp_path, image_dir=None)
    strategy = strategy_from_config(settings)
    info = strategy.create_sync_info()
    receiver = strategy_from_config(settings).create_receiver(info, rank=7)
    assert isinstance(receiver, TcpTransferReceiver)
    own = Path(receiver._own or "")
    assert own.is_dir()
    receiver.close()
    receiver.close()
    assert not own.exists()
    strategy.create_sender(info).close()


def test_the_agents_port_and_token_are_those_of_the_sync_info(tmp_path: Path) -> None:
    strategy = strategy_from_config(config(tmp_path))
    info = strategy.create_sync_info()
    assert isinstance(info, AgentWeightSyncInfo)
    assert info.token not in repr(info)
    assert len(info.token) == 64
    told: list[Any] = []

    class Client:
        async def update_weights(self, request: Any) -> None:
            told.append(request)

    with strategy.create_sender(info) as sender:
        asyncio.run(sender.send_model({"w": torch.ones(3)}, None, 4, Client()))  # type: ignore[attr-defined]
    assert told[0].sender_endpoint == info.endpoints[0]
    assert told[0].identity.version == 4
    with pytest.raises(WindlassInvalid, match="has not reserved"):
        strategy.create_sender(info)


def test_a_request_for_another_agent_or_model_is_refused(tmp_path: Path) -> None:
    info = AgentWeightSyncInfo(["http://127.0.0.1:1"], "a" * 64, "actor")
    receiver = strategy_from_config(config(tmp_path)).create_receiver(info)
    assert isinstance(receiver, TcpTransferReceiver)
    with pytest.raises(WindlassDenied, match="names the agent http://10.0.0.9:1"):
        receiver.pull(PullWeightUpdateRequest(Identity("actor", 1, 1), "http://10.0.0.9:1"))
    with pytest.raises(WindlassInvalid, match="for model 'critic'"):
        receiver.pull(PullWeightUpdateRequest(Identity("critic", 1, 1), "http://127.0.0.1:1"))
    with pytest.raises(WindlassInvalid, match="needs AgentWeightSyncInfo"):
        strategy_from_config(config(tmp_path)).create_receiver(EmptyWeightSyncInfo())
    with pytest.raises(WindlassInvalid, match="regon_dir.*did you mean 'region_dir'"):
        strategy_from_config(config(tmp_path, manager={"regon_dir": "/x"}))


def test_a_restarted_trainer_is_followed_by_new_sync_info(tmp_path: Path) -> None:
    settings = config(tmp_path)

    async def life(value: float, version: int) -> Engine:
        engine = Engine(settings, Kept())
        client = InferenceEngineClient([engine], prefix_cache="keep")
        manager = WeightSyncManager(strategy_from_config(settings), ModuleWeightExtractor(), client)
        await manager.initialize()
        model = torch.nn.Linear(4, 4)
        torch.nn.init.constant_(model.weight, value)
        await manager.sync_weights(model, version=version)
        await client.aclose()
        manager.close()
        return engine

    first, second = asyncio.run(life(1.0, 9)), asyncio.run(life(2.0, 3))
    assert first.loader.tensors["weight"].max() == 1.0
    assert second.loader.tensors["weight"].max() == 2.0


def alive() -> int:
    """Bytes of the chunks' tensors and of their copies that are there now; views of files and shared memory are none."""
    tensors = (thing for thing in gc.get_objects() if type(thing) is torch.Tensor)
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu")
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes() == CHUNK}.values())


CHUNK, CHUNKS = 4 << 20, 10


def sender_settings(how: str, home: Path) -> dict[str, Any]:
    adapter = {"strategy": "lora", "adapter_config": {"peft_type": "LORA", "r": 8}}
    return {
        "tcp": config(home),
        "adapter by file": {**adapter, "lora_sync_path": str(home / "lora")},
        "adapter pulled": config(home, **adapter),
    }[how]


@pytest.mark.parametrize("how", ["tcp", "adapter by file", "adapter pulled"])
def test_chunks_are_sent_without_keeping_them_in_memory(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = sender_settings(how, tmp_path)
    seen: list[int] = []
    read = Spool.__getitem__

    def look(spool: Spool, name: str) -> Any:
        seen.append(alive())
        return read(spool, name)

    monkeypatch.setattr(Spool, "__getitem__", look)

    def chunks(version: int) -> Iterator[WeightChunk]:
        for number in range(CHUNKS):
            # Written, so that it is memory and not a promise.
            tensor = torch.full((CHUNK // 4,), float(number + version))
            chunk = WeightChunk.of([(f"layers.{number}.q.lora_A.weight", tensor)])
            del tensor
            yield chunk
            del chunk
            seen.append(alive())

    class Client:
        async def update_weights(self, request: Any) -> None:
            seen.append(alive())

    async def run() -> None:
        strategy = strategy_from_config(settings)
        info = strategy.create_sync_info()
        with strategy.create_sender(info) as sender:
            for version in range(2):
                await sender.send_chunks(chunks(version), Client())

    tracemalloc.start()
    try:
        asyncio.run(run())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(seen) >= 2 * CHUNKS
    # One that is sent, one that is made, and one on its way: not all 40 MiB. The rest is what Python itself holds.
    assert max(seen) <= 3 * CHUNK, [bytes_ // CHUNK for bytes_ in seen]
    assert peak < 3 * CHUNK + (8 << 20), peak >> 20
    if how == "adapter by file":
        from safetensors.torch import load_file

        written = load_file(tmp_path / "lora" / "adapter-2" / "adapter_model.safetensors")
        assert len(written) == CHUNKS
        assert all(float(t[0]) == int(name.split(".")[1]) + 1 for name, t in written.items())


MEMORY = Path(__file__).with_name("programs") / "sender_memory.py"


@pytest.mark.parametrize("how", ["tcp", "adapter by file", "adapter pulled"])
def test_the_memory_of_a_sender_does_not_grow_with_what_it_sends(how: str) -> None:
    size = 4 << 20
    # What is freed leaves the process at once. By default glibc keeps freed memory for each thread, and how much of it is
    # chance; what it keeps is of the size of tensors, not of the model.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}

    def grown(count: int) -> list[int]:
        # Slots of a region in shared memory are what is sent, and counted apart.
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sender-") as home:
            told = json.dumps([sender_settings(how, Path(home)), size, count])
            command = [sys.executable, str(MEMORY), told]
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, timeout=100, check=True)
        return list(json.loads(done.stdout))

    # Each has the chunk that is made, the one that is on its way, and libraries that are read meanwhile.
    few, many = grown(4), grown(28)
    assert many[0] < 6 * size, many[0] >> 20
    # Anonymous memory and pages of files: 96 MiB more are sent.
    assert all(b < a + 2 * size for a, b in zip(few, many, strict=True)), (few, many)
