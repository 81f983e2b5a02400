"""``windlass receive --engine`` beside real engines: every version arrives, and whoever dies, none is left paused or mixed.

Each engine is started once for all of its tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import servers
import tiny
from sidecar import PATIENCE, Proxy, Sidecar, Trainer

pytestmark = pytest.mark.timeout(900)

TOKEN = "a-token-for-the-plugin"
BACKEND = ("--weight-transfer-config", '{"backend": "windlass"}')


@dataclass
class World:
    """An engine with its sidecar's way to it, and a trainer."""

    kind: str
    server: servers.Server
    proxy: Proxy
    trainer: Trainer
    images: Path
    config: Path

    @property
    def dialect(self) -> str:
        return self.kind.partition("-")[0]

    @property
    def pause(self) -> str:
        return "/pause_generation" if self.dialect == "sglang" else "/pause"

    @property
    def write(self) -> str:
        ways = {"sglang": "/update_weights_from_disk", "sglang-workers": "/update_weights_from_tensor"}
        return ways.get(self.kind, "/update_weights")

    def sidecar(self, *options: str) -> Sidecar:
        """A sidecar that reaches the engine through the proxy."""
        engine = f"--engine={self.dialect}={self.proxy.url}"
        image = f"--dir={self.images}"
        region = f"--region={self.trainer.region}"
        config = f"--model-dir={self.config}"
        return Sidecar(region, image, engine, config, *options, env={"WINDLASS_TOKEN": TOKEN})

    def agree(self) -> None:
        """The engine answers what the trainer's model answers."""
        assert self.server.answers() == tiny.answers(self.trainer.model)


@pytest.fixture(scope="module", params=["sglang", "sglang-workers", "vllm-native", "vllm-plugin"])
def world(request: pytest.FixtureRequest, checkpoint: Callable[[tiny.Kind], Path]) -> Iterator[World]:
    kind: str = request.param
    # One of them with tied embeddings.
    served: tiny.Kind = "qwen3tied" if kind == "sglang-workers" else "qwen3"
    model = checkpoint(served)
    server: servers.Server
    if kind == "sglang":
        server = servers.Sglang(model)
    elif kind == "sglang-workers":
        server = servers.Sglang(model, options=("--custom-weight-loader", "windlass.sglang.custom.load"))
    elif kind == "vllm-native":
        server = servers.Vllm(model, options=BACKEND)
    else:
        # Weights that are kept as they were loaded, as on a GPU: written in place, and proved.
        env = {"WINDLASS_TOKEN": TOKEN}
        server = servers.Vllm(model, dev=False, plain=True, plugins="windlass,plain_weights", env=env)
    home = Path(tempfile.mkdtemp(prefix="windlass-sidecar-", dir="/dev/shm"))
    with server:
        proxy = Proxy(server)
        trainer = Trainer(home / "trainer", served)
        try:
            yield World(kind, server, proxy, trainer, home / "images", model)
        finally:
            trainer.close()
            proxy.close()
            shutil.rmtree(home, ignore_errors=True)


class Requests:
    """Requests in flight, one after the other, until it ends."""

    def __init__(self, server: servers.Server) -> None:
        self._server = server
        self._end = threading.Event()
        self.done = 0
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                assert len(self._server.generate((7, 8, 9), 64, timeout=PATIENCE)) == 64
                self.done += 1
            except BaseException as e:
                self.errors.append(e)
                return

    def __enter__(self) -> Requests:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(PATIENCE)


def test_five_versions_reach_a_serving_engine_in_full_and_by_deltas(world: World) -> None:
    with world.sidecar() as sidecar, Requests(world.server) as requests:
        modes, hows = [], []
        for step in range(5):
            version = world.trainer.publish(all_of_it=step == 0)
            modes.append(sidecar.wait("synced")["mode"])
            loaded = sidecar.wait("loaded", version=version)
            assert loaded["engine"].startswith(world.dialect + "=")
            hows.append((loaded["how"], loaded["why"]))
            world.agree()
    assert modes == ["full", "delta", "delta", "delta", "delta"]
    assert requests.errors == [] and requests.done > 0
    if world.kind == "sglang":
        assert all(how == "disk" and "--custom-weight-loader" in why for how, why in hows), hows
    if world.kind == "sglang-workers":
        assert [how for how, _ in hows] == ["session", "sparse", "sparse", "sparse", "sparse"], hows
        assert [why for _, why in hows] == [None] * 5, hows


def test_requests_may_be_finished_or_ended_before_a_load(world: World) -> None:
    for mode in ("wait", "abort"):
        with world.sidecar(f"--pause={mode}") as sidecar, Requests(world.server):
            sidecar.wait("loaded", version=world.trainer.publish())
        world.agree()


def test_a_sidecar_killed_before_the_first_write_leaves_the_old_version_serving(world: World) -> None:
    if world.kind == "vllm-plugin":
        pytest.skip("the engine itself keeps the lease")
    with world.sidecar() as sidecar:
        sidecar.wait("loaded", version=world.trainer.publish())
        old = tiny.answers(world.trainer.model)
        world.proxy.hold(world.pause, "answer")
        world.trainer.publish()
        world.proxy.wait_held(world.pause)
        sidecar.kill()
    assert world.server.answers() == old, "it was resumed by the guard, with the old weights"
    world.proxy.release()
    with world.sidecar() as sidecar:
        sidecar.wait("loaded", version=world.trainer.version)
        world.agree()


@pytest.mark.parametrize("what", ["request", "answer"])
def test_a_sidecar_killed_after_the_first_write_leaves_the_new_version_serving(
    world: World, what: str
) -> None:
    path = "/windlass/v1/load" if world.kind == "vllm-plugin" else world.write
    if world.kind == "vllm-plugin" and what == "request":
        pytest.skip("nothing was asked of the engine yet")
    with world.sidecar() as sidecar:
        sidecar.wait("loaded", version=world.trainer.publish())
        world.proxy.hold(path, what)
        world.trainer.publish()
        world.proxy.wait_held(path)
        sidecar.kill()
    world.proxy.release()
    until = time.monotonic() + PATIENCE
    while label(world).rpartition(":")[2] != str(world.trainer.version):
        assert time.monotonic() < until, label(world)
        time.sleep(0.05)
    # Paused for as long as the guard clears the cache and resumes.
    world.agree()


def label(world: World) -> str:
    """The version that the engine says it has."""
    if world.dialect == "sglang":
        return str(world.server.get("/model_info")["weight_version"])
    if world.kind == "vllm-native":
        return str(world.server.get("/weight_info")["weight_version"])
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return str(world.server.get("/windlass/v1/status", headers=headers)["weight_version"])


def shapes(model: Any) -> list[tuple[str, Any]]:
    return [(name, p.detach().clone()) for name, p in model.named_parameters()]


def test_a_version_that_does_not_fit_is_refused_untouched_and_the_next_one_heals(world: World) -> None:
    with world.sidecar() as sidecar:
        sidecar.wait("loaded", version=world.trainer.publish())
        name = "model.layers.1.mlp.down_proj.weight"
        good = shapes(world.trainer.model)
        missing = [(n, p) for n, p in good if n != name]
        shape = [(n, p.t().contiguous() if n == name else p) for n, p in good]
        dtype = [(n, p.bfloat16() if n == name else p) for n, p in good]
        for bad, what in (
            (missing, "is missing"),
            (shape, "has the shape"),
            (dtype, "is bfloat16, not float32"),
        ):
            world.trainer.start_over()
            world.trainer.offload(bad)
            failed = sidecar.wait("engine_failed")
            assert name in failed["error"] and what in failed["error"], failed
            assert failed["stage"] == "check" and "not touched" in failed["error"]
            world.agree()
        world.trainer.start_over()
        sidecar.wait("loaded", version=world.trainer.publish())
        world.agree()


def test_tensors_that_the_engine_does_not_have_are_listed_and_left_out(world: World) -> None:
    world.trainer.start_over()
    try:
        with world.sidecar() as sidecar:
            # Usual names of heads are left out by the trainer already.
            version = world.trainer.publish(extra={"auxiliary.weight": torch.ones(1, 128)})
            assert sidecar.wait("extras")["names"] == ["auxiliary.weight"]
            sidecar.wait("loaded", version=version)
            world.agree()
    finally:
        world.trainer.start_over()


def test_live_weights_are_proved_equal_to_the_image_where_workers_can_be_asked(world: World) -> None:
    command = [sys.executable, "-m", "windlass", "verify", "--json"]
    command += [f"--engine={world.dialect}={world.server.url}", f"--image={world.images / 'policy'}"]
    env = {**os.environ, "PYTHONPATH": str(servers.PACKAGE), "WINDLASS_TOKEN": TOKEN}

    def verify() -> tuple[int, dict[str, Any]]:
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, timeout=PATIENCE, check=False)
        return done.returncode, json.loads(done.stdout)

    with world.sidecar() as sidecar:
        sidecar.wait("loaded", version=world.trainer.publish())
        code, said = verify()
        if world.kind == "vllm-plugin":
            tensors = len(list(world.trainer.model.parameters()))
            assert (code, said["equal"], said["equal_tensors"]) == (0, True, tensors), said
            assert said["version"] == world.trainer.version and said["state_digest"]
        else:
            assert code == 9 and said["error"]["kind"] == "unsupported", said
    if world.kind == "vllm-plugin":
        # An engine that is behind its image is not compared with it.
        with Sidecar(f"--region={world.trainer.region}", f"--dir={world.images}") as alone:
            world.trainer.publish()
            alone.wait("synced")
        code, said = verify()
        assert code == 4 and "the image holds" in said["error"]["message"], said


def test_an_engine_killed_and_restarted_comes_back_at_the_right_version(world: World) -> None:
    if world.kind == "sglang-workers":
        pytest.skip("tests/engines/sglang/test_dense.py restarts one, which takes a start")
    with world.sidecar() as sidecar:
        version = world.trainer.publish()
        sidecar.wait("loaded", version=version)
        world.server.kill()
        sidecar.wait("engine_waiting")
        world.server.start()
        world.server.wait_ready()
        loaded = sidecar.wait("loaded", version=version)
        assert loaded["how"] in ("disk", "dense", "session", "dense+session"), loaded
        world.agree()
        sidecar.wait("loaded", version=world.trainer.publish())
        world.agree()
