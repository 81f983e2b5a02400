"""The GRPO example, by the command line that a user types: every version is followed, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = [sys.executable, str(ROOT / "examples" / "02_grpo_fsdp2" / "run.py"), "--size=tiny"]
PATIENCE = 100.0


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def homes() -> set[Path]:
    return set(Path("/dev/shm").glob("windlass-grpo-*"))


def processes_of(home: Path) -> list[str]:
    """Command lines that name the run's directory: ranks, the agent, receivers."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, UnicodeDecodeError):
            continue
        if str(home) in words:
            found.append(words)
    return found


def until(what: str, look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not look():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)


def home_of(run: subprocess.Popen[str], before: set[Path]) -> Path:
    """The directory of this run: the ranks' command lines, children of this one, name it."""
    found: list[Path] = []

    def look() -> bool:
        assert run.poll() is None, run.communicate()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
                words = (process / "cmdline").read_bytes().decode().split("\0")
            except (OSError, UnicodeDecodeError):
                continue
            if int(parent) == run.pid:
                found.extend(Path(word) for word in words if word.startswith("/dev/shm/windlass-grpo-"))
        return bool(found)

    until("the ranks are started", look)
    assert found[0] not in before
    return found[0]


@pytest.mark.timeout(180)
def test_the_grpo_example_follows_every_version_and_leaves_nothing(tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    before = homes()
    # One of the options is also the beginning of an option of torchrun.
    words = ["--start=float32", "--steps=3", "--warm-up=2", "--learning-rate=1e-4"]
    run = start(*words, "--json", f"--stats={stats}")
    home = home_of(run, before)
    out, err = run.communicate(timeout=150)
    assert run.returncode == 0, err
    told: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert told["ok"] is True
    assert told["equal"] == [True, True]
    assert [v["version"] for v in told["versions"]] == [0, 1, 2, 3]
    for version in told["versions"]:
        assert [s["mode"] for s in version["synced"]] == [("delta" if version["version"] else "full")] * 2
        # A full image holds the tied head once; a delta is never more than the image.
        assert all(0 < s["wire_bytes"] <= told["bytes"] for s in version["synced"])
    _check_statistics(json.loads(stats.read_text()), told["parameters"])
    assert not home.exists()
    assert processes_of(home) == []


def _check_statistics(stats: dict[str, Any], parameters: int) -> None:
    assert [step["version"] for step in stats["steps"]] == [1, 2, 3]
    for step in stats["steps"]:
        changed = step["changed"]
        assert step["elements"] == parameters
        assert 0 < changed < parameters
        assert sum(step["ulps"].values()) == changed
        assert sum(n for _, n in step["octaves"].values()) == changed
        assert sum(n for n, _ in step["octaves"].values()) == parameters
        assert sum(kind["changed"] for kind in step["kinds"].values()) == changed
    assert stats["steady"]["versions"] == [2, 3]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("phase", ["at_once", "while_versions_flow"])
def test_ctrl_c_ends_the_grpo_example_without_leftovers(phase: str) -> None:
    before = homes()
    run = start("--steps=100000", "--warm-up=0", "--learning-rate=1e-4")
    home = home_of(run, before)
    if phase == "while_versions_flow":
        assert run.stdout is not None
        rows = (line for line in run.stdout if line.lstrip().startswith("2 "))
        assert next(rows), "the second version came"
    os.kill(run.pid, signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    assert not home.exists()
    # The agent and the receivers notice the end of their pipes.
    until("every process is gone", lambda: processes_of(home) == [])
    assert not home.exists()
