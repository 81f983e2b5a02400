"""The order of a sync in verl's driver: publish and stage while replicas generate, then abort, load, resume.

Owns: :func:`install`, which makes the backend known and has verl's manager follow that order where the backend is ``windlass``. Called by
:mod:`windlass.verl.plugin` after verl's module has been imported. Must not: change a sync of any other backend.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from types import ModuleType
from typing import Any

from windlass.frameworks.sender import listed

__all__ = ["BACKEND", "install"]

log = logging.getLogger("windlass")

#: The name that a configuration gives.
BACKEND = "windlass"


def install(base: ModuleType) -> None:
    """Makes the backend known to verl's ``checkpoint_engine.base``. Again is nothing."""
    from windlass.verl.engine import WindlassCheckpointEngine

    if BACKEND in base.CheckpointEngineRegistry._registry:
        return
    base.CheckpointEngineRegistry.register(BACKEND)(WindlassCheckpointEngine)
    manager = base.CheckpointEngineManager
    other = manager.update_weights.__wrapped__

    @functools.wraps(other)
    async def update_weights(self: Any, global_steps: int | None = None) -> dict[str, Any]:
        if self.backend != BACKEND:
            told: dict[str, Any] = await other(self, global_steps=global_steps)
            return told
        return await _update(base, self, global_steps)

    manager.update_weights = base.auto_await(update_weights)


async def _update(base: ModuleType, manager: Any, global_steps: int | None) -> dict[str, Any]:
    begun = time.monotonic()
    actors, replicas = manager.actor_wg, list(manager.replicas)
    dtype = next((getattr(replica.config, "dtype", None) for replica in replicas), None)
    await _all(_actors(actors, "prepare", dtype=[dtype] * actors.world_size))
    # verl gives the training engine itself, with its shards, to a backend that this mode names.
    metrics: dict[str, Any] = {}
    for one in await _all(actors.update_weights(global_steps=global_steps, mode="delta_sharded")):
        metrics.update(one or {})
    if not replicas:
        log.warning("step %s was published, and there is no replica that could load it", global_steps)
        return metrics
    told = await _all(_actors(actors, "published"))
    workers = [worker for replica in replicas for worker in replica.workers]
    rollout = base.RayWorkerGroup(
        worker_handles=workers, ray_cls_with_init=base.RayClassWithInitArgs(cls=base._worker_cls)
    )
    _, sources = manager.backend_cls.build_topology(actors.world_size, rollout.world_size, told)
    await _all(rollout.execute_checkpoint_engine(["init_process_group"] * rollout.world_size, **sources))
    staged = await _all(rollout.execute_checkpoint_engine(["stage"] * rollout.world_size))
    metrics["windlass/stage_s"] = max(one["windlass/stage_s"] for one in staged)
    metrics["windlass/wire_bytes"] = sum(one["windlass/wire_bytes"] for one in staged)
    paused = time.monotonic()
    await manager.abort_replicas()
    await _all(rollout.update_weights(global_steps=global_steps))
    # After a failure they stay paused, as with verl's own backends: their weights may not be whole.
    await manager.resume_generation_replicas()
    ended = time.monotonic()
    metrics["windlass/pause_s"], metrics["windlass/sync_s"] = ended - paused, ended - begun
    log.info("step %s is served by %d replicas: %s", global_steps, len(replicas), listed(metrics))
    return metrics


def _actors(actors: Any, method: str, **arguments: list[Any]) -> list[Any]:
    return list(actors.execute_checkpoint_engine([method] * actors.world_size, **arguments))


async def _all(calls: list[Any]) -> list[Any]:
    """What all workers answer, once all have ended: the next sync must not meet one of them at work. The driver's loop goes on
    meanwhile."""
    told = await asyncio.gather(*calls, return_exceptions=True)
    for one in told:
        if isinstance(one, BaseException):
            raise one
    return list(told)
