"""A store: engines follow objects in S3, GCS, Azure or on a shared disk, and need no connection to the trainer.

Owns: :class:`StoreTransferStrategy`, a strategy over :class:`windlass.WeightManager` and :class:`windlass.Receiver` for
engines that cannot reach the trainer's agent: in another cloud, or behind a router that lets nothing in. The sync info
carries the URL of the store. Credentials are in the environment of each side.

1. every training rank offloads its share of the version; the agent uploads it in the background;
2. rank 0 waits until the version is in the store, and announces a
   :class:`windlass.transfer.request.StoreWeightUpdateRequest`;
3. each engine fetches into its image what it does not have, proves the digest, and hands the image to the loader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from windlass.config import StoreConfig, WeightManagerConfig
from windlass.errors import WindlassDenied, WindlassInvalid
from windlass.identity import Identity
from windlass.transfer.base import WeightTransferStrategy
from windlass.transfer.request import StoreWeightUpdateRequest
from windlass.transfer.sync_info import StoreWeightSyncInfo, info_for
from windlass.transfer.tcp import PublishingSender, PullingReceiver, PullSettings
from windlass.transfer.trainer import TrainerRanks

if TYPE_CHECKING:
    from windlass.publish.manager import WeightManager
    from windlass.transfer.request import WeightUpdateRequest
    from windlass.transfer.sync_info import WeightSyncInfo

__all__ = ["StoreSettings", "StoreTransferReceiver", "StoreTransferSender", "StoreTransferStrategy"]


@dataclass(frozen=True, kw_only=True)
class StoreSettings(PullSettings):
    """``store_url`` is where versions are stored: a URL, or a path on a disk that both sides see. ``store`` are further fields of
    :class:`windlass.config.StoreConfig`. The others are those of :class:`~windlass.transfer.tcp.PullSettings`."""

    links: ClassVar[tuple[str, ...]] = ("store", "file")

    store_url: str = ""
    store: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.store_url, str) or not self.store_url:
            raise self._bad("store_url", "the URL of a store, such as 's3://bucket/run'")
        if not isinstance(self.store, Mapping) or "url" in self.store:
            raise self._bad("store", "a dictionary of the fields of StoreConfig but url, which is store_url")
        super().__post_init__()

    @property
    def url(self) -> str:
        """The URL of the store."""
        return self.store_url if "://" in self.store_url else f"file://{self.store_url}"

    def config(self) -> WeightManagerConfig:
        """How the trainer publishes."""
        store = StoreConfig.from_dict({"url": self.url, **self.store})
        return dataclasses.replace(super().config(), store=store)


class StoreTransferStrategy(WeightTransferStrategy):
    """Engines follow a store.

    >>> strategy = StoreTransferStrategy({"store_url": "s3://bucket/run", "model_id": "actor"})
    >>> strategy.create_sync_info()
    StoreWeightSyncInfo(url='s3://bucket/run')
    """

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        super().__init__(config)
        self.settings = StoreSettings.from_dict(self._config)

    def create_sync_info(self) -> StoreWeightSyncInfo:
        """Where versions will be."""
        return StoreWeightSyncInfo(self.settings.url)

    def create_sender(self, sync_info: WeightSyncInfo) -> StoreTransferSender:
        """The trainer's end; every training rank makes one."""
        info = info_for("this strategy", sync_info, StoreWeightSyncInfo)
        return StoreTransferSender(self.settings, info, TrainerRanks())

    def create_receiver(self, sync_info: WeightSyncInfo, *, rank: int = 1) -> StoreTransferReceiver:
        """The engine's end, with an image of its own."""
        info = info_for("this strategy", sync_info, StoreWeightSyncInfo)
        return StoreTransferReceiver(self.settings, info, rank)

    def get_request_type(self) -> type[StoreWeightUpdateRequest]:
        """Requests that name a version in a store."""
        return StoreWeightUpdateRequest


class StoreTransferSender(PublishingSender):
    """Publishes versions; the engines fetch them from the store."""

    def __init__(self, settings: StoreSettings, info: StoreWeightSyncInfo, ranks: TrainerRanks) -> None:
        super().__init__(settings.config(), ranks, settings.timeout)
        self._info = info

    def _request(self, manager: WeightManager, identity: Identity) -> WeightUpdateRequest:
        manager.wait_stored(identity.version, self._timeout)
        return StoreWeightUpdateRequest(self._info.url, identity)


class StoreTransferReceiver(PullingReceiver):
    """Fetches from the store."""

    request_type = StoreWeightUpdateRequest

    def __init__(self, settings: StoreSettings, info: StoreWeightSyncInfo, rank: int) -> None:
        super().__init__(settings, rank)
        self._info, self._model_id = info, settings.model_id

    def _source(self, request: WeightUpdateRequest) -> tuple[Identity, Mapping[str, Any]]:
        if not isinstance(request, StoreWeightUpdateRequest):
            raise WindlassInvalid(f"the request is {type(request).__name__}: this engine follows a store")
        if request.url != self._info.url:
            raise WindlassDenied(
                f"the request names the store {request.url}, and this engine was told {self._info.url}",
                "make new sync info if the store has moved",
            )
        self._refuse_model(request.identity, self._model_id)
        return request.identity, {"store": f"{self._info.url.rstrip('/')}/{self._model_id}"}
