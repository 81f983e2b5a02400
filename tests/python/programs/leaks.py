"""Publishes many versions, and tells what the trainer and its agent take before and after."""

import gc
import json
import os
import sys
import time
from pathlib import Path

import torch

from windlass import Receiver, WeightManager

home, warm, more, size = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(1)


def lines(path):
    return Path(path).read_text().splitlines()


def rss(pid):
    fields = dict(line.split(":", 1) for line in lines(f"/proc/{pid}/status") if ":" in line)
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
            "mappings": sum(line.split()[4] != "0" for line in lines(f"/proc/{pid}/maps")),
        }
    files = sorted(os.path.join(d, f) for d, _, fs in os.walk(home) for f in fs)
    seen["files"] = [len(files), sum(os.stat(f).st_blocks * 512 for f in files)]
    return seen


# A part that Rust copies, a part that is cast, new objects each step, and small changes so that deltas are made.
base = torch.randn(size // 4)
with WeightManager(
    model_id="leaks",
    region_dir=home,
    dtypes={"cast": "bfloat16"},
    agent={"history": 4, "history_bytes": 1 << 20},
) as wm:

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
sys.stdout.write(json.dumps([before, after, os.listdir(home)]))
