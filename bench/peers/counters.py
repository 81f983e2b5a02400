"""What is counted: bytes on the loopback device, processor time and memory of process trees.

Owns: a network namespace of this process, so that the counters of its loopback device are those of the benchmark alone; readings of
/proc. Must not: know a peer.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
#: How often memory is looked at.
EVERY_S = 0.02


def own_network() -> bool:
    """Moves this process into a network of its own, with a loopback device and nothing else. Call it before there are threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNET):
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))
    return True


def shape(rate: str) -> None:
    """Bounds what crosses the loopback device of this network, such as ``1gbit``."""
    words = [
        "tc",
        "qdisc",
        "replace",
        "dev",
        "lo",
        "root",
        "tbf",
        "rate",
        rate,
        "burst",
        "256k",
        "latency",
        "100ms",
    ]
    subprocess.run(words, check=True)


def loopback_bytes() -> int:
    """What was sent over the loopback device of this network, headers and acknowledgements included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "lo":
            return int(rest.split()[8])
    raise OSError("there is no loopback device")


def tree(roots: Iterable[int]) -> set[int]:
    """The processes, all below them, and all of their sessions."""
    parents: dict[int, int] = {}
    sessions: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                parents[int(entry)], sessions[int(entry)] = int(fields[1]), int(fields[3])
    wanted = set(roots)
    found = {pid for pid in parents if pid in wanted or sessions[pid] in wanted}
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return found


def cpu_seconds(pids: Iterable[int]) -> dict[int, float]:
    """Of each process with all of its threads, and of children of it that have ended."""
    found = {}
    tick = os.sysconf("SC_CLK_TCK")
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            # A clock of the process, which counts nanoseconds (CPUCLOCK_SCHED).
            own = time.clock_gettime((~pid << 3) | 2)
            found[pid] = own + (int(fields[13]) + int(fields[14])) / tick
    return found


class Cpu:
    """Processor time of trees since it was made."""

    def __init__(self, roots: Iterable[int]) -> None:
        self._roots = list(roots)
        self._begun = cpu_seconds(tree(self._roots))

    def spent(self) -> float:
        now = cpu_seconds(tree(self._roots))
        return sum(seconds - self._begun.get(pid, 0.0) for pid, seconds in now.items())

    def until_idle(self, most: float) -> tuple[float, bool]:
        """What was spent until the trees computed no more. If they never stop, what was spent until now, and false."""
        until, now = time.monotonic() + most, self.spent()
        first = now
        while time.monotonic() < until:
            time.sleep(0.15)
            before, now = now, self.spent()
            if now - before < 0.008:
                return now, True
        return first, False


def memory(roots: Iterable[int], home: Path) -> int:
    """Bytes of the trees: private and file pages by their share (PSS), and shared memory once, whether mapped or a file in
    ``home``, which is in shared memory."""
    private = shared = 0
    for pid in tree(roots):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                name, _, rest = line.partition(":")
                if name in ("Pss_Anon", "Pss_File"):
                    private += int(rest.split()[0]) << 10
                elif name == "Pss_Shmem":
                    shared += int(rest.split()[0]) << 10
    files = 0
    for folder, _, names in os.walk(home):
        for name in names:
            with contextlib.suppress(OSError):
                files += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return private + max(shared, files)


class Peak:
    """The most memory while it is entered."""

    def __init__(self, read: Callable[[], int], every: float = EVERY_S) -> None:
        self._read, self._every, self._end = read, every, threading.Event()
        self.most = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._end.wait(self._every):
            self.most = max(self.most, self._read())

    def __enter__(self) -> Peak:
        self.most = self._read()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.most = max(self.most, self._read())
