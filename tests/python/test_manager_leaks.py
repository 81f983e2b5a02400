"""Two hundred versions cost no more than ten: memory, descriptors, threads and files in shared memory stay."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from children import environment

pytestmark = pytest.mark.timeout(450)

#: Versions before the first look, and between the looks.
WARM, MORE = 30, 200
#: Allocators keep what they have had: each process may grow by this, far less than one version of each step would cost.
SLACK_KIB = 6 << 10
MODEL_BYTES = 4 << 20

TRAINER = Path(__file__).with_name("programs") / "leaks.py"


@pytest.fixture(scope="module")
def looks() -> list[Any]:
    """Before and after, and what is left in the end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="leaks-") as home:
        words = [home, str(WARM), str(MORE), str(MODEL_BYTES)]
        command = [sys.executable, str(TRAINER), *words]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr
        found: list[Any] = json.loads(done.stdout)
        assert Path(home).exists()
    return found


@pytest.mark.parametrize("process", ["trainer", "agent"])
def test_two_hundred_offloads_leak_no_memory(looks: list[Any], process: str) -> None:
    grown = looks[1][process]["kib"] - looks[0][process]["kib"]
    assert grown < SLACK_KIB, looks
    assert SLACK_KIB < MORE * 64, "the slack would hide 64 KiB a version"


@pytest.mark.parametrize("process", ["trainer", "agent"])
@pytest.mark.parametrize("what", ["descriptors", "threads", "mappings"])
def test_two_hundred_offloads_leak_nothing_that_is_counted(looks: list[Any], process: str, what: str) -> None:
    """Pools may still fill up by a few; a leak of one in ten versions would be twenty."""
    slack = {"descriptors": 4, "threads": 4, "mappings": 12}[what]
    assert looks[1][process][what] - looks[0][process][what] <= slack, looks


def test_two_hundred_offloads_leave_no_more_files_and_the_end_leaves_none(looks: list[Any]) -> None:
    before, after, left = looks
    assert after["files"][0] <= before["files"][0] + 1, looks
    # Deltas that are kept have other sizes.
    assert after["files"][1] <= before["files"][1] + (2 << 20), looks
    # The image is its receiver's, and stays for the next one.
    assert left == ["image"]
