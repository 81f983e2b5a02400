"""The guide to Ray, typed as it stands there."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from children import environment

GUIDE = pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "ray.md"


@pytest.mark.timeout(400)
def test_the_program_in_the_guide_to_ray_prints_what_the_guide_says(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("ray")
    text = GUIDE.read_text()
    program, said = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "text"))
    script = tmp_path / "sync.py"
    script.write_text(program[0])
    # A busy machine may not keep the deadlines that Ray's own processes have at the start.
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**environment(), "GLOO_SOCKET_IFNAME": "lo"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if "timed out during startup" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[:2] == said[1].strip().splitlines()
