"""The transfer backend ``windlass``, driven through vLLM's own routes, by a sidecar's hand and by the trainer's."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import servers
import tiny
from publishing import Publishing
from windlass.load import Report

KIND: tiny.Kind = "qwen3tied"
CONFIG = ("--weight-transfer-config", '{"backend": "windlass"}')


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[tiny.Kind], Path]) -> Iterator[servers.Vllm]:
    with servers.Vllm(checkpoint(KIND), options=CONFIG) as running:
        yield running


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="engine-") as folder:
        yield Path(folder)


def label(order: dict[str, Any]) -> str:
    return f"windlass:{order['incarnation']:016x}:{order['version']}"


def sync(server: servers.Vllm, order: dict[str, Any], mode: str = "keep") -> None:
    """What a sidecar does."""
    server.post(f"/pause?mode={mode}&clear_cache=false")
    server.post("/start_weight_update")
    server.post("/update_weights", {"update_info": {"order": order}}, timeout=90)
    server.post("/finish_weight_update", {"weight_version": label(order)})
    server.post("/reset_prefix_cache")
    server.post("/resume")


@pytest.mark.timeout(400)
def test_five_versions_through_the_native_routes(server: servers.Vllm, home: Path) -> None:
    trainer, reports = tiny.model(KIND), home / "reports"
    with Publishing(home) as publishing:
        for version in range(1, 6):
            tiny.stir(trainer, version)
            order = publishing.publish(trainer, version, reports=str(reports))
            if version == 1:
                server.post("/init_weight_transfer_engine", {"init_info": {"image": publishing.image}})
            sync(server, order)
            assert server.answers() == tiny.answers(trainer)
            assert server.get("/weight_info") == {"weight_version": label(order)}
            report = Report.read(str(reports), 0)
            assert report is not None and report.live is not None
            assert (report.state, report.live.version) == ("clean", version)


@pytest.mark.timeout(400)
def test_an_order_that_is_refused_leaves_the_server_serving(server: servers.Vllm, home: Path) -> None:
    trainer, reports = tiny.model(KIND), str(home / "reports")
    with Publishing(home) as publishing, Publishing(home / "other") as broken:
        order = publishing.publish(trainer, 10)
        server.post("/init_weight_transfer_engine", {"init_info": {"image": publishing.image}})
        sync(server, order)
        weights = publishing.tensors()
        del weights["model.norm.weight"]
        bad = broken.publish(weights, 11, reports=reports)
        server.post("/pause?mode=keep&clear_cache=false")
        server.post("/start_weight_update")
        with pytest.raises(servers.HttpFailure):
            server.post("/update_weights", {"update_info": {"order": bad}})
        report = Report.read(reports, 0)
        assert report is not None and report.error is not None
        assert (report.state, report.error.kind) == ("clean", "invalid")
        assert "model.norm.weight" in report.error.text
        server.post("/resume")
        assert server.answers() == tiny.answers(trainer)
        tiny.stir(trainer, 12)
        sync(server, publishing.publish(trainer, 12))
        assert server.answers() == tiny.answers(trainer)


TRAINER = """
import json, sys
from pathlib import Path

sys.path[:0] = sys.argv[4:]
import torch
import tiny
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from windlass.engines.vllm import WindlassTrainerInitInfo, register

url, home, kind = sys.argv[1:4]
register()
model = tiny.model(kind)
info = WindlassTrainerInitInfo(rank=0, image_dir=home + "/images", manager={"region_dir": home, "model_id": "trained"})
client = HTTPVLLMWeightSyncClient(url)
engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
for step in (21, 22):
    tiny.stir(model, step)
    client._post("pause?mode=abort")
    engine.send_weights()
    client._post("reset_prefix_cache")
    client._post("resume")
engine.shutdown()
print(json.dumps(tiny.answers(model)))
"""


@pytest.mark.timeout(400)
def test_a_training_script_of_vllm_changes_one_string(server: servers.Vllm, home: Path) -> None:
    script, said, log = (home / name for name in ("trainer.py", "said", "log"))
    script.write_text(TRAINER)
    argv = [script, server.url, home, KIND, servers.PACKAGE, servers.HERE]
    with said.open("wb") as out, log.open("wb") as errors:
        env = servers.environment_of("vllm")
        done = servers.template("vllm").start(argv, env, stdout=out, stderr=errors)
        try:
            code = done.wait(240)
        finally:
            done.kill()
    assert code == 0, log.read_text(errors="replace")[-3000:]
    assert server.answers() == json.loads(said.read_text().splitlines()[-1])
    assert server.get("/weight_info")["weight_version"].endswith(":2")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["broadcast", "tcp"])
def test_the_facade_reaches_a_server_by_a_strategy(name: str, server: servers.Vllm, home: Path) -> None:
    import asyncio

    from windlass import WeightSyncManager, strategy_from_config
    from windlass.engines.remote import VllmEngine
    from windlass.extract import ModuleWeightExtractor
    from windlass.transfer.client import InferenceEngineClient

    config: dict[str, Any] = {"strategy": name}
    if name == "broadcast":
        config |= {"engines": [{}], "weight_sync_backend": "gloo", "master_addr": "127.0.0.1"}
    else:
        manager = {"region_dir": str(home), "model_id": "facade"}
        config |= {"image_dir": str(home / "images"), "manager": manager}
    model = tiny.model(KIND)

    async def train() -> None:
        client = InferenceEngineClient([VllmEngine(server.url, strategy=config, timeout=90)], pause=True)
        syncing = WeightSyncManager(
            strategy_from_config(config), ModuleWeightExtractor(group_by_module=True), client
        )
        await syncing.initialize()
        try:
            for step in (31, 32):
                tiny.stir(model, step)
                await syncing.sync_weights(model, "float32")
                answers = await asyncio.to_thread(server.answers)
                assert answers == tiny.answers(model)
        finally:
            syncing.close()
            await client.aclose()

    asyncio.run(train())
