"""Two hundred versions cost no more than ten: memory, descriptors, threads and files in shared memory stay."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

from children import environment

#: Versions before the first look, and between the looks.
WARM, MORE = 30, 200
#: Allocators keep what they have had: each process may grow by this, far less than one version of each step would cost.
SLACK_KIB = 6 << 10
MODEL_BYTES = 4 << 20

TRAINER = """
    import gc, json, os, sys, time, torch
    from windlass import Receiver, WeightManager

    home, warm, more, size = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)

    def rss(pid):
        fields = dict(l.split(":", 1) for l in open(f"/proc/{pid}/status") if ":" in l)
        # Not the region, whose pages a process maps as it meets them.
        return int(fields["RssAnon"].split()[0])

    def look():
        gc.collect()
        agent = wm.status()["agent"]["pid"]
        seen = {}
        for name, pid in (("trainer", os.getpid()), ("agent", agent)):
            seen[name] = {
                "kib": rss(pid),
                "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
                "threads": len(os.listdir(f"/proc/{pid}/task")),
                # Of files: what is anonymous is counted above, and comes and goes with the allocator's threads.
                "mappings": sum(l.split()[4] != "0" for l in open(f"/proc/{pid}/maps")),
            }
        files = sorted(os.path.join(d, f) for d, _, fs in os.walk(home) for f in fs)
        seen["files"] = [len(files), sum(os.stat(f).st_blocks * 512 for f in files)]
        return seen

    # A part that Rust copies, a part that is cast, new objects each step, and small changes so that deltas are made.
    base = torch.randn(size // 4)
    with WeightManager(model_id="leaks", region_dir=home, dtypes={"cast": "bfloat16"},
                       agent={"history": 4, "history_bytes": 1 << 20}) as wm:
        def step(version):
            base[version % 64 :: 4096] += 1
            wm.offload({"copy": base, "cast": base[: size // 16], "new": base[:1000].clone()}, version, 0, 1)
            wm.wait_delta_ready(timeout=30)
            receiver.wait(version, 30)
            with receiver.hold() as image:
                assert torch.equal(image.tensors["copy"], base)

        wm.offload({"copy": base, "cast": base[: size // 16], "new": base[:1000].clone()}, 1, 0, 1)
        receiver = Receiver(os.path.join(home, "image"), region=wm.region)
        for version in range(2, 2 + warm):
            step(version)
        before = look()
        for version in range(2 + warm, 2 + warm + more):
            step(version)
        after = look()
        # What transfers that have just ended still hold, the agent lets go of in its next round.
        until = time.monotonic() + 10
        while after["agent"]["descriptors"] > before["agent"]["descriptors"] and time.monotonic() < until:
            time.sleep(0.1)
            after = look()
        receiver.close()
    print(json.dumps([before, after, os.listdir(home)]))
"""


@pytest.fixture(scope="module")
def looks() -> list[Any]:
    """Before and after, and what is left in the end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="leaks-") as home:
        words = [home, str(WARM), str(MORE), str(MODEL_BYTES)]
        command = [sys.executable, "-c", textwrap.dedent(TRAINER), *words]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr
        found: list[Any] = json.loads(done.stdout)
        assert Path(home).exists()
    return found


@pytest.mark.parametrize("process", ["trainer", "agent"])
def test_two_hundred_offloads_leak_no_memory(looks: list[Any], process: str) -> None:
    grown = looks[1][process]["kib"] - looks[0][process]["kib"]
    assert grown < SLACK_KIB, looks
    assert SLACK_KIB < MORE * 64, "the slack would hide 64 KiB a version"


@pytest.mark.parametrize("process", ["trainer", "agent"])
@pytest.mark.parametrize("what", ["descriptors", "threads", "mappings"])
def test_two_hundred_offloads_leak_nothing_that_is_counted(looks: list[Any], process: str, what: str) -> None:
    """Pools may still fill up by a few; a leak of one in ten versions would be twenty."""
    slack = {"descriptors": 4, "threads": 4, "mappings": 12}[what]
    assert looks[1][process][what] - looks[0][process][what] <= slack, looks


def test_two_hundred_offloads_leave_no_more_files_and_the_end_leaves_none(looks: list[Any]) -> None:
    before, after, left = looks
    assert after["files"][0] <= before["files"][0] + 1, looks
    # Deltas that are kept have other sizes.
    assert after["files"][1] <= before["files"][1] + (2 << 20), looks
    # The image is its receiver's, and stays for the next one.
    assert left == ["image"]
