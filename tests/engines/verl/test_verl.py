"""verl, and the vLLM that it brings."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import servers
import tiny
from publishing import Publishing

HERE = Path(__file__).resolve().parent
KIND: tiny.Kind = "qwen3"


@pytest.mark.timeout(2700)
def test_verl_syncs_replicas_that_come_and_go_with_actors_that_do(
    tmp_path: Path, checkpoint: Callable[[tiny.Kind], Path]
) -> None:
    tiny.make_model(KIND, tmp_path / "served", seed=1)
    log, result = tmp_path / "log", tmp_path / "result.json"
    paths = [servers.PACKAGE, servers.HERE / "on_ray", *servers.PLUGINS["verl"]]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VERL_PLATFORM": "cpu",
        # verl has its FSDP engine for GPUs only.
        "VERL_ENGINE_DEVICE": "cuda",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        # Ray's workers stand back for everything else on the machine, such as other tests.
        "RAY_worker_niceness": "0",
        # It kills workers when the machine is short of memory, also by what other tests use.
        "RAY_memory_monitor_refresh_ms": "0",
        # Nothing is compiled for the few tokens of a test.
        "TORCHDYNAMO_DISABLE": "1",
    }
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="verl-") as home:
        command = [servers.python_of("verl"), HERE / "end_to_end.py", checkpoint(KIND), tmp_path / "served"]
        command += [Path(home) / "images", result]
        with log.open("wb") as out:
            done = subprocess.run(
                list(map(str, command)),
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=2600,
                cwd=tmp_path,
            )
    assert done.returncode == 0, log.read_text(errors="replace")[-6000:]
    told = json.loads(result.read_text())
    assert [one["windlass/version"] for one in told["metrics"]] == [1, 2, 3, 4, 1, 1, 2, 3]
    whole, first, second, half = (one["windlass/wire_bytes"] for one in told["metrics"][:4])
    # Shards of 2 % of the rows, and all of them for nobody: the late replica finds the image on its host.
    assert 0 < first < whole / 5
    assert 0 < second < whole / 5
    assert 0 < half < whole
    assert all(one["windlass/pause_s"] < one["windlass/sync_s"] for one in told["metrics"])


@pytest.mark.timeout(600)
def test_the_backend_serves_an_older_vllm(checkpoint: Callable[[tiny.Kind], Path]) -> None:
    options = ["--weight-transfer-config", '{"backend": "windlass"}']
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="older-") as home,
        Publishing(Path(home)) as publishing,
        servers.Vllm(checkpoint(KIND), options=options, environment="verl") as server,
    ):
        trainer = tiny.model(KIND)
        for version in (1, 2):
            tiny.stir(trainer, version)
            order = publishing.publish(trainer, version)
            if version == 1:
                server.post("/init_weight_transfer_engine", {"init_info": {"image": order["image"]}})
            server.post("/pause", None)
            server.post("/start_weight_update", {})
            server.post("/update_weights", {"update_info": {"order": order}})
            server.post("/finish_weight_update", {})
            server.post("/reset_prefix_cache", None)
            server.post("/resume", None)
            assert server.answers() == tiny.answers(trainer)
        # The worker's methods are there as well, and load the same.
        tiny.stir(trainer, 3)
        order = publishing.publish(trainer, 3)
        told = server.post("/collective_rpc", {"method": "windlass_load", "args": [order]})
        assert told["results"][0]["live"]["version"] == 3
        server.post("/reset_prefix_cache", None)
        assert server.answers() == tiny.answers(trainer)
