"""The testdata check: each generator in testdata/ still makes exactly the golden files that are there.

    scripts/testdata.py               check; exit status 1 and one line per difference
    scripts/testdata.py --self-test   show that the check itself can fail

A generator is a `*.py` that writes next to itself. It is a second implementation, from the definition alone;
the Rust tests compare theirs with the same files. Generators run in a copy, so nothing here is touched.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from rust_source import ROOT


def check(testdata: pathlib.Path) -> tuple[list[str], int]:
    """Differences, and how many generators ran."""
    if not testdata.exists():
        return [], 0
    faults = []
    with tempfile.TemporaryDirectory() as scratch:
        copy = pathlib.Path(scratch) / "testdata"
        shutil.copytree(testdata, copy, ignore=shutil.ignore_patterns("__pycache__"))
        generators = sorted(copy.rglob("*.py"))
        for generator in generators:
            env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
            done = subprocess.run([sys.executable, generator], cwd=copy, env=env, capture_output=True, text=True)
            if done.returncode != 0:
                faults.append(f"{generator.relative_to(copy)} failed:\n{done.stderr}")
        made, kept = contents(copy), contents(testdata)
        for name in sorted(made.keys() | kept.keys()):
            if made.get(name) != kept.get(name):
                state = "differs from" if name in kept else "is not among"
                faults.append(f"{name}: what the generator makes {state} the files in testdata/")
    return faults, len(generators)


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    found = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def self_test() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        generator = folder / "make.py"
        generator.write_text("import pathlib\npathlib.Path(__file__).with_name('golden').write_text('right')\n")
        assert "is not among" in check(folder)[0][0]
        (folder / "golden").write_text("wrong")
        assert "differs" in check(folder)[0][0]
        assert (folder / "golden").read_text() == "wrong", "the check changes nothing"
        (folder / "golden").write_text("right")
        assert check(folder) == ([], 1)
        generator.write_text("raise SystemExit(3)")
        assert "failed" in check(folder)[0][0]
    print("testdata: self-test passed")


def main() -> None:
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    faults, generators = check(ROOT / "testdata")
    for fault in faults:
        print(f"testdata: {fault}", file=sys.stderr)
    if faults:
        sys.exit(1)
    print(f"testdata: {generators} generators make what is there")


if __name__ == "__main__":
    main()
