"""What vLLM's own routes say to the backend ``windlass``: where weights come from, and what to load.

Owns: :class:`WindlassInitInfo`, :class:`WindlassUpdateInfo`, and the order that the latter becomes. Called by the backends of all
versions of vLLM. Must not: touch a weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from windlass.errors import WindlassInvalid
from windlass.identity import Identity
from windlass.load.order import LoadOrder
from windlass.receive.pulling import Pulling

__all__ = ["WindlassInitInfo", "WindlassUpdateInfo", "order_of", "pulling_of"]


@dataclass
class WindlassInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where weights come from; see :mod:`windlass.engines.vllm.backend`."""

    image: str | None = None
    endpoint: str | None = None
    token: str | None = field(default=None, repr=False)
    tls_ca: str | None = None
    image_dir: str | None = None
    model_id: str | None = None
    sync_info: dict[str, Any] | None = field(default=None, repr=False)
    strategy: dict[str, Any] | None = None
    rank_offset: int = 1
    timeout: float = 300.0

    def __post_init__(self) -> None:
        ways = [self.image is not None, self.endpoint is not None, self.sync_info is not None]
        if sum(ways) != 1:
            raise WindlassInvalid(
                "init_info names none or several of image, endpoint and sync_info: give one of them",
                name="bad_value",
            )
        if self.endpoint is not None and not self.image_dir:
            raise WindlassInvalid(
                "init_info has an endpoint and no image_dir: name a directory for the image"
            )


@dataclass
class WindlassUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What to load; see :mod:`windlass.engines.vllm.backend`."""

    order: dict[str, Any] | None = None
    request: dict[str, Any] | None = None


def pulling_of(info: WindlassInitInfo) -> Pulling:
    """What brings versions from the endpoint that was named."""
    assert info.endpoint is not None and info.image_dir is not None
    return Pulling(info.image_dir, endpoint=info.endpoint, token=info.token, tls_ca=info.tls_ca)


def order_of(plain: dict[str, Any], info: WindlassInitInfo, pulling: Pulling | None) -> LoadOrder:
    """The order, once its version is in an image of this host."""
    name = plain.get("model_id") or info.model_id
    if not isinstance(name, str):
        raise WindlassInvalid("the order has no model_id")
    image = info.image if pulling is None else str(pulling.image_of(name))
    order = LoadOrder.from_dict({"image": image, "model_id": name, "timeout": info.timeout, **plain})
    if pulling is not None:
        pulling.bring(Identity(name, order.incarnation, order.version), order.timeout)
    return order
