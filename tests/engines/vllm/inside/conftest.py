"""Tests that build vLLM's own model classes in this process. Run by the Python of vLLM's environment."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_PLUGINS="",
)
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent), str(HERE.parent.parent / "plugin")]

import tiny  # noqa: E402

if importlib.util.find_spec("vllm.model_executor") is None:
    # Another Python, in which `vllm` is nothing but the name of a directory here.
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="engine-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tiny.Kind], Path]:
    """The directory of a tiny model's first checkpoint, made once for each kind."""
    made: dict[str, Path] = {}

    def of(kind: tiny.Kind) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            tiny.make_model(kind, made[kind])
        return made[kind]

    return of


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay as they were loaded, as on a GPU."""
    import building

    building.keep_plain(monkeypatch)


@pytest.fixture
def build(checkpoint: Callable[[tiny.Kind], Path]) -> Callable[..., Any]:
    """Makes a worker's model with its session."""
    import building

    return lambda kind, **how: building.session(checkpoint(kind), **how)
