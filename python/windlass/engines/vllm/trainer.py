"""The trainer's half of the backend ``windlass``: an existing vLLM training script changes one string.

Owns: :class:`WindlassTrainerWeightTransferEngine`, registered in vLLM's ``WeightTransferTrainerFactory``, and its
:class:`WindlassTrainerInitInfo`. Called in the trainer by vLLM's own factory. Must not: pause generation (the script
does, as with any other backend).

>>> info = WindlassTrainerInitInfo(rank=0, image_dir="/dev/shm/engine")                                # doctest: +SKIP
>>> engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))  # doctest: +SKIP
>>> engine.send_weights()                                                                              # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from windlass.config import WeightManagerConfig
from windlass.errors import WindlassInvalid
from windlass.load.order import LoadOrder
from windlass.publish.manager import WeightManager

__all__ = ["WindlassTrainerInitInfo", "WindlassTrainerWeightTransferEngine"]


@dataclass
class WindlassTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """How the trainer publishes. ``image_dir`` is a directory on the engine's host, best in memory; ``manager`` are the
    fields of a :class:`windlass.WeightManagerConfig`."""

    backend: ClassVar[str] = "windlass"

    image_dir: str = "/dev/shm/windlass-images"
    world_size: int = 1
    manager: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 600.0


class WindlassTrainerWeightTransferEngine(
    TrainerWeightTransferEngine[WindlassTrainerInitInfo]  # type: ignore[misc]
):
    """Publishes a source's weights and has the engines load them."""

    init_info_cls = WindlassTrainerInitInfo

    def __init__(self, info: WindlassTrainerInitInfo, *, client: object, source: object) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self._info = info
        self._manager = WeightManager(WeightManagerConfig.from_dict(dict(info.manager)))
        self._version = 0

    @classmethod
    def trainer_init(cls, init_info: WindlassTrainerInitInfo, *, client: Any, source: Any = None) -> Any:
        """Starts publishing and tells the engines where; called on every rank of the trainer."""
        if source is None:
            raise WindlassInvalid(
                "the backend windlass needs the source of the weights", "give source=ModuleSource(model)"
            )
        engine = cls(init_info, client=client, source=source)
        try:
            engine._manager.prepare(_Described(source), init_info.rank, init_info.world_size)
            if init_info.is_sender:
                token = engine._manager.token_file
                client.init_weight_transfer_engine(
                    {
                        "endpoint": engine._manager.endpoint,
                        "token": None if token is None else Path(token).read_text().strip(),
                        "image_dir": init_info.image_dir,
                        "model_id": engine._manager.config.model_id,
                        "timeout": init_info.timeout,
                    }
                )
        except BaseException:
            engine._manager.close()
            raise
        return engine

    def send_weights(self) -> None:
        """One round: publish, start, update, finish. Called on every rank of the trainer."""
        version = self._version + 1
        done = self._manager.offload(
            _Described(self.source),
            version,
            self._info.rank,
            self._info.world_size,
            timeout=self._info.timeout,
        )
        self._version = version
        if not self.is_sender:
            return
        order = LoadOrder(
            image=str(Path(self._info.image_dir) / self._manager.config.model_id),
            model_id=self._manager.config.model_id,
            incarnation=done.incarnation,
            version=version,
            timeout=self._info.timeout,
        )
        self.client.start_weight_update()
        self.client.update_weights({"order": order.to_dict()})
        self.client.finish_weight_update(order.label)

    @property
    def version(self) -> int:
        """The version that was sent last; 0 before the first."""
        return self._version

    def shutdown(self) -> None:
        """Ends publishing."""
        self._manager.close()


class _Described:
    """vLLM's source as :class:`windlass.WeightSource` describes it."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def metadata(self) -> Any:
        return [(meta.name, meta.dtype, meta.shape) for meta in self._source.metadata()]

    def __iter__(self) -> Any:
        return iter(self._source)

    def held_names(self) -> Any:
        held = getattr(self._source, "held_names", None)
        return None if held is None else held()
