"""Weight sync of OpenRLHF by Windlass, for policies and engines that do not share GPUs. One variable of the driver's environment:

    RAY_RUNTIME_ENV_HOOK=windlass.openrlhf.hook

Every rank of the policy publishes what it has of the model, and each engine pulls and loads: OpenRLHF's process group between the two is
not made. docs/openrlhf.md has the options.

Owns: :func:`hook`, which Ray calls in the driver, and :func:`setup`, which each worker calls first. Must not: change a run that does
not name the hook.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from windlass.errors import (
    WindlassError,
    WindlassPeerLost,
    WindlassTimeout,
    WindlassUnsupported,
)
from windlass.exchange import agree_on_all_ranks, exchange_for
from windlass.frameworks import ray_hook
from windlass.frameworks.after_import import after_import
from windlass.load.order import Failure, LoadOrder
from windlass.plain import Plain
from windlass.transfer.client import EnginesFailed

__all__ = ["hook", "setup"]

log = logging.getLogger("windlass")

#: Settings as JSON.
VARIABLE = "WINDLASS_OPENRLHF"
#: What settings there are.
SETTINGS = ("model_id", "image_dir", "manager", "timeout")
#: How often engines are asked whether they are done.
LOOK_S = 0.02
#: How much longer the other ranks wait than the first, which says what went wrong.
GRACE_S = 30.0


def hook(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """The runtime environment of ``ray.init``, in which each worker calls :func:`setup` first."""
    ray_hook.settings_in(VARIABLE, SETTINGS)
    if os.environ.get(ray_hook.HOOK) == f"{__name__}.hook":
        # What Ray calls from now on; it is no hook that was there before.
        del os.environ[ray_hook.HOOK]
    ray_hook.in_every_worker(f"{__name__}:setup", VARIABLE)
    # Here and now, where an error is seen: in a worker, OpenRLHF would go its own way.
    for name, act in _changes():
        try:
            act(importlib.import_module(name))
        except AttributeError as e:
            raise WindlassUnsupported(
                f"{name} is not as in OpenRLHF 0.11, and windlass.openrlhf knows no other: {e}",
                "use OpenRLHF 0.11; docs/compatibility.md says what was run",
            ) from e
    return ray_hook.hook(runtime_env)


def setup() -> None:
    """Has OpenRLHF sync by Windlass in this process."""
    for name, act in _changes():
        after_import(name, act)


def _changes() -> list[tuple[str, Callable[[Any], None]]]:
    """Modules, and what is changed in each."""
    return [
        ("openrlhf.trainer.ray.ppo_actor", _policy),
        ("openrlhf.trainer.ppo_trainer", lambda module: _trainer(module.PPOTrainer)),
        ("openrlhf.trainer.ppo_trainer_async", lambda module: _trainer(module.TrainingActor)),
    ]


def _policy(ppo_actor: ModuleType) -> None:
    """The policy's ranks publish, and the first has the engines load."""
    trainer: Any = ppo_actor.ActorPPOTrainer
    # All three must be there, or nothing is changed.
    begin, other, _ = trainer.__init__, trainer.broadcast_to_vllm, trainer._init_vllm_sync_group
    if other.__module__ == __name__:
        return

    def __init__(self: Any, strategy: Any, actor: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("vllm_engines") is not None:
            _refuse(strategy.args, actor)
        begin(self, strategy, actor, *args, **kwargs)
        if self.vllm_engines is not None:
            self.windlass = _Sending(ray_hook.settings_in(VARIABLE, SETTINGS))

    def _init_vllm_sync_group(self: Any, backend: str) -> None:
        """Engines pull: there is no group of theirs and the policy's."""

    def broadcast_to_vllm(self: Any) -> None:
        cuda = ppo_actor.torch.cuda
        cuda.empty_cache()
        reset = bool(getattr(self.args.vllm, "enable_prefix_caching", False))
        self.windlass.sync(self.actor.model, self.vllm_engines, reset)
        cuda.empty_cache()
        ppo_actor.torch_dist_barrier_and_cuda_sync()

    trainer.__init__, trainer.broadcast_to_vllm = __init__, broadcast_to_vllm
    trainer._init_vllm_sync_group = _init_vllm_sync_group


def _trainer(actor: Any) -> None:
    """The figures of a sync go where OpenRLHF logs the step's."""
    # Ray has made copies of what the class inherits.
    trainer = actor.__ray_metadata__.modified_class
    other = trainer.train_step
    if other.__module__ == __name__:
        return

    def train_step(self: Any, rollout_samples: Any, global_step: int) -> tuple[dict[str, Any], int]:
        import ray

        status, step = other(self, rollout_samples, global_step)
        if self.vllm_engines is not None:
            first = self.actor_model_group._actor_handlers[0]
            status.update(ray.get(first.__ray_call__.remote(_metrics, step), timeout=60.0))
        return status, step

    trainer.train_step = train_step


def _metrics(policy: Any, step: int) -> dict[str, float]:
    """In the policy's first actor: the figures of the last sync, which was that of this step."""
    from windlass.frameworks.sender import listed

    metrics: dict[str, float] = policy.trainer.windlass.metrics
    log.info("step %d is served: %s", step, listed(metrics))
    return metrics


def _refuse(args: Any, actor: Any) -> None:
    """What this way cannot do, or what was never run."""
    for refused, option, why in (
        (
            args.train.colocate_all and not args.train.async_enable,
            "--train.colocate_all without --train.async_enable",
            "a colocated engine takes its weights through the GPU that both share",
        ),
        (
            args.ds.tensor_parallel_size > 1,
            "--ds.tensor_parallel_size",
            "parameters that DeepSpeed splits over tensor-parallel ranks cannot be published",
        ),
        (args.ds.load_in_4bit, "--ds.load_in_4bit", "engines do not load weights in 4 bits"),
        (args.ds.lora.rank > 0, "--ds.lora.rank", "adapters are not merged here"),
        (getattr(actor, "is_vlm", False), "a model with vision", "only language models were run"),
    ):
        if refused:
            raise WindlassUnsupported(
                f"windlass.openrlhf is asked for, and {option} is set: {why}",
                f"leave that out, or unset {ray_hook.HOOK} for OpenRLHF's own weight sync",
            )


class _Sending:
    """One rank of the policy: publishes, and on the first rank has all engines load."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import torch.distributed as dist

        from windlass.frameworks.sender import Sender, ray_address, reached_by

        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._timeout = float(settings.get("timeout", 600.0))
        self._image_dir = settings.get("image_dir")
        fields = {"model_id": settings.get("model_id", "policy"), **settings.get("manager", {})}
        self._sender = Sender(reached_by(ray_address(), fields), rank=self._rank, world_size=self._ranks)
        #: Bytes of the model.
        self._whole = 0
        #: The figures of the last sync.
        self.metrics: dict[str, float] = {}

    def sync(self, model: Any, engines: Sequence[Any], reset: bool) -> None:
        """Publishes a model, and returns when all engines have loaded it; an error on all ranks otherwise. With ``reset`` cached
        prefixes are given up."""
        begun = time.monotonic()
        until = begun + self._timeout
        published = self._sender.publish_model(model, self._timeout)

        def work() -> dict[str, Any]:
            mine: dict[str, Any] = {"bytes": published.bytes}
            try:
                if self._rank == 0:
                    mine["metrics"] = self._load(published.identity, engines, reset, until)
            except EnginesFailed as e:
                # For all ranks: OpenRLHF shows the error of any of them.
                mine["failed"] = [str(e), e.advice]
            return mine

        exchange = exchange_for(self._rank, self._ranks, None)
        said = agree_on_all_ranks(exchange, work, "have the engines load", self._timeout + GRACE_S)
        if "failed" in said[0]:
            raise EnginesFailed(*said[0]["failed"])
        # The first version is written whole.
        self._whole = self._whole or sum(one["bytes"] for one in said)
        told = {**published.metrics(), **said[0]["metrics"], "windlass/sync_s": time.monotonic() - begun}
        told["windlass/wire_share"] = told.pop("host_bytes") / max(1, self._whole)
        self.metrics = told

    def _load(self, identity: Any, engines: Sequence[Any], reset: bool, until: float) -> dict[str, float]:
        """Brings the version to all engines' hosts, and then has all of them load it."""
        begun = time.monotonic()
        digest = self._sender.sealed(_left(until))
        order = self._sender.source().order(identity, _left(until), self._image_dir)
        told = _each("pull", engines, _pull, [(order,)] * len(engines), until)
        staged = time.monotonic()
        orders = [
            LoadOrder(
                image=workers[0]["image"],
                model_id=identity.model_id,
                incarnation=identity.incarnation,
                version=identity.version,
                digest=digest,
                timeout=_left(until),
            )
            for workers in told
        ]
        _each("load", engines, _load, [(one.to_dict(), reset) for one in orders], until)
        sizes = [worker["wire_bytes"] for workers in told for worker in workers]
        return {
            "host_bytes": float(max(sizes)),
            "windlass/wire_bytes": float(sum(sizes)),
            "windlass/stage_s": staged - begun,
            "windlass/load_s": time.monotonic() - staged,
        }


def _each(
    what: str, engines: Sequence[Any], act: Callable[..., Any], given: Sequence[tuple[Any, ...]], until: float
) -> list[list[Plain]]:
    """What the workers of all engines answer, which are asked at once; errors of all of them in one."""
    import ray

    done: dict[int, list[Plain]] = {}
    failures: dict[str, BaseException] = {}
    calls = {
        n: engine.__ray_call__.remote(_begin, act, args)
        for n, (engine, args) in enumerate(zip(engines, given))
    }
    while calls:
        for n, call in list(calls.items()):
            try:
                answer = ray.get(call, timeout=_left(until))
                if answer is None and time.monotonic() < until:
                    calls[n] = engines[n].__ray_call__.remote(_told)
                    continue
                done[n] = _heeded(answer)
            except Exception as e:
                failures[f"engine {n}"] = _failure(e)
            del calls[n]
        time.sleep(LOOK_S if calls else 0.0)
    if failures:
        raise EnginesFailed.at(what, failures, len(engines))
    return [done[n] for n in range(len(engines))]


def _heeded(workers: list[Plain] | None) -> list[Plain]:
    """What workers answered; the first error of theirs is raised."""
    if workers is None:
        raise WindlassTimeout("it was not done in time")
    for one in workers:
        if one["error"] is not None:
            raise Failure.from_dict(one["error"]).error()
    return workers


def _failure(error: Exception) -> WindlassError:
    """What became of an engine, from Ray's errors and those of its code."""
    from ray.exceptions import GetTimeoutError, RayActorError

    if isinstance(error, GetTimeoutError):
        return WindlassTimeout("it did not answer in time")
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, WindlassError):
        return cause
    told = Failure.of(cause)
    # The actor may outlive its vLLM.
    if isinstance(error, RayActorError) or type(cause).__name__ == "EngineDeadError":
        return WindlassPeerLost(
            f"it died: {told.text.splitlines()[0]}", "see its log, and start the run again"
        )
    return WindlassError(told.text, told.advice)


def _begin(engine: Any, act: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """In the actor of an engine: begins to have its workers do something, in the event loop of its vLLM. Ray calls this in another
    thread, which must not wait: the actor's other calls begin there."""
    engine.windlass = asyncio.run_coroutine_threadsafe(
        act(engine, *args), engine.llm.output_handler.get_loop()
    )


def _told(engine: Any) -> list[Plain] | None:
    """In the actor of an engine: what its workers answered, if they did already."""
    told: list[Plain] | None = engine.windlass.result() if engine.windlass.done() else None
    return told


async def _pull(engine: Any, order: Plain) -> list[Plain]:
    """In the actor of an engine: returns when a version is on the hosts of its workers."""
    told: list[Plain] = await engine.llm.collective_rpc("windlass_pull", args=(order,))
    while not all(one["done"] for one in told):
        await asyncio.sleep(LOOK_S)
        told = await engine.llm.collective_rpc("windlass_pulled")
    return told


async def _load(engine: Any, order: Plain, reset: bool) -> list[Plain]:
    """In the actor of an engine: its workers load a version."""
    told: list[Plain] = await engine.llm.collective_rpc("windlass_load", args=(order,))
    if reset:
        await engine.reset_prefix_cache()
    return told


def _left(until: float) -> float:
    return max(1.0, until - time.monotonic())
