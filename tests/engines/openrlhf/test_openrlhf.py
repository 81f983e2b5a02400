"""OpenRLHF with real vLLM engines: its own trainer, rollouts and rewards."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import servers
import tiny

HERE = Path(__file__).resolve().parent
KIND: tiny.Kind = "qwen3"
REWARD = """
import torch

def reward_func(queries, prompts, labels, **_):
    rewards = torch.tensor([float(len(query) % 7) for query in queries])
    return {"rewards": rewards, "scores": rewards}
"""
#: Two steps of four samples, whose updates change few weights of a model in bfloat16.
OPTIONS = """
--algo.advantage.estimator reinforce --algo.kl.init_coef 0 --vllm.num_engines 1 --vllm.enable_prefix_caching
--ds.attn_implementation eager --actor.num_gpus_per_node 2 --actor.adam.lr 1e-5 --actor.lr_warmup_ratio 0
--rollout.batch_size 2 --rollout.n_samples_per_prompt 2 --rollout.max_new_tokens 16 --train.batch_size 4 --data.max_len 64
"""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "mode",
    ["--ds.zero_stage 3", "--ds.zero_stage 2 --train.async_enable --train.partial_rollout_enable"],
    ids=["zero3", "zero2-async"],
)
def test_openrlhf_trains_with_engines_that_pull_and_names_one_that_died(
    tmp_path: Path, checkpoint: Callable[[tiny.Kind], Path], mode: str
) -> None:
    tiny.make_model(KIND, tmp_path / "served", seed=1)
    prompts, reward = tmp_path / "prompts.jsonl", tmp_path / "reward.py"
    words = ("weights travel", "a windlass", "versions one", "two three")
    prompts.write_text("".join(json.dumps({"input": one}) + "\n" for one in words))
    reward.write_text(REWARD)
    log, result = tmp_path / "log", tmp_path / "result.json"
    paths = [servers.PACKAGE, servers.HERE, servers.HERE / "on_ray", HERE / "plugin", servers.HERE / "plugin"]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "RAY_RUNTIME_ENV_HOOK": "windlass.openrlhf.hook",
        "WINDLASS_RAY_SETUP": "on_cpu:setup",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
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
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="openrlhf-") as home:
        # The engine computes in float32, so that its answers are those of transformers.
        manager = {"agent": {"bind": "127.0.0.1"}, "generator_dtype": "float32"}
        settings = {"image_dir": f"{home}/images", "model_id": "openrlhf", "timeout": 120, "manager": manager}
        env["WINDLASS_OPENRLHF"] = json.dumps(settings)
        command = [servers.python_of("openrlhf"), HERE / "end_to_end.py"]
        command += [checkpoint(KIND), tmp_path / "served", result, *OPTIONS.split(), *mode.split()]
        command += ["--actor.model_name_or_path", checkpoint(KIND)]
        command += ["--data.prompt_dataset", prompts, "--reward.remote_url", reward]
        with log.open("wb") as out:
            done = subprocess.run(
                list(map(str, command)),
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=1700,
                cwd=tmp_path,
            )
    text = log.read_text(errors="replace")
    assert done.returncode == 0, text[-6000:]
    told = json.loads(result.read_text())
    assert told["after"] == [told["expected"]] != told["before"]
    # OpenRLHF logs the figures of each step's sync with its own.
    steps = [line for line in text.splitlines() if "Global step" in line]
    assert [re.findall(r"'windlass/version': ([\d.]+)", line) for line in steps] == [["1.0"], ["2.0"]], steps
    whole, changed = (float(re.findall(r"'windlass/wire_bytes': ([\d.]+)", line)[0]) for line in steps)
    assert 0 < changed < whole / 5
    colocated, quantised = told["refused"]
    assert "--train.colocate_all" in colocated
    assert "--ds.load_in_4bit" in quantised
    assert told["killed"]["kind"] == "EnginesFailed"
    assert "1 of 1 engines failed at pull: engine 0: it died" in told["killed"]["text"]
    assert told["killed_s"] < 100
