"""The golden files under testdata/, which every language reads."""

from __future__ import annotations

import json
import pathlib
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2] / "testdata"


def cases(directory: str) -> list[tuple[str, dict[str, Any]]]:
    """Every case of every file in a directory, with a name for it."""
    found = []
    for file in sorted((ROOT / directory).glob("*.json")):
        for case in json.loads(file.read_text())["cases"]:
            found.append((f"{file.stem}: {case['name']}", case))
    return found


def keys(case: dict[str, Any]) -> list[str]:
    """What a case consists of, without its name."""
    return [key for key in case if key != "name"]
