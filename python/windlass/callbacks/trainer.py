"""The callback of ``transformers.Trainer``, and of all trainers that derive from it.

Owns: :class:`WindlassCallback`. Must not: import transformers where it is not.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from windlass.callbacks.publishing import DRAIN_S, Publishing, missing

if TYPE_CHECKING:
    import torch

    from windlass.publish.manager import WeightManager

    Base = object
    _why: ImportError
else:
    try:
        from transformers import TrainerCallback as Base
    except ImportError as e:
        Base, _why = object, e

__all__ = ["WindlassCallback"]


class WindlassCallback(Base):
    """Publishes the model of a ``transformers.Trainer`` after its optimizer steps.

    >>> trainer.add_callback(WindlassCallback(trainer, model_id="policy", every=1))             # doctest: +SKIP

    ``every`` is the number of optimizer steps from one version to the next; the last step is published too. The version is
    ``global_step``. The keyword arguments are those of :class:`windlass.WeightManager`; ``manager`` is one of your own instead, which is
    not closed at the end. When the training has ended, receivers have ``drain`` seconds to fetch the last version.

    With ``trainer``, figures of the newest version are in what the trainer logs, whenever it logs, and so in all of ``report_to``.
    Without it they are only in ``state.log_history`` and :attr:`metrics`, because reporters write before callbacks that were added
    later.
    """

    def __init__(
        self,
        trainer: Any = None,
        *,
        every: int = 1,
        manager: WeightManager | None = None,
        drain: float = DRAIN_S,
        **options: Any,
    ) -> None:
        if Base is object:
            raise missing("transformers", _why)
        self._publishing = Publishing(every, manager, drain, options)
        self._trainer = None if trainer is None else weakref.ref(trainer)
        #: The figures of the newest version, by the names that loggers plot.
        self.metrics: dict[str, float] = {}
        self._unlogged = False

    @property
    def manager(self) -> WeightManager | None:
        """What publishes, while a training is under way."""
        return self._publishing.manager

    def close(self) -> None:
        """Ends publishing. A training that ends does it; after one that failed, the end of the process or of the callback."""
        self._publishing.close()

    # What the trainer calls, on every rank.

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = None if self._trainer is None else self._trainer()
        if trainer is not None:
            # Before those that report. A new list: the old one is being gone through.
            handler = trainer.callback_handler
            handler.callbacks = [self, *(other for other in handler.callbacks if other is not self)]
        self._publishing.begin(state.global_step)

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: torch.nn.Module, optimizer: Any = None, **_: Any
    ) -> None:
        # An optimizer under fp16 skips a step whose gradients overflowed.
        changed = not getattr(optimizer, "step_was_skipped", False)
        last = control.should_training_stop or state.global_step >= state.max_steps > 0
        self._note(self._publishing.stepped(model, state.global_step, changed=changed, last=last))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if self._unlogged:
            self._unlogged = False
            logs.update(self.metrics)
            if state.log_history:
                state.log_history[-1].update(self.metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **_: Any) -> None:
        # By now the model may be an older one, which was the best.
        self._note(self._publishing.finish(None if args.load_best_model_at_end else model))

    def _note(self, done: Any) -> None:
        if done is not None:
            self.metrics, self._unlogged = done.metrics(), True
