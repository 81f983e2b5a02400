"""Ctrl-C ends every wait at once, and a forked child harms nobody.

Real signals to a real child: it says what it is about to wait for, is interrupted in the middle of it, and says when
it was out and which threads it still has.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from children import environment

#: From the signal to the exception, as the issue has it.
BAR_S = 0.5
PATIENCE_S = 60.0

PROGRAMS = Path(__file__).with_name("programs")
WAITING = "waits.py"
FORKS = "forks.py"


@pytest.fixture
def home() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="interrupt-") as folder:
        yield folder


def threads(pid: int) -> list[str]:
    names = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:
            continue
    return names


def started(script: str, home: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAMS / script), home]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_ctrl_c_ends_every_wait_within_half_a_second_and_leaves_no_thread(home: str) -> None:
    took: dict[str, float] = {}
    with started(WAITING, home) as child:
        try:
            assert child.stdout is not None
            for line in child.stdout:
                words: dict[str, Any] = json.loads(line)
                if "waits" in words:
                    end = time.monotonic() + PATIENCE_S
                    while "windlass-call" not in threads(child.pid):
                        assert time.monotonic() < end, words
                        time.sleep(0.001)
                    sent = time.monotonic()
                    child.send_signal(signal.SIGINT)
                elif "ended" in words:
                    took[words["ended"]] = words["at"] - sent
                    # A receiver goes on listening for others to pass its version on to.
                    assert set(words["threads"]) <= {"windlass-accept"}, words
                else:
                    assert words["done"] == []
            assert child.stderr is not None
            assert child.wait(PATIENCE_S) == 0, child.stderr.read()
        finally:
            child.kill()
    waits = ["begin", "commit", "wait_delta_ready", "wait_newer", "sync", "wait_newer of a silent agent"]
    assert list(took) == [*waits, "endpoint", "contact"], took
    late = {name: seconds for name, seconds in took.items() if not 0 < seconds < BAR_S}
    assert not late, took


def test_a_forked_child_gets_clear_errors_and_its_end_harms_nobody(home: str) -> None:
    with started(FORKS, home) as child:
        try:
            out, errors = child.communicate(timeout=PATIENCE_S)
        finally:
            child.kill()
    assert child.returncode == 0, errors
    said = json.loads(out.splitlines()[-1])
    for how in ("fork", "process"):
        assert said[how] == {}, said
        assert said[f"{how} status"] == 0, said
    assert said["equal"], said
    assert said["agent"], said
    assert said["left"] == ["fork", "image", "process"], said
    assert "Traceback" not in errors, errors
