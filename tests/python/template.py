"""Processes that have imported something once, and fork for every program of a test that would import it.

An engine takes about fifteen seconds of CPU to import, in the server and again in each of its workers, and torch takes three. A
fork has it already, and so have the processes that a server forks where it would spawn. What runs is the program's own code.

    template.py SOCKET MODULE...

is the process that forks. A request is a JSON object (``argv``, ``env``, ``cwd``, ``fork``) with four descriptors: stdin, stdout,
stderr, and a pipe that gets the exit code. The answer is the number of the process, which leads a group of its own. When the
socket ends, so do all groups.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing.context
import os
import pathlib
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

#: How long a template may import on a machine that does a lot else.
IMPORT_S = 300.0


class Process:
    """A program that a template has begun, in a process group of its own."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its exit code, once it has ended."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            # Without a code, the template is gone, and so are its programs.
            self.returncode = int(os.read(self._ended, 16) or -signal.SIGKILL)
            os.close(self._ended)
        return self.returncode

    def kill(self) -> None:
        """SIGKILL to it and everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(120)


class Template:
    """Imports modules once, and forks for programs until this process ends."""

    def __init__(self, python: pathlib.Path | str, modules: Sequence[str], env: Mapping[str, str]) -> None:
        # Forks are in turn: an answer belongs to the request before it.
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(IMPORT_S)
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [python, __file__, str(fd), *modules],
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=[fd],
                start_new_session=True,
            )

    def start(
        self,
        argv: Sequence[object],
        env: Mapping[str, str],
        *,
        stdin: int | None = None,
        stdout: IO[bytes],
        stderr: IO[bytes] | None = None,
        fork: bool = False,
    ) -> Process:
        """Runs ``-m MODULE ARG...`` or ``SCRIPT ARG...``. With ``fork``, processes that it would spawn are forks too."""
        request = {"argv": list(map(str, argv)), "env": dict(env), "cwd": os.getcwd(), "fork": fork}
        ended, theirs = os.pipe()
        with self._lock, open(os.devnull, "rb") as nothing:
            streams = [nothing.fileno() if stdin is None else stdin, stdout.fileno()]
            streams += [(stderr or stdout).fileno(), theirs]
            socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
            os.close(theirs)
            pid = self._socket.recv(16)
        if not pid:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait(30)}")
        return Process(int(pid), ended)


def serve(requests: socket.socket) -> dict[str, Any]:
    """Forks for each request. Returns in the fork alone, with the request."""
    # By the descriptor that says when a process has ended: its number, and where its exit code goes.
    running: dict[int, tuple[int, int]] = {}
    while True:
        for ready in select.select([requests, *running], [], [])[0]:
            if ready is not requests:
                pid, told = running.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):
                    os.write(told, str(code).encode())
                os.close(told)
                os.close(ready)
                continue
            words, fds, *_ = socket.recv_fds(requests, 1 << 20, 4)
            if not words:
                for pid, _told in running.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                os._exit(0)
            *streams, told = fds
            pid = os.fork()
            if pid == 0:
                os.setsid()
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                ended = [fd for one, (_, pipe) in running.items() for fd in (one, pipe)]
                for fd in [*fds, *ended, requests.fileno()]:
                    os.close(fd)
                requests.detach()
                request: dict[str, Any] = json.loads(words)
                return request
            for stream in streams:
                os.close(stream)
            running[os.pidfd_open(pid)] = (pid, told)
            requests.send(str(pid).encode())


def main() -> None:
    own = set(os.environ["PYTHONPATH"].split(os.pathsep))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    # What is there stays shared with the forks.
    gc.collect()
    gc.freeze()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    folders = request["env"]["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*folders, *(path for path in sys.path[1:] if path not in own)]
    if request["fork"]:
        contexts: Any = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
        contexts["spawn"] = contexts["fork"]
    sys.argv[:] = request["argv"]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
