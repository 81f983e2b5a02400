"""Two workers with shares of one model in a real server, whose weights stay plain: what is written directly."""

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
from windlass import _windlass

TOKEN = "a-secret-of-this-test"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[tiny.Kind], Path]) -> Iterator[servers.Vllm]:
    how: dict[str, Any] = {"dev": False, "plain": True, "tp": 2, "plugins": "windlass,plain_weights"}
    with servers.Vllm(checkpoint("qwen3"), env={"WINDLASS_TOKEN": TOKEN}, **how) as running:
        yield running


@pytest.mark.timeout(500)
def test_two_workers_write_what_changed_and_answer_as_a_fresh_engine(server: servers.Vllm) -> None:
    trainer, hows = tiny.model("qwen3"), []
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="engine-") as home,
        Publishing(Path(home), keep_deltas=8) as publishing,
    ):
        for version in range(1, 7):
            tiny.stir_some(trainer, version)
            order = publishing.publish(trainer, version, how="dense" if version == 3 else "auto")
            told = server.post("/windlass/v1/load", {"order": order}, headers=HEADERS, timeout=90)
            assert [(w["rank"], w["state"], w["plan"]["why"]) for w in told["workers"]] == [
                (0, "clean", {}),
                (1, "clean", {}),
            ]
            assert server.answers() == tiny.answers(trainer), version
            hows.append({w["last"]["how"] for w in told["workers"]})
        assert hows == [{"session"}, {"sparse"}, {"dense"}, {"sparse"}, {"sparse"}, {"sparse"}]
        # What both hold, taken together, is the image.
        workers = server.post("/windlass/v1/verify", headers=HEADERS)["workers"]
        assert [w["unseen"] for w in workers] == [[], []]
        held = _windlass.open_image(publishing.image, 30.0, 5.0)
        combined = json.loads(
            _windlass.combine_digests(held.layout(), [json.dumps(w["parts"]) for w in workers])
        )
        digest = held.digest
        held.finish()
    assert combined["digest"] == digest, combined
