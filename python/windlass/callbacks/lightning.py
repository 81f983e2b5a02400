"""The callback of Lightning's trainer, by either of the library's names.

Owns: :class:`LightningCallback`. Must not: import Lightning where it is not, or a second time by its other name.
"""

from __future__ import annotations

import operator
import sys
from typing import TYPE_CHECKING, Any

from windlass.callbacks.publishing import DRAIN_S, Publishing, missing

if TYPE_CHECKING:
    import torch

    from windlass.publish.manager import Offloaded, WeightManager

    Base = object
    _why: ImportError
else:
    try:
        # They are two libraries with the same content, and a program uses one of them.
        if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
            from pytorch_lightning import Callback as Base
        else:
            try:
                from lightning.pytorch import Callback as Base
            except ImportError:
                from pytorch_lightning import Callback as Base
    except ImportError as e:
        Base, _why = object, e

__all__ = ["LightningCallback"]


class LightningCallback(Base):
    """Publishes the model of a Lightning ``Trainer`` after its optimizer steps.

    >>> trainer = Trainer(callbacks=[LightningCallback(model_id="policy", every=1)])            # doctest: +SKIP

    ``every`` is the number of optimizer steps from one version to the next; the last step is published too. The version is
    ``trainer.global_step``. The whole ``LightningModule`` is published, as its strategy shards it; a model of transformers
    inside is found and has its checkpoint's names. ``module`` names the attribute that holds the policy, if there are others next to
    it (``module="actor"``). The keyword arguments are those of :class:`windlass.WeightManager`; ``manager`` is one of your own
    instead, which is not closed at the end. When the training has ended, receivers have ``drain`` seconds to fetch the last
    version. Figures of each version go into the trainer's loggers, as often as those log.
    """

    def __init__(
        self,
        *,
        every: int = 1,
        module: str | None = None,
        manager: WeightManager | None = None,
        drain: float = DRAIN_S,
        **options: Any,
    ) -> None:
        if Base is object:
            raise missing("lightning", _why)
        super().__init__()
        self._publishing = Publishing(every, manager, drain, options)
        self._module = module
        #: The figures of the newest version, by the names that loggers plot.
        self.metrics: dict[str, float] = {}

    @property
    def manager(self) -> WeightManager | None:
        """What publishes, while a training is under way."""
        return self._publishing.manager

    def close(self) -> None:
        """Ends publishing. A training that ends or fails does it."""
        self._publishing.close()

    # What the trainer calls, on every rank.

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._publishing.begin(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # While gradients are accumulated, the number of steps stays.
        done = self._publishing.stepped(self._model(trainer, pl_module), trainer.global_step)
        if done is not None:
            self._note(done)
            pl_module.log_dict(self.metrics, on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        done = self._publishing.finish(self._model(trainer, pl_module))
        if done is not None:
            self._note(done)
            for logger in trainer.loggers:
                logger.log_metrics(self.metrics, step=trainer.global_step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._publishing.close()

    def _model(self, trainer: Any, pl_module: Any) -> torch.nn.Module:
        found: torch.nn.Module = (
            trainer.strategy.model if self._module is None else operator.attrgetter(self._module)(pl_module)
        )
        return found

    def _note(self, done: Offloaded) -> None:
        self.metrics = done.metrics()
