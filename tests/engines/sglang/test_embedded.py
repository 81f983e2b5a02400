"""An ``sglang.Engine`` in its user's process, with tied embeddings: loaded by every way."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from embedded import MARK
from policy import Policy

import servers
import tiny

pytestmark = pytest.mark.timeout(900)


class Embedded:
    """The child that has the engine."""

    def __init__(self, model: Path) -> None:
        script = Path(__file__).with_name("embedded.py")
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115
        theirs, ours = os.pipe()
        answers, said = os.pipe()
        self._input, self._output = os.fdopen(ours, "w"), os.fdopen(answers)
        with os.fdopen(said, "wb") as out:
            self._child = servers.template("sglang").start(
                [script, model],
                {**servers.environment_of("sglang"), "SGLANG_CPU_OMP_THREADS_BIND": "0"},
                stdin=theirs,
                stdout=out,
                stderr=self._log,
                fork=True,
            )
        os.close(theirs)
        self._lines: Queue[str | None] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._next() == "ready"

    def _read(self) -> None:
        for line in self._output:
            if line.startswith(MARK):
                self._lines.put(line.removeprefix(MARK))
        self._lines.put(None)

    def _next(self) -> Any:
        line = self._lines.get(timeout=300)
        if line is None:
            self._log.seek(0)
            raise RuntimeError(
                f"the engine's process ended:\n{self._log.read()[-4000:].decode(errors='replace')}"
            )
        return json.loads(line)

    def ask(self, **words: Any) -> Any:
        self._input.write(json.dumps(words) + "\n")
        self._input.flush()
        return self._next()

    def kill(self) -> None:
        self._child.kill()
        self._input.close()
        self._log.close()


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[[tiny.Kind], Path]) -> Iterator[Embedded]:
    engine = Embedded(checkpoint("qwen3tied"))
    yield engine
    engine.kill()


def test_an_engine_in_its_users_process_is_loaded_by_every_way(engine: Embedded, home: Path) -> None:
    policy = Policy("qwen3tied", home)
    try:
        for way in ("custom", "disk", "tensors"):
            order = policy.step()
            refused = engine.ask(load={**order, "version": 999}, options={"way": way})
            assert "version" in refused["error"]
            assert not refused["dirty"]
            told = engine.ask(load=order, options={"way": way})
            assert told == {
                "way": way,
                "label": told["label"],
                "seen": told["label"],
                "reports": int(way == "custom"),
            }
            assert engine.ask(generate=tiny.PROMPTS, tokens=12) == tiny.answers(policy.model, 12)
    finally:
        policy.close()
