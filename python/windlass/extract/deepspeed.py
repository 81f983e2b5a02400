"""Models under DeepSpeed, ZeRO stage 0 to 3.

Up to stage 2 every rank has whole parameters. Stage 3 leaves an empty tensor in the module, with the shape beside
it (``ds_shape``); each parameter is gathered by itself and copied before it is given back, since its memory goes
away with that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from windlass.extract.source import GatheringExtractor, Source

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DeepSpeedWeightExtractor", "inner_module"]


class DeepSpeedWeightExtractor(GatheringExtractor):
    """Weights of a ``DeepSpeedEngine``, or of the module in one.

    Every rank of the engine iterates::

        for chunk in DeepSpeedWeightExtractor(only_rank0=True).extract_weights(engine, "bfloat16"):
            send(chunk)                      # on rank 0; the others gather and get nothing
    """

    backends = frozenset({"deepspeed"})

    @classmethod
    def fits(cls, model: torch.nn.Module) -> bool:
        """Whether it is an engine, or partitioned by ZeRO-3."""
        return _is_engine(model) or any(hasattr(parameter, "ds_id") for parameter in model.parameters())

    def sources(self, model: torch.nn.Module) -> Iterator[Source]:
        """The engine's parameters under the names of its module."""
        parameters: Iterator[tuple[str, Any]] = inner_module(model).named_parameters()
        for name, parameter in parameters:
            if hasattr(parameter, "ds_id"):
                yield Source(name, parameter.dtype, tuple(parameter.ds_shape), _Gather(parameter))
            else:
                yield Source.whole(name, parameter)

    def buffer_sources(self, model: torch.nn.Module) -> Iterator[Source]:
        """The buffers of the engine's module."""
        return super().buffer_sources(inner_module(model))


class _Gather:
    """The whole of a parameter that ZeRO-3 has partitioned."""

    def __init__(self, parameter: Any) -> None:
        self.parameter = parameter

    def __call__(self) -> Tensor:
        import deepspeed

        with deepspeed.zero.GatheredParameters([self.parameter]):
            whole: Tensor = self.parameter.data.clone()
        return whole


def _is_engine(model: torch.nn.Module) -> bool:
    # By name: a model that is no engine must not cost the import of DeepSpeed.
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)


def inner_module(model: torch.nn.Module) -> torch.nn.Module:
    """The module in an engine; any other module itself."""
    inner: torch.nn.Module = model.module if _is_engine(model) else model  # type: ignore[assignment]
    return inner
