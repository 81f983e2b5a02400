"""Trains a small model with Accelerate and publishes its weights after every step: python train.py [STEPS]"""

import sys
import time

import torch
from accelerate import Accelerator

from windlass.callbacks import AcceleratePublisher

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 600
accelerator = Accelerator()
# Put your model here. The publisher gets what prepare() returns.
model = torch.nn.Linear(1024, 1024)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5))

# The model_id names the region, /dev/shm/windlass-policy, in which receivers on this host find the versions.
with AcceleratePublisher(
    accelerator, model, model_id="policy", generator_dtype="bfloat16", every=1
) as publisher:
    for step in range(1, steps + 1):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(8, 1024, device=accelerator.device)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        publisher.step()  # after each optimizer.step(), on every rank
        accelerator.print(f"step {step}", flush=True)
        time.sleep(1)  # generate rollouts here
