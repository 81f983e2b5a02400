"""Windlass and what is used instead, on the same machine, with the same model and the same changes: `make peers`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Trainer and engine share the cores. Threads of torch that wait for each other on cores that others use, too, take ten times as long.
THREADS = max(1, len(os.sched_getaffinity(0)) // 2)
os.environ["OMP_NUM_THREADS"] = str(THREADS)
ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "bench"), str(ROOT / "python")]

import needs  # noqa: E402

needs.need("torch", "numpy", "safetensors", "windlass")

from peers.run import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
