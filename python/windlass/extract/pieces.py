"""From the weights of a trainer to the tensors of a checkpoint: cut, put together, cast.

Called by :mod:`windlass.extract.base` alone, on real tensors and on shadows without memory; it must do the same to
both, because chunks are planned on the shadows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch

from windlass.dtypes import torch_dtype
from windlass.errors import WindlassInvalid

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.names import DtypeRules, View

__all__ = ["Pieces", "Views"]


class Views(Protocol):
    """The source map as extractors use it: see :class:`windlass.names.SourceMap`."""

    def views(self, name: str, shape: tuple[int, ...]) -> tuple[View, ...]:
        """Where the parts of this parameter stand in the checkpoint; () for one that is not in it."""
        ...


class Pieces:
    """Turns raw weights into checkpoint tensors, one stream at a time.

    ``views`` of None leaves names and shapes as they are; ``dtypes`` says what each tensor is cast to.
    """

    def __init__(self, views: Views | None, dtypes: DtypeRules) -> None:
        self._views = views
        self._dtypes = dtypes
        self._parts: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}

    def stream(self, raw: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint tensors of these weights; holds nothing that it has yielded."""
        for name, tensor in raw:
            parts = self._cut(name, tensor)
            del tensor
            while parts:
                view, part = parts.pop(0)
                whole = view is None or list(part.shape) == list(view.shape)
                image = name if view is None else view.name
                done = [part.to(self._target(image, part))] if whole else []
                if view is not None and not whole:
                    done = self._put(view, part)
                # What is yielded is in no variable of this frame: it is the caller's alone.
                del part
                if done:
                    yield image, done.pop()
        if self._missing:
            name, count = next(iter(self._missing.items()))
            raise WindlassInvalid(
                f"{name!r} lacks {count} of its elements: no parameter of the model holds them",
                "give a source map whose views cover each tensor",
            )

    def _cut(self, name: str, tensor: Tensor) -> list[tuple[View | None, Tensor]]:
        if self._views is None:
            return [(None, tensor)]
        return [(view, _slice(tensor, view)) for view in self._views.views(name, tuple(tensor.shape))]

    def _put(self, view: View, part: Tensor) -> list[Tensor]:
        """Copies a part into its tensor; gives the tensor when it is complete."""
        name = view.name
        if name not in self._parts:
            dtype = self._target(name, part)
            self._parts[name] = torch.empty(view.shape, dtype=dtype, device=part.device)
            self._missing[name] = self._parts[name].numel()
        box = tuple(slice(start, start + size) for start, size in zip(view.at, part.shape))
        self._parts[name][box].copy_(part)
        self._missing[name] -= part.numel()
        if self._missing[name] > 0:
            return []
        del self._missing[name]
        return [self._parts.pop(name)]

    def _target(self, name: str, tensor: Tensor) -> torch.dtype:
        return torch_dtype(self._dtypes.dtype_of(name, tensor.dtype))


def _slice(tensor: Tensor, view: View) -> Tensor:
    """The view's box, with the dimensions of the image tensor: a view of the same memory."""
    part = tensor[tuple(slice(start, stop) for start, stop in view.box)]
    left_out = [dim for dim in range(part.dim()) if dim not in view.dims]
    part = part.permute([*view.dims, *left_out])
    for _ in left_out:
        part = part.select(-1, 0)
    return part
