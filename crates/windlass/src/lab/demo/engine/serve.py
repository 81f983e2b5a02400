"""Runs the server of `windlass demo --engine` until standard input closes: serve.py COMMAND...

Standard input is a pipe from the demo, which closes however the demo ends. This process leads the group of all that the server
starts. It gives them time to end, kills the others, and removes the shared memory that those leave behind.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

#: How long the server may take to stop, in seconds.
GRACE = 8.0
SHARED = "/dev/shm"


def members() -> Iterator[int]:
    """The other processes of this group."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if pid != os.getpid() and os.getpgid(pid) == os.getpgid(0):
                yield pid


def shared(pid: int) -> Iterator[str]:
    """The files in shared memory that a process has mapped."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition(SHARED + "/")[2]
            # Deeper ones are images and regions.
            if path and "/" not in path:
                yield os.path.join(SHARED, path)


server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr)
while server.poll() is None:
    if select.select([0], [], [], 0.1)[0] and not os.read(0, 4096):
        break
else:
    sys.exit(f"the server ended with status {server.returncode}")
files = {path for pid in members() for path in shared(pid)}
server.terminate()
with contextlib.suppress(subprocess.TimeoutExpired):
    server.wait(GRACE)
for pid in members():
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
for path in files:
    with contextlib.suppress(OSError):
        os.unlink(path)
