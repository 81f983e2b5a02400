"""Versions from an image into vLLM's own models: by its loader, by the plan, and not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny
from building import bits, places
from publishing import Publishing
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
