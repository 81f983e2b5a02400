"""A trainer whose agent uploads its versions to a store, and receivers that have nothing but the store."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from children import environment
from windlass import Receiver, WeightManager, WindlassInvalid, open_image
from windlass.config import StoreConfig, WeightManagerConfig

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="store-") as folder:
        yield Path(folder)


def received(url: str, home: Path, version: int) -> dict[str, torch.Tensor]:
    """What a new receiver has of a version. It waits until the version is there, and ends."""
    words = ["receive", f"--from={url}", f"--version={version}", f"--dir={home}", "--json"]
    command = [sys.executable, "-m", "windlass", *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    with open_image(home / "policy") as image:
        assert image.version == version, last
        return {name: tensor.clone() for name, tensor in image.tensors.items()}


def test_versions_of_a_trainer_are_in_its_store_after_it_has_ended(home: Path) -> None:
    url = f"file://{home}/run"
    weights = {f"layer.{n}": torch.randn(300, 200).to(torch.bfloat16) for n in range(4)}
    published = {}
    store = StoreConfig(url=url, anchor_every=2, keep=16, part_bytes=5 << 20)
    with WeightManager(region_dir=str(home), timeout=120.0, store=store) as wm:
        for version in range(1, 5):
            weights["layer.1"][version, :20] += 1.0
            wm.offload(weights, version)
            wm.wait_delta_ready(version)
            published[version] = {name: tensor.clone() for name, tensor in weights.items()}
            got = received(url, home / f"as-{version}", version)
            assert got.keys() == weights.keys()
            assert all(torch.equal(got[name], weights[name]) for name in weights)
        # The agent uploads what was sealed last before it ends.
        weights["layer.2"][:20] -= 1.0
        wm.offload(weights, 5)
        wm.wait_delta_ready(5)
    # The trainer, its agent and its region are gone.
    last = received(url, home / "last", 5)
    assert all(torch.equal(last[name], weights[name]) for name in weights)
    early = received(f"{url}/policy", home / "again", 2)
    assert all(torch.equal(early[name], published[2][name]) for name in weights)


def test_a_receiver_in_python_follows_a_store_and_gets_any_version_of_it(home: Path) -> None:
    url = f"file://{home}/run"
    weights = {f"layer.{n}": torch.randn(300, 200).to(torch.bfloat16) for n in range(4)}
    published = {}
    (home / "a").mkdir()
    # Nothing is there yet, not even the directory.
    with Receiver(home / "a", store=url) as receiver:
        assert receiver.version is None
        with WeightManager(region_dir=str(home), timeout=120.0, store=url) as wm:
            for version in range(1, 4):
                weights["layer.3"][version] += 1.0
                wm.offload(weights, version)
                published[version] = {name: tensor.clone() for name, tensor in weights.items()}
                synced = receiver.wait(version, timeout=120)
                assert synced.mode == ("full" if version == 1 else "delta")
                with receiver.hold() as image:
                    assert all(torch.equal(image.tensors[name], weights[name]) for name in weights)
    (home / "b").mkdir()
    with Receiver(home / "b", store=f"{url}/policy", version=2, timeout=60) as receiver:
        receiver.sync()
        with receiver.hold() as image:
            assert image.version == 2
            assert all(torch.equal(image.tensors[name], published[2][name]) for name in weights)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"store": "s3://bucket/run", "token": "t" * 32}, "a store takes no token"),
        ({"store": "s3://bucket/run", "region": "/dev/shm/x"}, "give one of"),
        ({"store": "s3://bucket/run", "nixl": True}, "from a store, receive the whole model"),
        ({"store": "bucket/run"}, "bucket/run"),
        ({"region": "/dev/shm/x", "version": 3}, "version is for a store"),
        ({}, "give one of"),
    ],
)
def test_a_receiver_says_what_a_store_does_not_do(home: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(WindlassInvalid, match=said):
        Receiver(home, **options)


def test_a_version_of_a_store_is_a_checkpoint_that_transformers_loads(home: Path) -> None:
    import transformers

    url = f"file://{home}/run"
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    model.config.save_pretrained(home / "base")
    with WeightManager(region_dir=str(home), timeout=120.0, store=url) as wm:
        wm.offload(model, 1)
        wm.wait_delta_ready(1)
    words = ["store", "get", url, "-o", str(home / "out"), "--model-dir", str(home / "base"), "--json"]
    command = [sys.executable, "-m", "windlass", *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = transformers.AutoModelForCausalLM.from_pretrained(home / "out")
    own = model.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in loaded.state_dict().items())


def test_a_store_is_configured_by_its_url_or_by_all_its_fields() -> None:
    config = WeightManagerConfig(store="s3://bucket/run")
    assert config.store == StoreConfig(url="s3://bucket/run")
    assert WeightManagerConfig.from_dict(config.to_dict()) == config
    given = WeightManagerConfig.from_dict({"store": {"url": "file:///mnt/run", "keep": 3}})
    assert given.store == StoreConfig(url="file:///mnt/run", keep=3)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"store": "bucket/run"}, "bucket/run"),
        ({"store": "s3://user:secret@bucket/run"}, "must not contain|secret|credential"),
        ({"store": {"url": "s3://bucket/run", "part_bytes": 1}}, "StoreConfig.part_bytes is 1"),
        ({"store": {"url": "s3://bucket/run", "keep_for": 1}}, "did you mean 'keep"),
        ({"store": "s3://bucket/run", "agent": {"enabled": False}}, "the agent is what uploads"),
        ({"store": 7}, "WeightManagerConfig.store is 7"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_at_once(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(WindlassInvalid, match=said) as refused:
        WeightManagerConfig.from_dict(fields)
    assert "user:secret" not in str(refused.value)
