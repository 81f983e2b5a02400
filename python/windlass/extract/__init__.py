"""Getting whole weights out of a trainer's model, chunk by chunk.

One extractor for each way a model can be spread over ranks; :func:`extractor_for` picks it. All of them give the
same thing: an iterator of :class:`~windlass.extract.chunk.WeightChunk` under checkpoint names, gathered one parameter at a
time, cast on the device where the weight is, cut by the same rules.

Who takes part
    Gathering is a collective: **every rank iterates, and to the same point**. A rank that stops after chunk n must
    not be alone. By default every rank gets the chunks, as senders that hand out device memory need them on each;
    with ``only_rank0=True`` the other ranks gather and yield nothing, so that the loop that sends runs on rank 0
    alone and the same lines work everywhere. Ranks that wait for a slow sender wait inside a collective: its
    timeout is the one of the process group.

What is held
    The chunk that was yielded last belongs to the caller; the extractor keeps nothing of it. When the next one is
    asked for, at most that one chunk is alive, besides the parameter that its tensors are slices of (fused experts)
    and tensors that are put together of several parameters and not complete yet. Extractors that cannot say shapes
    in advance (:meth:`WeightExtractor._extract_metadata`) hold the first weight of the next chunk as well.

LoRA
    A model with LoRA adapters yields the adapters only, under the names that PEFT gives them, because the base has
    been sent before and does not change. ``lora=False`` yields the base weights instead (the first sync), and
    ``lora=True`` refuses a model without adapters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from windlass._lazy import lazily

if TYPE_CHECKING:
    import torch

    from windlass.extract.base import WeightExtractor, settings
    from windlass.extract.deepspeed import DeepSpeedWeightExtractor
    from windlass.extract.fsdp import FSDPWeightExtractor
    from windlass.extract.megatron import MegatronWeightExtractor
    from windlass.extract.module import ModuleWeightExtractor
    from windlass.extract.source import GatheringExtractor, Source

__all__ = [
    "DeepSpeedWeightExtractor",
    "FSDPWeightExtractor",
    "GatheringExtractor",
    "MegatronWeightExtractor",
    "ModuleWeightExtractor",
    "Source",
    "WeightExtractor",
    "extractor_for",
    "settings",
]

#: All of them need torch, and :mod:`windlass.extract.chunk` does not.
_LAZY = {
    "DeepSpeedWeightExtractor": "windlass.extract.deepspeed",
    "FSDPWeightExtractor": "windlass.extract.fsdp",
    "GatheringExtractor": "windlass.extract.source",
    "MegatronWeightExtractor": "windlass.extract.megatron",
    "ModuleWeightExtractor": "windlass.extract.module",
    "Source": "windlass.extract.source",
    "WeightExtractor": "windlass.extract.base",
    "settings": "windlass.extract.base",
}
__getattr__ = lazily(__name__, _LAZY)


def extractor_for(model: torch.nn.Module, **options: Any) -> GatheringExtractor:
    """The extractor that fits this model; ``options`` are those of :class:`WeightExtractor`.

    Megatron models are not recognised: their extractor needs the bridge.

    >>> import torch
    >>> type(extractor_for(torch.nn.Linear(2, 2))).__name__
    'ModuleWeightExtractor'
    """
    from windlass.extract.deepspeed import DeepSpeedWeightExtractor
    from windlass.extract.fsdp import FSDPWeightExtractor
    from windlass.extract.module import ModuleWeightExtractor

    for extractor in (DeepSpeedWeightExtractor, FSDPWeightExtractor):
        if extractor.fits(model):
            return extractor(**options)
    return ModuleWeightExtractor(**options)
