"""A trainer and a receiver for tests: publishes models, and makes the orders that workers are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windlass import Receiver, WeightManager


class Publishing:
    """Publishes versions of a model and keeps an image of them on this host."""

    def __init__(self, home: Path, model_id: str = "policy", **receiver: Any) -> None:
        self._manager = WeightManager(model_id=model_id, region_dir=str(home))
        self._home = home
        self._how = receiver
        self._receiver: Receiver | None = None
        self.model_id = model_id
        self.image = str(home / "image" / model_id)

    def publish(self, weights: Any, version: int, **order: Any) -> dict[str, Any]:
        """Brings a version into the image, and returns the order to load it."""
        self._manager.offload(weights, version, 0, 1)
        if self._receiver is None:
            self._receiver = Receiver(self._home / "image", region=self._manager.region, **self._how)
        self.told = self._receiver.wait(version, 60)
        return self.order(**order)

    def begin_again(self) -> None:
        """As a trainer that was restarted: another incarnation, and possibly another layout."""
        self._manager.resume()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def order(self, **changes: Any) -> dict[str, Any]:
        """The order for what the image holds."""
        assert self._receiver is not None
        with self._receiver.hold() as image:
            order = {
                "image": self.image,
                "model_id": self.model_id,
                "incarnation": image.incarnation,
                "version": image.version,
                "digest": image.digest or "",
            }
        return {**order, **changes}

    def tensors(self) -> dict[str, Any]:
        """Copies of the image's tensors, by the names of a checkpoint."""
        assert self._receiver is not None
        with self._receiver.hold() as image:
            return {name: tensor.clone() for name, tensor in image.tensors.items()}

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._manager.close()

    def __enter__(self) -> Publishing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
