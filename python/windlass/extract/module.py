"""Modules that every rank holds whole: plain ones, DistributedDataParallel, ``torch.compile``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from windlass.errors import WindlassInvalid
from windlass.extract.source import GatheringExtractor, Source

__all__ = ["ModuleWeightExtractor"]


class ModuleWeightExtractor(GatheringExtractor):
    """Weights of a module that is whole on every rank. Nothing is gathered and, without a cast, nothing copied.

    >>> model = torch.nn.Linear(3, 2)
    >>> chunk, _ = ModuleWeightExtractor().extract_weights(model)
    >>> chunk.tensors[0].data_ptr() == model.weight.data_ptr()
    True
    """

    @classmethod
    def fits(cls, model: torch.nn.Module) -> bool:
        """Always; whether it is whole is seen when it is extracted."""
        return True

    def sources(self, model: torch.nn.Module) -> Iterator[Source]:
        """The parameters themselves."""
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "ds_id") or hasattr(parameter, "placements") or _is_flat(parameter):
                raise WindlassInvalid(
                    f"{name!r} is spread over ranks, and {type(self).__name__} does not gather",
                    "use windlass.extract.extractor_for(model)",
                )
            yield Source.whole(name, parameter)


def _is_flat(parameter: torch.nn.Parameter) -> bool:
    return type(parameter).__name__ == "FlatParameter"
