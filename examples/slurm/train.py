"""A trainer of several nodes, started by torchrun: FSDP2, and each version published to the receivers of a controller.

Its surroundings say where it runs: WINDLASS_CONTROLLER, TOKEN_FILE, and, where other hosts know this one by another name than its own,
WEIGHTS_HOST. WEIGHTS_PORTS are the agent's ports, STEPS the number of versions, CHECKPOINT a file for the last one.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from windlass import WeightManager

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cuda:nccl,cpu:gloo" if device == "cuda" else "gloo")
rank = dist.get_rank()

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).to(device)
mesh = init_device_mesh(device, (dist.get_world_size(),))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

with WeightManager(
    model_id="policy",
    generator_dtype="bfloat16",
    controller=os.environ["WINDLASS_CONTROLLER"],
    controller_token_file=os.environ["TOKEN_FILE"],
    agent={
        "bind": "0.0.0.0",
        "ports": os.environ.get("WEIGHTS_PORTS", "7000-7009"),
        "advertise_host": os.environ.get("WEIGHTS_HOST"),
        "token_file": os.environ["TOKEN_FILE"],
    },
) as wm:
    for version in range(1, int(os.environ.get("STEPS", "10")) + 1):
        model(torch.randn(8, 512, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        wm.offload(model, version)  # every rank makes this call
        wm.notify_version(sync=True, timeout=600)  # returns when every engine serves it
        if rank == 0:
            print(f"version {version} is served", flush=True)

    if "CHECKPOINT" in os.environ:
        weights = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
        if rank == 0:
            torch.save(weights, os.environ["CHECKPOINT"])
dist.destroy_process_group()
