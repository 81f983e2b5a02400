"""``windlass receive --engine`` beside a vLLM server of several replicas."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import servers
import tiny
from sidecar import Sidecar, Trainer

pytestmark = pytest.mark.timeout(900)

BACKEND = ("--weight-transfer-config", '{"backend": "windlass"}')
DATA = ("--data-parallel-size", "2", "--api-server-count", "1", "--distributed-executor-backend", "mp")


def test_both_replicas_of_a_data_parallel_server_have_every_version(
    checkpoint: Callable[[tiny.Kind], Path],
) -> None:
    model = checkpoint("qwen3")
    home = Path(tempfile.mkdtemp(prefix="windlass-parallel-", dir="/dev/shm"))
    trainer = Trainer(home / "trainer", "qwen3")
    try:
        with servers.Vllm(model, options=(*BACKEND, *DATA)) as server:
            region, images = f"--region={trainer.region}", f"--dir={home / 'images'}"
            with Sidecar(region, images, f"--engine=vllm={server.url}", f"--model-dir={model}") as sidecar:
                for step in range(3):
                    sidecar.wait("loaded", version=trainer.publish(all_of_it=step == 0))
                    # More than once, since replicas take turns.
                    assert [server.answers() for _ in range(3)] == [tiny.answers(trainer.model)] * 3
    finally:
        trainer.close()
        shutil.rmtree(home, ignore_errors=True)
