"""Real ranks for tests: several Python processes in one process group.

    results = run_ranks(2, "fsdp_ranks:shards_are_gathered", ["bfloat16"], timeout=60)

Each rank is a process of its own that imports the named module from this folder, joins a gloo group and calls
``function(*args)``; ``torch.distributed`` says who it is. What the functions return comes back in the order of
the ranks. A rank that raises, dies or outlives the deadline ends all of them, and :class:`RankFailure` carries
the end of what each one wrote.

The meeting point is a store in this process, listening on a port that the system chose and that stays bound, so
tests cannot collide. Ranks see the environment that ``torchrun`` gives (``RANK``, ``WORLD_SIZE``, ``MASTER_PORT``
...), and with ``group=False`` the group is left for the function to make. A rank ends when this process does.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE.parent.parent / "python"
# How long the other ranks may take to end by themselves, with an error that may say more, once one has failed.
GRACE_S = 3.0
TAIL = 4000


class RankFailure(AssertionError):
    """Some ranks did not return; the message holds what they wrote last."""


def run_ranks(
    world_size: int,
    target: str,
    args: Sequence[Any] = (),
    timeout: float = 120.0,
    *,
    env: Mapping[str, str] | None = None,
    group: bool = True,
) -> list[Any]:
    """Calls ``target`` ("module:function") on every rank of a new group and returns the results by rank."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    deadline = time.monotonic() + timeout
    store = TCPStore(
        "127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        here = pathlib.Path(folder)
        (here / "task").write_bytes(pickle.dumps((target, tuple(args), timeout, group)))
        ranks = [_start(here, rank, world_size, store.port, env or {}) for rank in range(world_size)]
        try:
            late = _wait(ranks, deadline)
        finally:
            for rank in ranks:
                _end(rank)
        if late or any(rank.returncode for rank in ranks):
            raise RankFailure(_report(here, target, ranks, late, timeout))
        return [pickle.loads((here / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _start(
    here: pathlib.Path, rank: int, world_size: int, port: int, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(HERE), str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {
        **os.environ,
        "PYTHONPATH": path,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store is ours already; rank 0 must not open another one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **env,
    }
    with (here / f"log-{rank}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(HERE / "ranks.py"), str(here)],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Until all have ended, or one has failed and the others had their grace; whether the deadline passed."""
    failed = False
    while any(rank.poll() is None for rank in ranks):
        if not failed and any(rank.returncode for rank in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            return not failed
        time.sleep(0.02)
    return False


def _end(rank: subprocess.Popen[bytes]) -> None:
    """Kills a rank with everything it started."""
    try:
        os.killpg(rank.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    rank.wait()
    if rank.stdin is not None:
        rank.stdin.close()


def _report(
    here: pathlib.Path, target: str, ranks: Sequence[subprocess.Popen[bytes]], late: bool, timeout: float
) -> str:
    why = f"not done after {timeout:g} s" if late else "a rank failed"
    lines = [f"{target}: {why}; exit codes {[rank.returncode for rank in ranks]}"]
    for number in range(len(ranks)):
        tail = (here / f"log-{number}").read_text(errors="replace")[-TAIL:]
        lines.append(f"--- rank {number} ---\n{tail}")
    return "\n".join(lines)


def _die_with_parent() -> None:
    """The standard input is a pipe that nobody writes to: it ends when the parent does."""

    def watch() -> None:
        os.read(0, 1)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _rank(here: pathlib.Path) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    _die_with_parent()
    target, args, timeout, group = pickle.loads((here / "task").read_bytes())
    torch.set_num_threads(1)
    if group:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    module, function = target.split(":")
    result = getattr(importlib.import_module(module), function)(*args)
    (here / f"result-{os.environ['RANK']}").write_bytes(pickle.dumps(result))
    if group and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    # Nothing of a framework's exit handlers may hang or fail a test that has passed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _rank(pathlib.Path(sys.argv[1]))
