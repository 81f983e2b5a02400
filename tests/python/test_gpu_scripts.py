"""Scripts for GPUs say in one sentence what is missing, and their exit codes mean something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BENCHMARKS = sorted(path for path in (ROOT / "bench").glob("*.py"))
TESTS = [
    ROOT / "tests" / "gpu" / f"{name}.py"
    for name in (
        "device",
        "end_to_end",
        "ipc",
        "kernels",
        "manager",
        "merged",
        "quantised",
        "real_vllm",
        "vllm_ipc",
    )
]


def run(*words: str, flags: tuple[str, ...] = ()) -> tuple[int, str]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "" if flags else str(ROOT / "python")}
    command = [sys.executable, *flags, *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("script", [*BENCHMARKS, *TESTS], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_without_torch_a_script_for_gpus_ends_with_2_and_says_what_to_do(script: Path) -> None:
    # -S: no packages but those of Python itself.
    code, said = run(str(script), flags=("-S",))
    assert code == 2 and said.count("\n") == 1, said
    assert said.startswith("*** torch cannot be imported") and "pip install torch" in said


def test_without_a_device_tests_are_skipped_loudly_and_benchmarks_fail() -> None:
    code, said = run("tests/gpu/ipc.py")
    assert code == 0 and said == "*** SKIPPED: no CUDA device; nothing of CUDA IPC was tested\n"
    code, said = run("bench/gpu_ipc.py", "--size", "8b")
    assert code == 2 and said == "*** no CUDA device: nothing was measured\n"
    assert run("tests/gpu/needs.py")[0] == 77


def test_sizes_and_counts_that_make_no_sense_are_refused_by_name() -> None:
    code, said = run("bench/gpu_sync.py", "--size", "9B")
    assert code == 2 and "take one of tiny, 0.6B, 1.7B, 8B" in said
    code, said = run("bench/gpu_sync.py", "--steps", "0")
    assert code == 2 and "--steps: '0' is not a whole number of at least 1" in said
