"""NeMo-RL's order of calls: prepare, process groups, then send and receive at once, refit after refit, with engines that stay."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_ranks import weights
from ranks import run_ranks
from windlass import WindlassInvalid
from windlass.nemo_rl import WindlassCheckpointEngine

VERSIONS = 3


def rollout(rank: int, home: Path, out: list[list[dict[str, torch.Tensor]]], batches: list[int]) -> None:
    """A worker of the engine."""
    until = time.monotonic() + 120
    while not (home / "metadata").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    engine = WindlassCheckpointEngine(20_000, role="rollout", image_dir=str(home / "images"), timeout=60)
    told = json.loads((home / "metadata").read_text()) + [engine.prepare()]
    place = {"train_world_size": 2, "rollout_world_size": 2}
    engine.init_rollout_process_group(rollout_rank=rank, metadata=told, **place)

    async def refit() -> dict[str, torch.Tensor]:
        got: dict[str, torch.Tensor] = {}
        async for batch in engine.receive_weight_batches():
            batches.append(sum(tensor.nbytes for _, tensor in batch))
            got.update({name: tensor.clone() for name, tensor in batch})
        return got

    for version in range(1, VERSIONS + 1):
        out[rank].append(asyncio.run(refit()))
        engine.finalize()
        (home / f"got-{rank}-{version}").touch()


def test_refits_go_from_two_policy_workers_to_two_of_an_engine() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="nemo-") as folder:
        home = Path(folder)
        out: list[list[dict[str, torch.Tensor]]] = [[], []]
        batches: list[int] = []
        workers = [threading.Thread(target=rollout, args=(rank, home, out, batches)) for rank in range(2)]
        for worker in workers:
            worker.start()
        told = run_ranks(2, "nemo_ranks:policy", [folder, VERSIONS], timeout=180)
        for worker in workers:
            worker.join(60)
        assert told[0]["endpoint"].startswith("http://127.0.0.1:")
        for received in out:
            assert len(received) == VERSIONS
            for version, got in enumerate(received, 1):
                wanted = weights(version)
                assert sorted(got) == sorted(wanted)
                assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())
        # Two tensors of 8 KiB fit in a batch, three do not.
        assert 2 * 64 * 32 * 4 <= max(batches) <= 20_000


def test_metadata_without_one_policy_is_an_error() -> None:
    engine = WindlassCheckpointEngine(1, role="rollout")
    place: dict[str, Any] = {"rollout_rank": 0, "train_world_size": 1, "rollout_world_size": 1}
    for told in ([], [{"rank": 0}], [{"endpoint": "http://a:1"}, {"endpoint": "http://b:1"}]):
        with pytest.raises(WindlassInvalid, match="policy workers say where they publish"):
            engine.init_rollout_process_group(metadata=told, **place)
    with pytest.raises(WindlassInvalid, match="role is 'both'"):
        WindlassCheckpointEngine(1, role="both")  # type: ignore[arg-type]
