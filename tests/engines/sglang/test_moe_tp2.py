"""A mixture of experts over two tensor-parallel workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from policy import Policy

import servers
import tiny
from windlass.sglang import SGLangWeightLoader
from windlass.sglang.custom import PATH

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[tiny.Kind], Path]) -> Iterator[servers.Sglang]:
    with servers.Sglang(checkpoint("qwen3moe"), tp=2, options=["--custom-weight-loader", PATH]) as server:
        yield server


def test_experts_over_two_workers_are_loaded_by_every_way(server: servers.Sglang, home: Path) -> None:
    policy = Policy("qwen3moe", home)
    try:
        for way in ("custom", "disk", "tensors", "custom", "custom"):
            order = policy.step()
            mine = SGLangWeightLoader(server.url, way=way, timeout=120.0)  # type: ignore[arg-type]
            loaded = asyncio.run(mine.load_image(order))
            assert server.answers(12) == tiny.answers(policy.model, 12)
            if way == "custom":
                assert [report.rank for report in loaded.reports] == [0, 1]
                assert len({report.worker for report in loaded.reports}) == 2
    finally:
        policy.close()
