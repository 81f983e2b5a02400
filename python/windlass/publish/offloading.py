"""Writing a version: this rank's share of it, by copy or by delta.

Owns: :class:`Opened`, the state of a publisher from its first version on, and :class:`Offloaded`, what an offload did. Called by
:class:`windlass.WeightManager`. Must not: know the agent or the controller.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from windlass.errors import WindlassError, WindlassStale
from windlass.exchange import Alone, Exchange, agree_on_all_ranks
from windlass.plain import numbers
from windlass.publish.derived import refresh
from windlass.publish.gpu import OnGpu
from windlass.publish.inputs import WeightSource, copy, everything, is_same, pieces
from windlass.publish.merged import Merging
from windlass.publish.plan import Plan, addresses, follow, placed
from windlass.publish.sources import lost
from windlass.receive.memory import flat

if TYPE_CHECKING:
    from windlass._windlass import Copies, Held, Publisher

__all__ = ["Offloaded", "Opened", "SameBytes", "left"]

log = logging.getLogger("windlass")

#: How many versions in a row may have the same bytes before a warning.
SAME = 3

#: Names and tensors.
Pairs = Iterable[tuple[str, Any]]


def left(until: float) -> float:
    """Seconds until a deadline."""
    return max(0.0, until - time.monotonic())


@dataclass(frozen=True)
class Offloaded:
    """A committed version, and what this rank did for it."""

    version: int
    #: The incarnation of the publisher; 0 on a rank that only takes part in the gathering.
    incarnation: int
    #: Bytes that this rank wrote.
    bytes: int
    #: Waiting for the slot and for the other ranks to begin.
    wait_ms: float
    #: Copying, casting and gathering.
    copy_ms: float
    #: Waiting for the other ranks to end.
    commit_ms: float
    #: False if the same version with the same bytes was there already.
    new: bool = True
    #: "copy" if the version is committed; "delta" if it is handed out, and its slot follows in the background.
    mode: str = "copy"

    def metrics(self, prefix: str = "windlass/offload_") -> dict[str, float]:
        """What a logger such as wandb or TensorBoard plots: numbers by flat names.

        >>> Offloaded(7, 1, 2048, 0.5, 3.0, 0.25).metrics()["windlass/offload_copy_ms"]
        3.0
        """
        return numbers(prefix, self, ("version", "bytes", "wait_ms", "copy_ms", "commit_ms"))

    def attributes(self) -> dict[str, str | float]:
        """What the span of the version says of it (:mod:`windlass.trace`)."""
        phases = {
            f"windlass.{phase}_s": getattr(self, f"{phase}_ms") / 1e3 for phase in ("wait", "copy", "commit")
        }
        return {"windlass.bytes": self.bytes, "windlass.mode": self.mode, **phases}


@dataclass
class Opened:
    """Everything that exists once the first version is under way."""

    model_id: str
    #: Seconds for work in the background, and for reading a slot.
    timeout: float
    plan: Plan
    publisher: Publisher | None
    copies: Copies | None
    place: int
    threads: int
    exchange: Exchange
    #: Whether every rank of the trainer writes; the others only help to gather.
    everyone: bool
    #: Whether it was made for a :class:`WeightSource`.
    exported: bool
    #: What is on a GPU.
    gpu: OnGpu | None = None
    #: Whether versions may be handed out by delta.
    deltas: bool = False
    #: Adapters that are merged into what is published.
    merging: Merging | None = None

    def help(self, given: Pairs | None, stream: WeightSource | None, version: int, until: float) -> Offloaded:
        """Takes part in what is gathered, where another host publishes."""
        begun = time.monotonic()
        self._follow(given, until)
        for _ in pieces(self.plan, stream):
            pass
        taken = (time.monotonic() - begun) * 1e3
        return Offloaded(version, 0, 0, 0.0, taken, 0.0)

    def publish(
        self,
        given: Pairs | None,
        stream: WeightSource | None,
        version: int,
        base: int | None,
        start: float,
        until: float,
    ) -> Offloaded:
        """Writes this rank's share of ``version``. ``base`` is the newest version, and ``start`` when the call began."""
        plan, publisher = self.plan, self.publisher
        assert publisher is not None
        delta = self.deltas and self._is_delta(base, version, until)
        if not delta:
            publisher.begin(version, left(until))
        elif self.gpu is None:
            publisher.stage(version)
        try:
            # An error from here on ends the attempt, so that the other ranks need not wait.
            begun, size = time.monotonic(), plan.bytes
            self._follow(given, until)
            here = addresses(plan)
            if delta and self.gpu is not None and base is not None:
                work = self.timeout
                size = self.gpu.compare(plan, publisher, base, version, left(until), work)
                copied = time.monotonic()
            else:
                if here and self.copies is not None:
                    publisher.copy(self.copies, here, self.threads, left(until))
                if self.gpu is not None:
                    self.gpu.copy(plan, publisher, version, left(until))
                if plan.casts or plan.gathered:
                    self._write(plan, stream, publisher)
                copied = time.monotonic()
                if delta:
                    publisher.publish(self.timeout)
                else:
                    publisher.commit(left(until), None if self.gpu is None else self.gpu.baseline)
        except BaseException:
            publisher.abort()
            raise
        ended = time.monotonic()
        return Offloaded(
            version,
            int(publisher.incarnation, 16),
            size,
            (begun - start) * 1e3,
            (copied - begun) * 1e3,
            (ended - copied) * 1e3,
            mode="delta" if delta else "copy",
        )

    def again(
        self,
        given: Pairs | None,
        stream: WeightSource | None,
        version: int,
        newest: int,
        until: float,
    ) -> Offloaded:
        """A version that is not newer: fine if it is the newest and the same."""
        publisher, plan = self.publisher, self.plan
        assert publisher is not None
        if version < newest:
            raise WindlassStale(
                f"version {version} is older than {newest}, which was published before: versions only grow",
                "call resume() first if the trainer went back to an older checkpoint",
            )

        def compare() -> bool:
            self._follow(given, until)
            addresses(plan)
            held: Held = publisher.hold(self.timeout)
            try:
                data = flat(held.memory())
                # All of it, also after a difference: other ranks may wait for what is gathered.
                same = [
                    is_same(placed(plan, data, target), values) for target, values in everything(plan, stream)
                ]
            finally:
                held.finish()
            return all(same)

        # Hosts that only help do not know that there is anything to compare.
        exchange = self.exchange if self.everyone else Alone(1)
        same = agree_on_all_ranks(exchange, compare, f"compare version {version}", left(until))
        if not all(same):
            raise WindlassStale(
                f"version {version} was published before with other bytes; nothing was changed",
                "give the next version another number",
            )
        return Offloaded(version, int(publisher.incarnation, 16), 0, 0.0, 0.0, 0.0, new=False)

    def _follow(self, given: Pairs | None, until: float) -> None:
        """The parameters of this call, and what is made of them."""
        plan = self.plan
        if given is not None:
            follow(plan, given)
        if self.merging is not None:
            self.merging.refresh(self.exchange, left(until))
        if plan.given < len(plan.sources):
            refresh(plan, self.exchange, left(until))

    def _is_delta(self, base: int | None, version: int, until: float) -> bool:
        """Whether a version is handed out by what changed since the newest; says why not."""
        assert self.publisher is not None
        why = self.publisher.needs_copy(version, left(until))
        if why is None and self.gpu is not None:
            why = "nothing was published yet" if base is None else self.gpu.why_copy(base)
        if why is not None:
            log.info("%s: version %d is copied: %s", self.model_id, version, why)
        return why is None

    def _write(self, plan: Plan, stream: WeightSource | None, publisher: Publisher) -> None:
        """What torch copies: casts, other devices, gathered tensors."""
        data = flat(publisher.slot())
        devices: set[torch.device] = set()
        try:
            for target, values in pieces(plan, stream):
                into = placed(plan, data, target)
                if values.device.type != "cpu" and values.dtype != into.dtype:
                    # On the device, where it is cheap, and so that less crosses the bus.
                    values = values.to(into.dtype)
                if values.device.type != "cpu":
                    devices.add(values.device)
                copy(into, values)
        except RuntimeError as e:
            if isinstance(e, WindlassError):
                raise
            raise lost("gathering or casting failed", e) from e
        for device in devices:
            torch.accelerator.synchronize(device)


class SameBytes:
    """Watches for versions that stay the same: the model that is trained may not be the one that is published."""

    def __init__(self, model_id: str) -> None:
        self._model_id = model_id
        #: The digests of the last versions that were seen sealed, and whether the warning was given.
        self._digests: dict[int, str] = {}
        self._warned = False

    def note(self, version: int, digest: str) -> None:
        """Warns if this version and those before it have the same digest."""
        if version in self._digests:
            return
        self._digests[version] = digest
        last = dict(sorted(self._digests.items())[-SAME:])
        self._digests = last
        if len(last) < SAME or len(set(last.values())) > 1:
            self._warned = False
        elif not self._warned:
            self._warned = True
            log.warning(
                "%s: versions %s have the same bytes: see whether the optimizer steps, and whether the model that is "
                "offloaded is the one that is trained",
                self._model_id,
                ", ".join(map(str, last)),
            )
