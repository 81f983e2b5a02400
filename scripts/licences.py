"""Writes the licences of the crates in the wheel to LICENSE-THIRD-PARTY, which `make wheel` puts next to LICENSE in the wheel.

Their texts are those that the crates bring. Where a crate brings none, as those of some workspaces do, the text of its licence is
taken from another crate, and the entry says so. A crate without a licence, or without a text that could be found, is an error.
`--check-sbom WHEEL` compares the crates with the SBOM that maturin has put into a wheel, and copies it to target/sbom.

The crates are the normal dependencies of `windlass-py` on Linux, without build scripts' own and without tests'.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import zipfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "LICENSE-THIRD-PARTY"
TARGET = "x86_64-unknown-linux-gnu"
FILES = re.compile(r"(?i)^(licen[cs]e|copying|notice|unlicense|copyright)([-_.].*)?$")
#: A line that a text of this licence has, for crates that bring none.
SIGNS = {"MIT": "Permission is hereby granted, free of charge", "Apache-2.0": "Version 2.0, January 2004"}


def crates() -> list[dict[str, Any]]:
    """The packages of other people in the wheel, by name."""
    command = [
        os.environ.get("CARGO", "cargo"),
        "metadata",
        "--format-version=1",
        "--locked",
        f"--filter-platform={TARGET}",
    ]
    told = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    packages = {package["id"]: package for package in told["packages"]}
    nodes = {node["id"]: node for node in told["resolve"]["nodes"]}
    todo = [id for id, package in packages.items() if package["name"] == "windlass-py"]
    seen: set[str] = set()
    while todo:
        id = todo.pop()
        if id not in seen:
            seen.add(id)
            normal = (d for d in nodes[id]["deps"] if any(kind["kind"] is None for kind in d["dep_kinds"]))
            todo.extend(d["pkg"] for d in normal)
    return sorted(
        (packages[id] for id in seen if packages[id]["source"]), key=lambda p: (p["name"], p["version"])
    )


def texts(package: dict[str, Any]) -> list[str]:
    """What a crate brings."""
    folder = pathlib.Path(package["manifest_path"]).parent
    found = sorted(path for path in folder.iterdir() if path.is_file() and FILES.match(path.name))
    if package["license_file"] and (named := folder / package["license_file"]) not in found:
        found.append(named)
    return [path.read_text(errors="replace").strip() for path in found]


def title(package: dict[str, Any]) -> str:
    return f"{package['name']} {package['version']} ({package['license'] or 'see below'})"


def write(packages: list[dict[str, Any]]) -> list[str]:
    """Writes the file; returns what is wrong."""
    faults = []
    groups: dict[str, list[str]] = {}
    brought = {package["id"]: texts(package) for package in packages}
    plain = [text for text_list in brought.values() for text in text_list]
    for package in packages:
        if not package["license"] and not brought[package["id"]]:
            faults.append(f"{title(package)} names no licence")
        own = brought[package["id"]]
        if own:
            for text in own:
                groups.setdefault(text, []).append(title(package))
            continue
        words = re.split(r"[^\w.-]+", package["license"] or "")
        sign = next((SIGNS[word] for word in words if word in SIGNS), None)
        text = next((text for text in plain if sign and sign in text), None)
        if text is None:
            faults.append(f"{title(package)} brings no text of its licence, and no other crate has it")
            continue
        authors = ", ".join(package["authors"]) or package["repository"] or "its authors"
        groups.setdefault(text, []).append(
            f"{title(package)}, by {authors}; the text is that of another crate"
        )
    rule = "\n" + "-" * 80 + "\n"
    parts = [f"Windlass contains these {len(packages)} crates of other authors, under their licences:\n"]
    parts += ["".join(f"  {title(package)}\n" for package in packages)]
    for text, names in sorted(groups.items(), key=lambda item: item[1]):
        parts.append(rule + "".join(f"{name}\n" for name in names) + "\n" + text + "\n")
    OUT.write_text("".join(parts))
    print(f"{OUT.name}: {len(packages)} crates, {len(groups)} texts, {OUT.stat().st_size >> 10} KiB")
    return faults


def check_sbom(packages: list[dict[str, Any]], wheel: pathlib.Path) -> list[str]:
    """Whether a wheel has an SBOM that names all crates and their licences, and the licences' texts."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        sboms = [name for name in names if ".dist-info/sboms/" in name and name.endswith(".json")]
        if len(sboms) != 1:
            return [f"{wheel.name} has {len(sboms)} SBOMs, expected one: {sboms}"]
        faults = (
            []
            if any(name.endswith(f"/{OUT.name}") for name in names)
            else [f"{wheel.name} has no {OUT.name}"]
        )
        data = archive.read(sboms[0])
    sbom = json.loads(data)
    listed = {(c["name"], c["version"]): c for c in sbom["components"]}
    for package in packages:
        component = listed.get((package["name"], package["version"]))
        if component is None:
            faults.append(f"the SBOM lacks {title(package)}")
        elif not component.get("licenses"):
            faults.append(f"the SBOM names no licence of {title(package)}")
    out = ROOT / "target" / "sbom" / pathlib.Path(sboms[0]).name
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(data)
    print(f"{out.relative_to(ROOT)}: CycloneDX {sbom['specVersion']}, {len(listed)} components")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check-sbom", metavar="WHEEL", type=pathlib.Path)
    wheel = parser.parse_args().check_sbom
    packages = crates()
    faults = write(packages) if wheel is None else check_sbom(packages, wheel)
    for fault in faults:
        print(f"*** {fault}", file=sys.stderr)
    return min(len(faults), 1)


if __name__ == "__main__":
    sys.exit(main())
