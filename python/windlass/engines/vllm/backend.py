"""The transfer backend ``windlass`` of vLLM, driven through vLLM's own routes.

Owns: :class:`WindlassWeightTransferEngine`, one per worker. Called by vLLM (``--weight-transfer-config
'{"backend": "windlass"}'``). Must not: keep a thread, or touch a weight before everything has been checked.

``init_info`` says where weights come from:

- ``{"image": DIR}``: an image that a sidecar (``windlass receive``) keeps on this host;
- ``{"endpoint": URL, "token": ..., "image_dir": DIR}``: an agent; the first worker of the host pulls into an image
  below ``image_dir`` when it is told of a version, and the others wait for it; ``tls_ca`` names a file with those to
  trust where the URL begins with ``https://``;
- ``{"sync_info": {...}, "strategy": {...}, "rank_offset": n}``: any strategy, such as a broadcast.

``update_info`` is ``{"order": {...}}`` for the first two (see :class:`windlass.load.LoadOrder`; with an endpoint the
``image`` may be left out) and ``{"request": {...}}`` for the third.

``start_weight_update`` touches nothing. ``update_weights`` raises if an order is refused: then the weights are those of
before, and the server can be resumed. It also raises if a load was cut short: then the worker says ``dirty`` in its
report, and the server must stay paused until a whole load succeeds.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from windlass.engines.vllm.extension import live_of
from windlass.engines.vllm.infos import WindlassInitInfo, WindlassUpdateInfo, order_of, pulling_of
from windlass.errors import WindlassError, WindlassInvalid
from windlass.load.order import Report
from windlass.load.receiving import Receiving
from windlass.receive.pulling import Pulling

__all__ = ["WindlassInitInfo", "WindlassUpdateInfo", "WindlassWeightTransferEngine"]

log = logging.getLogger("windlass")


class WindlassWeightTransferEngine(
    WeightTransferEngine[WindlassInitInfo, WindlassUpdateInfo]  # type: ignore[misc]
):
    """One worker's side of the backend ``windlass``."""

    init_info_cls = WindlassInitInfo
    update_info_cls = WindlassUpdateInfo

    def __init__(
        self, config: object, vllm_config: object, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._info: WindlassInitInfo | None = None
        self._receiving: Receiving | None = None
        self._pulling: Pulling | None = None

    def init_transfer_engine(self, init_info: WindlassInitInfo) -> None:
        """Joins what there is to join. Again replaces what was joined before."""
        self.shutdown()
        self._info = init_info
        if init_info.sync_info is not None:
            self._receiving = Receiving(
                self._live(), init_info.sync_info, init_info.strategy or {}, init_info.rank_offset
            )
        elif init_info.endpoint is not None:
            self._pulling = pulling_of(init_info)

    def start_weight_update(self) -> None:
        """Touches no weight: an order that is refused must leave the engine as it was."""
        if self._info is None:
            raise WindlassInvalid(
                "nobody said where weights come from: call /init_weight_transfer_engine first"
            )
        if self._receiving is not None:
            self._receiving.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Carries out an order or receives what a request announces."""
        # Not vLLM's own: that one needs an accelerator.
        info = self.parse_update_info(update_info)
        self.receive_weights(info)
        # A request is answered when its copies are started: the end of the update waits for them.
        if self.device.type != "cpu" and info.request is None:
            torch.accelerator.synchronize(self.device)

    def receive_weights(self, update_info: WindlassUpdateInfo) -> None:
        """See :meth:`update_weights`."""
        if update_info.request is not None:
            if self._receiving is None:
                raise WindlassInvalid("update_info has a request, and init_info named no strategy")
            self._receiving.update(update_info.request)
        elif update_info.order is not None:
            self._carry_out(update_info.order)
        else:
            raise WindlassInvalid("update_info has neither an order nor a request")

    def finish_weight_update(self) -> None:
        """Post-processes what a strategy brought; orders are finished by themselves."""
        if self._receiving is not None:
            self._receiving.finish()
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
        report = self.report()
        if report.state == "dirty":
            raise WindlassError(
                "the weights are not whole: load a version again before generation is resumed"
            )

    def shutdown(self) -> None:
        """Lets go of groups, connections and images."""
        receiving, self._receiving = self._receiving, None
        pulling, self._pulling = self._pulling, None
        self._info = None
        for end in (receiving, pulling):
            if end is not None:
                end.close()

    def report(self) -> Report:
        """What this worker says of itself."""
        told: Report = self._live().report()
        return told

    def _live(self) -> Any:
        own = None if self.model is self._default_model else self.model_config
        return live_of(self.model, self.vllm_config, own)

    def _carry_out(self, plain: dict[str, Any]) -> None:
        assert self._info is not None
        report = self._live().load(order_of(plain, self._info, self._pulling))
        if report.state == "dirty" and report.error is not None:
            raise report.error.error()
