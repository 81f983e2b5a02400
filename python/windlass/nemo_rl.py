"""Weight sync of NeMo-RL by Windlass, for policies and engines that do not share GPUs:

.. code-block:: yaml

    policy:
      generation:
        refit_transport: "windlass.nemo_rl:WindlassCheckpointEngine"
        refit_cfg:
          "windlass.nemo_rl:WindlassCheckpointEngine": {}

Owns: :class:`WindlassCheckpointEngine`. Made by NeMo-RL in every policy worker and in every worker of the engine. Must not: import NeMo-RL
where it is not.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from windlass.errors import WindlassInvalid
from windlass.frameworks.both_halves import ReceivingHalf
from windlass.frameworks.sender import Sender, settings_of

if TYPE_CHECKING:
    import torch

    Base = object
else:
    try:
        from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine as Base
    except ImportError:
        # Whoever is not NeMo-RL and calls it in the same way, as our tests do.
        Base = object

__all__ = ["WindlassCheckpointEngine"]


class WindlassCheckpointEngine(Base):
    """What ``refit_cfg`` configures.

    ``image_dir`` is a directory in memory on the engines' hosts, ``dtype`` what weights are cast to, ``manager`` are further fields of
    :class:`windlass.WeightManagerConfig`, and ``timeout`` bounds one refit. ``role`` says which half this is, where that cannot be seen.
    ``release_after_refit`` and ``update_weights_bucket_memory_ratio`` are read by NeMo-RL itself, which hands all settings on. Nothing is
    released here after a refit: what is kept is what the next one needs, and it is in the host's memory.
    """

    #: The image serves the next refit too.
    cleanup_after_load = False

    def __init__(
        self,
        bucket_size: int,
        *,
        model_id: str = "policy",
        image_dir: str | None = None,
        dtype: str | None = None,
        checkpoint: str | None = None,
        manager: Mapping[str, object] | None = None,
        timeout: float = 600.0,
        role: Literal["policy", "rollout"] | None = None,
        release_after_refit: bool = False,
        update_weights_bucket_memory_ratio: float | None = None,
    ) -> None:
        if role not in ("policy", "rollout", None):
            raise WindlassInvalid(f"role is {role!r}: expected 'policy' or 'rollout'")
        self._bucket_size = bucket_size
        self._timeout = timeout
        self._settings = settings_of(model_id, manager, dtype=dtype, checkpoint=checkpoint)
        self._rollout = _in_an_engine() if role is None else role == "rollout"
        self._sending: Sender | None = None
        self._receiving = ReceivingHalf(image_dir, timeout)

    def prepare(self) -> dict[str, Any]:
        """What the others are told: on the first policy worker, where versions will be."""
        import torch.distributed as dist

        rank = dist.get_rank() if dist.is_initialized() else 0
        if self._rollout:
            return {"rank": rank}
        told = self._sender().where() if rank == 0 else {}
        return {"rank": rank, **told}

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Nothing: whoever wants a version pulls it."""

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Takes note of where versions come from."""
        named = [told for told in metadata if isinstance(told, Mapping) and "endpoint" in told]
        if len(named) != 1:
            raise WindlassInvalid(
                f"{len(named)} policy workers say where they publish, and it should be one",
                "give the class role='policy' or role='rollout' if it cannot see which half it is",
            )
        self._receiving.expect({name: value for name, value in named[0].items() if name != "rank"})

    def finalize(self) -> None:
        """Nothing: the agent and the image serve the next refit too."""

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publishes a version, on all policy workers."""
        self._sender().publish(weights, self._timeout)

    async def receive_weight_batches(self) -> AsyncIterator[list[tuple[str, torch.Tensor]]]:
        """The next version, in batches of ``bucket_size`` bytes that are the image's own memory."""
        self._receiving.expect_next()
        staged = await asyncio.to_thread(self._receiving.bring)
        for batch in staged.batches(self._bucket_size):
            yield batch

    def _sender(self) -> Sender:
        if self._sending is None:
            self._sending = Sender.in_ray(self._settings)
        return self._sending


def _in_an_engine() -> bool:
    """Whether this process is a worker of an engine: NeMo-RL keeps engines out of the processes that train."""
    return any(
        name in sys.modules for name in ("vllm.v1.worker.worker_base", "sglang.srt.managers.scheduler")
    )
