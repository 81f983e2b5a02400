"""What the tests with real engines share: the models on disk."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import tiny

# Two threads that meet at every operation crawl beside an engine that spins.
torch.set_num_threads(1)

# A directory of tests has the name of the package too, but no code of its own.
_vllm = importlib.util.find_spec("vllm")
#: What runs in engines and frameworks only, and what runs in vLLM's own environment.
collect_ignore = ["plugin", "stubs", "openrlhf/plugin", "openrlhf/end_to_end.py"]
collect_ignore += ["skyrl/plugin", "skyrl/interface", "verl/plugin", "verl/end_to_end.py"]
collect_ignore += [] if _vllm and _vllm.origin else ["vllm/inside"]


#: Files that take longest come first, so that nobody waits for one that was begun last; `make engines` runs two at a time.
LONGEST = (
    "test_verl.py",
    "test_skyrl.py",
    "test_openrlhf.py",
    "test_sidecar.py",
    "test_trl.py",
    "test_broadcast.py",
    "test_adapters.py",
    "test_demo.py",
    "test_examples.py",
    "test_gpu_bench.py",
    "test_sidecar_parallel.py",
    "test_endpoint.py",
    "test_dense.py",
    "test_embedded.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files in that order; the tests of one stay as they are."""
    rank = {name: n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


#: Queues between the processes of vLLM and of SGLang, in /dev/shm.
QUEUES = ("psm_*", "sgl_shm_mq_*")
#: A younger one may be between its making and its mapping.
SETTLED_S = 60.0


@pytest.fixture(autouse=True)
def no_queues_of_killed_servers() -> Iterator[None]:
    """Removes what servers that were killed have left in memory: up to 250 MB each, of which other tests run short."""
    yield
    left: dict[str, Path] = {}
    for path in (path for name in QUEUES for path in Path("/dev/shm").glob(name)):
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > SETTLED_S:
                left[str(path)] = path
    if not left:
        return
    for maps in Path("/proc").glob("[0-9]*/maps"):
        # Processes end meanwhile, and those of other users do not show theirs.
        with contextlib.suppress(OSError):
            used = {line.rpartition(" ")[2] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
            left = {name: path for name, path in left.items() if name not in used}
    for path in left.values():
        path.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tiny.Kind], Path]:
    """The directory of a tiny model's first checkpoint, made once for each kind."""
    made: dict[str, Path] = {}

    def of(kind: tiny.Kind) -> Path:
        if kind not in made:
            path = tmp_path_factory.mktemp(kind)
            tiny.make_model(kind, path)
            made[kind] = path
        return made[kind]

    return of
