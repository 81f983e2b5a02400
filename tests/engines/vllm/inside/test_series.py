"""Requests of strategies into vLLM's own models: by its loader once, then directly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from building import bits, places
from windlass import strategy_from_config
from windlass.errors import WindlassInvalid
from windlass.extract import ModuleWeightExtractor
from windlass.load import Live
from windlass.load.receiving import Receiving
from windlass.transfer.sync_info import EmptyWeightSyncInfo

KINDS = ["qwen3", "qwen3tied", "qwen3moe"]


class Wire:
    """A sender of this process whose requests a worker of this process gets, as text."""

    def __init__(self, live: Live, strategy: str) -> None:
        config = {"strategy": strategy, "device": "cpu", "timeout": 60.0}
        self.receiving = Receiving(live, EmptyWeightSyncInfo().to_dict(), config)
        self.sender = strategy_from_config(config).create_sender(EmptyWeightSyncInfo())
        self.requests = 0

    async def update_weights(self, request: Any) -> None:
        self.requests += 1
        self.receiving_update(request.to_dict())

    def receiving_update(self, plain: Any) -> None:
        # In a thread: a worker has no event loop running, and this one has.
        import threading

        failure: list[BaseException] = []

        def work() -> None:
            try:
                self.receiving.update(plain)
            except BaseException as e:
                failure.append(e)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
        if failure:
            raise failure[0]

    def sync(self, model: Any, *, finish: bool = True) -> None:
        extractor = ModuleWeightExtractor(group_by_module=True, threshold_gb=1e-4)
        asyncio.run(self.sender.send_chunks(extractor.extract_weights(model, "float32"), self))  # type: ignore[arg-type]
        if finish:
            self.receiving.finish()

    def close(self) -> None:
        self.sender.close()
        self.receiving.close()


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["packed_cuda_ipc", "cuda_ipc"])
def test_every_sync_after_the_first_is_written_directly(
    kind: tiny.Kind, strategy: str, build: Callable[..., Any], home: Path
) -> None:
    import building

    worker, trainer = build(kind), tiny.model(kind)
    live = Live(worker, engine="vllm")
    where, hows = places(worker.model), []
    wire = Wire(live, strategy)
    try:
        for version in range(1, 5):
            tiny.stir_some(trainer, version)
            wire.sync(trainer)
            report = live.report()
            assert (report.state, report.error) == ("clean", None)
            assert report.last is not None
            hows.append(report.last.how)
        assert wire.requests > 4
    finally:
        wire.close()
    assert hows == ["session", "dense", "dense", "dense"]
    assert report.plan is not None
    assert (report.plan.session, report.plan.why) == (0, {})
    fresh = building.session(tiny.save(trainer, home / "fresh"))
    assert bits(worker.model) == bits(fresh.model)
    assert places(worker.model) == where


def test_packed_experts_go_through_the_engine_and_the_rest_is_written_directly(
    build: Callable[..., Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.model_executor.layers.utils as layers

    import building

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    monkeypatch.setattr(layers, "dispatch_cpu_unquantized_gemm", dispatch)
    worker, trainer = build("qwen3moe"), tiny.model("qwen3moe")
    live = Live(worker, engine="vllm")
    wire = Wire(live, "packed_cuda_ipc")
    try:
        for version in range(1, 4):
            tiny.stir_some(trainer, version)
            wire.sync(trainer)
            assert live.report().state == "clean"
    finally:
        wire.close()
    report = live.report()
    assert report.plan is not None and report.last is not None
    assert set(report.plan.why) == {f"model.layers.{i}.mlp.experts.routed_experts" for i in (0, 1)}
    assert report.plan.replayed > 10
    assert report.last.how == "dense"
    fresh = building.session(tiny.save(trainer, home / "fresh"))
    assert bits(worker.model) == bits(fresh.model)


def test_where_nothing_stays_as_it_was_loaded_every_sync_is_the_engines(
    build: Callable[..., Any], home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker, trainer = build("qwen3"), tiny.model("qwen3")
    live = Live(worker, engine="vllm")
    wire = Wire(live, "cuda_ipc")
    try:
        with caplog.at_level(logging.WARNING, "windlass"):
            for version in range(1, 4):
                tiny.stir_some(trainer, version)
                wire.sync(trainer)
                report = live.report()
                assert report.last is not None
                assert (report.state, report.last.how) == ("clean", "session")
    finally:
        wire.close()
    assert "0 modules are written directly, 19 by the engine's own loader" in caplog.text
    # The packed weights are in closures; the plain part is what a fresh engine has.
    import building

    fresh = building.session(tiny.save(trainer, home / "fresh"))
    assert bits(worker.model) == bits(fresh.model)


@pytest.mark.usefixtures("plain")
def test_weights_that_a_sleeping_engine_discarded_are_loaded_by_the_engine_once(
    build: Callable[..., Any], home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import building

    worker, trainer = build("qwen3"), tiny.model("qwen3")
    live = Live(worker, engine="vllm")
    wire, hows = Wire(live, "packed_cuda_ipc"), []
    try:
        for version in range(1, 7):
            tiny.stir_some(trainer, version)
            if version == 4:
                # What sleeping at level 2 does to parameters; buffers come back by vLLM itself.
                with torch.no_grad():
                    for parameter in worker.model.parameters():
                        parameter.fill_(float("nan"))
                live.forget("sleep was called")
            with caplog.at_level(logging.WARNING, "windlass"):
                wire.sync(trainer)
            report = live.report()
            assert report.last is not None and report.state == "clean"
            hows.append(report.last.how)
    finally:
        wire.close()
    assert hows == ["session", "dense", "dense", "session", "dense", "dense"]
    assert "sleep was called" in caplog.text
    fresh = building.session(tiny.save(trainer, home / "fresh"))
    assert bits(worker.model) == bits(fresh.model)


@pytest.mark.usefixtures("plain")
def test_a_sync_that_breaks_off_leaves_the_worker_dirty_until_the_next(
    build: Callable[..., Any], home: Path
) -> None:
    import building

    worker, trainer = build("qwen3"), tiny.model("qwen3")
    live = Live(worker, engine="vllm")
    wire = Wire(live, "cuda_ipc")
    try:
        for version in (1, 2):
            tiny.stir_some(trainer, version)
            wire.sync(trainer)
        fewer = {n: p for n, p in trainer.named_parameters() if n != "model.norm.weight"}
        from windlass.extract.chunk import WeightChunk

        asyncio.run(wire.sender.send_chunks([WeightChunk.of(fewer.items())], wire))  # type: ignore[arg-type]
        with pytest.raises(WindlassInvalid, match=r"model\.norm\.weight did not come"):
            wire.receiving.finish()
        report = live.report()
        assert report.state == "dirty" and report.error is not None
        for version in (3, 4):
            tiny.stir_some(trainer, version)
            wire.sync(trainer)
            assert live.report().state == "clean"
    finally:
        wire.close()
    fresh = building.session(tiny.save(trainer, home / "fresh"))
    assert bits(worker.model) == bits(fresh.model)
