"""SkyRL's policy workers with real vLLM servers, which come and go, and policies that do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import servers
import tiny

HERE = Path(__file__).resolve().parent
KIND: tiny.Kind = "qwen3"


class Policy:
    """Two ranks that sync when they are told to."""

    def __init__(
        self, model: Path, urls: list[str], images: Path, home: Path, *, main: bool = False, **more: str
    ) -> None:
        home.mkdir()
        self._home, self._step, self._log = home, 0, home / "log"
        paths = [servers.PACKAGE, servers.HERE, HERE / "plugin", servers.HERE / "plugin"]
        paths += [HERE / "interface"] if main else []
        program, python = ("factory_policy.py", "vllm") if main else ("policy.py", "skyrl")
        env = os.environ | more
        env |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [servers.python_of(python), HERE / program, model, ",".join(urls), images, home]
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                list(map(str, command)), env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def synced(self, timeout: float = 400.0) -> dict[str, Any]:
        """What it says once its next sync is done."""
        self._step += 1
        note, until = self._home / f"done-{self._step}.json", time.monotonic() + timeout
        while not note.exists():
            assert self._process.poll() is None and time.monotonic() < until, self._log.read_text()[-6000:]
            time.sleep(0.05)
        told: dict[str, Any] = json.loads(note.read_text())
        return told

    def go_on(self, *words: str) -> None:
        """The next sync is for these servers; or the end."""
        new = self._home / "go.new"
        new.write_text(json.dumps(words))
        new.rename(self._home / f"go-{self._step}")

    def wait(self) -> None:
        assert self._process.wait(120) == 0, self._log.read_text()[-6000:]

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)


OPTIONS = ("--weight-transfer-config", '{"backend": "windlass"}')


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    tiny.make_model(KIND, path, seed=1)
    return path


@pytest.fixture(scope="module")
def first(served: Path) -> Iterator[servers.Vllm]:
    with servers.Vllm(served, options=OPTIONS) as running:
        yield running


@pytest.mark.timeout(1200)
def test_policies_sync_engines_that_come_and_go(
    first: servers.Vllm, served: Path, tmp_path: Path, checkpoint: Callable[[tiny.Kind], Path]
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="skyrl-") as home:
        images = Path(home) / "images"
        policy = Policy(checkpoint(KIND), [first.url], images, tmp_path / "one")
        try:
            before = first.answers()
            told = begun = policy.synced()
            assert first.answers() == told["answers"] != before
            whole = told["metrics"]["windlass/wire_bytes"]
            policy.go_on(first.url)
            told = policy.synced()
            assert first.answers() == told["answers"]
            assert 0 < told["metrics"]["windlass/wire_bytes"] < whole / 5
            # One joins late.
            with servers.Vllm(served, options=OPTIONS) as late:
                policy.go_on(first.url, late.url)
                told = policy.synced()
                assert first.answers() == late.answers() == told["answers"]
                # One dies and is started again.
                first.kill()
                first.start()
                first.wait_ready()
                policy.go_on(first.url, late.url)
                told = policy.synced()
                assert first.answers() == late.answers() == told["answers"]
            # The policy dies, and begins again from its checkpoint.
            policy.kill()
            policy = Policy(checkpoint(KIND), [first.url], images, tmp_path / "two")
            told = policy.synced()
            assert first.answers() == told["answers"] == begun["answers"]
            policy.go_on("end")
            policy.wait()
        finally:
            policy.kill()


@pytest.mark.timeout(1200)
def test_vllms_trainer_factory_syncs_in_the_order_of_skyrls_main_branch(
    first: servers.Vllm, tmp_path: Path, checkpoint: Callable[[tiny.Kind], Path]
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="skyrl-") as home:
        images = Path(home) / "images"
        policy = Policy(checkpoint(KIND), [first.url], images, tmp_path / "one", main=True)
        try:
            told = begun = policy.synced()
            assert first.answers() == told["answers"]
            whole = told["metrics"]["windlass/wire_bytes"]
            policy.go_on(first.url)
            told = policy.synced()
            assert first.answers() == told["answers"] != begun["answers"]
            assert 0 < told["metrics"]["windlass/wire_bytes"] < whole / 5
            # The server dies and is started again, with its old weights.
            first.kill()
            first.start()
            first.wait_ready()
            policy.go_on(first.url)
            told = policy.synced()
            assert first.answers() == told["answers"]
            # The policy dies; the next one has a source without a model of its own.
            policy.kill()
            policy = Policy(checkpoint(KIND), [first.url], images, tmp_path / "two", main=True, GATHERED="1")
            told = policy.synced()
            assert first.answers() == told["answers"] == begun["answers"]
            policy.go_on("end")
            policy.wait()
        finally:
            policy.kill()
