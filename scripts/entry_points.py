#!/usr/bin/env python3
"""Makes the package in python/ look installed: writes the metadata that importlib finds beside it.

Engines look for plugins among the entry points of installed packages. A process that has python/ on its path finds
those of pyproject.toml by what this writes, and nothing needs to be installed into an engine's environment. Run by
`make develop`; git ignores the result.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = re.search(r'^version = "([^"]+)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    if found is None:
        sys.exit("entry_points: Cargo.toml names no version")
    version = found.group(1)
    package = ROOT / "python"
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()), "")
    ]
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n",
        "RECORD": "",
        "entry_points.txt": "\n".join(lines),
    }
    info = package / f"windlass-{version}.dist-info"
    # An engine of a test may be reading them: files that are right stay as they are.
    if all((info / name).is_file() and (info / name).read_text() == text for name, text in files.items()):
        return
    for old in package.glob("windlass-*.dist-info"):
        shutil.rmtree(old)
    info.mkdir()
    for name, text in files.items():
        (info / name).write_text(text)


if __name__ == "__main__":
    main()
