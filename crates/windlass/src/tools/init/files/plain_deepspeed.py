"""Trains a small model under ZeRO-3 and publishes each step: torchrun --nproc-per-node 1 train.py [STEPS]"""

import sys
import time

import deepspeed
import torch

from windlass import WeightManager

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 600
settings = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 3}}
# Put your model here.
model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

# The model_id names the region, /dev/shm/windlass-policy, in which receivers on this host find the versions.
with WeightManager(model_id="policy", generator_dtype="bfloat16") as wm:
    for version in range(1, steps + 1):
        engine.backward(engine(torch.randn(8, 1024, device=engine.device)).square().mean())
        engine.step()
        # Every rank makes this call, and writes its own partitions: nothing is gathered.
        wm.offload(engine, version)
        print(f"version {version} is {wm.wait_delta_ready()}", flush=True)
        time.sleep(1)  # generate rollouts here
torch.distributed.destroy_process_group()
