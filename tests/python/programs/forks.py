"""Uses a manager and a receiver in forked children, which may not use them."""

import json
import multiprocessing
import os
import sys

import torch

from windlass import Receiver, WeightManager, WindlassUnsupported

home = sys.argv[1]
torch.set_num_threads(1)
weights = {"a": torch.ones(1000), "cast": torch.ones(10)}


def uses():
    inner = wm._open.publisher
    return {
        "offload": lambda: wm.offload(weights, 2, 0, 1),
        "prepare": lambda: wm.prepare(weights, 0, 1),
        "wait_delta_ready": wm.wait_delta_ready,
        "notify_version": wm.notify_version,
        "resume": wm.resume,
        "close": wm.close,
        "endpoint": lambda: wm.endpoint,
        "begin": lambda: inner.begin(2, 1.0),
        "slot": inner.slot,
        "hold": lambda: inner.hold(1.0),
        "commit": lambda: inner.commit(1.0),
        "abort": inner.abort,
        "discard": inner.discard,
        "receiver.sync": receiver.sync,
        "receiver.wait_newer": lambda: receiver.wait_newer(1.0),
        "receiver.hold": lambda: receiver.hold().__enter__(),
        "receiver.status": receiver.status,
        "receiver.close": receiver.close,
        "held.memory": held.memory,
        "held.renew": lambda: held.renew(5.0),
        "held.finish": held.finish,
    }


def child(how):
    wrong = {}
    for name, use in uses().items():
        try:
            use()
            wrong[name] = "no error"
        except WindlassUnsupported as e:
            if "forked child" not in str(e):
                wrong[name] = str(e)
        except BaseException as e:
            wrong[name] = repr(e)
    with open(os.path.join(home, how), "w") as out:
        json.dump(wrong, out)


wm = WeightManager(model_id="forks", region_dir=home, dtypes={"cast": "bfloat16"})
wm.offload(weights, 1, 0, 1)
wm.wait_delta_ready()
receiver = Receiver(os.path.join(home, "image"), region=wm.region)
receiver.wait(1)
held = receiver._inner.hold(60.0)
mine = wm._open.publisher.hold(60.0)
agent = wm.status()["agent"]["pid"]

pid = os.fork()
if pid == 0:
    child("fork")
    with wm:
        pass
    # The whole end of an interpreter: finalizers, exit handlers, everything dropped.
    del held, mine, receiver, wm
    sys.exit(0)
said = {"fork status": os.waitpid(pid, 0)[1]}
process = multiprocessing.get_context("fork").Process(target=child, args=("process",))
process.start()
process.join(30)
said["process status"] = process.exitcode

# In the parent everything is as it was.
mine.finish()
held.finish()
weights["a"] += 1
wm.offload(weights, 2, 0, 1)
receiver.wait(2)
with receiver.hold() as image:
    said["equal"] = torch.equal(image.tensors["a"], weights["a"])
said["agent"] = wm.status()["agent"]["pid"] == agent and wm.status()["agent"]["restarts"] == 0
for how in ("fork", "process"):
    with open(os.path.join(home, how)) as text:
        said[how] = json.load(text)
receiver.close()
wm.close()
said["left"] = sorted(os.listdir(home))
sys.stdout.write(json.dumps(said) + "\n")
