"""verl's adapter to vLLM servers, for versions that the workers load from an image.

Owns: :class:`WindlassServerAdapter`. Made by verl in the rollout's workers where the backend is ``windlass``. Must not: change how
anything else is loaded.
"""

from __future__ import annotations

import asyncio
from typing import Any

from verl.workers.rollout.vllm_rollout import ServerAdapter

from windlass.verl.engine import Received

__all__ = ["WindlassServerAdapter"]


class WindlassServerAdapter(ServerAdapter):  # type: ignore[misc]
    """The workers of vLLM load by plan, and only what changed: no tensor passes through this process."""

    async def update_weights(self, weights: object, global_steps: int | None = None, **how: Any) -> None:
        """Has the server's workers load the version that this host has."""
        if not isinstance(weights, Received):
            await super().update_weights(weights, global_steps=global_steps, **how)
            return
        order = await weights.staged()
        if not self._ensure_server_handle():
            return
        # The server drops what its workers answer; what they raise comes through.
        await self._execute_method("windlass_load_or_raise", timeout=order.timeout, args=(order.to_dict(),))
        await asyncio.wait_for(self.server_handle.clear_kv_cache.remote(), order.timeout)
        if global_steps is not None:
            await self.server_handle.set_global_steps.remote(global_steps)
