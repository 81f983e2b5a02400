"""A checkpoint engine as verl and NeMo-RL have it: one class, made in the trainer's ranks and in the engines' workers.

Owns: :class:`ReceivingHalf`; the other half is a :class:`~windlass.frameworks.sender.Sender`. Called by :mod:`windlass.verl` and
:mod:`windlass.nemo_rl`. Must not: tear anything down between two syncs, so that engines can come and go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from windlass.errors import WindlassInvalid
from windlass.load.order import LoadOrder
from windlass.receive.pulling import Brought, Pulling, PullOrder
from windlass.receive.receiver import open_image

if TYPE_CHECKING:
    import torch

__all__ = ["ReceivingHalf", "Staged"]


@dataclass(frozen=True)
class Staged:
    """A version on this host."""

    order: LoadOrder
    seconds: float
    wire_bytes: int

    def metrics(self) -> dict[str, float]:
        """What the trainer's log gets."""
        return {"windlass/stage_s": self.seconds, "windlass/wire_bytes": float(self.wire_bytes)}

    def batches(self, size: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The tensors, at least one and otherwise at most ``size`` bytes at a time. They are the image's own memory, which is held
        until the iteration has ended."""
        with open_image(self.order.image, self.order.timeout, self.order.timeout) as image:
            batch: list[tuple[str, torch.Tensor]] = []
            held = 0
            for name in image.tensors:
                tensor = image.tensors[name]
                if batch and held + tensor.nbytes > size:
                    yield batch
                    batch, held = [], 0
                batch.append((name, tensor))
                held += tensor.nbytes
            if batch:
                yield batch


class ReceivingHalf:
    """One worker of an engine: brings versions to its host. One worker of a host pulls."""

    def __init__(self, image_dir: str | None, timeout: float) -> None:
        self._image_dir, self._timeout = image_dir, timeout
        self._next: PullOrder | None = None
        self._pulling: Pulling | None = None
        self._brought: Brought | None = None
        self._busy = threading.Lock()

    def expect(self, source: Mapping[str, object]) -> None:
        """Takes note of what comes next, as :meth:`windlass.frameworks.sender.Sender.where` says it."""
        new = PullOrder.from_dict({**source, "image_dir": self._image_dir, "timeout": self._timeout})
        if self._pulling is not None and not self._pulling.follows(new):
            # What is awaited from a trainer that is gone must not keep the next one waiting.
            self._pulling.stop()
        with self._busy:
            self._next, self._brought = new, None

    def expect_next(self) -> None:
        """The version after the one that came last."""
        with self._busy:
            if self._brought is not None and self._next is not None:
                came = self._brought.identity
                after = {"incarnation": came.incarnation, "version": came.version + 1, "exact": True}
                self._next = PullOrder.from_dict({**self._next.to_dict(), **after})
                self._brought = None

    def bring(self) -> Staged:
        """Returns when what is expected is on this host; again is nothing."""
        with self._busy:
            return self._bring()

    def _bring(self) -> Staged:
        start = time.monotonic()
        if self._next is None:
            raise WindlassInvalid("nobody said where the next version comes from")
        if self._brought is None:
            self._pulling = Pulling.of(self._next, self._pulling)
            self._brought = self._pulling.bring(self._next.identity, self._timeout, exact=self._next.exact)
        brought = self._brought
        order = LoadOrder(
            **asdict(brought.identity),
            image=str(brought.image),
            digest=brought.digest,
            timeout=self._timeout,
        )
        size = 0 if brought.synced is None else brought.synced.wire_bytes
        return Staged(order, time.monotonic() - start, size)

    def close(self) -> None:
        """Lets go of the image."""
        if self._pulling is not None:
            self._pulling.close()
