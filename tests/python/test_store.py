"""A trainer whose agent uploads its versions to a store, and receivers that have nothing but the store."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
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


def test_a_receiver_in_python_keeps_a_slice_from_a_store(home: Path) -> None:
    url = f"file://{home}/run"
    weights = {f"layer.{n}": torch.randn(300, 400).to(torch.bfloat16) for n in range(8)}
    (home / "image").mkdir()
    with (
        WeightManager(region_dir=str(home), timeout=120.0, store=url) as wm,
        Receiver(home / "image", store=url, slice={"layer.3": [[]]}) as receiver,
    ):
        for version in (1, 2):
            weights["layer.3"][version] += 1.0
            weights["layer.5"][version] += 1.0
            wm.offload(weights, version)
            synced = receiver.wait(version, timeout=120)
            assert synced.mode == ("full" if version == 1 else "delta")
            assert synced.wire_bytes <= 1.1 * 300 * 400 * 2
            with receiver.hold() as image:
                assert torch.equal(image.tensors["layer.3"], weights["layer.3"])
                with pytest.raises(WindlassInvalid, match=r"layer\.5"):
                    image.tensors["layer.5"]


def test_an_image_that_is_ahead_of_a_store_stays_unless_an_older_version_is_named(home: Path) -> None:
    url = f"file://{home}/run"
    weights = {"layer": torch.randn(300, 200).to(torch.bfloat16)}
    first = weights["layer"].clone()
    (home / "image").mkdir()
    with WeightManager(region_dir=str(home), timeout=120.0, store=url) as wm:
        wm.offload(weights, 1)
        wm.wait_stored(1)
        # What a store is whose upload is behind.
        shutil.copytree(home / "run", home / "behind")
        weights["layer"][7] += 1.0
        wm.offload(weights, 2)
        with Receiver(home / "image", region=wm.region) as receiver:
            receiver.wait(2, timeout=120)
    behind = f"file://{home}/behind"
    with Receiver(home / "image", store=behind, timeout=60) as receiver:
        synced = receiver.sync()
        assert (synced.mode, synced.wire_bytes, receiver.version) == ("none", 0, 2)
        assert receiver.wait_newer(0.5) is None
    with Receiver(home / "image", store=behind, version=1, timeout=60) as receiver:
        receiver.sync()
        with receiver.hold() as image:
            assert (image.version, torch.equal(image.tensors["layer"], first)) == (1, True)


class Way:
    """A way to an agent that can be cut."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("http://").rpartition(":")
        self._to = (host, int(port))
        self._open: list[socket.socket] = []
        self._whole = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self._whole:
                near.close()
                continue
            far = socket.create_connection(self._to)
            self._open += [near, far]
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        self._whole = False
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._whole = True

    def close(self) -> None:
        self.cut()
        self._listener.close()


def test_a_receiver_in_python_goes_on_from_the_store_while_its_agent_is_away(home: Path) -> None:
    url = f"file://{home}/run"
    weights = {f"layer.{n}": torch.randn(300, 200).to(torch.bfloat16) for n in range(4)}
    (home / "image").mkdir()
    with WeightManager(region_dir=str(home), timeout=120.0, store=url) as wm:
        wm.offload(weights, 1)
        wm.wait_stored(1)
        with contextlib.closing(Way(wm.endpoint)) as way:
            agent = {"endpoint": way.endpoint, "token_file": wm.token_file}
            with Receiver(home / "image", **agent, store=url, store_after=0.1) as receiver:
                assert receiver.wait(1, timeout=120).mode == "full"
                for version, publisher in enumerate((url, url, way.endpoint, way.endpoint, url), 2):
                    if publisher == url:
                        way.cut()
                    else:
                        way.mend()
                        until = time.monotonic() + 120
                        while publisher not in str(receiver.status().publisher):
                            assert time.monotonic() < until, receiver.status()
                            receiver.sync(60)
                    weights["layer.2"][version] += 1.0
                    wm.offload(weights, version)
                    wm.wait_stored(version)
                    synced = receiver.wait(version, timeout=120)
                    assert (synced.mode, synced.wire_bytes < 100_000) == ("delta", True), synced
                    assert publisher in str(receiver.status().publisher)
                    with receiver.hold() as image:
                        assert all(torch.equal(image.tensors[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"store": "s3://bucket/run", "token": "t" * 32}, "a store takes no token"),
        ({"store": "s3://bucket/run", "region": "/dev/shm/x", "version": 3}, "leave out the agent"),
        ({"store": "s3://bucket/run", "region": "/dev/shm/x", "store_after": -1.0}, "store_after of -1 s"),
        ({"endpoint": "http://a:1", "token": "t" * 32, "region": "/dev/shm/x"}, "give one of"),
        ({"store": "s3://bucket/run", "nixl": True}, "nixl is for agents"),
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


def test_an_adapter_and_its_base_model_are_followed_from_one_store_beside_each_other(home: Path) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    from windlass.extract.lora import collect_lora

    url = f"file://{home}/run"
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    chosen = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config).to(torch.bfloat16), chosen)

    def train() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape).to(parameter.dtype))

    def check(receiver: Receiver, expected: dict[str, torch.Tensor]) -> None:
        with receiver.hold() as image:
            assert sorted(image.tensors) == sorted(expected)
            assert all(torch.equal(image.tensors[name], tensor) for name, tensor in expected.items())

    def publisher(run: str, kind: str, model_id: str) -> WeightManager:
        place = home / run / kind
        place.mkdir(parents=True)
        return WeightManager(region_dir=str(place), timeout=120.0, store=url, lora=kind, model_id=model_id)

    def receiver(model_id: str) -> Receiver:
        (home / "image").mkdir(exist_ok=True)
        return Receiver(home / "image", store=f"{url}/{model_id}")

    incarnations = {}
    with receiver("policy") as base, receiver("policy.lora") as adapter:
        for run in ("first", "resumed"):
            with (
                publisher(run, "base", "policy") as bases,
                publisher(run, "adapter", "policy.lora") as adapters,
            ):
                bases.offload(model, 1)
                bases.wait_stored(1)
                for version in (1, 2, 3):
                    train()
                    adapters.offload(model, version)
                    adapters.wait_stored(version)
                    while (newer := adapter.wait_newer(120)) is not None and newer[1] != version:
                        adapter.sync()
                    assert newer is not None
                    assert adapter.sync().image is not None
                    check(adapter, collect_lora(model).tensors)
                incarnations[run] = newer[0]
                base.wait(1, timeout=120)
                assert base.version == 1
                names = [name for name in model.state_dict() if "lora_" not in name]
                check(base, {clean(name): model.state_dict()[name] for name in names})
    assert incarnations["first"] < incarnations["resumed"]
    # A URL that does not say which of the two is not enough.
    with pytest.raises(WindlassInvalid, match="policy, policy.lora"):
        Receiver(home / "other", store=url, timeout=60)
    # The versions of the run before stay, and each is a file that an engine loads.
    words = ["store", "ls", f"{url}/policy.lora", "--json"]
    command = [sys.executable, "-m", "windlass", *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    listed = json.loads(done.stdout.splitlines()[-1])["models"][0]
    assert (listed["model_id"], listed["incarnations"], listed["versions"]) == ("policy.lora", 2, 6), listed


def clean(name: str) -> str:
    """The name of a tensor of the base model, without what peft puts around it."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")
