"""One SGLang server with a dense model, brought from version to version by every way, and disturbed in between.

The server lives for the whole module; its tests leave it serving the newest version of the policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from policy import Policy

import servers
import tiny
from windlass.sglang import SGLangWeightLoader
from windlass.sglang.custom import PATH

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[tiny.Kind], Path]) -> Iterator[servers.Sglang]:
    with servers.Sglang(checkpoint("qwen3"), options=["--custom-weight-loader", PATH]) as server:
        yield server


@pytest.fixture(scope="module")
def policy(home: Path) -> Iterator[Policy]:
    policy = Policy("qwen3", home)
    yield policy
    policy.close()


def loader(server: servers.Sglang, **options: Any) -> SGLangWeightLoader:
    return SGLangWeightLoader(server.url, **{"timeout": 120.0, **options})


def load(server: servers.Sglang, order: dict[str, Any], **options: Any) -> Any:
    return asyncio.run(loader(server, **options).load_image(order))


def label_of(server: servers.Sglang) -> str:
    return str(server.get("/model_info")["weight_version"])


@pytest.mark.parametrize("way", ["custom", "disk", "tensors"])
def test_versions_in_a_row_are_what_the_server_answers(
    way: str, server: servers.Sglang, policy: Policy
) -> None:
    mine = loader(server, way=way, bucket_bytes=200_000)
    for _ in range(5 if way == "custom" else 2):
        order = policy.step()
        loaded = asyncio.run(mine.load_image(order))
        assert loaded.way == way
        assert loaded.label == label_of(server) == f"windlass:{order['incarnation']:016x}:{policy.version}"
        assert server.answers() == policy.answers()
    assert not mine.dirty
