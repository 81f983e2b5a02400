"""Megatron models, through their bridge.

megatron-bridge knows how a Megatron model becomes a Hugging Face checkpoint: it gathers over tensor, expert and
pipeline ranks and yields whole weights under checkpoint names. This adapter only decides how much is converted at a
time. The bridge is given, not made, and is used by these members alone::

    bridge.get_conversion_tasks(model)
        One task for each parameter, the same list on every rank; entries may be None. Of a task: ``param_weight``
        (None on ranks that do not hold it), ``mapping.tp_size``, ``mapping.ep_size`` and ``mapping.is_expert``
        where they are there, and ``mapping.group_key`` of tasks with ``mapping.is_grouped_export``, which make up
        one weight together.
    bridge.export_hf_weights(model, cpu=False, show_progress=False, conversion_tasks=tasks)
        An iterator of tuples that begin with name and weight, or a mapping of names and weights.
    bridge.export_adapter_weights(model, cpu=False, show_progress=False)
        The same for LoRA adapters; only used with ``lora=True``.

What was verified: the buckets, the collectives of all ranks and the equality of what comes out, with the real
tensor-parallel layers of megatron-core at TP 2 over gloo, and a bridge of the test's own that has the members above.
megatron-bridge itself needs transformer_engine and thereby a GPU build; it was not run with this adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from windlass import _windlass
from windlass.errors import WindlassInvalid, WindlassUnsupported
from windlass.exchange import OverGroup
from windlass.extract.base import WeightExtractor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MegatronWeightExtractor"]


class MegatronWeightExtractor(WeightExtractor):
    """Weights of a Megatron model, converted by ``bridge``, which is the first argument or follows the configuration.

    With ``threshold_gb`` the conversion tasks are put into buckets of about that size when the extractor is made,
    once for all syncs, and each bucket is converted and yielded as one chunk. All ranks make the extractor together
    and iterate together. Without a threshold, each weight is a chunk.

    LoRA adapters are merged into the weights by the bridge; ``lora=True`` yields the adapters instead. There is no
    detection: whether a Megatron model has adapters is the bridge's knowledge.
    """

    backends = frozenset({"megatron"})

    def __init__(
        self,
        bridge_or_cfg: object = None,
        model: object = None,
        *,
        bridge: Any = None,
        cfg: object = None,
        **options: Any,
    ) -> None:
        # A configuration of OmegaConf's has whatever attribute it is asked for.
        if not isinstance(bridge_or_cfg, Mapping) and hasattr(bridge_or_cfg, "export_hf_weights"):
            bridge = bridge_or_cfg
        elif bridge_or_cfg is not None:
            cfg = bridge_or_cfg
        if bridge is None or model is None:
            raise WindlassInvalid(
                f"{type(self).__name__} needs the bridge that converts, and the model",
                "MegatronWeightExtractor(bridge, model), or MegatronWeightExtractor(cfg, model, bridge=bridge)",
            )
        super().__init__(cfg, model, **options)
        self.bridge = bridge
        self.buckets = self._buckets() if self._should_batch_by_threshold() else None

    def _buckets(self) -> list[list[Any]]:
        """Tasks that are converted together, in their order; the same on every rank."""
        units: dict[object, list[Any]] = {}
        for number, task in enumerate(self.bridge.get_conversion_tasks(self.model)):
            if task is not None:
                grouped = getattr(task.mapping, "is_grouped_export", False)
                units.setdefault(task.mapping.group_key if grouped else number, []).append(task)
        sizes = _largest([sum(map(_bytes, tasks)) for tasks in units.values()])
        chunker = _windlass.Chunker(threshold_bytes=self.threshold_bytes)
        done = []
        for number, (size, tasks) in enumerate(zip(sizes, units.values())):
            done += chunker.push(str(number), "uint8", [size], tasks)
        done += chunker.finish()
        return [[task for *_, tasks in items for task in tasks] for _, items in done]

    def _extract_raw_weights(self, model: Any) -> Iterator[tuple[str, Tensor]]:
        return self._export(None)

    def _extract_buckets(self, model: Any) -> Iterable[Iterator[tuple[str, Tensor]]] | None:
        return None if self.buckets is None else map(self._export, self.buckets)

    def _export(self, bucket: list[Any] | None) -> Iterator[tuple[str, Tensor]]:
        exported = self.bridge.export_hf_weights(
            self.model, cpu=False, show_progress=False, conversion_tasks=bucket
        )
        for weight in _tuples(exported):
            pair = [(weight[0], weight[1].detach())]
            del weight
            yield pair.pop()

    def _extract_lora(self, model: Any) -> Iterator[tuple[str, Tensor]] | None:
        if not self.lora:
            return None
        export = getattr(self.bridge, "export_adapter_weights", None)
        if export is None:
            raise WindlassUnsupported(
                f"{type(self.bridge).__name__} has no export_adapter_weights",
                "use a newer bridge, or leave lora out: adapters are merged into the weights then",
            )
        return (
            (weight[0], weight[1].detach())
            for weight in _tuples(export(self.model, cpu=False, show_progress=False))
        )


def _tuples(exported: Any) -> Iterable[Any]:
    return exported.items() if isinstance(exported, Mapping) else exported


#: How long ranks may take to tell each other the sizes.
AGREE_S = 300.0


def _bytes(task: Any) -> int:
    """About what a task's weight takes when it is whole; 0 on a rank that does not hold it."""
    if task.param_weight is None:
        return 0
    mapping = task.mapping
    ranks = getattr(mapping, "tp_size", 1) * (
        getattr(mapping, "ep_size", 1) if getattr(mapping, "is_expert", False) else 1
    )
    size: int = task.param_weight.numel() * task.param_weight.element_size() * ranks
    return size


def _largest(sizes: list[int]) -> list[int]:
    """The sizes as the ranks that hold the weights know them."""
    if not (dist.is_available() and dist.is_initialized()):
        return sizes
    everywhere: list[list[int]] = OverGroup(None).all(sizes, AGREE_S)
    lengths = sorted({len(those) for those in everywhere})
    if len(lengths) > 1:
        raise WindlassInvalid(
            f"ranks have different numbers of conversion tasks: {lengths}", "give every rank the same model"
        )
    return [max(those) for those in zip(*everywhere)]
