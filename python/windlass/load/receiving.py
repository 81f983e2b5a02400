"""A worker's end of any :class:`~windlass.transfer.base.WeightTransferStrategy`.

Owns: :class:`Receiving`, which joins a strategy and receives what requests announce. Whole images are loaded as orders
are; tensors go where :class:`windlass.load.series.Series` says, request by request. Called by what runs in
an engine's workers: vLLM's transfer backend and worker extension, SGLang's custom loader. Must not: keep a thread, or know
an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Sequence
from typing import TYPE_CHECKING

from windlass.errors import WindlassError
from windlass.load.order import LoadOrder
from windlass.transfer.base import NamedTensors, WeightLoader, each_tensor, strategy_from_config
from windlass.transfer.request import parse_request
from windlass.transfer.sync_info import parse_sync_info

if TYPE_CHECKING:
    from windlass.load.live import Live
    from windlass.plain import Plain
    from windlass.receive.receiver import Image

__all__ = ["Receiving"]


class Receiving:
    """One worker's receiver, and the load that its requests are parts of."""

    def __init__(self, live: Live, sync_info: Plain, strategy: Plain, rank_offset: int = 1) -> None:
        info = parse_sync_info(sync_info)
        self._strategy = strategy_from_config(strategy)
        self._receiver = self._strategy.create_receiver(info, rank=rank_offset + live.report().rank)
        self._loader = _IntoLive(live)

    def start(self) -> None:
        """A new update begins: what is left of one that was never finished does not belong to it."""
        self.abandon(WindlassError("another update began before this one was finished"))

    def abandon(self, why: BaseException) -> None:
        """The update that is under way, if one is, failed: the worker stays dirty."""
        self._loader.abandon(why)

    def update(self, request: Plain) -> None:
        """Receives one request into the engine. The first of a series of tensors begins the load."""
        parsed = parse_request(request)
        try:
            asyncio.run(self._receiver.receive_and_load_weights(parsed, self._loader))
        except BaseException as e:
            self.abandon(e)
            raise

    def finish(self) -> None:
        """Post-processes what came."""
        self._loader.finish()

    def close(self) -> None:
        """Leaves the group or closes the connection."""
        self.abandon(WindlassError("the strategy was closed in the middle of an update"))
        self._receiver.close()


class _IntoLive(WeightLoader):
    """A worker's weights, as strategies load into them."""

    def __init__(self, live: Live) -> None:
        self._live = live

    async def load_weights(self, named_tensors: NamedTensors) -> None:
        if isinstance(named_tensors, AsyncIterable):
            # Each may be gone when the next one is asked for.
            async for pair in named_tensors:
                self._live.series.feed([pair])
            return
        self._live.series.feed([pair async for pair in each_tensor(named_tensors)])

    def fits(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> bool:
        """Whether addresses are enough (:class:`windlass.transfer.ipc.strategy.AddressLoader`)."""
        return self._live.series.fits(names, dtypes, shapes)

    def load_at(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        addresses: Sequence[int],
    ) -> None:
        """A request by the addresses of its tensors, in one launch."""
        self._live.series.load_at(names, dtypes, shapes, addresses)

    async def load_image(self, image: Image) -> None:
        """A whole version, by the plan where there is one."""
        report = self._live.load(LoadOrder.of(image))
        if report.state == "dirty" and report.error is not None:
            raise report.error.error()

    def finish(self) -> None:
        try:
            self._live.series.finish()
        except BaseException as e:
            self._live.series.abandon(e)
            raise

    def abandon(self, why: BaseException) -> None:
        self._live.series.abandon(why)
