"""Versions from an image into vLLM's own models: by its loader, by the plan, and not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from building import bits, places
from publishing import Publishing
from windlass.errors import WindlassInvalid, WindlassStale
from windlass.load import Live, LoadOrder

KINDS = ["qwen3", "qwen3tied", "qwen3moe"]


def order(plain: dict[str, Any]) -> LoadOrder:
    return LoadOrder.from_dict(plain)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("kind", KINDS)
def test_a_replayed_version_is_what_a_fresh_engine_has(
    kind: tiny.Kind, build: Callable[..., Any], home: Path
) -> None:
    import building

    worker, trainer = build(kind), tiny.model(kind)
    live = Live(worker, engine="vllm", verify_every=2)
    where = places(worker.model)
    hows = []
    with Publishing(home) as publishing:
        for version in range(1, 6):
            tiny.stir_some(trainer, version)
            report = live.load(order(publishing.publish(trainer, version)))
            assert (report.state, report.error) == ("clean", None)
            assert report.last is not None and report.live is not None
            assert report.live.version == version
            hows.append(report.last.how)
    assert hows[0] == "session"
    assert set(hows[1:]) <= {"dense", "sparse"}
    assert report.plan is not None
    assert (report.plan.session, report.plan.why) == (0, {})
    fresh = building.session(tiny.save(trainer, home / "fresh"))
    assert bits(worker.model) == bits(fresh.model)
    assert places(worker.model) == where


@pytest.mark.usefixtures("plain")
def test_what_was_refused_leaves_every_byte_as_it_was(build: Callable[..., Any], home: Path) -> None:
    worker, trainer = build("qwen3"), tiny.model("qwen3")
    live = Live(worker)
    with Publishing(home / "good") as publishing:
        live.load(order(publishing.publish(trainer, 1)))
        good = publishing.tensors()
    before = bits(worker.model)
    q, embedding = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"
    cases = {
        "missing": ({k: v for k, v in good.items() if k != q}, q),
        "shape": ({**good, q: good[q].repeat(2, 1)}, q),
        "rows": ({**good, embedding: good[embedding].repeat(2, 1)}, embedding),
        "dtype": ({**good, q: good[q].to(torch.float16)}, q),
    }
    for case, (weights, name) in cases.items():
        with Publishing(home / case) as other:
            wrong = other.publish(weights, 2)
            # To a worker that knows what it had, and to one that has just started.
            for worker_live in (live, Live(worker)):
                if case == "dtype" and worker_live is not live:
                    continue
                with pytest.raises(WindlassInvalid) as caught:
                    told = worker_live.load(order(wrong))
                    pytest.fail(f"{case} was loaded: {told}")
                assert name in str(caught.value) or "qkv_proj" in str(caught.value), case
                assert worker_live.report().state == "clean"
    assert bits(worker.model) == before


@pytest.mark.usefixtures("plain")
def test_an_order_for_another_version_is_refused(build: Callable[..., Any], home: Path) -> None:
    worker, trainer = build("qwen3"), tiny.model("qwen3")
    live = Live(worker)
    with Publishing(home) as publishing:
        right = publishing.publish(trainer, 3)
        for change in ({"version": 4}, {"incarnation": 1}, {"digest": "00"}):
            with pytest.raises(WindlassStale):
                live.load(order({**right, **change}))
        assert live.report().live is None
        assert live.load(order(right)).state == "clean"


@pytest.mark.usefixtures("plain")
def test_extra_tensors_are_listed_or_refused(build: Callable[..., Any], home: Path) -> None:
    worker, trainer = build("qwen3"), tiny.model("qwen3")
    with Publishing(home / "good") as publishing:
        publishing.publish(trainer, 1)
        weights = {**publishing.tensors(), "extra_head.weight": torch.zeros(3, 3)}
    with Publishing(home / "more") as publishing:
        given = order(publishing.publish(weights, 1))
        with pytest.raises(WindlassInvalid, match=r"extra_head\.weight"):
            Live(worker, extras="error").load(given)
        report = Live(worker, extras="ignore").load(given)
    assert (report.state, report.extras) == ("clean", ("extra_head.weight",))


@pytest.mark.usefixtures("plain")
def test_a_foreign_reload_is_not_patched(build: Callable[..., Any], home: Path) -> None:
    worker, trainer = build("qwen3"), tiny.model("qwen3")
    live = Live(worker)
    with Publishing(home, keep_deltas=8) as publishing:
        for version in (1, 2, 3):
            tiny.stir_some(trainer, version)
            report = live.load(order(publishing.publish(trainer, version)))
        assert report.last is not None
        assert report.last.how == "sparse"
        right = bits(worker.model)
        # Somebody writes to a parameter behind our back, in the same memory.
        norm = worker.model.get_parameter("model.layers.1.mlp.down_proj.weight")
        norm.data.mul_(3)
        tiny.stir_some(trainer, 4)
        report = live.load(order(publishing.publish(trainer, 4)))
        assert report.last is not None
        assert (report.state, report.last.how) == ("clean", "dense")
        assert bits(worker.model) != right
        # Told by the engine, as after level-2 sleep.
        live.forget("a test says so")
        tiny.stir_some(trainer, 5)
        report = live.load(order(publishing.publish(trainer, 5)))
        assert report.last is not None
        assert report.last.how == "dense"
    import building

    fresh = building.session(tiny.save(trainer, home / "fresh"))
    assert bits(worker.model) == bits(fresh.model)


@pytest.mark.usefixtures("plain")
def test_a_parameter_that_moved_ends_the_plan(build: Callable[..., Any], home: Path) -> None:
    worker, trainer = build("qwen3"), tiny.model("qwen3")
    live = Live(worker)
    with Publishing(home) as publishing:
        live.load(order(publishing.publish(trainer, 1)))
        weight = worker.model.get_parameter("model.norm.weight")
        weight.data = weight.data.clone()
        tiny.stir_some(trainer, 2)
        report = live.load(order(publishing.publish(trainer, 2)))
        assert report.last is not None
        assert (report.state, report.last.how) == ("clean", "session")
        tiny.stir_some(trainer, 3)
        report = live.load(order(publishing.publish(trainer, 3)))
        assert report.last is not None
        assert report.last.how in ("dense", "sparse")


@pytest.mark.usefixtures("plain")
def test_a_load_that_fails_halfway_leaves_the_worker_dirty(
    build: Callable[..., Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import building

    worker, trainer = build("qwen3"), tiny.model("qwen3")
    live = Live(worker)
    with Publishing(home) as publishing:
        given = order(publishing.publish(trainer, 1, reports=str(home / "reports")))
        load = worker.load

        def break_off(weights: Any) -> None:
            load(pair for i, pair in enumerate(weights) if i < 5)
            raise OSError("the disk is gone")

        monkeypatch.setattr(worker, "load", break_off)
        report = live.load(given)
        assert (report.state, report.live) == ("dirty", None)
        assert report.error is not None and "the disk is gone" in report.error.text
        assert '"dirty"' in (home / "reports" / "0.json").read_text()
        monkeypatch.setattr(worker, "load", load)
        report = live.load(given)
        assert (report.state, report.error) == ("clean", None)
    fresh = building.session(tiny.save(trainer, home / "fresh"))
    assert bits(worker.model) == bits(fresh.model)


@pytest.mark.usefixtures("plain")
def test_expert_rebalancing_refuses_the_plan(build: Callable[..., Any], home: Path) -> None:
    worker, trainer = build("qwen3moe"), tiny.model("qwen3moe")
    worker._vllm_config.parallel_config.enable_eplb = True
    live = Live(worker)
    with Publishing(home) as publishing:
        for version in (1, 2):
            report = live.load(order(publishing.publish(trainer, version)))
            assert report.last is not None
            assert (report.state, report.last.how) == ("clean", "session")


def test_packed_experts_go_through_the_engine_and_the_rest_is_replayed(
    build: Callable[..., Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.model_executor.layers.utils as layers

    import building

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    monkeypatch.setattr(layers, "dispatch_cpu_unquantized_gemm", dispatch)
    worker, trainer = build("qwen3moe"), tiny.model("qwen3moe")
    live = Live(worker)
    with Publishing(home) as publishing:
        for version in (1, 2, 3):
            tiny.stir_some(trainer, version)
            report = live.load(order(publishing.publish(trainer, version)))
            assert report.state == "clean"
    assert report.plan is not None and report.last is not None
    assert set(report.plan.why) == {f"model.layers.{i}.mlp.experts.routed_experts" for i in (0, 1)}
    assert report.plan.replayed > 10
    assert report.last.how in ("dense", "sparse")
    fresh = building.session(tiny.save(trainer, home / "fresh"))
    assert bits(worker.model) == bits(fresh.model)
