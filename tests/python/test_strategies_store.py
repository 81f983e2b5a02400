"""The store strategy: engines that have nothing but a store, in a directory."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from models import differences, policy, reference
from test_strategies_tcp import Engine, InPlace, Kept
from windlass import WeightSyncManager, WindlassDenied, WindlassInvalid, strategy_from_config
from windlass.config import WeightManagerConfig
from windlass.extract import ModuleWeightExtractor
from windlass.identity import Identity
from windlass.publish.manager import WeightManager
from windlass.transfer import StoreTransferStrategy
from windlass.transfer.base import choose
from windlass.transfer.client import InferenceEngineClient
from windlass.transfer.request import PullWeightUpdateRequest, StoreWeightUpdateRequest
from windlass.transfer.store import StoreTransferReceiver

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="store-") as folder:
        yield Path(folder)


def config(home: Path, **more: Any) -> dict[str, Any]:
    return {
        "strategy": "store",
        "store_url": str(home / "run"),
        "model_id": "actor",
        "image_dir": str(home / "images"),
        "timeout": 120.0,
        "manager": {"region_dir": str(home / "regions")},
        **more,
    }


@pytest.mark.parametrize("as_model", [True, False], ids=["model", "chunks"])
def test_engines_fetch_every_version_from_the_store_and_load_it_bit_by_bit(
    home: Path, as_model: bool
) -> None:
    settings = config(home, store={"anchor_every": 2})

    async def run() -> None:
        loaders = [Kept(), InPlace()]
        client = InferenceEngineClient([Engine(settings, loader) for loader in loaders], prefix_cache="keep")
        manager = WeightSyncManager(strategy_from_config(settings), ModuleWeightExtractor(), client)
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
                await manager._sender.send_chunks(chunks, client)
            want = reference(model, "bfloat16")
            for loader in loaders:
                assert not differences({name: loader.tensors[name] for name in want}, want)
        assert isinstance(loaders[1], InPlace)
        assert [version for version, _ in loaders[1].images] == [1, 2, 3]
        await client.aclose()
        manager.close()

    asyncio.run(run())
    # The store outlives everything else.
    late = strategy_from_config(config(home, image_dir=str(home / "late")))
    receiver = late.create_receiver(late.create_sync_info())
    assert isinstance(receiver, StoreTransferReceiver)
    request = StoreWeightUpdateRequest(f"file://{home}/run", Identity("actor", 0, 3))
    assert receiver.pull(request).version == 3
    receiver.close()


def test_an_engine_takes_versions_of_its_own_store_and_model_only(home: Path) -> None:
    strategy = strategy_from_config(config(home))
    assert isinstance(strategy, StoreTransferStrategy)
    info = strategy.create_sync_info()
    assert info.url == f"file://{home}/run"
    receiver = strategy.create_receiver(info)
    identity = Identity("actor", 1, 1)
    with pytest.raises(WindlassDenied, match="this engine was told file://"):
        receiver.pull(StoreWeightUpdateRequest("s3://other/run", identity))
    with pytest.raises(WindlassInvalid, match="follows 'actor'"):
        receiver.pull(StoreWeightUpdateRequest(info.url, Identity("critic", 1, 1)))
    with pytest.raises(WindlassInvalid, match="this engine follows a store"):
        receiver.pull(PullWeightUpdateRequest(identity, "http://127.0.0.1:1"))
    receiver.close()


def test_a_trainer_waits_for_its_store_and_is_told_what_keeps_a_version_from_it(home: Path) -> None:
    weights = {"w": torch.ones(300_000)}
    url = f"file://{home}/run"
    with WeightManager(region_dir=str(home), model_id="one", timeout=120.0, store=url) as wm:
        wm.offload(weights, 1)
        assert wm.wait_stored() == 1
        weights["w"][0] = 2.0
        wm.offload(weights, 2)
        assert wm.wait_stored(2) == 2
        # Another run of the trainer takes the head over.
        with WeightManager(region_dir=str(home / "other"), model_id="one", timeout=120.0, store=url) as other:
            other.offload(weights, 1)
            assert other.wait_stored(1) == 1
            weights["w"][1] = 2.0
            wm.offload(weights, 3)
            with pytest.raises(WindlassDenied, match="another publisher has moved the head"):
                wm.wait_stored(3)
    with WeightManager(region_dir=str(home), model_id="two", timeout=120.0) as wm:
        wm.offload(weights, 1)
        with pytest.raises(WindlassInvalid, match="no store to wait for"):
            wm.wait_stored(1)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"store_url": ""}, "StoreSettings.store_url is ''"),
        ({"store_url": "bucket/run"}, "bucket/run"),
        ({"store": {"url": "s3://a/b"}}, "which is store_url"),
        ({"store": {"keep_for": 1}}, "did you mean 'keep"),
        ({"link": "tcp"}, "link"),
        ({"codec": "full"}, "codec"),
        ({"region_dir": "/dev/shm"}, "under 'manager'"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_at_once(
    home: Path, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(WindlassInvalid, match=said):
        strategy_from_config(config(home, **more))


def test_a_document_with_a_store_leads_engines_of_another_region_to_it() -> None:
    document = {
        "generator": {
            "weight_sync_backend": "nccl",
            "run_engines_locally": False,
            "cross_region": True,
            "store_url": "s3://bucket/run",
            "model_id": "actor",
        }
    }
    strategy = strategy_from_config(document)
    assert isinstance(strategy, StoreTransferStrategy)
    built = strategy.settings.config()
    assert isinstance(built, WeightManagerConfig)
    assert (built.model_id, strategy.settings.url) == ("actor", "s3://bucket/run")
    # Near engines are reached directly, and far ones without a store by TCP.
    near = choose({"placement": "remote", "store_url": "s3://bucket/run"})
    assert near["strategy"] != "store"
    far = choose({"placement": "remote", "cross_region": True})
    assert far["strategy"] == "tcp"
