"""An ``sglang.Engine`` in its user's process, with tied embeddings: loaded by every way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
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

pytestmark = pytest.mark.timeout(400)


class Embedded:
    """The child that has the engine."""

    def __init__(self, model: Path) -> None:
        python = servers.python_of("sglang")
        own = servers.Sglang(model)._env
        drop = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH"}
        env = {**{k: v for k, v in os.environ.items() if k not in drop}, **own}
        script = Path(__file__).with_name("embedded.py")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._child = subprocess.Popen(
            [str(python), str(script), str(model)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._lines: Queue[str | None] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._next() == "ready"

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith(MARK):
                self._lines.put(line.removeprefix(MARK))
        self._lines.put(None)

    def _next(self) -> Any:
        line = self._lines.get(timeout=300)
        if line is None:
            self._log.seek(0)
            raise RuntimeError(f"the engine's process ended:\n{self._log.read()[-4000:]}")
        return json.loads(line)

    def ask(self, **words: Any) -> Any:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(words) + "\n")
        self._child.stdin.flush()
        return self._next()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(30)
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
