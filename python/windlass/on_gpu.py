"""This rank's weights on a GPU, and how they get into a version.

Owns: :func:`find`, which says whether Windlass can drive the GPU that a rank's tensors are on; :func:`can_compare`, which
decides for ``offload_mode="auto"`` whether a baseline is kept there; and :class:`OnGpu`, the copies and the baseline of one
rank. Called by :class:`windlass.WeightManager`. Must not: plan who writes what, or touch a byte itself: addresses and the
handle of torch's stream go down in one call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from windlass import plan as planning
from windlass._windlass import Gpu
from windlass.dtypes import dtype_name, torch_dtype
from windlass.errors import WindlassError, WindlassExhausted, WindlassUnsupported

if TYPE_CHECKING:
    from windlass._windlass import Baseline, Publisher
    from windlass.plan import Plan, Source

__all__ = ["OnGpu", "can_compare", "find"]

log = logging.getLogger("windlass")

#: Records of a pass have this share of the weights as room beside the baseline, as a divisor.
ROOM = 16
#: A GPU of which others have more than this share is an engine's too.
SHARED = 0.1


def _locals(sources: Sequence[Source]) -> Iterator[tuple[Source, torch.Tensor]]:
    """Parameters and the memory that this rank holds of its parameters, as far as it is there without asking other ranks."""
    for source in sources:
        for share in source.shares:
            if not share.gathered and source.given is not None and source.derived is None:
                local = share.fetch(source.given)
                if local.numel() and not local.is_meta:
                    yield source, local


def find(sources: Sequence[Source]) -> Gpu | None:
    """The GPU of this rank's tensors, if there is one that can be driven; what is on another goes by torch."""
    ordinal = next((local.get_device() for _, local in _locals(sources) if local.is_cuda), None)
    if ordinal is None:
        return None
    try:
        return Gpu.open(ordinal)
    except WindlassError as e:
        log.warning("weights on cuda:%d are copied by torch, which is slower: %s", ordinal, e)
        return None


def can_compare(sources: Sequence[Source], gpu: Gpu | None, dtype: Callable[[str, str], str]) -> bool:
    """Whether versions are handed out by delta where nobody said how: if all weights are on one GPU that has room for a
    baseline and is not an engine's too. ``dtype`` says which dtype a tensor of a name and dtype is published in."""
    if gpu is None or any(share.gathered for source in sources for share in source.shares):
        return False
    need = 0
    for source, local in _locals(sources):
        if local.get_device() != gpu.ordinal:
            return False
        # What is kept is what is published: fp32 masters of a bf16 image take half of what they are.
        if not source.spent:
            need += local.numel() * torch_dtype(dtype(source.name, dtype_name(local.dtype))).itemsize
    made = sum(source.derived.size() for source in sources if source.derived and source.what == "weight")
    # What is quantised is there before it is compared, too.
    need += made + (need + made) // ROOM + made
    free, total = gpu.memory()
    others = total - free - torch.cuda.memory_reserved(gpu.ordinal)
    why = None
    if need > free // 2:
        why = f"a baseline takes {_gb(need)} of the {_gb(free)} that are free on {gpu.name}"
    elif others > total * SHARED:
        why = f"others have {_gb(others)} of {gpu.name}, which may be an engine"
    if why is not None:
        log.info('versions are copied: %s; offload_mode="delta" overrules this', why)
    return why is None


class OnGpu:
    """What a rank has on a GPU, by copies of a plan."""

    def __init__(self, gpu: Gpu, plan: Plan, publisher: Publisher) -> None:
        assert plan.device is not None
        self._gpu = gpu
        self._copies = publisher.plan(plan.device.copies)
        self._casts = plan.device.casts if any(plan.device.casts) else None
        self._baseline: Baseline | None = None

    def keep(self) -> str | None:
        """Keeps a baseline from the next copy on; why not, if it cannot be."""
        try:
            self._baseline = self._gpu.baseline(self._copies, self._casts)
        except (WindlassExhausted, WindlassUnsupported) as e:
            return str(e)
        log.info(
            "a baseline of %s and %s for records are kept on %s",
            *map(_gb, self._baseline.bytes),
            self._gpu.name,
        )
        return None

    @property
    def baseline(self) -> Baseline | None:
        """The last published state, if one is kept."""
        return self._baseline

    def why_copy(self, base: int) -> str | None:
        """Why what changed since version ``base`` cannot be told; ``None`` if it can."""
        if self._baseline is None:
            return "no baseline is kept"
        if self._baseline.version != base:
            return f"the baseline on the GPU does not hold version {base}"
        return None

    def copy(self, plan: Plan, publisher: Publisher, version: int, timeout: float) -> None:
        """Into the slot that is being written; the baseline holds it afterwards."""
        addresses, stream = planning.device_addresses(plan), self._stream()
        if self._baseline is not None:
            self._baseline.reset(addresses, version, stream, timeout)
        publisher.copy_device(self._gpu, self._copies, addresses, stream, self._casts, timeout)

    def compare(
        self, plan: Plan, publisher: Publisher, base: int, version: int, timeout: float, work: float
    ) -> int:
        """Publishes what changed since ``base``; how many bytes that is. Weights may change when it returns; what is left to do
        is done in the background, for at most ``work`` seconds, and the baseline holds ``version`` afterwards."""
        assert self._baseline is not None
        addresses = planning.device_addresses(plan)
        size = self._baseline.compare(addresses, base, version, self._stream(), timeout)
        publisher.publish_compared(self._baseline, base, version, work)
        return size

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._gpu.ordinal).cuda_stream)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
