"""Keeps weights at the trainer's newest version, until Ctrl-C or until a given version: python follow.py [VERSION]"""

import contextlib
import sys

import torch

from windlass import Follower, Image, Receiver

weights: dict[str, torch.Tensor] = {}


def load(image: Image) -> None:
    """Copies a whole, verified version. With a model of yours: model.load_state_dict(dict(image.tensors))."""
    for name, tensor in image.tensors.items():
        weights.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


last = int(sys.argv[1]) if len(sys.argv) > 1 else None
# The region is that of train.py on this host. On another host: endpoint=URL, token_file=FILE instead of region. The image
# stays in /dev/shm/images for the next start; `windlass gc --images` removes it.
with (
    Receiver("/dev/shm/images", region="/dev/shm/windlass-policy") as receiver,
    contextlib.suppress(KeyboardInterrupt),
):
    for loaded in Follower(receiver, load).run(until=last):
        print(f"version {loaded.version} is {loaded.digest}, by {loaded.mode}", flush=True)
