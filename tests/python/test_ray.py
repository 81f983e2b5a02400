"""Trainers and engines as actors on a real local Ray cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from children import environment
from windlass import WindlassError, WindlassInvalid, WindlassPeerLost
from windlass.engines.ray import RayEngine, RayWeightSync, plain, result
from windlass.transfer.client import EnginesFailed

ray = pytest.importorskip("ray")

import patient_ray  # noqa: E402

# Ray starts half a dozen processes; on a busy machine that alone takes half a minute.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A cluster of this machine. Its workers inherit the environment, where the tests' modules are found."""
    changed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": environment()["PYTHONPATH"]}
    # Ray's workers stand back for everything else on the machine, such as other tests.
    changed["RAY_worker_niceness"] = "0"
    # It kills workers when the machine is short of memory, also by what other tests use.
    changed["RAY_memory_monitor_refresh_ms"] = "0"
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    patient_ray.start(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=80 << 20,
    )
    yield
    ray.shutdown()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def broadcast(*shapes: dict[str, int], **more: Any) -> dict[str, Any]:
    return {
        "strategy": "broadcast",
        "engines": list(shapes),
        "weight_sync_backend": "gloo",
        "master_addr": "127.0.0.1",
        "timeout": 30.0,
        "join_timeout": 240.0,
        **more,
    }


def actors(config: dict[str, Any], folder: Path, trainers: int, shapes: list[int], **how: Any) -> Any:
    import ray_actors

    trainer = ray.remote(num_cpus=0.5)(ray_actors.Trainer)
    engine = ray.remote(num_cpus=0.5)(ray_actors.Engine)
    training = [trainer.remote(config, rank, trainers, str(folder), **how) for rank in range(trainers)]
    serving = [[engine.remote(config, rank, tp) for rank in range(tp)] for tp in shapes]
    engines = [RayEngine(ranks, name=f"engine {number}") for number, ranks in enumerate(serving)]
    # Actors are started by the first call, which imports torch in each of them.
    return training, serving, RayWeightSync(training, engines, timeout=240.0)


def end(*groups: Any) -> None:
    for group in groups:
        for actor in group:
            if isinstance(actor, list):
                end(actor)
            else:
                ray.kill(actor)


def same(weights: Any, serving: Any) -> None:
    for engine in serving:
        for got in ray.get([actor.weights.remote() for actor in engine], timeout=240):
            assert got == weights


def test_trainers_and_engines_sync_by_broadcast_and_only_plain_data_crosses(tmp_path: Path) -> None:
    config = broadcast({"tp": 2}, {})
    training, serving, sync = actors(config, tmp_path, 2, [2, 1], pause=True)
    try:
        with pytest.raises(WindlassInvalid, match="comes before"):
            sync.sync_weights()
        sync.initialize()
        for version in (1, 2, 3):
            weights = ray.get([actor.step.remote(0.5) for actor in training], timeout=240)[0]
            assert sync.sync_weights() == version
            same(weights, serving)
        assert sync.sync_weights(10) == 10
        steps, calls = ray.get(serving[1][0].told.remote(), timeout=240)
        assert steps[0] == "init"
        assert {"update", "start_update", "finish_update", "reset_prefix_cache"} <= set(steps)
        assert calls[:3] == ["pause", "finished 1", "resume"]
        sync.close()
        sync.initialize()
        sync.sync_weights()
        same(ray.get(training[0].step.remote(0.0), timeout=240), serving)
        sync.close()
    finally:
        end(training, serving)


@pytest.mark.parametrize("kind", ["packed_cuda_ipc", "tcp"])
def test_actors_sync_by_the_other_strategies_too(tmp_path: Path, kind: str) -> None:
    config: dict[str, Any] = {"strategy": kind}
    if kind == "tcp":
        config |= {
            "link": "shm",
            "image_dir": str(tmp_path / "images"),
            "manager": {"region_dir": str(tmp_path)},
            "timeout": 240.0,
        }
    training, serving, sync = actors(config, tmp_path, 1, [1, 1])
    try:
        sync.initialize()
        for _ in range(2):
            weights = ray.get(training[0].step.remote(0.5), timeout=240)
            sync.sync_weights()
            same(weights, serving)
        sync.close()
    finally:
        end(training, serving)


@pytest.mark.timeout(400)
def test_a_dead_engine_is_named_and_the_others_are_not(tmp_path: Path) -> None:
    import ray_actors

    config = broadcast({}, {}, timeout=30.0)
    training, serving, sync = actors(config, tmp_path, 1, [1, 1])
    try:
        sync.initialize()
        sync.sync_weights()
        os.kill(ray.get(serving[1][0].pid.remote(), timeout=240), signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(WindlassError, match="engine 1 died") as lost:
            sync.sync_weights()
        assert time.monotonic() - begun < 240
        assert isinstance(lost.value, (EnginesFailed, WindlassPeerLost))
        assert "engine 0 died" not in str(lost.value)
        assert "engine 1: engine 1" not in str(lost.value)
        # Another one takes its place. The others do not wait for the dead one to leave.
        serving[1] = [ray.remote(num_cpus=0.5)(ray_actors.Engine).remote(config)]
        engines = [RayEngine(ranks, name=f"engine {number}") for number, ranks in enumerate(serving)]
        sync = RayWeightSync(training, engines, timeout=240.0)
        sync.initialize()
        weights = ray.get(training[0].step.remote(0.5), timeout=240)
        sync.sync_weights()
        same(weights, serving)
    finally:
        end(training, serving)


def test_a_dead_trainer_is_named(tmp_path: Path) -> None:
    training, serving, sync = actors(broadcast({}, timeout=30.0), tmp_path, 2, [1])
    try:
        sync.initialize()
        os.kill(ray.get(training[1].pid.remote(), timeout=240), signal.SIGKILL)
        with pytest.raises(WindlassPeerLost, match="trainer rank 1 died"):
            sync.sync_weights()
    finally:
        end(training, serving)


def test_an_actor_that_was_not_prepared_says_so() -> None:
    from windlass.engines.ray import EngineActor, TrainerActor

    engine = ray.remote(num_cpus=0.1)(EngineActor).remote()
    trainer = ray.remote(num_cpus=0.1)(TrainerActor).remote()
    try:
        with pytest.raises(WindlassInvalid, match=r"trainer rank 0: .*attach_model\(\)"):
            RayWeightSync([trainer], [RayEngine([engine])], timeout=60).initialize()
    finally:
        end([engine, trainer])


def test_what_is_not_plain_data_does_not_leave() -> None:
    with pytest.raises(WindlassInvalid, match="not plain data"):
        plain({"tensor": object()}, "call")
    with pytest.raises(WindlassError, match="engine 3: KeyError: 'w'"):
        result({"error": {"kind": "KeyError", "text": "'w'", "advice": "", "name": ""}}, "engine 3")
    with pytest.raises(WindlassError, match="answered 7"):
        result(7, "engine 3")
    with pytest.raises(WindlassInvalid, match="2 actors and the shape"):
        from windlass.transfer.sync_info import EngineShape

        RayEngine([None, None], shape=EngineShape(tp=3))
