"""Waits in every call that blocks, one after the other, until Ctrl-C ends it."""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import torch

from windlass import Receiver, WeightManager, _windlass
from windlass.publish.supervise import AgentSupervisor

home = sys.argv[1]
torch.set_num_threads(1)
weights = {"a": torch.ones(1000)}


def say(**words):
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def threads():
    names = [Path(f"/proc/self/task/{t}/comm").read_text().strip() for t in os.listdir("/proc/self/task")]
    # The thread that watches an agent lives as long as the manager.
    return [n for n in names if n.startswith("windlass") and n != "windlass-superv"]


def waits(name, call, later=False):
    if not later:
        say(waits=name)
    try:
        call()
    except KeyboardInterrupt:
        say(ended=name, at=time.monotonic(), threads=threads())
    else:
        say(ended=name, at=0, threads=threads())


def manager(name, **more):
    return WeightManager(model_id=name, region_dir=home, **more)


quiet = {"enabled": False}
lead = manager("begin", agent=quiet)
lead.prepare(weights, 0, 2)
waits("begin", lambda: lead.offload(weights, 1, 0, 2))

second = _windlass.Publisher.open(lead.region, lead._open.plan.layout, rank=1)
joined = threading.Thread(target=second.begin, args=(1, 60.0))
joined.start()


class Saying:
    def __getattr__(self, name):
        if name == "commit":
            joined.join()
            say(waits="commit")
        return getattr(publisher, name)


publisher, lead._open.publisher = lead._open.publisher, Saying()
waits("commit", lambda: lead.offload(weights, 1, 0, 2), later=True)
lead._open.publisher = publisher
second.abort()

# What was interrupted is not there, and the next attempt is as good as any.
assert lead.version is None
joined = threading.Thread(target=lambda: (second.begin(1, 60.0), second.commit(60.0)))
joined.start()
assert lead.offload(weights, 1, 0, 2).new
joined.join()
second.close()
lead.close()

with manager("sealed", agent=quiet) as wm:
    wm.offload(weights, 1, 0, 1)
    waits("wait_delta_ready", wm.wait_delta_ready)

with manager("pulled") as wm:
    wm.offload(weights, 1, 0, 1)
    receiver = Receiver(os.path.join(home, "image"), region=wm.region)
    receiver.wait(1)
    waits("wait_newer", lambda: receiver.wait_newer(60.0))
    agent = wm.status()["agent"]["pid"]
    wm.offload({"a": torch.zeros(1000)}, 2, 0, 1)
    wm.wait_delta_ready()
    os.kill(agent, signal.SIGSTOP)
    waits("sync", lambda: receiver.sync(60.0))
    waits("wait_newer of a silent agent", lambda: receiver.wait_newer(60.0))
    os.kill(agent, signal.SIGCONT)
    receiver.wait(2, 30.0)
    with receiver.hold() as image:
        assert torch.equal(image.tensors["a"], torch.zeros(1000))
    receiver.close()

with manager("silent", agent=quiet) as wm:
    wm.offload(weights, 1, 0, 1)
    wm._agent = AgentSupervisor(wm.region, program=[sys.executable, "-c", "import time; time.sleep(1000)"])
    waits("endpoint", lambda: wm.endpoint)
    wm._agent.stop(0)

with socket.create_server(("127.0.0.1", 0)) as deaf:
    url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
    waits("contact", lambda: Receiver(os.path.join(home, "other"), endpoint=url, token="x" * 32, timeout=60))
say(done=threads())
