"""The version is in one place, `[workspace.package]` of Cargo.toml; this checks what repeats it, and what a tag says.

`version.py` compares the requirements of the crates on each other, Cargo.lock and the lock files of fuzz and loom. `version.py v1.2.3`
is for the tag of a release: it must be that version, and CHANGELOG.md must have a section for it. `--notes` prints that section.
"""

from __future__ import annotations

import pathlib
import re
import sys

import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent


def section(version: str) -> str | None:
    """What the changelog says of a version."""
    text = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|\Z)", text, re.M | re.S)
    return found[1].strip() if found else None


def faults() -> tuple[str, list[str]]:
    """The version, and what does not repeat it."""
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]
    version, wrong = workspace["package"]["version"], []
    manifests = {
        path.parent.name: tomllib.loads(path.read_text()) for path in ROOT.glob("crates/*/Cargo.toml")
    }
    for name, manifest in manifests.items():
        if manifest["package"].get("version") != {"workspace": True}:
            wrong.append(f"crates/{name}/Cargo.toml has a version of its own: write version.workspace = true")
    tables = {"Cargo.toml": workspace["dependencies"]}
    tables |= {
        f"crates/{name}/Cargo.toml": manifest.get("dependencies", {}) for name, manifest in manifests.items()
    }
    for where, table in tables.items():
        for name, wanted in table.items():
            if isinstance(wanted, dict) and "path" in wanted and wanted.get("version", version) != version:
                wrong.append(f"{where} wants {name} {wanted['version']}, and it is {version}")
    for lock in ("Cargo.lock", "fuzz/Cargo.lock", "loom/Cargo.lock"):
        for package in tomllib.loads((ROOT / lock).read_text())["package"]:
            if package["name"] in manifests and package["version"] != version:
                found = package["version"]
                wrong.append(
                    f"{lock} has {package['name']} {found}, and it is {version}: cargo update --workspace"
                )
    return version, wrong


def main(args: list[str]) -> int:
    notes, tags = "--notes" in args, [arg for arg in args if arg != "--notes"]
    version, wrong = faults()
    if tags and tags[0] != f"v{version}":
        wrong.append(f"the tag is {tags[0]}, and Cargo.toml has {version}")
    changes = section(version) if tags else None
    if tags and not changes:
        wrong.append(f"CHANGELOG.md has nothing under ## [{version}]: rename what is under Unreleased")
    for fault in wrong:
        print(f"*** {fault}", file=sys.stderr)
    if not wrong:
        print(changes if notes and changes else version)
    return min(len(wrong), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
