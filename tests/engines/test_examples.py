"""The examples with a real server, by the command that a user types: the server answers every version as its trainer does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import servers

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_server_of_an_example_answers_each_version_as_its_trainer_does(engine: str) -> None:
    (script,) = (servers.ROOT / "examples").glob(f"*_{engine}/run.sh")
    python = servers.python_of(engine)
    before = set(Path("/dev/shm").glob(f"windlass-{engine}-*"))
    run = subprocess.Popen(
        [str(script), "--quick"],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "VLLM": str(python.parent / "vllm"),
            "SGLANG_PYTHON": str(python),
            "PORT": str(servers.free_port()),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, errors = run.communicate(timeout=800)
    finally:
        # The script stops the processes that it started.
        run.terminate()
    assert run.returncode == 0, errors
    assert re.findall(r"^version (\d+) ", out, re.M) == ["1", "2", "3", "4"], out
    assert f"{engine} gave the trainer's own answer at every version" in out
    assert f"{engine}=http://" in out and "loaded version 4" in out
    assert set(Path("/dev/shm").glob(f"windlass-{engine}-*")) <= before
