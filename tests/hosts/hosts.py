"""Hosts on one machine: each has its own network, address, name, `/dev/shm`, processes and System V objects.

Owns: :class:`Bench`, a switch and the hosts at it, and :class:`Host`. A host is a set of Linux namespaces that a first process holds;
all of a host ends with that process, as by a power cut. Links have a rate (`tc tbf`) in both directions, and a host can be
taken off the network and put back. The file system is the machine's, except for `/dev/shm` and `/tmp`. Needs root, `ip`, `tc` and
`unshare`; :func:`missing` says what is not there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import IO, Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent.parent
#: How long a host may take to start, and anything else on a machine that does a lot besides.
PATIENCE = 60.0
NET = "10.77.0"


def own_memory() -> str:
    """The commands that give a host a /dev/shm and a /tmp of its own. A checkout and a Python that are in /tmp stay there."""
    lines = ["mount -t tmpfs -o mode=1777 tmpfs /dev/shm", "mkdir /dev/shm/kept"]
    found = {path for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix)) if path.is_relative_to("/tmp")}
    kept = sorted(path for path in found if not found.intersection(path.parents))
    for number, path in enumerate(kept):
        lines += [f"mkdir /dev/shm/kept/{number}", f"mount --bind {quote(str(path))} /dev/shm/kept/{number}"]
    lines.append("mount -t tmpfs -o mode=1777 tmpfs /tmp")
    for number, path in enumerate(kept):
        lines += [f"mkdir -p {quote(str(path))}", f"mount --move /dev/shm/kept/{number} {quote(str(path))}"]
    return " && ".join([*lines, "rm -r /dev/shm/kept"])


T = TypeVar("T")


def missing() -> str | None:
    """What this machine lacks for a bench, in words."""
    tools = [tool for tool in ("ip", "tc", "unshare", "nsenter", "mount") if shutil.which(tool) is None]
    if tools:
        return f"there is no {', '.join(tools)} (packages iproute2, util-linux, mount)"
    if os.geteuid() != 0:
        return "namespaces of hosts need root"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "ip", "link", "add", "name", "a"]
        + ["type", "veth", "peer", "name", "b"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return None if tried.returncode == 0 else f"a network of one's own is refused: {tried.stderr.strip()}"


def run(*words: str) -> str:
    """What a command prints; an error with what it says if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


class Namespaces:
    """Namespaces, as long as a first process holds them."""

    def __init__(self, name: str, setup: str = ":") -> None:
        self.name = name
        ready, told = os.pipe()
        script = f"hostname {name} && {setup} && echo ready >&{told} && exec sleep infinity"
        words = [
            "unshare",
            "--net",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        # When it is killed, unshare complains of signals that it cannot set back.
        self._holder = subprocess.Popen(
            [*words, "bash", "-euc", script], pass_fds=[told], stderr=subprocess.PIPE, text=True
        )
        os.close(told)
        with os.fdopen(ready) as end:
            if end.read(6) != "ready\n":
                raise RuntimeError(f"the host {name} did not start: {self._holder.communicate()[1]}")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        self.pid = int(children.read_text().split()[0])

    def inside(self, *words: str) -> list[str]:
        """A command, as it is run there."""
        return ["nsenter", "-t", str(self.pid), "--net", "--mount", "--uts", "--ipc", "--pid", "--", *words]

    def path(self, path: str) -> Path:
        """A file there, as this process finds it."""
        return Path(f"/proc/{self.pid}/root{path}")

    def kill(self) -> None:
        """Ends every process in it at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._holder.wait(PATIENCE)


class Host(Namespaces):
    """A host at the switch of a bench."""

    def __init__(self, name: str, number: int, port: str, switch: Namespaces, rate: str | None) -> None:
        # Two links of one host are told apart by their number, and a host that is started again gets its address back.
        super().__init__(name, own_memory())
        self.address = f"{NET}.{number}"
        self._switch, self._port = switch, port
        veth = ["type", "veth", "peer", "name", port, "netns", str(switch.pid)]
        run("ip", "link", "add", "name", "eth0", "netns", str(self.pid), *veth)
        run(*switch.inside("ip", "link", "set", port, "master", "switch", "up"))
        run(*self.inside("ip", "address", "add", f"{self.address}/24", "dev", "eth0"))
        for link in ("lo", "eth0"):
            run(*self.inside("ip", "link", "set", link, "up"))
        if rate is not None:
            self.shape(rate)

    def shape(self, rate: str) -> None:
        """Bounds what the host sends and what it gets, such as ``500mbit``."""
        shaped = ["tc", "qdisc", "replace", "dev"]
        how = ["root", "tbf", "rate", rate, "burst", "64k", "latency", "100ms"]
        run(*self.inside(*shaped, "eth0", *how))
        run(*self._switch.inside(*shaped, self._port, *how))

    def sent(self) -> int:
        """The bytes that it has sent."""
        # Not from /sys, which shows the links of the namespace that mounted it.
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()
        (link,) = (line for line in lines if line.strip().startswith("eth0:"))
        return int(link.split()[9])

    def unplug(self) -> None:
        """Takes it off the network: nothing arrives, and nobody is told."""
        run(*self._switch.inside("ip", "link", "set", self._port, "nomaster"))

    def plug(self) -> None:
        """Puts it back."""
        run(*self._switch.inside("ip", "link", "set", self._port, "master", "switch"))

    def start(
        self,
        *words: str,
        env: Mapping[str, str] = {},
        out: IO[Any] | int | None = None,
        err: IO[Any] | int | None = None,
    ) -> subprocess.Popen[str]:
        """Starts a command there."""
        variables = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **env}
        how: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": out, "stderr": err}
        return subprocess.Popen(self.inside(*words), env=variables, text=True, bufsize=1, **how)

    def python(self, *words: str, **how: Any) -> subprocess.Popen[str]:
        """Starts a Python program there."""
        return self.start(sys.executable, *words, **how)


class Bench:
    """A switch, and hosts at it."""

    def __init__(self) -> None:
        self._switch = Namespaces("switch")
        self._ports = itertools.count(1)
        self.hosts: dict[str, Host] = {}
        inside = self._switch.inside
        run(*inside("ip", "link", "add", "name", "switch", "type", "bridge"))
        run(*inside("ip", "link", "set", "switch", "up"))

    def host(self, name: str, rate: str | None = None) -> Host:
        """A new host, or one that was killed, at the address that it had."""
        before = self.hosts.get(name)
        number = len(self.hosts) + 1 if before is None else int(before.address.rpartition(".")[2])
        self.hosts[name] = Host(name, number, f"port{next(self._ports)}", self._switch, rate)
        return self.hosts[name]

    def close(self) -> None:
        """Ends all hosts."""
        for host in [*self.hosts.values(), self._switch]:
            host.kill()


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    """A bench, and nothing left of it."""
    made = Bench()
    try:
        yield made
    finally:
        made.close()


def until(what: str, look: Callable[[], T | None], patience: float = PATIENCE) -> T:
    """Waits until ``look`` gives something."""
    deadline = time.monotonic() + patience
    while not (found := look()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)
    return found
