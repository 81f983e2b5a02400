"""A mixture of experts over two tensor-parallel workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from policy import Policy, is_held_by

import servers
import tiny
from sidecar import Sidecar
from windlass.engines.sglang import SGLangWeightLoader
from windlass.engines.sglang.custom import PATH

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[tiny.Kind], Path]) -> Iterator[servers.Sglang]:
    with servers.Sglang(checkpoint("qwen3moe"), tp=2, options=["--custom-weight-loader", PATH]) as server:
        yield server


def test_two_workers_of_experts_write_what_changed(server: servers.Sglang, home: Path) -> None:
    """The sidecar's orders, and the bytes that are there afterwards."""
    (home / "sidecar").mkdir()
    policy, image, hows = Policy("qwen3moe", home / "sidecar"), home / "images", []
    try:
        policy.step()
        region = f"--region={policy.manager.region}"
        with Sidecar(region, f"--dir={image}", f"--engine=sglang={server.url}") as sidecar:
            for _ in range(4):
                loaded = sidecar.wait("loaded", version=policy.version)
                hows.append((loaded["how"], loaded["why"] is None))
                assert server.answers(12) == tiny.answers(policy.model, 12)
                policy.step(sparsely=True)
            sidecar.wait("loaded", version=policy.version)
            workers = asyncio.run(SGLangWeightLoader(server.url).digests())
            assert [worker["unseen"] for worker in workers] == [[], []]
            assert is_held_by(workers, image / "policy")
    finally:
        policy.close()
    assert hows == [("session", True), ("sparse", True), ("sparse", True), ("sparse", True)]


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
