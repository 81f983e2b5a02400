"""The controller's two calls.

Owns: :class:`WeightSyncManager`, a thin facade over a strategy, an extractor and a client of the engines. It keeps the
order of things and nothing else: process groups and connections belong to the sender and the receivers.

The order:

1. ``initialize()``: sync info on training rank 0, told to the other training ranks, handed to the engines; both sides
   join at the same time.
2. ``sync_weights(model)``: once before training, then once per step. The prefix cache's reset is started, the update
   opened, chunks sent one by one, the update closed, the reset awaited; then all training ranks meet.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from windlass.errors import WindlassError, WindlassInvalid

if TYPE_CHECKING:
    from windlass.dtypes import Dtype
    from windlass.extract import WeightExtractor
    from windlass.publish.inputs import Weights
    from windlass.transfer.base import InferenceClient, WeightTransferSender, WeightTransferStrategy
    from windlass.transfer.trainer import TrainerRanks

__all__ = ["ModelSender", "WeightSyncManager"]

log = logging.getLogger("windlass")


@runtime_checkable
class ModelSender(Protocol):
    """A sender that takes the model itself: it publishes shards where they are, or only the adapters."""

    async def send_model(
        self, model: Weights, generator_dtype: Dtype | None, version: int, inference_client: InferenceClient
    ) -> None:
        """Sends what changed in ``model`` as ``version``, and returns when every engine has loaded it."""


class WeightSyncManager:
    """Joins trainer and engines once, then sends the weights whenever it is told to.

    >>> manager = WeightSyncManager(strategy, FSDPWeightExtractor(), client)     # doctest: +SKIP
    >>> await manager.initialize()                                               # doctest: +SKIP
    >>> await manager.sync_weights(model, "bfloat16")                            # doctest: +SKIP
    1

    On trainers of several ranks every rank has one and makes the same calls; the client is needed on rank 0.
    ``timeout`` bounds the meetings of training ranks. :attr:`version` is the last one that every engine has loaded.
    """

    def __init__(
        self,
        strategy: WeightTransferStrategy,
        extractor: WeightExtractor,
        inference_client: InferenceClient | None = None,
        *,
        timeout: float = 600.0,
    ) -> None:
        self._strategy = strategy
        self._extractor = extractor
        self._client: Any = inference_client
        self._timeout = timeout
        self._sender: WeightTransferSender | None = None
        self._ranks: TrainerRanks | None = None
        #: The last version that every engine has loaded.
        self.version: int | None = None

    async def initialize(self) -> None:
        """Makes the sync info, hands it to the engines, and joins while they join. Ready when it returns."""
        from windlass.transfer.sync_info import WeightSyncInfo
        from windlass.transfer.trainer import TrainerRanks

        if self._sender is not None:
            raise WindlassInvalid("this WeightSyncManager has joined already; close it first")
        ranks = TrainerRanks()
        first = ranks.rank == 0
        if first and self._client is None:
            raise WindlassInvalid("training rank 0 speaks to the engines and needs a client of them")
        info: WeightSyncInfo | None = None
        failure: Exception | None = None
        try:
            info = self._strategy.create_sync_info() if first else None
        except Exception as e:
            failure = e
        await asyncio.to_thread(ranks.meet, failure, self._timeout, "make the sync info")
        if ranks.count > 1:
            plain = None if info is None else info.to_dict()
            told = await asyncio.to_thread(ranks.tell, plain, self._timeout, "tell each other the sync info")
            info = info or WeightSyncInfo.from_dict(told[0])
        assert info is not None
        joins = [asyncio.to_thread(self._strategy.create_sender, info)]
        if first:
            joins.append(self._client.init_weight_transfer(info))
        sender, *engines = await asyncio.gather(*joins, return_exceptions=True)
        failed = [e for e in (*engines, sender) if isinstance(e, BaseException)]
        try:
            await asyncio.to_thread(ranks.meet, failed[0] if failed else None, self._timeout, "join")
        except BaseException:
            # Half of a group is of no use to anybody.
            if not isinstance(sender, BaseException):
                sender.close()
            raise
        assert not isinstance(sender, BaseException)
        self._sender, self._ranks = sender, ranks

    async def sync_weights(
        self, model: object, generator_dtype: Dtype | None = None, version: int | None = None
    ) -> int:
        """Sends all weights of ``model``, a chunk at a time, and returns when every engine has loaded them.

        Returns the version: the one given, which must be newer than the last, or the next number.
        """
        if self._sender is None or self._ranks is None:
            raise WindlassInvalid("initialize() comes before sync_weights()")
        last = self.version or 0
        version = last + 1 if version is None else version
        if version <= last:
            raise WindlassInvalid(f"version {version} is not newer than {last}, which the engines have")
        failure: Exception | None = None
        _empty_cache()
        try:
            await self._sync(self._sender, self._ranks, model, generator_dtype, version)
        except Exception as e:
            failure = e
        _empty_cache()
        await asyncio.to_thread(self._ranks.meet, failure, self._timeout, f"sync version {version}")
        self.version = version
        return version

    async def _sync(
        self,
        sender: WeightTransferSender,
        ranks: TrainerRanks,
        model: Any,
        dtype: Dtype | None,
        version: int,
    ) -> None:
        begin = getattr(self._client, "begin_sync", None)
        failure: Exception | None = None
        try:
            if begin is not None:
                await begin()
        except Exception as e:
            failure = e
        # Before any of them gathers: a rank that left now would be missed in a collective, where nobody can tell.
        await asyncio.to_thread(ranks.meet, failure, self._timeout, "prepare the engines")
        try:
            if isinstance(sender, ModelSender):
                await sender.send_model(model, dtype, version, self._client)
            else:
                chunks = self._extractor.extract_weights(model, dtype)
                try:
                    await sender.send_chunks(chunks, self._client)
                finally:
                    chunks.close()
            finish = getattr(self._client, "finish_sync", None)
            if finish is not None:
                await finish(str(version))
        except Exception as e:
            abort = getattr(self._client, "abort_sync", None)
            state = "" if abort is None else await abort()
            if state and isinstance(e, WindlassError):
                log.error("sync of version %d failed: %s", version, state)
                if hasattr(e, "add_note"):
                    e.add_note(state)
            raise

    def close(self) -> None:
        """Closes the sender. :meth:`initialize` may be called again."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()


def _empty_cache() -> None:
    """Gives cached device memory back, where this process has used a device."""
    import sys

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
