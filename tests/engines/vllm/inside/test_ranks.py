"""Two ranks that hold shares of one model: each rehearses, qualifies and decides alone."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import servers
import tiny
from publishing import Publishing

RANK = Path(__file__).resolve().parent / "rank.py"


class Rank:
    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, str(RANK), *map(str, arguments)]
        env = {**os.environ, "PYTHONPATH": str(servers.PACKAGE)}
        self._child = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, value: object) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(value) + "\n")
        self._child.stdin.flush()

    def hear(self) -> Any:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith("windlass "):
                return json.loads(line.removeprefix("windlass "))
        raise AssertionError(f"a rank ended with {self._child.wait(10)}")

    def end(self) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(20)


@contextlib.contextmanager
def ranks(checkpoint: Path, world: int = 2) -> Iterator[list[Rank]]:
    address = f"tcp://127.0.0.1:{servers.free_port()}"
    made = [Rank(rank, world, address, checkpoint) for rank in range(world)]
    try:
        yield made
    finally:
        for rank in made:
            rank.end()


def ask(all_ranks: list[Rank], value: object) -> list[Any]:
    for rank in all_ranks:
        rank.tell(value)
    return [rank.hear() for rank in all_ranks]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3moe"])
def test_shares_of_two_ranks_are_what_fresh_ranks_have(
    kind: tiny.Kind, checkpoint: Callable[[tiny.Kind], Path], home: Path
) -> None:
    trainer = tiny.model(kind)
    with Publishing(home) as publishing, ranks(checkpoint(kind)) as both:
        assert [rank.hear() for rank in both] == [{"ready": 0}, {"ready": 1}]
        for version in (1, 2, 3):
            tiny.stir_some(trainer, version)
            reports = ask(both, {"order": publishing.publish(trainer, version)})
            assert [(r["state"], r["error"], r["rank"]) for r in reports] == [
                ("clean", None, 0),
                ("clean", None, 1),
            ]
            hows = {r["last"]["how"] for r in reports}
            assert hows == {"session"} if version == 1 else hows <= {"dense", "sparse"}
            assert [r["plan"]["why"] for r in reports] == [{}, {}]
        fresh = str(tiny.save(trainer, home / "fresh"))
        for told in ask(both, {"fresh": fresh}):
            assert told["different"] == []
            assert told["all"] > 10


@pytest.mark.timeout(300)
def test_shares_of_requests_are_what_fresh_ranks_have(
    checkpoint: Callable[[tiny.Kind], Path], home: Path
) -> None:
    trainer = tiny.model("qwen3")
    with ranks(checkpoint("qwen3")) as both:
        assert [rank.hear() for rank in both] == [{"ready": 0}, {"ready": 1}]
        for version in (1, 2):
            tiny.stir_some(trainer, version)
            saved = tiny.save(trainer, home / str(version))
            reports = ask(both, {"series": str(saved / "model.safetensors")})
            assert [(r["state"], r["error"], r["plan"]["why"]) for r in reports] == [("clean", None, {})] * 2
            assert {r["last"]["how"] for r in reports} == {"session" if version == 1 else "dense"}
        for told in ask(both, {"fresh": str(saved)}):
            assert told["different"] == []
            assert told["all"] > 10
