"""Parameters that can be gathered one at a time.

The trainers that spread a torch module differ in one thing only: how one parameter becomes whole. An extractor for
such a trainer lists its parameters as :class:`Source` and gets metadata, weights and adapters from that list.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from windlass.errors import WindlassInvalid
from windlass.extract.base import Metadata, WeightExtractor
from windlass.extract.pieces import Views
from windlass.names import names_of, persistent_buffers

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GatheringExtractor", "Source", "gathered"]


@dataclass(frozen=True)
class Source:
    """A parameter: what it is when it is whole, and the collective that makes it so.

    ``gather`` is called by all ranks, without gradients, and its result shares no memory that goes away. It may be
    the parameter itself where that is whole already.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    gather: Callable[[], Tensor]

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Source:
        """A tensor that every rank has."""
        if tensor.is_meta or tensor.layout != torch.strided:
            what = "is on the meta device and has no values" if tensor.is_meta else f"is {tensor.layout}"
            raise WindlassInvalid(f"{name!r} {what}", "materialise the model before it is extracted")
        return cls(name, tensor.dtype, tuple(tensor.shape), tensor.detach)


class GatheringExtractor(WeightExtractor):
    """An extractor for a torch module whose parameters are gathered one at a time.

    ``buffers=True`` adds the persistent buffers, after the parameters.
    """

    needs_model = True

    def __init__(
        self,
        cfg: object = None,
        model: torch.nn.Module | None = None,
        *,
        buffers: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(cfg, model, **options)
        self.buffers = buffers
        self._made: tuple[weakref.ref[torch.nn.Module], Views] | None = None

    @classmethod
    @abstractmethod
    def fits(cls, model: torch.nn.Module) -> bool:
        """Whether this model is spread the way this extractor gathers."""

    @abstractmethod
    def sources(self, model: torch.nn.Module) -> Iterator[Source]:
        """All parameters of the model in one order on every rank, a tied one once."""

    def buffer_sources(self, model: torch.nn.Module) -> Iterator[Source]:
        """The buffers that a checkpoint holds. Every rank has them whole."""
        return (Source.whole(name, buffer) for name, buffer in persistent_buffers(model))

    def _wanted(self, model: torch.nn.Module) -> Iterator[Source]:
        """Without what is not part of the checkpoint: that need not even be gathered."""
        views = self._source_map(model)
        found = [*self.sources(model), *(self.buffer_sources(model) if self.buffers else ())]
        return (source for source in found if views is None or views.views(source.name, source.shape))

    def _extract_metadata(self, model: torch.nn.Module) -> Iterable[Metadata]:
        return [(source.name, source.dtype, source.shape) for source in self._wanted(model)]

    def _extract_raw_weights(self, model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
        return gathered(self._wanted(model))

    def _extract_lora(self, model: torch.nn.Module) -> Iterator[tuple[str, Tensor]] | None:
        from windlass.extract.adapters import adapters_of
        from windlass.extract.lora import adapter_sources, is_lora

        if is_lora(model):
            return gathered(adapter_sources(model, self)[0])
        # Any other adapter would be left out, and what is trained with it.
        adapters_of(model)
        return None

    def _source_map(self, model: torch.nn.Module) -> Views | None:
        if self.names is not None:
            return self.names
        if self._made is None or self._made[0]() is not model:
            # Made once: that takes a pass over the model's structure.
            self._made = (weakref.ref(model), names_of(model))
        return self._made[1]


def gathered(sources: Iterable[Source]) -> Iterator[tuple[str, Tensor]]:
    """Gathers each source when it is asked for, and keeps none."""
    for source in sources:
        with torch.no_grad():
            # Not in a variable: while this generator waits, the weight is the caller's alone.
            box = [source.gather()]
        yield source.name, box.pop()
