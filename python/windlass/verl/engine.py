"""verl's checkpoint engine ``windlass``.

Owns: :class:`WindlassCheckpointEngine`, which verl makes in every actor and in every worker of the rollout, and :class:`Received`, what
the latter gets. Called by verl. Must not: tear anything down between two syncs, so that replicas can come and go.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine

from windlass.errors import WindlassInvalid, WindlassUnsupported
from windlass.frameworks.sender import Sender, reached_by
from windlass.identity import Identity
from windlass.load.order import LoadOrder
from windlass.receive.pulling import Brought, Pulling, PullOrder
from windlass.receive.receiver import open_image

__all__ = ["Received", "WindlassCheckpointEngine"]

log = logging.getLogger("windlass")

#: verl's adapter to vLLM, and the one that loads versions by plan.
ADAPTERS = {("vllm", "async"): "windlass.verl.adapter.WindlassServerAdapter"}


class WindlassCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """What ``checkpoint_engine.engine_kwargs.windlass`` configures.

    ``image_dir`` is a directory in memory on the rollout's hosts. ``dtype`` is that of the rollout if it is not said.
    ``checkpoint`` completes what is frozen and never sent. ``manager`` are further fields of :class:`windlass.WeightManagerConfig`.
    ``shards`` says whether FSDP2's shards are published as they are, or gathered by verl. ``timeout`` bounds each step of a sync.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        model_id: str = "policy",
        image_dir: str = "/dev/shm/windlass-images",
        dtype: str | None = None,
        checkpoint: str | None = None,
        manager: Mapping[str, Any] | None = None,
        shards: bool = True,
        timeout: float = 600.0,
    ) -> None:
        from verl.workers.rollout import base

        base._ROLLOUT_REGISTRY.update(ADAPTERS)
        self.is_master = is_master
        self.shards = shards
        self._timeout, self._image_dir = timeout, image_dir
        self._settings: dict[str, Any] = {"model_id": model_id, **_plain(manager or {})}
        for name, value in (("generator_dtype", dtype), ("checkpoint", checkpoint)):
            if value is not None:
                self._settings[name] = value
        self._sender: Sender | None = None
        #: In a worker of the rollout: where the next version comes from, and what brings it.
        self._next: PullOrder | None = None
        self._pulling: Pulling | None = None
        self._brought: Brought | None = None

    # Both sides.

    def prepare(self, dtype: str | None = None) -> dict[str, Any]:
        """In the first actor: where the next version will be, known before the first tensor is. ``dtype`` is the rollout's."""
        if not self.is_master:
            return {}
        manager = self._sending(dtype).manager
        return {
            "endpoint": manager.listen(),
            "token": self._sending(dtype).source().token,
            "tls_ca": manager.config.tls_ca,
            "model_id": manager.config.model_id,
            "incarnation": manager.incarnation,
            "version": self._sending(dtype).version + 1,
        }

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Every worker of the rollout is told where the first actor publishes; actors need to be told nothing."""
        if not metadata or "endpoint" not in metadata[0]:
            raise WindlassInvalid(
                "the first actor did not say where it publishes",
                "update verl, or report the version that has its ranks in another order",
            )
        return {}, {"source": [metadata[0]] * rollout_world_size}

    def init_process_group(self, source: dict[str, Any] | None = None) -> None:
        """Takes note of what comes next."""
        if source is not None:
            self._next = PullOrder.from_dict(
                {**source, "image_dir": self._image_dir, "timeout": self._timeout}
            )
            self._brought = None

    def finalize(self) -> None:
        """Nothing: the agent and the images serve the next sync too."""

    # An actor.

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publishes a version, on all actors. ``weights`` is a stream of whole tensors, or verl's training engine."""
        sender = self._sending(None)
        if hasattr(weights, "get_per_tensor_param"):
            model = self._module(weights)
            if model is not None:
                done = sender.publish_model(model, self._timeout)
                return done.metrics() if self.is_master else {}
            weights, peft_config = weights.get_per_tensor_param()
            if peft_config is not None:
                raise WindlassUnsupported(
                    "adapters that are not merged cannot be published to a rollout of whole weights",
                    "set actor_rollout_ref.model.lora.merge=True",
                )
        done = sender.publish(weights, self._timeout)
        return done.metrics() if self.is_master else {}

    def _module(self, engine: Any) -> torch.nn.Module | None:
        """The model whose shards can be published as they are: that of FSDP2, without adapters and quantisation."""
        module = getattr(engine, "module", None)
        if (
            not self.shards
            or not isinstance(module, torch.nn.Module)
            or getattr(engine, "_qat_enabled", False)
        ):
            return None
        sharded = any(hasattr(p, "full_tensor") for p in module.parameters())
        return module if sharded and not hasattr(module, "peft_config") else None

    def _sending(self, dtype: str | None) -> Sender:
        if self._sender is None:
            import ray

            settings = dict(self._settings)
            if dtype is not None and "checkpoint" not in settings:
                settings.setdefault("generator_dtype", dtype)
            settings = reached_by(ray.util.get_node_ip_address(), settings)
            self._sender = Sender(settings, rank=dist.get_rank(), world_size=dist.get_world_size())
        return self._sender

    # A worker of the rollout.

    def stage(self) -> dict[str, float]:
        """Brings the next version to this host, while the engine generates: one worker of the host pulls."""
        return self._bring().metrics()

    def receive_weights(self, global_steps: int | None = None) -> Received:
        """The next version, as verl's adapters take it."""
        return Received(self)

    def _bring(self) -> _Staged:
        start = time.monotonic()
        if self._next is None:
            raise WindlassInvalid(
                "nobody said where the next version comes from: init_process_group() was not called"
            )
        if self._brought is None:
            self._pulling = Pulling.of(self._next, self._pulling)
            self._brought = self._pulling.bring(self._next.identity, self._timeout)
        return _Staged(self._brought, time.monotonic() - start, self._timeout)


class _Staged:
    """A version on this host."""

    def __init__(self, brought: Brought, seconds: float, timeout: float) -> None:
        self.brought, self._seconds = brought, seconds
        identity: Identity = brought.identity
        self.order = LoadOrder(
            image=str(brought.image),
            model_id=identity.model_id,
            incarnation=identity.incarnation,
            version=identity.version,
            digest=brought.digest,
            timeout=timeout,
        )

    def metrics(self) -> dict[str, float]:
        """What the trainer's log gets."""
        synced = self.brought.synced
        return {
            "windlass/stage_s": self._seconds,
            "windlass/wire_bytes": 0.0 if synced is None else float(synced.wire_bytes),
        }


class Received:
    """A version for verl's adapters. Ours has it loaded from its image; the others iterate over its tensors, which are the image's
    own memory, as any checkpoint engine would have it."""

    def __init__(self, engine: WindlassCheckpointEngine) -> None:
        self._engine = engine

    async def staged(self) -> LoadOrder:
        """The order to load it, once it is on this host."""
        staged = await asyncio.to_thread(self._engine._bring)
        return staged.order

    async def __aiter__(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        order = await self.staged()
        with open_image(order.image, order.timeout, order.timeout) as image:
            for name in image.tensors:
                yield name, image.tensors[name]


def _plain(value: Any) -> Any:
    """Configuration as plain data, whatever library it comes from."""
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return [_plain(part) for part in value]
    return value
