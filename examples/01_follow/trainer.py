"""Trains a small model and publishes its weights after every step, until Ctrl-C."""

import contextlib
import itertools
import time

import torch

from windlass import WeightManager

model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
with (
    WeightManager(model_id="follow", generator_dtype="bfloat16") as wm,
    contextlib.suppress(KeyboardInterrupt),
):
    for version in itertools.count(1):
        model(torch.randn(8, 1024)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        wm.offload(model, version)
        print(f"trainer: version {version} is {wm.wait_delta_ready()}", flush=True)
        time.sleep(1)
