"""A worker's end of any :class:`~windlass.strategy.WeightTransferStrategy`.

Owns: :class:`Receiving`, which joins a strategy, receives what requests announce, and hands it to the engine's own
loader: layer by layer, as the tensors come. Called by the transfer backend and the worker extension. Must not: keep a
thread; load past the engine's loader (a request may be any part of a model).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from windlass.errors import WindlassError
from windlass.request import parse_request
from windlass.strategy import strategy_from_config
from windlass.sync_info import parse_sync_info

if TYPE_CHECKING:
    import torch

    from windlass.load.live import Live
    from windlass.plain import Plain

__all__ = ["Receiving"]


class Receiving:
    """One worker's receiver, and the load that its requests are parts of."""

    def __init__(self, live: Live, sync_info: Plain, strategy: Plain, rank_offset: int = 1) -> None:
        self._live = live
        info = parse_sync_info(sync_info)
        self._strategy = strategy_from_config(strategy)
        self._receiver = self._strategy.create_receiver(info, rank=rank_offset + live.report().rank)
        self._begun = False

    def update(self, request: Plain) -> None:
        """Receives one request into the engine's loader. The first of a series begins the load."""
        parsed = parse_request(request)
        if not self._begun:
            self._live.begin_tensors()
            self._begun = True
        try:
            self._live.feed_tensors(self._pull(parsed))
        except BaseException as e:
            self._begun = False
            self._live.abandon_tensors(e)
            raise

    def finish(self) -> None:
        """Post-processes what came."""
        if not self._begun:
            return
        self._begun = False
        try:
            self._live.finish_tensors()
        except BaseException as e:
            self._live.abandon_tensors(e)
            raise

    def close(self) -> None:
        """Leaves the group or closes the connection."""
        if self._begun:
            self._begun = False
            self._live.abandon_tensors(WindlassError("the strategy was closed in the middle of an update"))
        self._receiver.close()

    def _pull(self, request: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors as they come. Each is copied: the engine keeps them until their layer is complete, and the receiver
        gives its memory to the next one."""
        loop = asyncio.new_event_loop()
        try:
            tensors = self._receiver.receive_weights(request)
            while True:
                try:
                    name, tensor = loop.run_until_complete(anext(tensors))
                except StopAsyncIteration:
                    return
                yield name, tensor.clone()
        finally:
            loop.close()
