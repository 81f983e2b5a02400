"""A real vLLM with two tensor-parallel ranks, each on a host of its own: each host brings and keeps its half."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import servers
import tiny

ROOT = Path(__file__).resolve().parent.parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "hosts"))

import hosts  # noqa: E402

TOKEN = "a-secret-of-this-test"
PATIENCE = 600.0
#: What a host with half of the ranks may have of the wire and of memory.
SHARE = 1.1 / 2


def model(path: Path) -> Path:
    """Rows of 64 KiB, so that the pages at the ends of half a row are few."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    sizes = {"hidden_size": 256, "intermediate_size": 16384, "num_hidden_layers": 1, "head_dim": 128}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512}
    torch.manual_seed(0)
    config = Qwen3Config(
        **sizes, **heads, initializer_range=0.2, max_position_embeddings=512, tie_word_embeddings=False
    )
    tiny.save(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), path)
    return path


class World:
    """Two hosts of an engine, and one of a trainer."""

    def __init__(self, bench: hosts.Bench, home: Path) -> None:
        self.home = home
        self.trainer, *self.engine = (bench.host(name) for name in ("trainer", "engine0", "engine1"))
        self.checkpoint = model(home / "model")
        first = self.engine[0].address
        server = servers.Vllm(self.checkpoint, tp=2, dev=False, plain=True, plugins="windlass,plain_weights")
        common = [
            str(servers.python_of("vllm")),
            *server._command,
            "--nnodes",
            "2",
            "--master-addr",
            first,
            "--master-port",
            "29600",
        ]
        common += ["--distributed-executor-backend", "mp"]
        common[common.index("--host") + 1] = first
        self.url = f"http://{first}:{server.port}"
        self.processes: list[subprocess.Popen[str]] = []
        for rank, host in enumerate(self.engine):
            words = [*common, "--node-rank", str(rank), *(["--headless"] if rank else [])]
            env = {
                **servers.environment_of("vllm"),
                **server._env,
                "WINDLASS_TOKEN": TOKEN,
                "VLLM_HOST_IP": host.address,
            }
            env |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            with open(self.log(rank), "w") as log:
                self.processes.append(host.start(*words, env=env, out=log, err=subprocess.STDOUT))
        until = time.monotonic() + PATIENCE
        while not self.ready():
            assert time.monotonic() < until, self.tails()
            time.sleep(0.5)

    def log(self, rank: int) -> Path:
        return self.home / f"engine{rank}.log"

    def tails(self) -> str:
        return "\n".join(f"== engine{r}\n{self.log(r).read_text()[-4000:]}" for r in range(2))

    def ready(self) -> bool:
        assert all(process.poll() is None for process in self.processes), self.tails()
        ask = "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)"
        words = self.trainer.inside(sys.executable, "-c", ask, f"{self.url}/health")
        return subprocess.run(words, capture_output=True, check=False, timeout=60).returncode == 0

    def train(self) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """What the trainer says of each version, and the memory that each host's image takes then."""
        words = [str(ROOT / "tests/engines/vllm/slices_trainer.py"), str(self.checkpoint)]
        log = self.home / "trainer.log"
        with open(log, "w") as err:
            trainer = self.trainer.python(
                *words, self.trainer.address, self.url, TOKEN, out=subprocess.PIPE, err=err
            )
        assert trainer.stdout is not None and trainer.stdin is not None
        for line in trainer.stdout:
            said = json.loads(line)
            yield said, [self.held(host) for host in self.engine]
            trainer.stdin.write("\n")
            trainer.stdin.flush()
        assert trainer.wait(PATIENCE) == 0, log.read_text()[-4000:] + self.tails()

    @staticmethod
    def held(host: hosts.Host) -> int:
        return os.stat(host.path("/dev/shm/images/policy/a.safetensors")).st_blocks * 512


@pytest.mark.timeout(1800)
def test_hosts_of_a_tensor_parallel_engine_have_their_halves() -> None:
    if (lack := hosts.missing()) is not None:
        pytest.skip(f"hosts cannot be made here: {lack}")
    # Not in /tmp, which hosts have of their own.
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp", prefix="windlass-slices-") as home,
        hosts.bench() as bench,
    ):
        world = World(bench, Path(home))
        seen = []
        for said, held in world.train():
            seen.append(said["version"])
            assert said["same"], said
            whole, pulled = said["bytes"], said["pulled"]
            assert all(size <= SHARE * whole for size in held), (held, whole)
            if said["version"] == 1:
                assert pulled["mode"] == "full" and said["hows"] == ["session"] * 2
                # Of both hosts together.
                assert pulled["wire_bytes"] <= 2 * SHARE * whole, said
            else:
                # A delta of each host's half, written by the changes alone.
                assert pulled["mode"] == "delta" and said["hows"] == ["sparse"] * 2, said
                assert pulled["wire_bytes"] < whole / 10, said
        assert seen == [1, 2, 3], world.tails()
