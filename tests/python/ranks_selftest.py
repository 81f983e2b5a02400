"""What the ranks of test_ranks.py do."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def add_up(start: int) -> int:
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    return int(total)


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one cannot go on")
    dist.barrier()


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()


def hang() -> None:
    time.sleep(600)
