"""The CUDA kernels, compiled for the CPU: their records, hashes and writes are those of the Rust codec.

``tests/gpu/kernels.py`` runs the same tests on a GPU, with more data.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parent.parent / "gpu" / "kernels.py"


@pytest.mark.skipif(
    shutil.which("c++") is None, reason="NO C++ COMPILER: the kernels are not compiled for the CPU"
)
def test_the_kernels_on_a_cpu() -> None:
    command = [sys.executable, str(PROGRAM), "--host", "--scale", "0.05", "--patience", "300"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("\nok ") == 12, ran.stdout
