"""Processes that tests start find the package and the tests' own modules where the tests do."""

from __future__ import annotations

import os
import pathlib

HERE = pathlib.Path(__file__).resolve().parent
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(HERE.parent.parent / "python"), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
)
