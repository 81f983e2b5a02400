"""The controller's two calls.

Owns: :class:`WeightSyncManager`, a thin facade over a strategy, an extractor and a client of the engines. It keeps the
order of things and nothing else: process groups and connections belong to the sender and the receivers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from windlass.errors import WindlassInvalid

if TYPE_CHECKING:
    from windlass.dtypes import Dtype
    from windlass.extract import WeightExtractor
    from windlass.strategy import InferenceClient, WeightTransferSender, WeightTransferStrategy

__all__ = ["WeightSyncManager"]


class WeightSyncManager:
    """Joins trainer and engines once, then sends the weights whenever it is told to.

    >>> manager = WeightSyncManager(strategy, FSDPWeightExtractor(), client)     # doctest: +SKIP
    >>> await manager.initialize()                                               # doctest: +SKIP
    >>> await manager.sync_weights(model, "bfloat16")                            # doctest: +SKIP

    On trainers of several ranks every rank iterates the extractor; the one that sends has this.
    """

    def __init__(
        self, strategy: WeightTransferStrategy, extractor: WeightExtractor, inference_client: InferenceClient
    ) -> None:
        self._strategy = strategy
        self._extractor = extractor
        self._client = inference_client
        self._sender: WeightTransferSender | None = None

    async def initialize(self) -> None:
        """Makes the sync info, hands it to the engines, and joins while they join. Ready when it returns."""
        if self._sender is not None:
            raise WindlassInvalid("this WeightSyncManager has joined already; close it first")
        info = self._strategy.create_sync_info()
        sender, engines = await asyncio.gather(
            asyncio.to_thread(self._strategy.create_sender, info),
            self._client.init_weight_transfer(info),
            return_exceptions=True,
        )
        failed = [e for e in (engines, sender) if isinstance(e, BaseException)]
        if failed:
            # Half of a group is of no use to anybody.
            if not isinstance(sender, BaseException):
                sender.close()
            raise failed[0]
        assert not isinstance(sender, BaseException)
        self._sender = sender

    async def sync_weights(self, model: Any, generator_dtype: Dtype | None = None) -> None:
        """Sends all weights of ``model``, a chunk at a time, and returns when every engine has loaded them."""
        if self._sender is None:
            raise WindlassInvalid("initialize() comes before sync_weights()")
        chunks = self._extractor.extract_weights(model, generator_dtype)
        await self._sender.send_chunks(chunks, self._client)

    def close(self) -> None:
        """Closes the sender. :meth:`initialize` may be called again."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
