"""Ray on a busy machine, for tests and for the programs that they start in the frameworks' environments."""

from __future__ import annotations

import sys
from typing import Any

import ray

__all__ = ["start"]

TURNS = 5


def start(**options: Any) -> None:
    """``ray.init``, again where Ray's own processes missed their deadlines, which nothing can set."""
    for turn in range(1, TURNS + 1):
        try:
            ray.init(**options)
            return
        except Exception as e:
            ray.shutdown()
            if turn == TURNS:
                raise
            sys.stderr.write(f"start of Ray {turn} of {TURNS} failed: {e}\n")
