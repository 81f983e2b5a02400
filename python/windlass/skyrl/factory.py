"""SkyRL since September 2026, which drives the trainer's half of vLLM's weight transfer: its engine ``skyrl_windlass``.

Owns: :func:`init_info`, :class:`WindlassTrainerInfo` and :class:`WindlassTrainerEngine`, registered in vLLM's
``WeightTransferTrainerFactory``. Called by :mod:`windlass.skyrl` once SkyRL has imported vLLM. Must not: talk to an engine from
another rank than the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from windlass.errors import WindlassInvalid
from windlass.frameworks import ray_hook
from windlass.skyrl.sending import Sending, Servers
from windlass.skyrl.settings import SETTINGS, VARIABLE

__all__ = ["WindlassTrainerEngine", "WindlassTrainerInfo", "init_info"]


@dataclass
class WindlassTrainerInfo(TrainerInitInfo):  # type: ignore[misc]
    """How a rank of the policy publishes, and which servers the first has load."""

    # `windlass` is the engine for scripts of vLLM's, which pause engines themselves.
    backend: ClassVar[str] = "skyrl_windlass"

    server_urls: Sequence[str]
    dtype: str
    settings: Mapping[str, Any] = field(default_factory=dict)


class WindlassTrainerEngine(TrainerWeightTransferEngine[WindlassTrainerInfo]):  # type: ignore[misc]
    """Publishes what SkyRL's source has, and has the servers load it: they are paused for the load alone."""

    init_info_cls = WindlassTrainerInfo

    #: What SkyRL's worker reads: the cache is reset between load and resume, which the worker cannot do.
    skyrl_handles_prefix_cache_reset = True
    #: No memory of a GPU is shared.
    skyrl_force_disable_expandable_segments = False
    #: Nothing on the GPU is used again for the next sync.
    skyrl_empty_cache_after_send = True

    def __init__(self, info: WindlassTrainerInfo, *, client: object, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self._servers = Servers(info.server_urls)
        self._sending = Sending(info.settings, info.dtype)
        self._reset = True

    @classmethod
    def trainer_init(cls, init_info: WindlassTrainerInfo, *, client: Any, source: Any = None) -> Any:
        """Starts publishing and tells the engines where; called on every rank of the policy."""
        if source is None:
            raise WindlassInvalid(
                "the engine skyrl_windlass needs the source of the weights, and SkyRL gave none",
                "see docs/compatibility.md for the versions of SkyRL that were run",
            )
        engine = cls(init_info, client=client, source=source)
        try:
            if engine.is_sender:
                client.init_weight_transfer_engine(engine._sending.where())
        except BaseException:
            engine.shutdown()
            raise
        return engine

    def skyrl_set_reset_prefix_cache(self, reset: bool) -> None:
        """Whether the next sync gives up cached prefixes; SkyRL says it before each."""
        self._reset = bool(reset)

    def send_weights(self) -> None:
        """One sync; called on every rank of the policy."""
        until = self._sending.deadline()
        model, prefix = getattr(self.source, "model", None), getattr(self.source, "weight_prefix", None)
        if model is None or prefix:
            # Megatron's exports, and models that the engines know by other names.
            published = self._sending.publish(self.source)
        else:
            # Each rank writes its own shards: nothing is gathered.
            published = self._sending.publish_model(model)
        if not self.is_sender:
            return
        self._sending.load(published, self._servers, until)
        try:
            if self._reset:
                self._servers.reset_prefix_cache(until)
        finally:
            # Their weights are whole.
            self._servers.resume(until)

    @property
    def metrics(self) -> dict[str, float]:
        """The figures of the last sync, on the first rank."""
        return self._sending.metrics

    def shutdown(self) -> None:
        """Ends publishing. The engines go on with the last version."""
        self._sending.close()


def init_info(rank: int, server_urls: Sequence[str], dtype: Any) -> WindlassTrainerInfo:
    """What ``WeightTransferTrainerFactory.trainer_init`` takes, with the settings of the run; the factory knows the engine then."""
    if WindlassTrainerInfo.backend not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(WindlassTrainerInfo.backend, WindlassTrainerEngine)
    settings = ray_hook.settings_in(VARIABLE, SETTINGS)
    return WindlassTrainerInfo(list(server_urls), str(dtype).removeprefix("torch."), settings, rank=rank)
