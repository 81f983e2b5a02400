"""SkyRL 0.3: a strategy of its own for weight transfer.

Owns: :func:`install_in`. Called by :mod:`windlass.skyrl`. Must not: change a sync of any other backend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from windlass.frameworks import ray_hook
from windlass.skyrl.settings import BACKEND, SETTINGS, VARIABLE

if TYPE_CHECKING:
    from windlass.skyrl.sending import Sending

__all__ = ["install_in"]


def install_in(weight_sync: ModuleType) -> None:
    """SkyRL chooses a class by a function, which does not know the backend."""
    class_of, name_of = weight_sync.get_transfer_strategy_cls, weight_sync.get_transfer_strategy

    def get_transfer_strategy_cls(weight_sync_backend: str, colocate_all: bool) -> Any:
        if name_of(weight_sync_backend, colocate_all) != BACKEND:
            return class_of(weight_sync_backend, colocate_all)
        return _strategy(weight_sync)

    weight_sync.get_transfer_strategy_cls = get_transfer_strategy_cls  # type: ignore[attr-defined]


def _strategy(weight_sync: ModuleType) -> Any:
    """The strategy as a class of SkyRL's."""

    class WindlassInitInfo(weight_sync.WeightSyncInitInfo):  # type: ignore[misc, name-defined]
        """What engines are told once."""

        def __init__(self, sending: Sending) -> None:
            super().__init__(override_existing_receiver=True)
            self.sending = sending

        def for_servers(self, world_size_per_server: int, num_servers: int, dp_size: int = 1) -> list[Any]:
            return [self] * num_servers

        def to_api_payload(self) -> dict[str, Any]:
            return self.sending.where()

    class WindlassSender(weight_sync.WeightTransferSender):  # type: ignore[misc, name-defined]
        """SkyRL's sender."""

        def __init__(self, sending: Sending, client: Any) -> None:
            self._sending, self._client = sending, client

        async def send_chunks(self, chunks: Iterable[Any], weight_metadata: Any = None, **_: Any) -> None:
            """Publishes; on the first rank, has all engines load. They stay paused: who asked for the sync resumes them, as with
            SkyRL's own backends."""
            import torch.distributed as dist

            from windlass.skyrl.sending import Servers

            until = self._sending.deadline()
            published = self._sending.publish(_pairs(chunks))
            if dist.get_rank() == 0:
                servers = Servers(self._client.server_urls)
                await asyncio.to_thread(self._sending.load, published, servers, until)

        def teardown(self) -> None:
            self._sending.close()

    class WindlassTransferStrategy(weight_sync.WeightTransferStrategy):  # type: ignore[misc, name-defined]
        """What ``weight_sync_backend=windlass`` means."""

        @staticmethod
        def create_init_info(ie_cfg: Any, inference_world_size: Any = None, **_: Any) -> Any:
            from windlass.skyrl.sending import Sending

            return WindlassInitInfo(Sending(ray_hook.settings_in(VARIABLE, SETTINGS)))

        @staticmethod
        def get_vllm_transfer_engine() -> type:
            from windlass.engines.vllm.backend import WindlassWeightTransferEngine

            return WindlassWeightTransferEngine

        @staticmethod
        def create_sender(init_info: Any, inference_client: Any) -> Any:
            return WindlassSender(init_info.sending, inference_client)

    return WindlassTransferStrategy


def _pairs(chunks: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for chunk in chunks:
        yield from zip(chunk.names, chunk.tensors, strict=True)
