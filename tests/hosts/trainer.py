"""One rank of a trainer over several hosts: FSDP2 over gloo, which publishes what it is told to.

Started as ``trainer.py SETTINGS`` with JSON. Each line of standard input is a version: it takes a step, publishes it, and writes the
gathered weights to a file, for the test to compare with. It says the version when it is published.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from windlass import WeightManager


def main() -> None:
    settings = json.loads(sys.argv[1])
    rank, ranks = settings["rank"], settings["ranks"]
    dist.init_process_group("gloo", init_method=settings["meet"], rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(301, 301) for _ in range(settings["layers"]))).to(torch.bfloat16)
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
    with WeightManager(**settings["manager"]) as manager:
        for line in sys.stdin:
            version = int(line)
            step(model, version)
            manager.offload(model, version, rank, ranks)
            manager.notify_version()
            gathered = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
            if rank == 0:
                torch.save(gathered, Path(settings["home"]) / f"{version}.pt")
            sys.stdout.write(json.dumps({"version": version}) + "\n")
            sys.stdout.flush()
    dist.destroy_process_group()


def step(model: nn.Module, version: int) -> None:
    """Changes a hundredth of the weights, which ones depends on the version."""
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local().view(-1)
            local[version % 100 :: 100] += 1


if __name__ == "__main__":
    main()
