"""The scripts that run a real vLLM on a GPU work, but for the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import servers

SCRIPT = servers.ROOT / "bench" / "gpu_vllm.py"


@pytest.mark.timeout(900)
def test_the_bench_of_vllm_runs_without_a_gpu_and_its_answers_are_those_of_a_fresh_server(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--device=cpu", "--size=tiny", "--steps=2", f"--json={out}"]
    command += [f"--vllm-python={servers.python_of('vllm')}", "--seconds=3", "--clients=2"]
    env = {**os.environ, "PYTHONPATH": str(servers.PACKAGE)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["equal"], last["changed"], last["offload"]) == (True, True, ["delta"])
    measured = json.loads(out.read_text())
    assert len(measured["rows"]) == 2 and measured["tokens_meanwhile"] > 0
    assert all(row["engine_pause_ms"] > 0 for row in measured["rows"])
    # The server's core did the load between two of its steps, and the live weights are those of the version.
    assert all(row["drain_ms"] is not None for row in measured["rows"])
    assert (
        measured["proved"]
        and measured["rates"]["with"]["rate"] > 0
        and measured["rates"]["without"]["rate"] > 0
    )


@pytest.mark.timeout(600)
def test_the_script_for_ipc_into_vllm_runs_without_a_gpu_and_every_parameter_is_the_trainers(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out.json"
    script = servers.ROOT / "tests" / "gpu" / "vllm_ipc.py"
    command = [sys.executable, str(script), "--device=cpu", "--size=tiny", "--syncs=2", "--bucket-gb=0.0001"]
    command += [f"--json={out}", f"--vllm-python={servers.python_of('vllm')}"]
    env = {**os.environ, "PYTHONPATH": str(servers.PACKAGE)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0 and done.stdout.endswith("passed\n"), done.stdout + done.stderr
    measured = json.loads(out.read_text())
    # What was learnt with one strategy holds for the other.
    assert measured["packed_cuda_ipc"]["hows"] == ["session"] + ["dense"] * 5
    assert measured["cuda_ipc"]["hows"] == ["dense"] * 6
