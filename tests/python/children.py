"""Processes that tests start find the package and the tests' own modules where the tests do."""

from __future__ import annotations

import os
import pathlib

HERE = pathlib.Path(__file__).resolve().parent


def environment(*first: pathlib.Path) -> dict[str, str]:
    """The environment of a child; ``first`` are folders that come before all others on its path."""
    folders = [*first, HERE.parent.parent / "python", HERE]
    path = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}
