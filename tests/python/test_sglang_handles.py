"""Weights of a trainer's memory into SGLang's workers by handles: the adapter, the loader in a worker, and all that is between
but the server. With real servers: ``tests/engines/test_broadcast.py``."""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fake_engines import OK, SGLANG, Fake, serving
from windlass import WeightSyncManager, strategy_from_config
from windlass.engines.remote import SglangEngine
from windlass.engines.sglang import custom
from windlass.errors import WindlassInvalid, WindlassPeerLost, WindlassUnsupported
from windlass.extract import ModuleWeightExtractor
from windlass.load.order import Report
from windlass.transfer.client import EnginesFailed, InferenceEngineClient
from windlass.transfer.ipc.arena import host_device
from windlass.transfer.request import IpcHandle, PackedCudaIpcWeightUpdateRequest, packed_layout
from windlass.transfer.sync_info import EmptyWeightSyncInfo

PACKED = {"strategy": "packed_cuda_ipc", "timeout": 20.0}
INFO = {"version": "0.5.23", "tp_size": 1, "custom_weight_loader": [custom.PATH]}


class Policy(torch.nn.Module):
    """A trainer's model, and with a loader of its own a worker's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(3, 4)
        self.down = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
        self.breaks = False

    def load_weights(self, weights: Any) -> None:
        own = dict(self.named_parameters())
        for name, tensor in weights:
            if self.breaks:
                raise RuntimeError("out of luck")
            own[name].data.copy_(tensor)

    def holds(self, other: Policy) -> bool:
        pairs = zip(self.parameters(), other.parameters(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)


def stir(model: Policy) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Policy:
    model = Policy()
    save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(custom, "_checkpoint", lambda: str(tmp_path))
    return model


@contextmanager
def engine_of(worker: Policy, **routes: Any) -> Iterator[Fake]:
    """A server with one worker."""

    def update(body: Any) -> Any:
        assert body["load_format"] == custom.PATH
        text = base64.b64decode(body["serialized_named_tensors"][0])
        # Nothing but the text of a request: weights are not in it.
        assert len(text) < 10_000
        custom.load(worker, pickle.loads(text))
        return OK

    known = {"GET /server_info": (200, INFO), "POST /update_weights_from_tensor": update}
    with serving({**SGLANG, **known, **routes}) as fake:
        yield fake


def report_of(engine: SglangEngine) -> Report:
    assert engine._handles is not None
    (report,) = engine._handles.reports
    return report


@pytest.mark.parametrize("strategy", ["packed_cuda_ipc", "cuda_ipc"])
@pytest.mark.parametrize("older", [False, True])
def test_an_sglang_with_our_loader_is_told_of_handles(trainer: Policy, strategy: str, older: bool) -> None:
    settings = {"strategy": strategy, "timeout": 20.0}
    worker = Policy()
    missing = (404, {"detail": "Not Found"})
    routes = {"POST /begin_weight_update": missing, "POST /end_weight_update": missing} if older else {}

    async def run(url: str) -> None:
        engine = SglangEngine(url, strategy=settings)
        client = InferenceEngineClient([engine], pause=True, prefix_cache="keep")
        manager = WeightSyncManager(strategy_from_config(settings), ModuleWeightExtractor(), client)
        await manager.initialize()
        for version in (1, 2, 3):
            stir(trainer)
            assert await manager.sync_weights(trainer) == version
            assert worker.holds(trainer)
            assert report_of(engine).state == "clean"
        await client.aclose()
        assert worker.__dict__["_windlass_worker"]._receiving is None
        manager.close()

    with engine_of(worker, **routes) as fake:
        asyncio.run(run(fake.url))
    calls = [path for path in fake.paths if path != "/server_info"]
    # A request for each parameter, and the end of the update.
    updates = ["/update_weights_from_tensor"] * 5
    begun = ["/pause_generation", "/begin_weight_update", *updates]
    if older:
        assert calls[: len(begun) + 1] == [*begun, "/update_weight_version"]
        assert calls.count("/begin_weight_update") == 1
    else:
        assert calls[: len(begun) + 1] == [*begun, "/end_weight_update"]
        # Its end: nothing is computed while a session is open.
        assert calls[-6:] == [
            "/continue_generation",
            "/pause_generation",
            "/begin_weight_update",
            "/update_weights_from_tensor",
            "/end_weight_update",
            "/continue_generation",
        ]


def test_requests_of_handles_are_loaded_whole_or_said_to_be_dirty(trainer: Policy) -> None:
    worker = Policy()

    async def run(url: str) -> None:
        engine = SglangEngine(url, strategy=PACKED)
        client = InferenceEngineClient([engine], pause=True, prefix_cache="keep")
        manager = WeightSyncManager(strategy_from_config(PACKED), ModuleWeightExtractor(), client)
        await manager.initialize()
        await manager.sync_weights(trainer)
        before = Policy()
        before.load_state_dict(worker.state_dict())
        # Another shape is found before anything is written.
        stir(trainer)
        down, trainer.down = trainer.down, torch.nn.Linear(4, 3, dtype=torch.bfloat16)
        up, trainer.up = trainer.up, torch.nn.Linear(3, 5)
        with pytest.raises(EnginesFailed, match=r"up.weight has shape \[5, 3\], the engine serves \[4, 3\]"):
            await manager.sync_weights(trainer)
        assert report_of(engine).state == "clean" and worker.holds(before)
        trainer.up = up
        # A tensor that does not come, or a loader that breaks, is dirty until a whole update comes.
        del trainer.down
        with pytest.raises(EnginesFailed, match="down.bias.*down.weight.* did not come"):
            await manager.sync_weights(trainer)
        assert report_of(engine).state == "dirty"
        trainer.down = down
        worker.breaks = True
        with pytest.raises(EnginesFailed, match="out of luck"):
            await manager.sync_weights(trainer)
        assert report_of(engine).state == "dirty"
        worker.breaks = False
        await manager.sync_weights(trainer)
        assert report_of(engine).state == "clean" and worker.holds(trainer)
        await client.aclose()
        manager.close()

    with engine_of(worker) as fake:
        asyncio.run(run(fake.url))


def test_an_sglang_that_cannot_open_handles_says_what_to_do(trainer: Policy) -> None:
    join = EmptyWeightSyncInfo()

    def refused(info: Any, strategy: Any = PACKED) -> Any:
        with engine_of(Policy(), **{"GET /server_info": (200, info)}) as fake:
            return asyncio.run(SglangEngine(fake.url, strategy=strategy).init_weight_transfer(join, 1))

    with pytest.raises(
        WindlassUnsupported, match="without --custom-weight-loader windlass.sglang.custom"
    ) as e:
        refused({**INFO, "custom_weight_loader": []})
    assert "tcp" in e.value.advice
    with pytest.raises(WindlassUnsupported, match="2 data-parallel replicas"):
        refused({**INFO, "dp_size": 2})
    # An adapter that was not told of handles, and one whose workers do not answer.
    words = ["w"], ["float32"], [[1]]
    handle = host_device(), IpcHandle("vmm_fd", b"{}", 4, 0)
    request = PackedCudaIpcWeightUpdateRequest(*words, packed_layout(*words), dict([handle]))
    with pytest.raises(WindlassInvalid, match="was not told that handles would come") as untold:
        asyncio.run(SglangEngine("http://h").update_weights(request))
    assert "strategy=" in untold.value.advice

    async def silent(url: str) -> None:
        engine = SglangEngine(url, strategy=PACKED)
        await engine.init_weight_transfer(join, 1)
        await engine.start_update()
        await engine.update_weights(request)

    route = {"POST /update_weights_from_tensor": OK}
    with engine_of(Policy(), **route) as fake, pytest.raises(WindlassPeerLost, match="rank 0 did not report"):
        asyncio.run(silent(fake.url))


@pytest.mark.parametrize(
    ("says", "goes_on"), [("a weight-update session is already open; end it first", True), ("no", False)]
)
def test_a_session_that_a_dead_trainer_left_open_is_taken_over(says: str, goes_on: bool) -> None:
    async def run(url: str) -> None:
        engine = SglangEngine(url, strategy=PACKED)
        await engine.init_weight_transfer(EmptyWeightSyncInfo(), 1)
        await engine.start_update()
        await engine.finish_update()

    refusal = (400, {"success": False, "message": says})
    with engine_of(Policy(), **{"POST /begin_weight_update": refusal}) as fake:
        if goes_on:
            asyncio.run(run(fake.url))
            assert fake.paths[-1] == "/end_weight_update"
        else:
            with pytest.raises(WindlassInvalid, match="no"):
                asyncio.run(run(fake.url))
