"""A policy under training, its publisher and its image on this host: what a driver of an engine has at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import tiny
from windlass import Receiver, WeightManager, _windlass


class Policy:
    """Publishes versions of a tiny model and keeps an image at the newest."""

    def __init__(self, kind: tiny.Kind, home: Path, extra: dict[str, torch.Tensor] | None = None) -> None:
        self.model = tiny.model(kind)
        self.version = 0
        self._extra = extra
        # What is not of a checkpoint is left out unless it is asked for.
        include = ["*"] if extra else []
        self.manager = WeightManager(model_id="policy", region_dir=str(home / "region"), include=include)
        self._home = home
        self._receiver: Receiver | None = None

    def step(self, seed: int | None = None, scale: float = 0.05, *, sparsely: bool = False) -> dict[str, Any]:
        """Trains a little, publishes, receives, and returns the order for it."""
        self.version += 1
        if sparsely:
            tiny.stir_some(self.model, self.version)
        else:
            tiny.stir(self.model, self.version if seed is None else seed, scale)
        return self.publish()

    def publish(self) -> dict[str, Any]:
        """Publishes the model as it is, as the current version."""
        source: Any = self.model
        if self._extra is not None:
            source = [*self.model.named_parameters(), *self._extra.items()]
        self.manager.offload(source, version=self.version, rank=0, world_size=1)
        if self._receiver is None:
            self._receiver = Receiver(self._home / "image", region=self.manager.region, keep_deltas=8)
        self._receiver.wait(self.version, timeout=60)
        return self.order()

    def order(self) -> dict[str, Any]:
        """The order to load what the image has."""
        assert self._receiver is not None
        with self._receiver.hold() as image:
            return {
                "image": str(image.path.parent),
                "model_id": "policy",
                "incarnation": image.incarnation,
                "version": image.version,
                "digest": image.digest,
                "timeout": 120.0,
            }

    def close(self) -> None:
        """Ends publisher and receiver."""
        if self._receiver is not None:
            self._receiver.close()
        self.manager.close()


def is_held_by(workers: list[dict[str, Any]], image: Path | str) -> bool:
    """Whether what workers hold, taken together, is the image."""
    held = _windlass.open_image(str(image), 30.0, 5.0)
    try:
        parts = [json.dumps(worker["parts"]) for worker in workers]
        return bool(json.loads(_windlass.combine_digests(held.layout(), parts))["digest"] == held.digest)
    finally:
        held.finish()
