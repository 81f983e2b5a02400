"""Real ranks for tests: several Python processes in one process group.

    results = run_ranks(2, "fsdp_ranks:shards_are_gathered", ["bfloat16"], timeout=60)

Each rank is a process of its own that imports the named module from this folder, joins a gloo group and calls
``function(*args)``; ``torch.distributed`` says who it is. What the functions return comes back in the order of
the ranks. A rank that raises, dies or outlives the deadline ends all of them, and :class:`RankFailure` carries
the end of what each one wrote.

Most of the time of a test would go into starting processes that import torch, so ranks are forks of one that has it
(template.py), :class:`Ranks` stay up and run one function after the other, and the fixture ``ranks`` (conftest.py) shares
them among tests. ``run_ranks`` starts fresh ones, for a function that kills, forks or leaves something behind.

The meeting point is a store in this process, listening on a port that the system chose and that stays bound, so
tests cannot collide. Ranks see the environment that ``torchrun`` gives (``RANK``, ``WORLD_SIZE``, ``MASTER_PORT``
...), and with ``group=False`` the group is left for the function to make. A rank ends when this process does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pathlib
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from template import Process, Template

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE.parent.parent / "python"
# How long the other ranks may take to end by themselves, with an error that may say more, once one has failed.
GRACE_S = 3.0
# How long a group may take to come up; collectives of a function have its own deadline, which ends the process.
START_S = 120.0
TAIL = 4000


#: What the fixture ``ranks`` gives: ``ranks(world_size, "module:function", args, timeout)``.
Run = Callable[..., "list[Any]"]


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
    with Ranks(world_size, env=env, group=group) as ranks:
        return ranks.run(target, args, timeout)


class Ranks:
    """Processes that form a group and run functions until they are closed, or until one of them fails."""

    def __init__(self, world_size: int, *, env: Mapping[str, str] | None = None, group: bool = True) -> None:
        from datetime import timedelta

        from torch.distributed import TCPStore

        self._store = TCPStore(
            "127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_S)
        )
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._here = pathlib.Path(self._folder.name)
        self._turn = 0
        self.broken = False
        variables = {**(env or {}), "RANKS_GROUP": "1" if group else ""}
        started = [
            _start(self._here, rank, world_size, self._store.port, variables) for rank in range(world_size)
        ]
        self._ranks = [rank for rank, _ in started]
        self._pipes = [pipe for _, pipe in started]

    def run(self, target: str, args: Sequence[Any] = (), timeout: float = 120.0) -> list[Any]:
        """Calls the function on every rank and returns the results by rank. After a failure there is no next."""
        deadline = time.monotonic() + timeout
        self._turn += 1
        task = pickle.dumps((self._turn, target, tuple(args)))
        results = [self._here / f"result-{self._turn}-{rank}" for rank in range(len(self._ranks))]
        try:
            for pipe in self._pipes:
                _send(pipe, task)
            late = self._wait(results, deadline)
        except BaseException:
            self.broken = True
            raise
        if all(result.exists() for result in results):
            return [pickle.loads(result.read_bytes()) for result in results]
        self.broken = True
        self._kill()
        raise RankFailure(self._report(target, late, timeout))

    def _wait(self, results: Sequence[pathlib.Path], deadline: float) -> bool:
        """Until all have a result, or one has died and the others had their grace; whether the deadline passed."""
        failed = False
        while not all(result.exists() for result in results):
            dead = [rank.poll() is not None for rank in self._ranks]
            if all(dead):
                return False
            if any(dead) and not failed:
                failed = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() > deadline:
                return not failed
            time.sleep(0.01)
        return False

    def _report(self, target: str, late: bool, timeout: float) -> str:
        why = f"not done after {timeout:g} s" if late else "a rank failed"
        lines = [f"{target}: {why}; exit codes {[rank.returncode for rank in self._ranks]}"]
        for number in range(len(self._ranks)):
            tail = (self._here / f"log-{number}").read_text(errors="replace")[-TAIL:]
            lines.append(f"--- rank {number} ---\n{tail}")
        return "\n".join(lines)

    def _kill(self) -> None:
        """Ends the ranks with everything they started."""
        for rank in self._ranks:
            rank.kill()

    def close(self) -> None:
        """Ends the ranks; nothing of theirs is left."""
        self._kill()
        for pipe in self._pipes:
            # What a dead rank did not read is lost.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _send(pipe: Any, task: bytes) -> None:
    # A rank that is dead is seen, and reported with what it wrote, by the wait.
    with contextlib.suppress(BrokenPipeError):
        pipe.write(len(task).to_bytes(8, "little") + task)
        pipe.flush()


def _start(
    here: pathlib.Path, rank: int, world_size: int, port: int, env: Mapping[str, str]
) -> tuple[Process, IO[bytes]]:
    path = os.pathsep.join([str(HERE), str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {
        **os.environ,
        "PYTHONPATH": path,
        # Tools that came with this Python (ninja) are found without its environment being activated.
        "PATH": os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")]),
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
    tasks, pipe = os.pipe()
    with (here / f"log-{rank}").open("wb") as log:
        process = _template().start([HERE / "ranks.py", here], variables, stdin=tasks, stdout=log)
    os.close(tasks)
    return process, os.fdopen(pipe, "wb", buffering=0)


@functools.cache
def _template() -> Template:
    """What ranks are forks of, as long as this process lives."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    return Template(sys.executable, ["torch.distributed.fsdp", "torch._dynamo"], env)


def _receive(tasks: queue.Queue[bytes]) -> None:
    """The parent's tasks. The pipe ends when the parent does, and so does the rank, whatever it is doing."""
    # Unbuffered: an interpreter that ends would wait for the lock of a buffer.
    with open(0, "rb", buffering=0, closefd=False) as pipe:
        while size := pipe.read(8):
            length, task = int.from_bytes(size, "little"), b""
            while len(task) < length and (more := pipe.read(length - len(task))):
                task += more
            tasks.put(task)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _rank(here: pathlib.Path) -> None:
    from datetime import timedelta

    tasks: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_receive, args=(tasks,), daemon=True).start()

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if os.environ["RANKS_GROUP"]:
        dist.init_process_group("gloo", timeout=timedelta(seconds=START_S))
    while True:
        turn, target, args = pickle.loads(tasks.get())
        module, function = target.split(":")
        result = getattr(importlib.import_module(module), function)(*args)
        draft = here / f"draft-{turn}-{os.environ['RANK']}"
        draft.write_bytes(pickle.dumps(result))
        draft.rename(here / f"result-{turn}-{os.environ['RANK']}")


if __name__ == "__main__":
    _rank(pathlib.Path(sys.argv[1]))
