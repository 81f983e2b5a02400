"""A training loop of one's own, with Accelerate.

Owns: :class:`AcceleratePublisher`. Must not: import Accelerate; the program has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from windlass.callbacks.publishing import DRAIN_S, Publishing
from windlass.errors import WindlassInvalid

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from windlass.publish.manager import Offloaded, WeightManager

__all__ = ["AcceleratePublisher"]


class AcceleratePublisher:
    """Publishes a model that an ``Accelerator`` has prepared after its optimizer steps, on every rank.

    >>> with AcceleratePublisher(accelerator, model, model_id="policy", every=1) as publisher:   # doctest: +SKIP
    ...     for batch in batches:
    ...         with accelerator.accumulate(model):
    ...             accelerator.backward(model(**batch).loss)
    ...             optimizer.step()
    ...             optimizer.zero_grad()
    ...         publisher.step()

    ``model`` is what ``accelerator.prepare()`` gave: DDP, FSDP, FSDP2, DeepSpeed and compiled models are read as they are. ``every``
    is the number of optimizer steps from one version to the next; the last step is published too. The keyword arguments are those of
    :class:`windlass.WeightManager`; ``manager`` is one of your own instead, which is not closed at the end. When the block has ended,
    receivers have ``drain`` seconds to fetch the last version; after an error it ends at once. Figures of each version go to
    ``accelerator.log``.

    Versions count the steps from 1. ``accelerator.register_for_checkpointing(publisher)`` has them go on after ``load_state()``.
    """

    def __init__(
        self,
        accelerator: Any,
        model: torch.nn.Module,
        *,
        every: int = 1,
        manager: WeightManager | None = None,
        drain: float = DRAIN_S,
        **options: Any,
    ) -> None:
        if not hasattr(accelerator, "sync_gradients"):
            raise WindlassInvalid(
                f"accelerator is a {type(accelerator).__name__}: expected an accelerate.Accelerator"
            )
        self._accelerator, self._model = accelerator, model
        self._publishing = Publishing(every, manager, drain, options)
        self._steps = 0
        self._publishing.begin(0)
        #: The figures of the newest version, by the names that loggers plot.
        self.metrics: dict[str, float] = {}

    @property
    def manager(self) -> WeightManager | None:
        """What publishes, until the end."""
        return self._publishing.manager

    def step(self) -> Offloaded | None:
        """After each ``optimizer.step()``, also while gradients are accumulated, which it sees. What was published, if it was the turn
        of a version."""
        if not self._accelerator.sync_gradients:
            return None
        self._steps += 1
        changed = not self._accelerator.optimizer_step_was_skipped
        return self._note(self._publishing.stepped(self._model, self._steps, changed=changed))

    def finish(self) -> None:
        """The training has ended: publishes the last step, waits for receivers, and ends."""
        self._note(self._publishing.finish(self._model))

    def close(self) -> None:
        """Ends at once."""
        self._publishing.close()

    def state_dict(self) -> dict[str, int]:
        """For ``accelerator.register_for_checkpointing``."""
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Versions go on after those of a checkpoint; if newer ones were published, under a new incarnation."""
        self._steps = int(state["steps"])
        self._publishing.begin(self._steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()

    def _note(self, done: Offloaded | None) -> Offloaded | None:
        if done is not None:
            self.metrics = done.metrics()
            self._accelerator.log(self.metrics, step=done.version)
        return done
