"""The script for a GPU, on a CPU: the whole way of a version, between processes, with a real language model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from children import environment

SCRIPT = Path(__file__).resolve().parent.parent / "gpu" / "end_to_end.py"


@pytest.mark.timeout(300)
def test_an_engine_that_answers_throughout_never_mixes_versions() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", "--versions", "4"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for form in ("disaggregated, fused: ", "disaggregated, plain: ", "taking, fused: "):
        assert form in done.stdout
    assert "colocated: SKIPPED" in done.stdout
