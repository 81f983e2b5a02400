"""Doors: questions and descriptors over a unix socket, between real processes. And what device arenas need no GPU for."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass import WindlassInvalid, WindlassNotFound, WindlassPeerLost, WindlassStale, WindlassUnsupported
from windlass.load.planned import PlannedLoader
from windlass.load.trace import Copy
from windlass.transfer.ipc.device import DeviceOpener, namespaces, strided
from windlass.transfer.ipc.handle_server import PREFIX, HandleClient, HandleServer, HandleSession
from windlass.transfer.request import IpcHandle

SERVER = """
import os, sys, tempfile, time
from pathlib import Path
from windlass.errors import WindlassStale
from windlass.transfer.ipc.handle_server import HandleServer
left = []
def answer(session, words):
    if "fail" in words:
        raise WindlassStale("the wrong turn")
    if "crash" in words:
        raise ZeroDivisionError("oops")
    if "left" in words:
        return {"left": left}, []
    made = []
    for i in range(words.get("files", 0)):
        with tempfile.TemporaryFile() as f:
            f.write(b"number %d" % i)
            f.flush()
            made.append(os.dup(f.fileno()))
    return {"pid": os.getpid(), "you": session.pid, "open": len(os.listdir("/proc/self/fd"))}, made
server = HandleServer(Path(sys.argv[1]), answer, lambda session: left.append(session.pid))
print(server.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short path: a socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="door-") as made:
        yield Path(made)


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    yield process, process.stdout.readline().strip()
    process.kill()
    process.wait(timeout=30)


def until(what: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def test_descriptors_travel_to_another_process_and_nobody_keeps_one(
    server: tuple[subprocess.Popen[str], str],
) -> None:
    process, path = server
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    client = HandleClient(path)
    assert client.pid == process.pid
    before, opened = len(os.listdir("/proc/self/fd")), set()
    for count in (0, 1, 250, 3, 250):
        answer, descriptors = client.ask({"files": count})
        opened.add(answer["open"])
        assert (answer["pid"], answer["you"], len(descriptors)) == (process.pid, os.getpid(), count)
        for i, descriptor in enumerate(descriptors):
            assert os.pread(descriptor, 100, 0) == b"number %d" % i
            assert not os.get_inheritable(descriptor)
            os.close(descriptor)
    assert len(os.listdir("/proc/self/fd")) == before
    # The descriptors of an answer are open while it is counted, and not one of the answers before.
    assert max(opened) - min(opened) == 250
    client.close()
    again = HandleClient(path)
    until(lambda: again.ask({"left": 1})[0]["left"] == [os.getpid()])
    again.close()


def test_errors_keep_their_kind_through_a_door(server: tuple[subprocess.Popen[str], str]) -> None:
    client = HandleClient(server[1])
    with pytest.raises(WindlassStale, match="the wrong turn"):
        client.ask({"fail": 1})
    with pytest.raises(Exception, match="ZeroDivisionError: oops"):
        client.ask({"crash": 1})
    assert client.ask({})[0]["pid"] == server[0].pid
    client.close()


def test_a_killed_host_is_noticed_and_its_door_removed_by_the_next(
    server: tuple[subprocess.Popen[str], str], folder: Path
) -> None:
    process, path = server
    client = HandleClient(path)
    assert client.is_there()
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    until(lambda: not client.is_there())
    with pytest.raises(WindlassPeerLost, match=f"process {process.pid}"):
        client.ask({})
    client.close()
    with pytest.raises(WindlassPeerLost, match="the trainer that exported it is gone"):
        HandleClient(path)
    other = HandleServer(folder, lambda v, w: ({}, []), lambda v: None)
    assert not Path(path).exists()
    other.close()
    assert list(folder.iterdir()) == []
    with pytest.raises(WindlassNotFound, match="no handle server"):
        HandleClient(path)


def test_a_process_is_told_that_it_cannot_open_its_own_memory(folder: Path) -> None:
    server = HandleServer(folder, lambda v, w: ({}, []), lambda v: None)
    try:
        with pytest.raises(WindlassUnsupported, match="of this very process"):
            HandleClient(str(server.path))
    finally:
        server.close()


def test_nonsense_at_a_door_ends_the_visit_and_not_the_door(
    server: tuple[subprocess.Popen[str], str],
) -> None:
    for words in (b"not json", b"[1, 2]", b"\xff\xfe"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rude:
            rude.settimeout(20)
            rude.connect(server[1])
            rude.send(words)
            assert rude.recv(100) == b""
    client = HandleClient(server[1])
    assert client.ask({})[0]["pid"] == server[0].pid
    client.close()


def test_a_closed_door_has_ended_its_visits_and_threads(folder: Path) -> None:
    import threading

    sessions: list[HandleSession] = []
    server = HandleServer(folder, lambda v, w: ({}, []), sessions.append)
    program = (
        "import socket,sys; s=socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1]);"
        "s.send(b'{}'); print(s.recv(99), flush=True); print(s.recv(99), flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(server.path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "b'{}'\n"
    with server.sessions() as held:
        assert [session.pid for session, _ in held] == [process.pid]
    server.close()
    server.close()
    assert process.stdout.readline() == "b''\n"
    assert process.wait(timeout=30) == 0
    assert len(sessions) == 1
    assert not any(t.name == "windlass-handles" for t in threading.enumerate())


@pytest.mark.parametrize(
    ("kind", "handle", "words"),
    [
        ("vmm_fd", b"not json", "says nothing of an arena"),
        ("vmm_fd", b"[]", "says nothing of an arena"),
        (
            "vmm_fd",
            b'{"arena": "/etc/passwd", "half": 0, "turn": 1, "sync": 0, "table": 1}',
            "no handle server in",
        ),
        (
            "vmm_fd",
            b'{"arena": "/dev/shm/windlass-door-x", "half": 2, "turn": 1, "sync": 0, "table": 1}',
            "names half 2",
        ),
        (
            "vmm_fd",
            b'{"arena": "/dev/shm/windlass-arena-x", "half": 0, "turn": 1, "sync": 0, "table": 1}',
            "no handle server in",
        ),
        ("legacy", bytes(64), "says nothing of when"),
    ],
)
def test_a_handle_from_outside_opens_doors_only(kind: Any, handle: bytes, words: str) -> None:
    opener = DeviceOpener.__new__(DeviceOpener)
    opener._folder = Path("/dev/shm")
    with pytest.raises((WindlassInvalid, WindlassUnsupported), match=words):
        opener._read(IpcHandle(kind, handle, 1, 0))
    fine = json.dumps({"arena": f"/dev/shm/{PREFIX}1-a", "half": 1, "turn": 3, "sync": 2, "table": 4})
    place = opener._read(IpcHandle("vmm_fd", fine.encode(), 1, 0))
    assert (place.half, place.turn, place.sync, place.table) == (1, 3, 2, 4)


def test_different_namespaces_are_named_where_something_cannot_be_opened() -> None:
    opener = DeviceOpener.__new__(DeviceOpener)
    with (
        pytest.raises(WindlassUnsupported, match="different PID namespaces"),
        opener._explained({"spaces": {**namespaces(), "pid": 1}}),
    ):
        raise WindlassNotFound("it cannot be opened")
    with pytest.raises(WindlassNotFound, match="it cannot"), opener._explained({"spaces": namespaces()}):
        raise WindlassNotFound("it cannot be opened")


def test_rows_of_copies_move_what_torch_would() -> None:
    torch.manual_seed(7)
    base = torch.arange(2 * 3 * 4 * 5, dtype=torch.int32)
    for shape, strides in [
        ((2, 3, 4, 5), (60, 20, 5, 1)), ((5, 4), (1, 5)), ((3, 1, 5), (20, 7, 1)), ((2, 4), (60, 5)),
        ((7,), (3,)), ((), ()), ((1, 1), (9, 9)), ((0, 4), (4, 1)),
    ]:  # fmt: skip
        box = base.as_strided(shape, strides)
        dense = torch.empty(shape).stride()
        read, write, run, dims = strided(0, 0, shape, dense, strides, 4)
        raw, out = base.view(torch.uint8), torch.zeros(box.numel() * 4, dtype=torch.uint8)
        places = [(write, read)] if run else []
        for count, to, source in dims:
            places = [(t + i * to, f + i * source) for t, f in places for i in range(count)]
        for t, f in places:
            out[t : t + run] = raw[f : f + run]
        assert torch.equal(out.view(torch.int32), box.reshape(-1)), (shape, strides)


def test_a_planned_loader_fuses_what_comes_in_parts() -> None:
    import asyncio

    qkv, up = torch.zeros(6, 4), torch.zeros(4, 3)
    loader = PlannedLoader(
        [qkv, up],
        [
            Copy("q", 0, (4, 1), 0, 0, (4, 1), (3, 4)),
            Copy("k", 0, (4, 1), 0, 12, (4, 1), (3, 4)),
            Copy("up", 0, (1, 4), 1, 0, (3, 1), (4, 3)),
        ],
    )
    parts = {name: torch.randn(3, 4) for name in ("q", "k", "up")}
    asyncio.run(loader.load_weights(list(parts.items())))
    assert torch.equal(qkv, torch.cat([parts["q"], parts["k"]]))
    assert torch.equal(up, parts["up"].t())
    with pytest.raises(WindlassNotFound, match="no copies of 'v'"):
        asyncio.run(loader.load_weights([("v", torch.zeros(1))]))


def test_a_folder_with_too_long_a_path_is_named(folder: Path) -> None:
    deep = folder / ("d" * 90)
    deep.mkdir()
    with pytest.raises(WindlassInvalid, match="allows 107"):
        HandleServer(deep, lambda v, w: ({}, []), lambda v: None)
