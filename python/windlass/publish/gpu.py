"""This rank's weights on a GPU, and how they get into a version.

Owns: :func:`find`, which says whether Windlass can drive the GPU that a rank's tensors are on; :func:`can_compare`, which
decides for ``offload_mode="auto"`` whether a baseline is kept for it; and :class:`OnGpu`, the copies and the baseline of one
rank. Where a baseline is kept is decided by the Rust core (``place_baseline``). Called by :class:`windlass.WeightManager`. Must not: plan who writes what, or touch a byte itself: addresses and the
handle of torch's stream go down in one call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from windlass._windlass import Gpu, host_memory, place_baseline
from windlass.dtypes import dtype_name, torch_dtype
from windlass.errors import WindlassError, WindlassExhausted, WindlassUnsupported
from windlass.publish.plan import device_addresses

if TYPE_CHECKING:
    from windlass._windlass import Baseline, Publisher
    from windlass.publish.plan import Plan
    from windlass.publish.sources import Source

__all__ = ["OnGpu", "can_compare", "find"]

log = logging.getLogger("windlass")


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


def can_compare(
    sources: Sequence[Source], gpu: Gpu | None, dtype: Callable[[str, str], str], where: str | int = "auto"
) -> bool:
    """Whether versions are handed out by delta where the configuration does not say how: if all weights are on one GPU, and comparing them is
    expected to take less time than copying them. ``dtype`` says which dtype a tensor of a name and dtype is published in, and
    ``where`` is the configured place of the baseline."""
    if gpu is None or any(share.gathered for source in sources for share in source.shares):
        return False
    weights = 0
    for source, local in _locals(sources):
        if local.get_device() != gpu.ordinal:
            return False
        # What is kept is what is published: fp32 masters of a bf16 image take half of what they are.
        if not source.spent:
            weights += local.numel() * torch_dtype(dtype(source.name, dtype_name(local.dtype))).itemsize
    made = sum(
        source.derived.size()
        for source in sources
        if source.derived and source.what == "weight" and not source.spent
    )
    weights += made
    free, total = gpu.memory()
    # What is quantised or merged is there before it is compared, too.
    free = max(0, free - made)
    host = host_memory()
    # The slots, which are not there yet, come first.
    left = None if host is None else max(0, host - 2 * weights)
    try:
        placed = place_baseline(weights, free, total, left, demanded=False, **_placing(where))
    except WindlassExhausted as e:
        log.warning("versions are copied: %s", e)
        return False
    _, on_host, _, compare, copy = placed
    if on_host == 0 or compare < copy:
        return True
    log.warning(
        "versions are copied: %s would have %s of the baseline in host memory, for want of GPU memory, and comparing would take "
        'about %.0f ms, a copy %.0f; leave more GPU memory to the trainer, or offload_mode="delta" overrules this',
        gpu.name,
        _gb(on_host),
        compare,
        copy,
    )
    return False


def _placing(where: str | int) -> dict[str, Any]:
    """The configured place of a baseline, as the core takes it."""
    return {"keep": where} if isinstance(where, str) else {"keep": "auto", "most": where}


class OnGpu:
    """What a rank has on a GPU, by copies of a plan."""

    def __init__(self, gpu: Gpu, plan: Plan, publisher: Publisher) -> None:
        assert plan.device is not None
        self._gpu = gpu
        self._copies = publisher.plan(plan.device.copies)
        self._casts = plan.device.casts if any(plan.device.casts) else None
        self._baseline: Baseline | None = None

    def keep(self, where: str | int = "auto", *, demanded: bool = True, ranks: int = 1) -> str | None:
        """Keeps a baseline from the next copy on, at the configured place; why not, if it cannot be. ``demanded`` says whether
        deltas were, and ``ranks`` how many of this host keep one."""
        try:
            self._baseline = self._gpu.baseline(
                self._copies, self._casts, demanded=demanded, ranks=ranks, **_placing(where)
            )
        except (WindlassExhausted, WindlassUnsupported) as e:
            return str(e)
        device, host, records, compare, copy = self._baseline.place
        if host == 0:
            log.info(
                "a baseline of %s and %s for records are kept on %s",
                _gb(device),
                _gb(records),
                self._gpu.name,
            )
            return None
        log.log(
            logging.INFO if where == "host" else logging.WARNING,
            "of the baseline %s are kept on %s, and the tail, %s, in page-locked host memory, which the GPU reads over the bus: "
            "comparing takes about %.0f ms a version instead of %.0f, a copy would take %.0f; for all of it on the GPU, leave it "
            "%s more (vLLM: gpu_memory_utilization), or shard the weights over more GPUs",
            _gb(device),
            self._gpu.name,
            _gb(host),
            compare,
            place_baseline(device + host, 1 << 62, 0)[3],
            copy,
            _gb(host),
        )
        return None

    def place(self) -> dict[str, Any] | None:
        """Where the baseline is, and what comparing with it is expected to take, as plain data."""
        if self._baseline is None:
            return None
        device, host, records, compare, copy = self._baseline.place
        return {
            "device_bytes": device,
            "host_bytes": host,
            "record_bytes": records,
            "compare_ms": compare,
            "copy_ms": copy,
        }

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
        addresses, stream = device_addresses(plan), self._stream()
        if self._baseline is not None:
            self._baseline.reset(addresses, version, stream, timeout)
        publisher.copy_device(self._gpu, self._copies, addresses, stream, self._casts, timeout)

    def compare(
        self, plan: Plan, publisher: Publisher, base: int, version: int, timeout: float, work: float
    ) -> int:
        """Publishes what changed since ``base``; how many bytes that is. Weights may change when it returns; what is left to do
        is done in the background, for at most ``work`` seconds, and the baseline holds ``version`` afterwards."""
        assert self._baseline is not None
        addresses = device_addresses(plan)
        size = self._baseline.compare(addresses, base, version, self._stream(), timeout)
        publisher.publish_compared(self._baseline, base, version, work)
        return size

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._gpu.ordinal).cuda_stream)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
