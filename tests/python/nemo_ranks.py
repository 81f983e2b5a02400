"""NeMo-RL's policy workers, for test_nemo_rl.py: what its synchroniser calls on each of them, in its order."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from windlass.nemo_rl import WindlassCheckpointEngine


def weights(version: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(7)
    out = {f"layers.{i}.weight": torch.randn(64, 32, generator=made) for i in range(4)}
    out["norm.weight"] = torch.full((32,), float(version))
    return out


def policy(home: str, versions: int) -> dict[str, Any]:
    """Prepares once, then sends as often as it is told to."""
    engine = WindlassCheckpointEngine(
        1 << 20,
        role="policy",
        model_id="nemo",
        manager={"region_dir": home, "agent": {"bind": "127.0.0.1"}},
        timeout=60,
    )
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, engine.prepare())
    place = {"train_world_size": dist.get_world_size(), "rollout_world_size": 2}
    engine.init_policy_process_group(worker_rank=dist.get_rank(), metadata=told, **place)
    if dist.get_rank() == 0:
        note = Path(home) / "metadata"
        note.with_suffix(".new").write_text(json.dumps(told))
        note.with_suffix(".new").rename(note)
    for version in range(1, versions + 1):
        asyncio.run(engine.send_weights(iter(weights(version).items())))
        engine.finalize()
        until = time.monotonic() + 60
        # The synchroniser waits for both sides before the next refit.
        while not all((Path(home) / f"got-{rank}-{version}").exists() for rank in range(2)):
            assert time.monotonic() < until
            time.sleep(0.01)
    dist.barrier()
    assert engine._sending is not None
    engine._sending.close()
    return told[0]
