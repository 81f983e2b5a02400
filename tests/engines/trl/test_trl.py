"""TRL's trainers with a real vLLM server: trained for some steps, and the server answers as the trained model does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import servers
import tiny
from windlass import WindlassInvalid
from windlass.transfer.client import EnginesFailed
from windlass.trl import WindlassTransfer

HERE = Path(__file__).resolve().parent
KIND: tiny.Kind = "qwen3"


def run(program: str, *args: object, timeout: float = 400.0) -> dict[str, Any]:
    """What a program of this folder writes as its result."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        log = Path(folder) / "log"
        paths = [servers.PACKAGE, servers.HERE, servers.HERE / "plugin"]
        env = servers.environment_of("vllm") | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        model, url, token_file, images, *more = args
        argv = [HERE / program, model, url, token_file, images, result, *more]
        with log.open("wb") as out:
            done = servers.template("vllm").start(argv, env, stdout=out)
            try:
                code = done.wait(timeout)
            finally:
                done.kill()
        assert code == 0, log.read_text(errors="replace")[-6000:]
        told: dict[str, Any] = json.loads(result.read_text())
        return told


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("token") / "token"
    path.touch(0o600)
    path.write_text("a-secret-of-this-test\n")
    return path


@pytest.fixture(scope="module")
def images() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="trl-") as home:
        yield Path(home) / "images"


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[tiny.Kind], Path]) -> Path:
    return checkpoint(KIND)


@pytest.fixture(scope="module")
def server(model: Path, token_file: Path) -> Iterator[servers.Vllm]:
    options = [
        "--logprobs-mode",
        "processed_logprobs",
        "--max-logprobs",
        "-1",
        "--served-model-name",
        str(model),
        "tiny",
    ]
    env = {"WINDLASS_TOKEN_FILE": str(token_file)}
    with servers.Vllm(model, plugins="windlass,plain_weights", options=options, env=env) as started:
        yield started


@pytest.mark.timeout(600)
def test_async_grpo_trains_one_layer_and_only_that_travels(
    server: servers.Vllm, model: Path, token_file: Path, images: Path
) -> None:
    before = tiny.answers(tiny.model(KIND))
    told = run("async_grpo.py", model, server.url, token_file, images)
    assert server.answers() == told["answers"] != before
    syncs = told["syncs"]
    assert [sync["windlass/version"] for sync in syncs] == [1, 2, 3, 4]
    # Everything once, then the layer that is trained.
    sizes = [sync["windlass/wire_bytes"] for sync in syncs]
    assert all(0 < size < sizes[0] / 3 for size in sizes[1:]), sizes
    assert told["logged"], "its figures are not in the trainer's log"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["grpo", "rloo-peft", "online-dpo"])
def test_trainers_with_trls_client_follow_by_one_call(
    how: str, server: servers.Vllm, model: Path, token_file: Path, images: Path
) -> None:
    before = server.answers()
    told = run("by_client.py", model, server.url, token_file, images, how)
    assert server.answers() == told["answers"] != before
    assert told["metrics"]["windlass/version"] == 3


# The transfer without a trainer: servers and trainers that come and go.


@pytest.fixture
def policy() -> Any:
    return tiny.model(KIND, seed=3)


def sync(transfer: WindlassTransfer, policy: Any) -> dict[str, float]:
    """What TRL calls, in its order."""
    transfer.pause()
    transfer.send_weights(iter(policy.named_parameters()))
    transfer.resume()
    return transfer.metrics


@pytest.mark.timeout(1200)
def test_a_server_that_joins_late_or_dies_gets_the_version_that_the_others_have(
    server: servers.Vllm, model: Path, token_file: Path, images: Path, policy: Any
) -> None:
    env = {"WINDLASS_TOKEN_FILE": str(token_file)}
    # A server takes its time to start where others do the same.
    patience = {"timeout": 500.0, "away": 500.0}
    options = {"token_file": token_file, "image_dir": str(images), "model_id": "late", **patience}
    transfer = WindlassTransfer(server.url, **options)
    with servers.Vllm(model, plugins="windlass,plain_weights", dev=False, env=env) as late:
        try:
            transfer.init_weight_transfer()
            whole = sync(transfer, policy)["windlass/wire_bytes"]
            assert server.answers() == tiny.answers(policy)
            transfer.add(late.url)
            assert late.answers() == tiny.answers(policy)
            tiny.stir_some(policy, 1)
            # One pulls for both, which are on one host.
            assert 0 < sync(transfer, policy)["windlass/wire_bytes"] < whole / 4
            tiny.stir(policy, 2)
            transfer.send_weights(iter(policy.named_parameters()))
            late.kill()
            late.start()
            # Asked again until it is back.
            transfer.resume()
            assert server.answers() == late.answers() == tiny.answers(policy)
            transfer.remove(late.url)
            assert transfer.servers.urls == [server.url]
        finally:
            transfer.destroy()


@pytest.mark.timeout(600)
def test_a_trainer_that_is_killed_is_followed_by_the_next(
    server: servers.Vllm, token_file: Path, images: Path, policy: Any
) -> None:
    options = {
        "token_file": str(token_file),
        "image_dir": str(images),
        "model_id": "killed",
        "timeout": 120.0,
    }
    code = f"""
import os, signal, tiny
from windlass.trl import WindlassTransfer
transfer = WindlassTransfer({server.url!r}, **{options!r})
transfer.init_weight_transfer()
policy = tiny.model({KIND!r}, seed=4)
for version in range(3):
    tiny.stir(policy, version)
    transfer.send_weights(iter(policy.named_parameters()))
    transfer.resume()
os.kill(os.getpid(), signal.SIGKILL)
"""
    paths = os.pathsep.join([str(servers.PACKAGE), str(servers.HERE)])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, timeout=300)
    assert done.returncode == -signal.SIGKILL
    before = server.answers()
    transfer = WindlassTransfer(server.url, **options)
    try:
        transfer.init_weight_transfer()
        # Its versions begin anew, and count as newer.
        assert sync(transfer, policy)["windlass/version"] == 1
        assert server.answers() == tiny.answers(policy) != before
    finally:
        transfer.destroy()


@pytest.mark.timeout(600)
def test_weights_in_another_dtype_than_the_servers_are_warned_of_once(
    server: servers.Vllm, token_file: Path, images: Path, policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    policy.bfloat16()
    options = {"token_file": token_file, "image_dir": str(images), "model_id": "dtypes", "timeout": 120.0}
    transfer = WindlassTransfer(server.url, **options)
    try:
        transfer.init_weight_transfer()
        # Published alone: a server that has loaded float32 takes nothing else.
        for _ in range(2):
            transfer.send_weights(iter(policy.named_parameters()))
        assert caplog.text.count("the servers compute in float32 and the weights are sent in bfloat16") == 1
    finally:
        transfer.destroy()


@pytest.mark.timeout(600)
def test_what_is_missing_is_named_before_training_begins(
    server: servers.Vllm, token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WINDLASS_TOKEN", "WINDLASS_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(WindlassInvalid, match="need a token") as e:
        WindlassTransfer(server.url)
    assert "token_file=FILE" in e.value.advice
    with pytest.raises(WindlassInvalid, match="mode is 'sometimes'"):
        WindlassTransfer(server.url, token="x", pause="sometimes")  # type: ignore[arg-type]
    with pytest.raises(EnginesFailed, match="does not accept the token"):
        WindlassTransfer(server.url, token="wrong").init_weight_transfer()
    with pytest.raises(EnginesFailed, match="did not come back in time"):
        WindlassTransfer(
            f"http://127.0.0.1:{servers.free_port()}", token="x", timeout=1.0
        ).init_weight_transfer()
    transfer = WindlassTransfer(server.url, token_file=token_file)
    with pytest.raises(WindlassInvalid, match="before init_weight_transfer"):
        transfer.send_weights(iter([]))
    with pytest.raises(WindlassInvalid, match="no version was published"):
        transfer.resume()
