"""What is known of loading one layout into a model.

Owns: :class:`LayoutPlan`: the trace of a rehearsal, the verdict on each module, the copies that are replayed and where the
parameters were when they were judged. Made and used by :mod:`windlass.load.live`. Must not: write to the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from windlass.load.order import REASONS, PlanSummary

if TYPE_CHECKING:
    import torch

    from windlass.load.device import DeviceWeights
    from windlass.load.qualify import Verdict
    from windlass.load.trace import Trace

__all__ = ["LayoutPlan", "place", "reasons", "summary"]


@dataclass
class LayoutPlan:
    """What is known of loading one layout into this model."""

    key: str
    trace: Trace
    #: Names that the engine does not take.
    extras: list[str]
    #: (dtype, shape) of each tensor that it takes.
    table: dict[str, tuple[str, tuple[int, ...]]]
    verdict: Verdict | None = None
    native: Any = None
    #: The replayed parameters, if they are on a GPU.
    device: DeviceWeights | None = None
    #: Names of the replayed parameters, in the order of the plan's targets, and where they were.
    names: list[str] = field(default_factory=list)
    places: list[tuple[int, torch.dtype, tuple[int, ...]]] = field(default_factory=list)
    #: The modules' own tables that hold them: looking there takes no walk through the model.
    holders: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    #: A slice that was found to have all that is read.
    covered: bytes | None = None
    #: Why it was dropped, until modules are judged anew.
    dropped: str = ""

    def drop(self, why: str) -> None:
        """The plan is not to be used any more; modules are judged anew with the next load."""
        self.verdict = self.native = self.device = None
        self.dropped = why

    @property
    def ahead(self) -> bool:
        """Whether a delta can be loaded before the image holds what it leads to."""
        return self.device is not None and self.verdict is not None and not self.verdict.session

    def in_place(self) -> bool:
        """Whether the parameters are still where they were, as far as their modules are the model's."""
        return all(
            (tensor := table.get(name)) is not None and tensor.data_ptr() == place[0]
            for (table, name), place in zip(self.holders, self.places)
        )


def summary(plan: LayoutPlan) -> PlanSummary:
    verdict = plan.verdict
    if verdict is None:
        modules = {plan.trace.targets[i].module for reached in plan.trace.reached.values() for i in reached}
        return PlanSummary(key=plan.key, replayed=0, session=len(modules), why={})
    why = dict(list(verdict.why.items())[:REASONS])
    return PlanSummary(
        key=plan.key, replayed=verdict.modules, session=len(verdict.why), why=why, ahead=plan.ahead
    )


def reasons(verdict: Verdict) -> str:
    """Why some modules are not written directly, in one line; empty if all are."""
    if not verdict.why:
        return ""
    module, reason = next(iter(verdict.why.items()))
    more = f", and {len(verdict.why) - 1} more modules" if len(verdict.why) > 1 else ""
    return f"{module}: {reason}{more}" if module else reason


def place(tensor: torch.Tensor) -> tuple[int, torch.dtype, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)
