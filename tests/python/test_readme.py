"""What the README shows runs as it stands there."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def snippet() -> str:
    """The trainer's lines of the README."""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"## In a trainer\n\n```python\n(.*?)```", text, re.S)
    assert found is not None
    return found.group(1)


def test_the_lines_of_the_readme_run_alone_and_under_torchrun(tmp_path: pathlib.Path) -> None:
    # A model of its own, so that nothing else on this machine is in the way.
    name = f"readme-{os.getpid()}"
    script = tmp_path / "train.py"
    # Ranks that give the same names must hold the same weights, as under DDP.
    seed = "import torch\n\ntorch.manual_seed(0)\n"
    script.write_text(
        seed + snippet().replace('"policy"', f'"{name}"').replace("time.sleep(5)", "time.sleep(0)")
    )
    path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    # Without a process group, each of the two ranks takes itself from torchrun's environment. Each writes to a file of
    # its own: on one pipe, their letters mix.
    logs = tmp_path / "logs"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    torchrun += ["--redirects=1", f"--log-dir={logs}"]
    for command, ranks in [([sys.executable], 1), (torchrun, 2)]:
        done = subprocess.run(
            [*command, str(script)], env=env, capture_output=True, text=True, timeout=100, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr[-3000:]
        printed = [done.stdout] if ranks == 1 else [path.read_text() for path in logs.rglob("stdout.log")]
        assert len(printed) == ranks
        for of_one in printed:
            assert len(re.findall(r"\b[0-9a-f]{32}\b", of_one)) == 3, printed
        assert "".join(printed).count("http://127.0.0.1:") == 3, printed
        assert not os.path.exists(f"/dev/shm/windlass-{name}")
