"""The README and the quick start run as they are printed, and every link of the documentation leads somewhere."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from children import environment

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
#: Where documentation is, besides the top.
FOLDERS = ("docs", "bench", "examples")


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


def test_the_trainer_of_the_quick_start_publishes_every_version(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers")
    found = re.search(r"## 2. Train\n.*?```python\n(.*?)```", (ROOT / "docs/quickstart.md").read_text(), re.S)
    assert found is not None
    script = tmp_path / "train.py"
    name = f"quick-{os.getpid()}"
    program = found.group(1).replace('model_id="policy"', f'model_id="{name}"')
    script.write_text(
        program.replace("range(1, 601)", "range(1, 4)").replace("time.sleep(1)", "time.sleep(0)")
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"^\d [0-9a-f]{32} http://127.0.0.1:", done.stdout, re.M)) == 3, done.stdout
    assert (tmp_path / "policy" / "config.json").exists()
    assert not os.path.exists(f"/dev/shm/windlass-{name}")


def prose(page: pathlib.Path) -> str:
    """A page without its code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.S)


def anchors(page: pathlib.Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_of_the_documentation_leads_to_a_page_and_a_heading() -> None:
    pages = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
    assert len(pages) > 30
    broken = []
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if link.startswith(("http://", "https://")):
                continue
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken
