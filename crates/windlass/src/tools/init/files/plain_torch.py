"""Trains a small model and publishes its weights after every step: python train.py [STEPS]"""

import contextlib
import sys
import time

import torch

from windlass import WeightManager

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 600
# Put your model here: plain, DDP, FSDP, DeepSpeed, transformers or PEFT.
model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

with (
    # The model_id names the region, /dev/shm/windlass-policy, in which receivers on this host find the versions.
    WeightManager(model_id="policy", generator_dtype="bfloat16") as wm,
    contextlib.suppress(KeyboardInterrupt),
):
    for version in range(1, steps + 1):
        model(torch.randn(8, 1024)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        # Every rank makes this call. It returns when the version is in shared memory.
        wm.offload(model, version)
        print(f"version {version} is {wm.wait_delta_ready()}", flush=True)
        # Generate rollouts here.
        time.sleep(1)
