"""The transfer backend ``windlass`` of vLLM before 0.26, whose backends are given the model and nothing else.

Owns: :class:`OlderWeightTransferEngine`. Called by vLLM's own routes, as :mod:`windlass.engines.vllm.backend` is. Must not: keep a
thread. These versions begin an update by taking the model apart for its loader, so that every version is loaded whole; the worker's
methods (:mod:`windlass.engines.vllm.extension`) load only what changed there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from windlass.engines.vllm.infos import WindlassInitInfo, WindlassUpdateInfo, order_of, pulling_of
from windlass.errors import WindlassInvalid, WindlassStale, WindlassUnsupported
from windlass.receive.pulling import Pulling
from windlass.receive.receiver import open_image

__all__ = ["OlderWeightTransferEngine"]


class OlderWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """One worker's side of the backend ``windlass``."""

    init_info_cls = WindlassInitInfo
    update_info_cls = WindlassUpdateInfo

    def __init__(self, config: object, parallel_config: object, model: object) -> None:
        super().__init__(config, parallel_config, model)
        self._info: WindlassInitInfo | None = None
        self._pulling: Pulling | None = None

    def init_transfer_engine(self, init_info: WindlassInitInfo) -> None:
        """Takes note of where versions come from. Again replaces what was said before."""
        if init_info.sync_info is not None:
            raise WindlassUnsupported(
                "vLLM before 0.26 takes no strategies through the backend windlass",
                "give init_info an endpoint or an image, or use a newer vLLM",
            )
        self.shutdown()
        self._info = init_info
        if init_info.endpoint is not None:
            self._pulling = pulling_of(init_info)

    def receive_weights(
        self, update_info: WindlassUpdateInfo, load_weights: Callable[[Iterable[tuple[str, Any]]], Any]
    ) -> None:
        """Brings a version to this host and gives all of it to vLLM's loader."""
        if self._info is None:
            raise WindlassInvalid(
                "nobody said where weights come from: call /init_weight_transfer_engine first"
            )
        if update_info.order is None:
            raise WindlassInvalid("update_info has no order")
        if getattr(load_weights, "__func__", None) is None:
            raise WindlassInvalid(
                "the update was started for weights in the engine's own format, and versions are in that of checkpoints",
                "start it with is_checkpoint_format=true, which is the default",
            )
        order = order_of(update_info.order, self._info, self._pulling)
        with open_image(order.image, order.timeout, order.timeout) as image:
            if (image.incarnation, image.version) != (order.incarnation, order.version):
                raise WindlassStale(
                    f"the image has {image.incarnation:016x}:{image.version}, and the order is for {order.label}"
                )
            live = self.model.__dict__.get("_windlass_live")
            if live is not None:
                live.forget("vLLM's own loader loads a version")
            load_weights((name, image.tensors[name]) for name in image.tensors)

    def shutdown(self) -> None:
        """Lets go of the agent."""
        pulling, self._pulling = self._pulling, None
        self._info = None
        if pulling is not None:
            pulling.close()

    @staticmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None:
        """Not by way of vLLM: trainers publish."""
        raise WindlassUnsupported(
            "trainers do not send to the backend windlass", "publish with windlass.WeightManager"
        )
