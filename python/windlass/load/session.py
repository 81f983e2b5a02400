"""What an engine's adapter offers to whoever loads into it.

Owns: :class:`Session`, and what its implementations share. Implemented for each engine; called by :class:`windlass.load.live.Live`. Must not: know an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from windlass.load.qualify import Judge
from windlass.load.trace import Target

__all__ = ["Session", "class_name", "is_listed", "replace", "without_data"]


class Session(Judge, Protocol):
    """An engine's own full reload of one worker's model, and what is known of its modules."""

    model: torch.nn.Module

    @property
    def parallelism(self) -> str:
        """The shares of the model, as part of a plan's key."""

    @property
    def shares(self) -> int:
        """How many workers may hold parts of one tensor."""

    @property
    def partial(self) -> str | None:
        """Why this worker need not take every tensor of the image; ``None`` if it must."""

    @property
    def hides_writes(self) -> bool:
        """Whether loaders keep tensors back and write later: then the names that they say they loaded are believed."""

    def optional(self, module: torch.nn.Module, attribute: str) -> bool:
        """Whether a checkpoint need not have a parameter: the engine has a default for it."""

    def refuses_plan(self) -> str | None:
        """Why nothing may be replayed now; ``None`` if it may."""

    def vocabulary(self, module: torch.nn.Module) -> int | None:
        """Rows of the checkpoint's tensor where the engine pads them."""

    def rehearsal(self) -> AbstractContextManager[list[Target]]:
        """A place in which the loader can be run without harm."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """The model's own loader."""

    def begin(self) -> None:
        """Prepares the model to be loaded."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Feeds tensors."""

    def finish(self) -> None:
        """Post-processes what was loaded."""

    def abandon(self) -> None:
        """Makes another session possible after a failure."""

    def incomplete(self) -> list[str]:
        """Layers of which a part was fed and a part was not, while a session is open."""


def class_name(value: object) -> str:
    """The full name of its class.

    >>> class_name(torch.nn.Linear(1, 1))
    'torch.nn.modules.linear.Linear'
    """
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_listed(attribute: str, module: torch.nn.Module, table: Mapping[str, set[str]]) -> bool:
    """Whether a table of attributes, by how the names of classes begin, has an attribute of a module."""
    home = class_name(module)
    return any(home.startswith(prefix) and attribute in names for prefix, names in table.items())


def replace(into: dict[str, Any], values: dict[str, Any]) -> None:
    """Makes a dictionary hold these values only, in their order."""
    into.clear()
    into.update(values)


def without_data(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device, of the same class and with the same attributes."""
    stand_in = tensor.data.to("meta")
    stand_in.__class__ = tensor.__class__
    stand_in.__dict__ = dict(tensor.__dict__)
    return stand_in
