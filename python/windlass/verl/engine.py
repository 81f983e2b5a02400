"""verl's checkpoint engine ``windlass``.

Owns: :class:`WindlassCheckpointEngine`, which verl makes in every actor and in every worker of the rollout, and :class:`Received`, what
the latter gets. Called by verl. Must not: tear anything down between two syncs, so that replicas can come and go.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine

from windlass.errors import WindlassInvalid, WindlassUnsupported
from windlass.frameworks.both_halves import ReceivingHalf
from windlass.frameworks.sender import Sender, settings_of
from windlass.load.order import LoadOrder

__all__ = ["Received", "WindlassCheckpointEngine"]

#: verl's adapter to vLLM, and the one that loads versions by plan.
ADAPTERS = {
    ("vllm", "async"): (
        "verl.workers.rollout.vllm_rollout.ServerAdapter",
        "windlass.verl.adapter.WindlassServerAdapter",
    )
}
#: The engine whose export is its parameters under their names; others convert or gather them first.
FSDP = "verl.workers.engine.fsdp.transformer_impl"


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
        image_dir: str | None = None,
        dtype: str | None = None,
        checkpoint: str | None = None,
        manager: Mapping[str, object] | None = None,
        shards: bool = True,
        timeout: float = 600.0,
    ) -> None:
        from verl.workers.rollout import base

        for key, (theirs, ours) in ADAPTERS.items():
            # Not if somebody has put an adapter of their own there.
            if base._ROLLOUT_REGISTRY.get(key) == theirs:
                base._ROLLOUT_REGISTRY[key] = ours
        self.is_master = is_master
        self.shards = shards
        self.bucket_size = bucket_size
        self._timeout = timeout
        self._settings = settings_of(model_id, manager, dtype=dtype, checkpoint=checkpoint)
        #: Made in an actor when it is first asked for.
        self._sending: Sender | None = None
        self._receiving = ReceivingHalf(image_dir, timeout)

    # Both sides.

    def prepare(self, dtype: str | None = None) -> dict[str, Any]:
        """In the first actor: where the next version will be. ``dtype`` is the rollout's, the same for all actors."""
        if dtype is None and not self.is_master:
            # In verl's own order of calls this may be a worker of the rollout.
            return {}
        sender = self._sender(dtype)
        return sender.where() if self.is_master else {}

    def published(self) -> dict[str, Any]:
        """In the first actor: where the version is that was sent last."""
        if not self.is_master:
            return {}
        sender = self._sender(None)
        return sender.where(sender.version)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Every worker of the rollout is told where the first actor publishes; actors need to be told nothing."""
        if not metadata or "endpoint" not in metadata[0]:
            raise WindlassInvalid(
                "the first of verl's actors is not the one that publishes: rank 0 was expected first among those that prepared"
            )
        return {}, {"source": [metadata[0]] * rollout_world_size}

    def init_process_group(self, source: Mapping[str, object] | None = None) -> None:
        """Takes note of what comes next."""
        if source is not None:
            self._receiving.expect(source)

    def finalize(self) -> None:
        """Nothing: the agent and the images serve the next sync too."""

    # An actor.

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publishes a version, on all actors. ``weights`` is a stream of whole tensors, or verl's training engine."""
        sender = self._sender(None)
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
        plainly = getattr(type(engine).get_per_tensor_param, "__module__", None) == FSDP
        if not self.shards or not plainly or getattr(engine, "_qat_enabled", False):
            return None
        if not isinstance(module, torch.nn.Module):
            return None
        sharded = any(hasattr(p, "full_tensor") for p in module.parameters())
        return module if sharded and not hasattr(module, "peft_config") else None

    def _sender(self, dtype: str | None) -> Sender:
        if self._sending is None:
            settings = dict(self._settings)
            if dtype is not None and "checkpoint" not in settings:
                settings.setdefault("generator_dtype", dtype)
            self._sending = Sender.in_ray(settings)
        return self._sending

    # A worker of the rollout.

    def stage(self) -> dict[str, float]:
        """Brings the next version to this host, while the engine generates."""
        return self._receiving.bring().metrics()

    def receive_weights(self, global_steps: int | None = None) -> Received:
        """The next version, as verl's adapters take it."""
        return Received(self._receiving, self.bucket_size)


class Received:
    """A version for verl's adapters. Ours has it loaded from its image; the others iterate over its tensors, which are the image's
    own memory, as any checkpoint engine would have it."""

    def __init__(self, receiving: ReceivingHalf, bucket_size: int) -> None:
        self._receiving, self._bucket_size = receiving, bucket_size

    async def staged(self) -> LoadOrder:
        """The order to load it, once it is on this host."""
        return (await asyncio.to_thread(self._receiving.bring)).order

    async def __aiter__(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        staged = await asyncio.to_thread(self._receiving.bring)
        for batch in staged.batches(self._bucket_size):
            for name, tensor in batch:
                yield name, tensor
