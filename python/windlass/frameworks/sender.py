"""The trainer's side of a framework's weight sync.

Owns: :class:`Sender`, a :class:`windlass.WeightManager` for streams, which numbers the versions itself: frameworks give the same step
twice, or none. Called by the adapters. Must not: know an engine.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.config import WeightManagerConfig
from windlass.document import plain
from windlass.errors import WindlassError, WindlassNotFound
from windlass.identity import Identity
from windlass.names import SourceMap
from windlass.publish.manager import WeightManager
from windlass.publish.stream import WeightStream

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from windlass.publish.inputs import Weights

__all__ = ["Published", "Sender", "Source", "listed", "ray_address", "reached_by", "settings_of"]

log = logging.getLogger("windlass")


@dataclass(frozen=True)
class Source:
    """Where engines pull from."""

    endpoint: str
    token: str | None
    tls_ca: str | None = None

    def order(self, identity: Identity, timeout: float, image_dir: str | None) -> dict[str, Any]:
        """What brings a version to an engine's host: a :class:`windlass.receive.pulling.PullOrder` as plain data."""
        return {**asdict(self), **asdict(identity), "timeout": timeout, "image_dir": image_dir}


@dataclass(frozen=True)
class Published:
    """A version that this rank has published its share of."""

    identity: Identity
    #: Bytes that this rank wrote.
    bytes: int
    #: How long the trainer was held up.
    seconds: float

    def metrics(self) -> dict[str, float]:
        """What a framework's log gets."""
        return {
            "windlass/version": float(self.identity.version),
            "windlass/publish_bytes": float(self.bytes),
            "windlass/publish_s": self.seconds,
        }


def settings_of(
    model_id: str, manager: object = None, *, dtype: str | None = None, checkpoint: str | None = None
) -> dict[str, Any]:
    """Settings of a :class:`Sender` from the options that adapters have; ``manager`` may be a mapping of any library.

    >>> settings_of("policy", {"agent": {"ports": (1, 2)}}, dtype="bfloat16")
    {'model_id': 'policy', 'agent': {'ports': [1, 2]}, 'generator_dtype': 'bfloat16'}
    """
    said = {"generator_dtype": dtype, "checkpoint": checkpoint}
    given = {name: value for name, value in said.items() if value is not None}
    return {"model_id": model_id, **plain(manager or {}), **given}


def reached_by(address: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a :class:`windlass.WeightManagerConfig` with an agent that other hosts reach by an address of this one, unless they
    say themselves where it listens."""
    agent = dict(settings.get("agent") or {})
    if address is not None and "bind" not in agent:
        every = "::" if ":" in address else "0.0.0.0"
        agent = {"bind": every, "advertise_host": address, **agent}
    return {**settings, **({"agent": agent} if agent else {})}


def listed(metrics: Mapping[str, float]) -> str:
    """Figures for a line of a log.

    >>> listed({"windlass/pause_s": 0.25, "windlass/wire_bytes": 4096.0})
    'pause_s 0.25, wire_bytes 4096'
    """
    return ", ".join(f"{name.removeprefix('windlass/')} {value:g}" for name, value in metrics.items())


def ray_address() -> str | None:
    """The address by which other hosts reach this one, where Ray knows it."""
    ray = sys.modules.get("ray")
    return str(ray.util.get_node_ip_address()) if ray is not None and ray.is_initialized() else None


def _names_of(checkpoint: str) -> SourceMap | None:
    """The names of a checkpoint's model in memory, if transformers knows it."""
    where = Path(checkpoint)
    folder = where if where.is_dir() else where.parent
    if not (folder / "config.json").is_file():
        return None
    try:
        return SourceMap.from_config(str(folder))
    except (ImportError, WindlassError, ValueError, KeyError) as e:
        log.warning("the names of %s are taken as they are: %s", folder, e)
        return None


class Sender:
    """Publishes what a framework hands over, version by version. Every rank of the trainer that sees the stream makes one.

    ``settings`` are fields of a :class:`windlass.WeightManagerConfig`. Its ``checkpoint`` also completes what is not sent: see
    :class:`windlass.publish.stream.WeightStream`.
    """

    def __init__(
        self,
        settings: Mapping[str, object] | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        # Nobody but the engines is told of versions here, unless the user says so.
        config = WeightManagerConfig.from_dict({"controller": None, **dict(settings or {})})
        # Frameworks send what the model has in memory, which may be called or fused otherwise in a checkpoint.
        names = None if config.checkpoint is None else _names_of(config.checkpoint)
        self.manager = WeightManager(config, names=names, group=group)
        self._stream = WeightStream(rank, world_size, checkpoint=config.checkpoint, names=names)
        self._rank = rank, world_size
        self._version = 0

    @classmethod
    def in_ray(cls, settings: Mapping[str, object]) -> Sender:
        """That of this rank of ``torch.distributed``, reached by the address that Ray knows."""
        import torch.distributed as dist

        rank, world_size = dist.get_rank(), dist.get_world_size()
        return cls(reached_by(ray_address(), settings), rank=rank, world_size=world_size)

    @property
    def version(self) -> int:
        """The version that was published last; 0 before the first."""
        return self._version

    def publish(self, weights: Iterable[tuple[str, torch.Tensor]], timeout: float | None = None) -> Published:
        """Publishes a stream as the next version. It has been drained when this returns or raises."""
        with self._stream.version(weights) as source:
            return self.publish_model(source, timeout)

    def publish_model(self, weights: Weights, timeout: float | None = None) -> Published:
        """The same of anything that :meth:`windlass.WeightManager.offload` takes, such as a model of which each rank has shards."""
        start = time.monotonic()
        done = self.manager.offload(weights, self._version + 1, *self._rank, timeout=timeout)
        self._version = done.version
        identity = Identity(self.manager.config.model_id, done.incarnation, done.version)
        return Published(identity, done.bytes, time.monotonic() - start)

    def sealed(self, timeout: float | None = None) -> str:
        """Waits until engines can have the newest version, and returns its digest. On the rank that has the agent."""
        return self.manager.wait_delta_ready(timeout=timeout)

    def source(self) -> Source:
        """Where engines pull from, known before the first tensor is. On the rank that has the agent."""
        endpoint, file = self.manager.listen(), self.manager.token_file
        if endpoint is None:
            raise WindlassNotFound("this rank has no agent that engines could pull from", "ask rank 0")
        token = None if file is None else Path(file).read_text().strip()
        return Source(endpoint, token, self.manager.config.tls_ca)

    def where(self, version: int | None = None) -> dict[str, Any]:
        """On the rank that has the agent: where the next version will be, or where a ``version`` is; a
        :class:`~windlass.receive.pulling.PullOrder` as far as the trainer knows it."""
        source, manager = self.source(), self.manager
        return {
            **asdict(source),
            "model_id": manager.config.model_id,
            "incarnation": manager.incarnation,
            "version": self._version + 1 if version is None else version,
            "exact": manager.version is not None,
        }

    def close(self) -> None:
        """Ends the agent and removes the region."""
        self.manager.close()
