"""The wheel, as somebody gets it who has nothing of this tree."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

import windlass

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOLS = shutil.which(os.environ.get("CARGO", "cargo")) and importlib.util.find_spec("maturin")


def run(*command: str | pathlib.Path, cwd: pathlib.Path) -> str:
    """Runs a program that sees nothing of this tree, and gives what it wrote."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.skipif(not TOOLS, reason="NOT TESTED: the wheel, because cargo or maturin is missing")
def test_the_wheel_alone_has_the_package_its_types_and_the_command(tmp_path: pathlib.Path) -> None:
    build = ["maturin", "build", "--quiet", "--locked", "--strip", "--profile", "dev", "--out", str(tmp_path)]
    run(sys.executable, "-m", *build, cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"windlass-{windlass.__version__}-cp310-abi3-manylinux")
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {name for name in names if name.startswith("windlass/")}
    assert ours >= {"windlass/py.typed", "windlass/_windlass.pyi", "windlass/_windlass.abi3.so"}
    assert [name for name in names if name.endswith((".so", ".pyd"))] == ["windlass/_windlass.abi3.so"]
    assert all(".dist-info/" in name for name in names - ours)

    home = tmp_path / "env"
    venv.create(home, with_pip=True)
    run(
        home / "bin/python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=tmp_path
    )
    version = run(home / "bin/python", "-c", "import windlass; print(windlass.__version__)", cwd=tmp_path)
    assert version.strip() == windlass.__version__
    for command in ([home / "bin/windlass"], [home / "bin/python", "-m", "windlass"]):
        assert windlass.__version__ in run(*command, "--version", cwd=tmp_path)
        assert "agent" in run(*command, "--help", cwd=tmp_path)
