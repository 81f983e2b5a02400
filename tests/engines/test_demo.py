"""`windlass demo --engine`: a real server follows a tiny model that learns, and nothing of it is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

import servers

pytestmark = pytest.mark.timeout(600)
SHARED = Path("/dev/shm")


def processes(home: Path) -> list[int]:
    """Those that name a directory in their arguments, and those that they started."""
    found: list[int] = []
    for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda entry: int(entry.name)):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in found or str(home) in (entry / "cmdline").read_text():
                found.append(int(entry.name))
    return found


def shared_files(pids: list[int]) -> set[Path]:
    """The files at the top of /dev/shm that they have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found |= set(re.findall(rf" {SHARED}/([^/\n]+)$", Path(f"/proc/{pid}/maps").read_text(), re.M))
    return {SHARED / name for name in found}


def demo(engine: str, home: Path, *options: str) -> subprocess.Popen[str]:
    """The command, in the engine's environment."""
    words = [str(servers.python_of(engine)), "-m", "windlass", "demo", f"--engine={engine}", "--json"]
    return subprocess.Popen(
        [*words, f"--dir={home}", *options],
        env=servers.environment_of(engine),
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_server_of_vllm_learns_the_sentence_of_its_trainer() -> None:
    with tempfile.TemporaryDirectory(dir=SHARED, prefix="windlass-test-") as home:
        run = demo("vllm", Path(home), "--steps=4", "--pace=0.1")
        out, _ = run.communicate(timeout=500)
        lines: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
        told = lines[-1]
        assert (run.returncode, told.get("ok"), told.get("served")) == (0, True, 4), told
        answers = [line for line in lines if line.get("event") == "answer"]
        assert answers == told["answers"] and [a["version"] for a in answers] == [0, 1, 2, 3, 4]
        # vLLM and transformers give the same tokens in float32, of every version.
        assert [a["answer"] for a in answers] == [a["own"] for a in answers]
        assert answers[0]["answer"] != answers[-1]["answer"] == "lass hauls the anchor up, link by link."
        assert all(sync["state"] == "served" for sync in told["syncs"]) and told["errors"] == [], told
        assert (processes(Path(home)), os.listdir(home)) == ([], [])


def test_a_demo_with_sglang_that_is_interrupted_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory(dir=SHARED, prefix="windlass-test-") as home:
        run = demo("sglang", Path(home), "--steps=3", "--pace=0.1", "--stay")
        assert run.stdout is not None
        told: dict[str, Any] = {}
        while "ok" not in told and "error" not in told:
            told = json.loads(run.stdout.readline())
        assert (told.get("ok"), told.get("served")) == (True, 3), told
        assert all(a["answer"] == a["own"] for a in told["answers"]), told
        running = processes(Path(home))
        files = shared_files(running)
        assert len(running) > 5 and files, running
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 0
        assert ([f for f in files if f.exists()], processes(Path(home)), os.listdir(home)) == ([], [], [])
