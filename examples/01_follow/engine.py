"""Keeps a model at the trainer's newest version, until Ctrl-C or until a given version: python engine.py [VERSION]"""

import contextlib
import sys
import tempfile

import torch

from windlass import Follower, Receiver

model = torch.nn.Linear(1024, 1024, dtype=torch.bfloat16)
last = int(sys.argv[1]) if len(sys.argv) > 1 else None
with (
    tempfile.TemporaryDirectory(dir="/dev/shm") as images,
    Receiver(images, region="/dev/shm/windlass-follow") as receiver,
    contextlib.suppress(KeyboardInterrupt),
):
    follower = Follower(receiver, load=lambda image: model.load_state_dict(dict(image.tensors)))
    for loaded in follower.run(until=last):
        print(f"engine:  version {loaded.version} is {loaded.digest}, by {loaded.mode}", flush=True)
