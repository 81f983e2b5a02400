"""The example of ten lines on each side, by the command that a user types."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "01_follow"


@pytest.mark.timeout(180)
def test_the_engine_of_the_first_example_has_every_digest_of_its_trainer(tmp_path: Path) -> None:
    # A model of its own, so that two runs of this test on one machine do not meet.
    name = f"follow-{os.getpid()}"
    for path in EXAMPLE.iterdir():
        (tmp_path / path.name).write_text(path.read_text().replace('follow"', f'{name}"'))
        shutil.copymode(path, tmp_path / path.name)
    run = subprocess.Popen(
        [str(tmp_path / "run.sh"), "--quick"],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, errors = run.communicate(timeout=150)
    finally:
        # The script stops the processes that it started.
        run.terminate()
    assert run.returncode == 0, errors
    published = dict(re.findall(r"^trainer: version (\d+) is ([0-9a-f]{32})$", out, re.M))
    loaded = re.findall(r"^engine:  version (\d+) is ([0-9a-f]{32}), by (\w+)$", out, re.M)
    assert len(loaded) > 1 and int(loaded[-1][0]) >= 4, out
    assert all(published[version] == digest for version, digest, _ in loaded), out
    assert [mode for _, _, mode in loaded] == ["full"] + ["delta"] * (len(loaded) - 1), out
    assert not Path(f"/dev/shm/windlass-{name}").exists()
