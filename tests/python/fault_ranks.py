"""Ranks that are killed, stopped and lied to.

Starting torch takes seconds, so the ranks of a scenario are forks of a process that has imported it and has done
nothing else: `Stem` starts that process, `Stem.run` has it fork the ranks of one scenario, and what each of them did
comes back as plain data; a rank that was killed gives `None`. A scenario is a function of this module; ranks meet in a
gloo group over a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from windlass import Receiver, WeightManager
from windlass.publish import manager as manager_module

HERE = pathlib.Path(__file__).resolve().parent
#: How long the scenarios let an offload take that cannot succeed.
SHORT = 2.0
#: How long what is to succeed may take.
PATIENCE = 40.0


class Stem:
    """The process that is forked."""

    def __init__(self) -> None:
        from children import environment

        variables = {**environment(), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fault_ranks.py")],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, world: int, scenario: str, *args: Any, timeout: float = 60.0) -> list[Any]:
        """What each rank returned."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        words = json.dumps([world, scenario, args, timeout]).encode() + b"\n"
        self._process.stdin.write(words)
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the stem is gone"
        results: list[Any] = json.loads(line)
        for rank, result in enumerate(results):
            assert not (isinstance(result, dict) and "traceback" in result), (
                f"rank {rank}: {result['traceback']}"
            )
        return results

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def serve() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        world, scenario, args, timeout = json.loads(line)
        sys.stdout.write(json.dumps(forked(world, scenario, args, timeout)) + "\n")
        sys.stdout.flush()


def forked(world: int, scenario: str, args: list[Any], timeout: float) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                live(rank, world, scenario, args, folder)
            pids.append(pid)
        end = time.monotonic() + timeout
        left = set(pids)
        while left and time.monotonic() < end:
            left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == pid}
            time.sleep(0.005)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        files = [pathlib.Path(folder, f"result-{rank}") for rank in range(world)]
        late = {"traceback": f"not done after {timeout} s"}
        return [
            json.loads(f.read_text()) if f.exists() else late if pid in left else None
            for f, pid in zip(files, pids, strict=True)
        ]


def live(rank: int, world: int, scenario: str, args: list[Any], folder: str) -> None:
    """The whole life of a forked rank."""
    os.close(0)
    file = pathlib.Path(folder, f"result-{rank}")
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        result = globals()[scenario](rank, world, *args)
    except BaseException:
        result = {"traceback": traceback.format_exc()}
    (file.parent / f"partial-{rank}").write_text(json.dumps(result))
    os.rename(file.parent / f"partial-{rank}", file)
    # No exit handlers: gloo may still wait for the dead.
    os._exit(0)


# What ranks do.


def weights(version: int) -> dict[str, torch.Tensor]:
    """A tensor of which each rank copies a part, one to cast for each of three ranks, and a small one."""
    return {
        "large": torch.full((64, 8192), float(version), dtype=torch.bfloat16),
        **{f"cast.{i}": torch.full((33, 3), float(version + i)) for i in range(3)},
        "small": torch.full((5,), version, dtype=torch.int32),
    }


def manager(home: str, **more: Any) -> WeightManager:
    options = {"timeout": SHORT, "dtypes": {"cast.*": "bfloat16"}, **more}
    return WeightManager(model_id="faulty", region_dir=home, **options)


def attempt(wm: WeightManager, given: Any, version: int, rank: int, world: int) -> dict[str, Any]:
    """How an offload went."""
    begun = time.monotonic()
    try:
        wm.offload(given, version, rank, world)
        kind, said = "", ""
    except Exception as e:
        kind, said = type(e).__name__, str(e)
    return {"kind": kind, "said": said, "seconds": time.monotonic() - begun}


def pulled(wm: WeightManager, home: str, version: int) -> bool:
    """Whether a new receiver gets this version, bit by bit."""
    with tempfile.TemporaryDirectory(dir=home) as image, Receiver(image, region=wm.region) as receiver:
        receiver.wait(version, 30.0)
        with receiver.hold() as held:
            assert held.version == version
            assert held.digest == wm.wait_delta_ready(version, 30.0)
            wanted = {n: t.bfloat16() if n.startswith("cast") else t for n, t in weights(version).items()}
            assert sorted(held.tensors) == sorted(wanted)
            return all(torch.equal(held.tensors[name], tensor) for name, tensor in wanted.items())


class Deadly:
    """A publisher whose process is killed before one of its calls."""

    def __init__(self, publisher: Any, phase: str) -> None:
        self._publisher, self._phase = publisher, phase

    def __getattr__(self, name: str) -> Any:
        if name == self._phase:
            os.kill(os.getpid(), signal.SIGKILL)
        return getattr(self._publisher, name)


def killed(rank: int, world: int, home: str, victim: int, phase: str) -> dict[str, Any]:
    """One rank dies in the second version. The others fail, and the first version is still there."""
    wm = manager(home)
    wm.offload(weights(1), 1, rank, world, timeout=PATIENCE)
    if rank == 0:
        assert pulled(wm, home, 1)
    assert wm._open is not None
    dist.barrier()
    if rank == victim:
        wm._open.publisher = Deadly(wm._open.publisher, phase)  # type: ignore[assignment]
    told = attempt(wm, weights(2), 2, rank, world)
    told["version"] = wm.version
    # One that closes before the others have their answer is missing, too.
    pathlib.Path(home, f"told-{rank}").touch()
    until = time.monotonic() + 60
    while len(list(pathlib.Path(home).glob("told-*"))) < world - 1 and time.monotonic() < until:
        time.sleep(0.01)
    if rank == 0:
        told["served"] = pulled(wm, home, 1)
    wm.close()
    return told


def killed_at_first(rank: int, world: int, home: str, victim: int, phase: str) -> dict[str, Any]:
    """One rank dies before there is anything."""
    wm = manager(home)
    if rank == victim and phase == "describe":
        return attempt(wm, dying(), 1, rank, world)
    if rank == victim:
        manager_module.Publisher = Deadly(manager_module.Publisher, phase)  # type: ignore[assignment, misc]
    return attempt(wm, weights(1), 1, rank, world)


def dying() -> Iterator[tuple[str, torch.Tensor]]:
    yield "large", weights(1)["large"]
    os.kill(os.getpid(), signal.SIGKILL)


def published(rank: int, world: int, home: str, version: int) -> bool:
    """A trainer that was started again."""
    wm = manager(home, timeout=20.0)
    wm.offload(weights(version), version, rank, world)
    good = rank != 0 or pulled(wm, home, version)
    dist.barrier()
    wm.close()
    return good


def absent(rank: int, world: int, home: str, first: bool) -> dict[str, Any] | None:
    """The last rank does not call."""
    wm = manager(home)
    if not first:
        wm.offload(weights(1), 1, rank, world, timeout=PATIENCE)
        dist.barrier()
    told = None
    if rank != world - 1:
        told = attempt(wm, weights(2), 2, rank, world)
    pathlib.Path(home, f"done-{rank}").touch()
    while len(list(pathlib.Path(home).glob("done-*"))) < world:
        time.sleep(0.01)
    return told


def disagreeing(rank: int, world: int, home: str, what: str) -> list[dict[str, Any]]:
    """The last rank has something else than the others, at first and later; then all agree again."""
    wm = manager(home)
    odd = rank == world - 1
    told = []
    for version in (1, 2):
        given: Any = weights(version)
        number = version
        if odd and what == "version":
            number += 10
        elif odd and what == "dtype":
            given["small"] = given["small"].float()
        elif odd and what == "shape":
            given["small"] = torch.zeros(6, dtype=torch.int32)
        elif odd and what == "meta":
            given["small"] = given["small"].to("meta")
        elif odd and what == "raising":
            given = broken()
        elif odd and what == "memory":
            given = nn.ParameterDict({n: nn.Parameter(t, False) for n, t in weights(version).items()})
        told.append(attempt(wm, given, number, rank, world))
        dist.barrier()
        good = attempt(wm, weights(version), version, rank, world)
        assert not good["kind"], good
        dist.barrier()
    wm.close()
    return told


def broken() -> Iterator[tuple[str, torch.Tensor]]:
    yield "large", weights(1)["large"]
    raise ZeroDivisionError("the trainer's own")


def repeated(rank: int, world: int, home: str) -> list[dict[str, Any]]:
    """The same version again: with the same bytes, and with others on one rank."""
    wm = manager(home)
    # The third is written by rank 0 alone and the others are not: each rank compares what it would write.
    given = {**weights(1), **{f"more.{i}": torch.full((3,), float(i)) for i in range(world)}}
    told = [attempt(wm, given, 1, rank, world), attempt(wm, given, 1, rank, world)]
    if rank == world - 1:
        for tensor in given.values():
            tensor += 1
    told.append(attempt(wm, given, 1, rank, world))
    dist.barrier()
    wm.close()
    return told


def unlucky_agent(rank: int, world: int, home: str, number: int) -> dict[str, Any]:
    """The agent is stopped or killed; offloads go on."""
    wm = manager(home, timeout=20.0)
    wm.offload(weights(1), 1, rank, world)
    pid = 0
    if rank == 0:
        wm.wait_delta_ready(timeout=20.0)
        pid = wm.status()["agent"]["pid"]
        os.kill(pid, number)
    dist.barrier()
    told = [attempt(wm, weights(v), v, rank, world) for v in range(2, 8)]
    assert not any(t["kind"] for t in told), told
    if rank == 0 and number == signal.SIGSTOP:
        # Unless it was found to be silent and was replaced.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    good = rank != 0 or pulled(wm, home, 7)
    dist.barrier()
    wm.close()
    return {"good": good, "slowest": max(t["seconds"] for t in told)}


def interrupted(rank: int, world: int, home: str) -> float | None:
    """Ctrl-C while the first rank waits for the others to agree; how long it took to end."""
    wm = manager(home, timeout=60.0)
    ready, sent, over = (pathlib.Path(home, name) for name in ("ready", "sent", "over"))
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid())

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(1).items()
        # The last that is asked for before ranks agree.
        ready.touch()

    took = None
    if rank == 0:
        try:
            wm.offload(given(), 1, rank, world)
        except KeyboardInterrupt:
            took = time.monotonic() - float(sent.read_text())
        over.touch()
    elif rank == 1:
        wait_for(ready)
        sent.write_text(str(time.monotonic()))
        os.kill(pids[0], signal.SIGINT)
    wait_for(over)
    return took


def wait_for(file: pathlib.Path) -> None:
    end = time.monotonic() + 30.0
    while not file.exists():
        assert time.monotonic() < end, file
        time.sleep(0.002)


def other_host(rank: int, world: int, home: str) -> list[str]:
    """The second rank is on a host that only has a replica."""
    wm = manager(home, node=f"host-{rank}", timeout=20.0, controller="http://127.0.0.1:9")
    wm.offload(weights(1), 1, rank, world)
    wm.offload(weights(2), 2, rank, world)
    said = []
    if rank == 1:
        said.append(str(wm.notify_version()))
        said.append(str(wm.notify_version_async().result(0)))
        try:
            wm.wait_delta_ready()
        except NotImplementedError as e:
            said.append(str(e))
    dist.barrier()
    wm.close()
    return said


def orphan(rank: int, world: int, home: str) -> None:
    """A trainer that dies with a version published, and leaves word of its agent."""
    wm = manager(home, timeout=20.0)
    wm.offload(weights(1), 1, rank, world)
    if rank == 0:
        wm.wait_delta_ready(timeout=20.0)
        pathlib.Path(home, "agent").write_text(str(wm.status()["agent"]["pid"]))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    serve()
