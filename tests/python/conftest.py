"""What tests share: where the package is, and ranks.

Processes that tests start find the package and the tests' own modules where the tests do.
"""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from ranks import Ranks, Run

#: Tests start them as processes.
collect_ignore_glob = ["programs/*"]

HERE = pathlib.Path(__file__).resolve().parent
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(HERE.parent.parent / "python"), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
)
# What torch compiles for DeepSpeed stays in this tree. A process that is killed while it compiles leaves a lock behind, for
# which all later ones would wait; the first process of a run removes it.
EXTENSIONS = HERE.parent.parent / "target" / "torch-extensions"
os.environ["TORCH_EXTENSIONS_DIR"] = str(EXTENSIONS)
if "PYTEST_XDIST_WORKER" not in os.environ:
    for lock in EXTENSIONS.glob("**/lock"):
        lock.unlink(missing_ok=True)
# Where tests run in the background of a script, Ctrl-C is ignored, and every process that they start inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Run]:
    """``ranks(world_size, "module:function", args, timeout)`` on processes that the tests of a module share.

    A function must leave its group usable; after a failure the next test gets fresh ranks.
    """
    pools: dict[tuple[int, tuple[tuple[str, str], ...]], Ranks] = {}

    def run(
        world_size: int,
        target: str,
        args: Sequence[Any] = (),
        timeout: float = 120.0,
        *,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        key = (world_size, tuple(sorted((env or {}).items())))
        if key in pools and pools[key].broken:
            pools.pop(key).close()
        if key not in pools:
            pools[key] = Ranks(world_size, env=env)
        return pools[key].run(target, args, timeout)

    yield run
    for pool in pools.values():
        pool.close()
