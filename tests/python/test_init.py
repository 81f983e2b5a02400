"""`windlass init`, and the scripts that it writes, really run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from children import environment

#: Nothing of the machine's own configuration, and no threads that wait for each other. DeepSpeed looks for ninja on the path.
ENVIRONMENT = {
    **environment(),
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
}
for name in ("WINDLASS_CONFIG", "VIRTUAL_ENV"):
    ENVIRONMENT.pop(name, None)


def init(folder: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "windlass", "init", "--json", *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == told.get("error", {}).get("exit", 0), done.stderr
    return told


@pytest.fixture
def apart() -> Iterator[tuple[str, str]]:
    """A model and a directory for images of its own, so that tests on one machine do not meet."""
    home = tempfile.mkdtemp(dir="/dev/shm", prefix="init-")
    try:
        yield Path(home).name, home
    finally:
        shutil.rmtree(home)
        shutil.rmtree(f"/dev/shm/windlass-{Path(home).name}", ignore_errors=True)


def set_apart(folder: Path, apart: tuple[str, str]) -> None:
    model, images = apart
    for path in folder.glob("*.py"):
        text = path.read_text()
        text = text.replace('model_id="policy"', f'model_id="{model}"')
        text = text.replace("/dev/shm/windlass-policy", f"/dev/shm/windlass-{model}")
        path.write_text(text.replace("/dev/shm/images", images))


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(400)
def test_the_trainer_and_the_follower_that_init_writes_agree_on_every_version(
    tmp_path: Path, apart: tuple[str, str]
) -> None:
    told = init(tmp_path, "--trainer", "torch", "--engine", "python")
    assert told["files"] == ["windlass.toml", "train.py", "follow.py"]
    assert sorted(told["files"]) == sorted(path.name for path in tmp_path.iterdir())
    # The interpreter that runs the command is the one that is asked.
    assert told["python"] == sys.executable
    assert told["found"]["torch"] and "windlass" in told["found"]
    assert [command.split()[-1] for command in told["next"]] == ["train.py", "follow.py"]

    set_apart(tmp_path, apart)
    trainer = start(tmp_path, "train.py", "300")
    follower = start(tmp_path, "follow.py", "3")
    try:
        followed, errors = follower.communicate(timeout=280)
        assert follower.returncode == 0, errors
        trainer.send_signal(signal.SIGINT)
        trained, errors = trainer.communicate(timeout=60)
        assert trainer.returncode == 0, errors
    finally:
        for process in (trainer, follower):
            process.kill()
            with contextlib.suppress(ValueError):
                process.communicate()
    published = dict(re.findall(r"^version (\d+) is ([0-9a-f]{32})$", trained, re.M))
    loaded = re.findall(r"^version (\d+) is ([0-9a-f]{32}), by (\w+)$", followed, re.M)
    assert loaded and int(loaded[-1][0]) >= 3, followed
    assert all(published[version] == digest for version, digest, _ in loaded), (trained, followed)
    assert not os.path.exists(f"/dev/shm/windlass-{apart[0]}")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "trainer",
    [
        "torch",
        "transformers",
        "lightning",
        "accelerate",
        pytest.param("deepspeed", marks=pytest.mark.deepspeed),
    ],
)
def test_each_trainer_for_a_server_writes_its_checkpoint_and_ends_after_its_steps(
    trainer: str, tmp_path: Path, apart: tuple[str, str]
) -> None:
    told = init(tmp_path, "--trainer", trainer, "--engine", "vllm")
    train, serve = told["next"]
    assert serve == "./serve.sh" and train.startswith(sys.executable)
    set_apart(tmp_path, apart)
    with start(tmp_path, *train.split()[1:], "1") as process:
        try:
            _, errors = process.communicate(timeout=380)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert (tmp_path / "policy/config.json").exists()
    assert not os.path.exists(f"/dev/shm/windlass-{apart[0]}")


def test_init_in_a_directory_that_has_a_train_py_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine\n")
    error = init(tmp_path, "--trainer", "torch")["error"]
    assert error["kind"] == "invalid" and "train.py" in error["message"] and "--force" in error["advice"]
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert (tmp_path / "train.py").read_text() == "mine\n"
