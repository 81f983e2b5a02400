"""The part of a load that is done on a GPU.

Owns: :class:`DeviceWeights`, a plan's parameters on one GPU: the tables of the plan there, the sums of the blocks that
the parameters hold, and records that were brought there before they are needed. Called by
:class:`~windlass.load.live.Live`. Must not: decide which version is loaded, or whether a load is whole or sparse.

Records are brought to the device while the model computes (:meth:`DeviceWeights.stage`) and only applied while it does
not. Each is checked against the sum of its block, so that applying it twice changes nothing and weights that it does not
begin from are refused. The sums are taken from the parameters themselves, once after each whole load, when these are
known to be a version; from then on records carry them along. What a sum cannot see, a change that no record of a version
touches, the digest of all parameters shows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from windlass import _windlass
from windlass.errors import (
    WindlassCorrupt,
    WindlassError,
    WindlassExhausted,
    WindlassStale,
    WindlassUnsupported,
)

if TYPE_CHECKING:
    from windlass._windlass import FetchedDelta, Held
    from windlass.load.order import DeltaFiles, LiveVersion

__all__ = ["Arriving", "DeviceWeights", "device_weights"]

log = logging.getLogger("windlass")


@dataclass
class _Staged:
    """Records on the device, to be applied one after another."""

    base: LiveVersion
    target: LiveVersion
    records: list[Any]

    @property
    def bytes(self) -> int:
        return sum(int(r.bytes) for r in self.records)


@dataclass(frozen=True)
class Arriving:
    """Records on their way to the device."""

    base: LiveVersion
    target: LiveVersion
    job: Any


def device_weights(native: _windlass.LoadPlan, tensors: Sequence[torch.Tensor]) -> DeviceWeights | None:
    """The parameters of ``native``, in its order, if they are on a GPU; ``None`` if they are the host's.

    Unsupported if they are neither here nor on one GPU that can be used.
    """
    devices = {tensor.device for tensor in tensors if tensor.numel()}
    if not devices or devices == {torch.device("cpu")}:
        return None
    if len(devices) > 1 or (device := next(iter(devices))).type != "cuda":
        named = ", ".join(sorted(map(str, devices)))
        raise WindlassUnsupported(f"parameters are on {named}, and a plan writes to the host or to one GPU")
    return DeviceWeights(native, tensors, device)


class DeviceWeights:
    """The parameters of a plan on ``device``. They must stay where they are."""

    def __init__(
        self, native: _windlass.LoadPlan, tensors: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        self.device = device
        gpu = _windlass.Gpu.open(device.index or 0)
        gpu.warm()
        self._plan = gpu.load_plan(native, [tensor.data_ptr() for tensor in tensors])
        self._staged: _Staged | None = None
        #: Records that were applied. Freeing device memory takes a moment, which is not that of the pause.
        self._spent: _Staged | None = None
        self._summed = False

    @property
    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    @cached_property
    def _aside(self) -> Any:
        """A stream on which nothing is ever under way: who reads need not wait for what the model computes."""
        untyped: Any = torch.cuda.Stream
        return untyped(self.device)

    @property
    def staged(self) -> tuple[LiveVersion, LiveVersion] | None:
        """From which version to which one the records lead that are here."""
        return None if self._staged is None else (self._staged.base, self._staged.target)

    def forget(self) -> None:
        """Somebody else writes to the parameters, or has: nothing that is known of them holds."""
        self._staged = self._spent = None
        self._summed = False

    def dense(self, held: Held, threads: int, timeout: float) -> int:
        """All of an image; how many bytes."""
        self.forget()
        copied, _ = self._plan.dense_held(held, self._stream, threads, timeout=timeout)
        return int(copied)

    def sum_up(self, timeout: float) -> None:
        """Takes the sums of what the parameters hold, which must be a version whole, unless they are known."""
        if not self._summed:
            self._plan.sum_blocks(self._stream, timeout=timeout)
            self._summed = True

    def stage(
        self, held: Held, base: LiveVersion, target: LiveVersion, prove: bool, timeout: float
    ) -> str | None:
        """Brings the records that lead from ``base``, which the parameters hold, to ``target``, which ``held`` is. The
        parameters are only read. Answers their state digest if it is to be proved, and they are all of the model."""
        stream = self._ready(prove, timeout)
        begins = (base.incarnation, base.version)
        records, digest = self._plan.stage_held(held, begins, prove=stream, timeout=timeout)
        self._staged = _Staged(base, target, records)
        return digest

    def stage_fetched(
        self, fetched: FetchedDelta, base: LiveVersion, target: LiveVersion, prove: bool, timeout: float
    ) -> str | None:
        """:meth:`stage` of a delta that no image shows yet."""
        stream = self._ready(prove, timeout)
        begins = (base.incarnation, base.version)
        records, digest = self._plan.stage_fetched(fetched, begins, prove=stream, timeout=timeout)
        self._staged = _Staged(base, target, records)
        return digest

    def begin(
        self, delta: DeltaFiles, base: LiveVersion, target: LiveVersion, prove: bool, timeout: float
    ) -> Arriving:
        """:meth:`stage_fetched` of a delta that a receiver of this host hands over in files; it goes on by itself."""
        stream = self._ready(prove, timeout)
        leads = (base.incarnation, base.version), (target.incarnation, target.version)
        files = [(path, size) for path, size in delta.files]
        job = self._plan.begin_handed(files, target.model_id, *leads, prove=stream, timeout=timeout)
        return Arriving(base, target, job)

    def arrived(self, delta: Arriving) -> str | None:
        """Waits for a delta that was begun: it is staged then. Answers what :meth:`stage` does."""
        digest: str | None
        records, digest = delta.job.take()
        self._staged = _Staged(delta.base, delta.target, records)
        return digest

    def _ready(self, prove: bool, timeout: float) -> int | None:
        """Before records come. Answers the stream after which the parameters are read to prove them."""
        self._staged = self._spent = None
        self.sum_up(timeout)
        return int(self._aside.cuda_stream) if prove else None

    def reserve(self, size: int) -> None:
        """Takes memory for deltas of up to so many bytes, if there is any: the first delta need not wait for it."""
        try:
            self._plan.reserve(size)
        except (WindlassExhausted, WindlassUnsupported) as e:
            log.info("the first delta takes longer: %s", e)

    def sparse(self, held: Held | None, base: LiveVersion, target: LiveVersion, timeout: float) -> int:
        """Applies what was staged for this, or stages it first; how many bytes. Stale if the parameters must be loaded
        whole: deltas were not kept, records do not fit, or there is no room for them."""
        try:
            if self.staged != (base, target):
                if held is None:
                    raise WindlassStale(f"what is staged does not lead from {base} to {target}")
                self.stage(held, base, target, False, timeout)
            staged = self._staged
            assert staged is not None
            for records in staged.records:
                self._plan.apply(records, self._stream, timeout=timeout)
        except (WindlassCorrupt, WindlassExhausted, WindlassUnsupported) as e:
            self.forget()
            raise WindlassStale(str(e), e.advice) from e
        except BaseException:
            self.forget()
            raise
        self._staged, self._spent = None, staged
        self._pin()
        return staged.bytes

    def _pin(self) -> None:
        """Lets the device read the files of deltas by itself from now on: not while the first one waits for that."""
        try:
            self._plan.pin_files()
        except WindlassError as e:
            log.info("deltas go on being copied on their way to the device: %s", e)

    def difference(self, held: Held, threads: int, timeout: float) -> list[str]:
        """The tensors of which the parameters do not hold what ``held`` does."""
        return list(self._plan.difference(held, self._stream, threads, timeout=timeout))

    def digest(self, timeout: float) -> str:
        """The sums of what the parameters hold, box by box, as JSON."""
        return str(self._plan.digest(self._stream, timeout=timeout))
