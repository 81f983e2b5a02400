"""The weights of one worker, and how the next version gets into them.

Owns: :class:`Live`: which version a worker's weights are, whether a write to them was cut short, the plan by which they
can be written directly, and :meth:`Live.load`, which carries out an order. Called in the worker by whatever drives it,
one call at a time and, but for :meth:`Live.stage`, never while the model computes. Must not: pause an engine, start a
thread, or know which engine it is in: that is the session's part (:class:`Session`).

How an order is carried out::

    hold the image ─► is it what was ordered ─► rehearse once per layout ─► does everything fit
        ─► (first write) ─► modules that do not qualify, by the engine's session ─► the others by the plan ─► clean

Everything that can be refused is refused before the first write: then the error is raised, the weights are those of
before and the worker stays clean. After the first write nothing is raised: the report says ``dirty`` and why, and only
a whole load makes the worker clean again.

The first load of a layout goes wholly through the session and is the reference against which modules qualify
(:mod:`windlass.load.qualify`). Later loads are *sparse* where the weights are known to be a version from which the
image's deltas lead to the order, and *dense* otherwise; both end in the same bytes, so that workers decide alone.
Parameters on a GPU are written there (:mod:`windlass.load.device`): :meth:`Live.stage` brings deltas to it before the
pause, and the load itself only applies them. Where that cannot be, the reason is logged and the engine's session loads.

Invariants:

1. An order that fails before the first write leaves every byte as it was (``test_a_missing_tensor_is_named…``).
2. A sparse load starts only from weights that this process itself wrote as that version, that nobody moved or reloaded,
   and that a sample finds in place (``test_a_foreign_reload_is_not_patched``), or on a GPU the sums of blocks and, when
   records are staged, the digest.
3. ``dirty`` is cleared by a whole load only (``test_a_load_that_fails_halfway_leaves_the_worker_dirty``).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch

from windlass import _windlass
from windlass._windlass import FetchedDelta, Held, Layout
from windlass.dtypes import dtype_name
from windlass.errors import (
    WindlassCancelled,
    WindlassError,
    WindlassExhausted,
    WindlassInvalid,
    WindlassStale,
    WindlassTimeout,
    WindlassUnsupported,
)
from windlass.identity import Identity
from windlass.load.device import Arriving, DeviceWeights, device_weights
from windlass.load.fit import check_changed, check_missing, check_reads, listed
from windlass.load.layout_plan import LayoutPlan, place, reasons, summary
from windlass.load.needs import blank, needs_of
from windlass.load.order import EXTRAS, REASONS, Failure, Last, LiveVersion, LoadOrder, Report
from windlass.load.qualify import Snapshot, Verdict, qualify, snapshot, without
from windlass.load.series import Series
from windlass.load.session import Session
from windlass.load.take import Pause, take
from windlass.load.trace import trace, warm_up
from windlass.receive.reading import Selection
from windlass.receive.receiver import Tensors
from windlass.trace import record

if TYPE_CHECKING:
    from windlass.receive.receiver import Receiver

__all__ = ["Live", "Session"]

log = logging.getLogger("windlass")

#: At every so many sparse loads all weights are compared with the version that they should be.
VERIFY_EVERY = 50
#: How many elements a sparse load looks at before it trusts the weights.
SAMPLE = 4096
#: Memory for a delta is taken ahead, of this share of the weights, as a divisor: what 1 % of changes take and some more.
DELTA_SHARE = 80
#: How long summing the weights may take.
DIGEST_S = 600.0

Extras = Literal["ignore", "error"]


class Live:
    """The weights of one worker.

    ``session`` is the engine's own way to load, ``rank`` the worker's among those of its engine, and ``engine`` its
    name and version. ``extras`` says what happens to tensors that the engine does not take. At every Nth sparse load,
    ``verify_every``, all weights are compared with the version that they should be; both come from the environment
    (``WINDLASS_EXTRAS``, ``WINDLASS_VERIFY_EVERY``) if they are not given.
    """

    def __init__(
        self,
        session: Session,
        *,
        rank: int = 0,
        engine: str = "",
        extras: Extras | None = None,
        threads: int = 1,
        verify_every: int | None = None,
    ) -> None:
        chosen = extras or os.environ.get("WINDLASS_EXTRAS", "ignore")
        if chosen not in ("ignore", "error"):
            raise WindlassInvalid(f"WINDLASS_EXTRAS is {chosen!r}: expected 'ignore' or 'error'")
        self._session = session
        self._rank = rank
        self._engine = engine
        self._extras = chosen
        self._threads = threads
        self._verify_every = _verify_every() if verify_every is None else max(1, verify_every)
        self._worker = secrets.token_hex(8)
        self._live: LiveVersion | None = None
        #: The state digest of that version.
        self._digest: str | None = None
        self._dirty = False
        self._plan: LayoutPlan | None = None
        #: What earlier images were: they do not change under a running engine.
        self._accepted: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._last: Last | None = None
        self._error: Failure | None = None
        self._since_verified = 0
        self._told_extras: list[str] | None = None
        self._loads: dict[str, int] = {}
        self._told_why = ""
        warm_up()

    def take(
        self, receiver: Receiver, pause: Pause, timeout: float = 60.0, load_timeout: float = 600.0
    ) -> Report | None:
        """:func:`windlass.load.take` of these weights."""
        return take(self, receiver, pause, timeout, load_timeout)

    # What a driver asks.

    def prepare(self, image: str, timeout: float = 60.0) -> Report:
        """Rehearses loading from an image, so that the first order need not. Nothing is written."""
        held = _windlass.open_image(image, timeout, timeout, slices=True)
        try:
            self._fit(held)
        finally:
            held.finish()
        self._warm()
        return self.report()

    def _warm(self) -> None:
        """Has the driver load the kernels, which it compiles for a GPU that it sees for the first time."""
        device = self._device()
        if device is not None:
            try:
                _windlass.Gpu.open(device.index or 0).warm()
            except WindlassError as e:
                log.warning("rank %d: nothing will be written directly on %s: %s", self._rank, device, e)

    def _device(self) -> torch.device | None:
        """The GPU that the weights are on, if they are on one."""
        first = next((p for p in self._session.model.parameters() if p.numel()), None)
        return first.device if first is not None and first.device.type == "cuda" else None

    def load(self, order: LoadOrder) -> Report:
        """Carries out an order. Raises before the first write only; see the module."""
        began = time.monotonic()
        try:
            report = self._load(order, began)
        except Exception as e:
            self._error = Failure.of(e)
            self._write_report(order)
            if isinstance(e, WindlassError):
                raise
            raise WindlassInvalid(f"version {order.version} cannot be loaded: {type(e).__name__}: {e}") from e
        self._write_report(order)
        return _traced(report)

    def check(self, order: LoadOrder) -> Report:
        """Whether an order could be carried out now: raises what :meth:`load` would raise before the first write. An order
        with a delta must have been staged."""
        if order.delta is not None:
            self._check_staged(order.identity)
            return self.report()
        held = _hold(order, order.timeout)
        try:
            self._check_identity(order, held)
            self._fit(held)
        finally:
            _let_go(held)
        return self.report()

    def needs(self, layout: Layout) -> Selection:
        """What this worker reads of images of a layout: of every tensor the boxes (:mod:`windlass.load.needs`). Rehearses
        the layout if it is new, so that it must not be called while the model computes."""
        plan = self._fit_layout(layout, blank(layout))
        if self._session.hides_writes:
            # Not every read can be seen.
            return {name: [[[0, size] for size in shape]] for name, (_, shape) in plan.table.items()}
        return needs_of(plan.trace, layout)

    def knows(self, order: LoadOrder) -> bool:
        """Whether an order can be checked and staged while the model computes: its image has the layout of the last one."""
        held = _hold(order, order.timeout)
        try:
            return self._plan is not None and self._plan.key == self._key(held.layout())
        finally:
            _let_go(held)

    def _key(self, layout: Layout) -> str:
        return f"{layout.hash}.{self._session.parallelism}"

    def stage(self, order: LoadOrder) -> bool:
        """Brings what changed up to an order to the GPU, while the model goes on computing; nothing of the model is
        written. The next :meth:`load` of the same order only applies it. False, and nothing lost, where that is not
        possible or of no use, as on a CPU. An order with a delta is staged from that: see :meth:`stage_fetched`."""
        if order.delta is not None:
            arriving = self.begin_delta(order)
            if arriving is not None:
                self.delta_arrived(arriving)
            return arriving is not None
        plan, base = self._plan, self._base_of(order)
        if plan is None or plan.device is None or base is None or not self._in_place(plan):
            return False
        if self._session.refuses_plan() is not None or plan.device.staged == (base, order.identity):
            return plan.device.staged is not None
        try:
            held = _hold(order, order.timeout)
            try:
                self._check_identity(order, held)
                return self._staged(plan, plan.device, held, base, order)
            finally:
                held.finish()
        except Exception as e:
            # Loading does without.
            plan.device.forget()
            log.info("rank %d: version %d is not staged: %s", self._rank, order.version, e)
            return False

    def _staged(
        self, plan: LayoutPlan, device: DeviceWeights, held: Held, base: LiveVersion, order: LoadOrder
    ) -> bool:
        layout = held.layout()
        if self._key(layout) != plan.key:
            return False
        return self._proved(device.stage(held, base, order.identity, True, order.timeout))

    def _proved(self, found: str | None) -> bool:
        """Whether the digest that was found is that of the live version; also if there is none to compare."""
        if found is None or self._digest is None or self._live is None:
            return True
        self._since_verified = 0
        if found != self._digest:
            self.forget(f"they have the digest {found}, and version {self._live.version} has {self._digest}")
            return False
        return True

    # A version that no image shows yet.

    def stage_fetched(self, fetched: FetchedDelta, timeout: float = 60.0) -> bool:
        """:meth:`stage` of a delta that a receiver has fetched and not shown yet (:meth:`windlass.Receiver.fetch`).

        The engine is then ahead of its image for a moment: :meth:`load_fetched` while it is paused, and
        :meth:`~windlass.Receiver.show` once it goes on. False, and nothing lost, where that is not possible: if not all
        modules are written directly, on a CPU, or if the weights are not the version that the delta begins from. Then show it,
        and load from the image.
        """
        target = _version_of(fetched)
        try:
            ready = self._ready_for_delta()
            if ready is None:
                return False
            return self._proved(ready[0].stage_fetched(fetched, ready[1], target, self._take_turn(), timeout))
        except Exception as e:
            self._not_staged(target, e)
            return False

    def _take_turn(self) -> bool:
        """Whether the weights are to be proved with this delta; if so, the count begins anew."""
        due = self._since_verified + 1 >= self._verify_every
        if due:
            self._since_verified = 0
        return due

    def _ready_for_delta(self) -> tuple[DeviceWeights, LiveVersion] | None:
        """The device and the version that a delta is applied to before the image holds what it leads to, if that is
        possible."""
        plan, base = self._plan, self._live
        if plan is None or plan.device is None or not plan.ahead or base is None or self._dirty:
            return None
        if self._session.refuses_plan() is not None or not self._in_place(plan):
            return None
        return plan.device, base

    def _not_staged(self, target: LiveVersion, why: Exception) -> None:
        if self._plan is not None and self._plan.device is not None:
            self._plan.device.forget()
        log.warning("rank %d: version %d is not staged: %s", self._rank, target.version, why)

    def begin_delta(self, order: LoadOrder) -> Arriving | None:
        """Begins to stage the delta of an order, which goes on by itself while the model computes; ``None`` if the weights are
        not what it begins from, or nothing can be applied before the image."""
        assert order.delta is not None
        try:
            ready = self._ready_for_delta()
            if ready is None or _begins(order) != ready[1]:
                return None
            return ready[0].begin(order.delta, ready[1], order.identity, self._take_turn(), order.timeout)
        except Exception as e:
            self._not_staged(order.identity, e)
            return None

    def delta_arrived(self, arriving: Arriving) -> None:
        """Waits for what :meth:`begin_delta` began. Raises if it failed, or if the weights turned out to be others: load from
        the image then."""
        plan = self._plan
        if plan is None or plan.device is None:
            raise WindlassStale("the plan does not hold any more", "load from the image")
        try:
            found = plan.device.arrived(arriving)
        except Exception as e:
            self._not_staged(arriving.target, e)
            raise
        if not self._proved(found):
            raise WindlassStale(
                "the weights are not the version that they were known as", "load from the image"
            )

    def load_fetched(self, fetched: FetchedDelta, timeout: float = 60.0) -> Report:
        """Applies what :meth:`stage_fetched` has brought, of which each record is checked. Raises before the first write
        only; if the report says ``dirty``, load from the image, whole."""
        return _traced(self._load_staged(_version_of(fetched), fetched.digest, timeout))

    def _check_staged(self, target: LiveVersion) -> tuple[DeviceWeights, LiveVersion]:
        """What is staged for a version, and the one that the weights are. Invalid or stale if it cannot be applied."""
        plan, base = self._plan, self._live
        if plan is None or plan.device is None or base is None or plan.device.staged != (base, target):
            raise WindlassInvalid(
                f"the delta to version {target.version} is not staged for what the weights are",
                "stage it first, and load from the image where that says no",
                name="not_staged",
            )
        if self._session.refuses_plan() is not None or not plan.in_place():
            plan.device.forget()
            raise WindlassStale("the plan does not hold any more", "load from the image")
        return plan.device, base

    def _load_staged(self, target: LiveVersion, digest: str | None, timeout: float) -> Report:
        began = time.monotonic()
        device, base = self._check_staged(target)
        self._dirty, self._error = True, None
        self._since_verified += 1
        try:
            size = device.sparse(None, base, target, timeout)
        except Exception as e:
            self._live = None
            self._last = Last(how="sparse", ms=_since(began))
            self._error = Failure.of(e)
            log.error("rank %d: loading version %d failed halfway: %s", self._rank, target.version, e)
            return self.report()
        self._dirty = False
        self._live, self._digest = target, digest
        self._count(Last(how="sparse", ms=_since(began), bytes=size))
        return self.report()

    # Tensors that come another way than by an image.

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Report:
        """Loads tensors that are all at hand, from where they are: by known copies if the same ones came before, and by
        the engine's own reload otherwise, which wants all tensors of each layer that they touch."""
        series = self.series
        if not series.knows(tensors):
            series.drop("other tensors came than before")
            # What does not fit is told before anything is touched.
            with self._session.rehearsal() as targets:
                trace(self._session.load_weights, tensors, targets)
        try:
            series.feed(sorted(tensors.items()))
            series.finish()
        except BaseException as e:
            series.abandon(e)
            raise
        return self.report()

    def begin_tensors(self) -> None:
        """Begins a load whose tensors come one by one. The worker is dirty until :meth:`finish_tensors`."""
        self.forget("weights come from elsewhere")
        self._dirty = True
        self._error = None
        self._session.begin()

    def feed_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Some of the tensors; they must stay as they are until the load is finished."""
        self._session.load(tensors)

    def finish_tensors(self) -> None:
        """Ends the load. An error if a layer came in part: what did not come is not what it was."""
        partly = self._session.incomplete()
        if partly:
            raise WindlassInvalid(
                f"only a part of the tensors came of {listed(partly)}",
                "send all tensors of a layer in one update",
                name="missing_tensor",
            )
        self._session.finish()
        self._dirty = False

    def abandon_tensors(self, why: BaseException) -> None:
        """Ends a load that failed: the worker stays dirty."""
        self._error = Failure.of(why)
        self._session.abandon()

    # Tensors of requests: see :mod:`windlass.load.series`.

    @cached_property
    def series(self) -> Series:
        """The updates whose tensors come in requests."""
        return Series(self)

    @property
    def session(self) -> Session:
        """The engine's own way to load."""
        return self._session

    @property
    def rank(self) -> int:
        """The worker's among those of its engine."""
        return self._rank

    def mark(self, why: str) -> None:
        """The weights are about to be written: dirty until :meth:`settle`."""
        self._unknown(why)
        self._dirty, self._error = True, None

    def settle(self, last: Last) -> None:
        """What :meth:`mark` began is whole."""
        self._dirty = False
        self._count(last)

    def broken(self, why: BaseException, session: bool) -> None:
        """What :meth:`mark` began has failed, with a ``session`` open or not."""
        self._dirty = True
        if session:
            self.abandon_tensors(why)
        self._error = Failure.of(why)

    def report(self) -> Report:
        """What there is to say."""
        plan = self._plan
        series = self.__dict__.get("series")
        coming = None if series is None else series.summary()
        return Report(
            rank=self._rank,
            worker=self._worker,
            engine=self._engine,
            live=self._live,
            state="dirty" if self._dirty else "clean",
            plan=coming if plan is None else summary(plan),
            last=self._last,
            extras=tuple((plan.extras if plan is not None else [])[:EXTRAS]),
            error=self._error,
            loads=dict(self._loads),
        )

    def _count(self, done: Last) -> None:
        """Notes how an order was carried out. What a plan was expected to do and did not is said aloud."""
        self._last = done
        self._loads[done.how] = self._loads.get(done.how, 0) + 1
        if done.why:
            self._loads["unplanned"] = self._loads.get("unplanned", 0) + 1
            tell = log.warning if done.why != self._told_why else log.info
            tell("rank %d: the engine's own loader was used, which is slow: %s", self._rank, done.why)
        self._told_why = done.why

    def digest(self) -> dict[str, Any]:
        """Sums of what the parameters hold, by source tensor and box, for those that are kept as they were loaded."""
        plan = self._plan
        out: dict[str, Any] = {"report": self.report().to_dict(), "parts": None, "unseen": []}
        if plan is None or plan.verdict is None:
            out["why"] = "nothing was loaded yet"
        elif plan.native is None:
            out["why"] = "no module keeps its weights as they were loaded"
            out["unseen"] = sorted(plan.verdict.session)
        else:
            if plan.device is not None:
                parts = plan.device.digest(DIGEST_S)
            else:
                parts = plan.native.digest(self._addresses(plan), self._threads)
            out["parts"] = json.loads(parts)
            out["unseen"] = sorted(plan.verdict.session)
        return out

    def forget(self, why: str) -> None:
        """Says that somebody else may have changed the weights: the next load is a whole one."""
        self._unknown(why)
        if "series" in self.__dict__:
            self.series.drop(why)

    def _unknown(self, why: str) -> None:
        if self._live is not None:
            log.info("rank %d: the weights are not known any more: %s", self._rank, why)
        self._live = None
        if self._plan is not None and self._plan.device is not None:
            self._plan.device.forget()

    # Before the first write.

    def _load(self, order: LoadOrder, began: float) -> Report:
        if order.delta is not None:
            return self._load_staged(order.identity, order.digest or None, order.timeout)
        # A minute beyond the deadline: the hold must not end while the last bytes are read.
        held = _hold(order, order.timeout + 60.0)
        finished = False
        try:
            self._check_identity(order, held)
            if self._live == order.identity and not self._dirty and order.how == "auto":
                self._count(Last(how="skipped", ms=_since(began)))
                self._error = None
                return self.report()
            plan = self._fit(held)
            how, base, why = self._decide(order, plan)
            # Nothing is refused from here on.
            self._dirty = True
            self._error = None
            try:
                done = self._write(how, base, plan, held, order, began)
                done = dataclasses.replace(done, why=done.why or why)
                finished = True
                # What was read may be of two versions if the hold was taken back.
                held.finish()
            except Exception as e:
                self._live = None
                self._last = Last(how=how, ms=_since(began))
                self._error = Failure.of(e)
                log.error("rank %d: loading version %d failed halfway: %s", self._rank, order.version, e)
                return self.report()
            self._dirty = False
            self._live, self._digest = order.identity, held.digest
            self._count(done)
            self._accepted.update(plan.table)
            return self.report()
        finally:
            if not finished:
                _let_go(held)

    def _check_identity(self, order: LoadOrder, held: Held) -> None:
        incarnation = _number(held.incarnation)
        if (incarnation, held.version) != (order.incarnation, order.version):
            raise WindlassStale(
                f"the image {order.image!r} holds version {held.version} of incarnation {incarnation:016x}; the order "
                f"is for version {order.version} of {order.incarnation:016x}",
                "give an order for what the image holds",
                name="wrong_version",
            )
        # A slice has a digest of its own, which its receiver compared with the trainer's.
        known = held.digest if held.slice is None else None
        if order.digest and known is not None and known != order.digest:
            raise WindlassStale(
                f"version {order.version} in {order.image!r} has the digest {known}; the order says {order.digest}",
                "give an order for what the image holds",
                name="wrong_digest",
            )

    def _fit(self, held: Held) -> LayoutPlan:
        """The plan for an image, rehearsed if its layout is new. An error that names what does not fit."""
        layout = held.layout()
        plan = self._fit_layout(layout, Tensors(held, whole=False))
        kept = held.slice
        if kept is not None and plan.covered != kept:
            lacking = held.lacks(json.dumps(self.needs(layout)))
            if lacking:
                raise WindlassInvalid(
                    f"the image keeps only a slice of the model, without all that rank {self._rank} reads of "
                    f"{listed(lacking)}",
                    "have the receiver of this host keep what its workers read (docs/slices.md)",
                    name="outside_slice",
                )
            plan.covered = kept
        return plan

    def _fit_layout(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> LayoutPlan:
        key = self._key(layout)
        if self._plan is not None and self._plan.key == key:
            return self._plan
        check_changed(layout, self._accepted)
        with self._session.rehearsal() as targets:
            found = trace(self._session.load_weights, tensors, targets)
        check_missing(self._session, found)
        check_reads(self._session, found, tensors)
        taken = set(found.reached)
        extras = sorted(found.unexpected)
        if self._session.partial is None:
            aliases = set(layout.aliases())
            extras = sorted(
                {*extras, *(name for name in tensors if name not in taken and name not in aliases)}
            )
        self.tell_extras(extras)
        rows = {name: (dtype, tuple(shape)) for name, dtype, shape, _, _ in layout.tensors()}
        table = {name: rows[name] for name in taken if name in rows}
        self._plan = LayoutPlan(key, found, extras, table)
        return self._plan

    def tell_extras(self, extras: list[str]) -> None:
        """Says which tensors the engine does not take, or refuses them."""
        if not extras:
            return
        named = listed(extras)
        if self._extras == "error":
            raise WindlassInvalid(
                f"the engine does not take {len(extras)} tensors of the image: {named}",
                "exclude them from what is published, or set WINDLASS_EXTRAS=ignore",
                name="extra_tensors",
            )
        if extras != self._told_extras:
            self._told_extras = extras
            log.warning(
                "rank %d: the engine does not take %d tensors of the image: %s",
                self._rank,
                len(extras),
                named,
            )

    def _decide(
        self, order: LoadOrder, plan: LayoutPlan
    ) -> tuple[Literal["sparse", "dense", "session"], LiveVersion | None, str]:
        """How an order is carried out, from which version on if it is by its changes alone, and why the engine's own loader
        does what a plan was expected to do, if so."""
        if order.how == "session":
            return "session", None, ""
        refusal = self._session.refuses_plan()
        if plan.verdict is None:
            # The first load of a layout is the reference, and by the engine's own loader.
            return "session", None, refusal or plan.dropped
        if refusal is None and plan.native is not None and not self._in_place(plan):
            refusal = "parameters are not where they were"
        if refusal is not None:
            self.forget(refusal)
            plan.drop(refusal)
            return "session", None, refusal
        why = reasons(plan.verdict)
        if plan.native is None:
            return "session", None, why
        base = self._base_of(order)
        return ("dense", None, why) if base is None else ("sparse", base, why)

    def _base_of(self, order: LoadOrder) -> LiveVersion | None:
        """The version that the weights are, if an order may be carried out by what changed since."""
        base = self._live
        if (
            order.how != "auto"
            or self._dirty
            or base is None
            or (base.model_id, base.incarnation) != (order.model_id, order.incarnation)
            or base.version >= order.version
        ):
            return None
        return base

    # From the first write on.

    def _write(
        self,
        how: Literal["sparse", "dense", "session"],
        base: LiveVersion | None,
        plan: LayoutPlan,
        held: Held,
        order: LoadOrder,
        began: float,
    ) -> Last:
        if how == "session":
            if plan.device is not None:
                plan.device.forget()
            tensors, before = Tensors(held, whole=False), self._before(plan)
            with self._pinned(held):
                size = self._by_session(plan, tensors, sorted({*plan.table}))
            why = self._judge(plan, before, tensors, held)
            return Last(how="session", ms=_since(began), bytes=size, why=why)
        verdict = plan.verdict
        assert verdict is not None
        until = began + order.timeout
        size = (
            self._by_session(plan, Tensors(held, whole=False), sorted(verdict.session))
            if verdict.session
            else 0
        )
        if base is not None:
            try:
                done, elements = self._sparsely(plan, held, base, order, until)
            except WindlassStale as e:
                log.info("rank %d: version %d is loaded whole: %s", self._rank, held.version, e)
            else:
                return Last(how="sparse", ms=_since(began), bytes=size + done, elements=elements)
        self._since_verified = 0
        if plan.device is None:
            done, _ = plan.native.dense(held, self._addresses(plan), self._threads, timeout=_left(until))
            return Last(how="dense", ms=_since(began), bytes=size + done)
        try:
            done = plan.device.dense(held, self._threads, _left(until))
        except (WindlassTimeout, WindlassCancelled, WindlassStale):
            raise
        except WindlassError as e:
            done = self._by_session(plan, Tensors(held, whole=False), sorted(verdict.replayed))
            return Last(how="session", ms=_since(began), bytes=size + done, why=str(e))
        return Last(how="dense", ms=_since(began), bytes=size + done)

    def _sparsely(
        self, plan: LayoutPlan, held: Held, base: LiveVersion, order: LoadOrder, until: float
    ) -> tuple[int, int]:
        """Bytes and elements that were written, as far as they were counted."""
        size, elements, wrong = 0, 0, []
        self._since_verified += 1
        whole = self._since_verified >= self._verify_every
        if plan.device is not None:
            size = plan.device.sparse(held, base, order.identity, _left(until))
            if whole:
                wrong = plan.device.difference(held, self._threads, _left(until))
        else:
            addresses = self._addresses(plan)
            written = plan.native.sparse(
                held, base.incarnation, base.version, addresses, self._threads, timeout=_left(until)
            )
            elements = int(written[0])
            count = (1 << 62) if whole else SAMPLE
            wrong = plan.native.sampled_difference(held, addresses, count, secrets.randbits(32))
        if wrong:
            raise WindlassStale(
                f"{listed(sorted(wrong))} are not what this worker wrote as version {base.version}: somebody else "
                "changed the weights"
            )
        if whole:
            self._since_verified = 0
        return size, elements

    def _by_session(self, plan: LayoutPlan, tensors: Mapping[str, torch.Tensor], names: list[str]) -> int:
        """The engine's own loader, for all tensors of some modules."""
        size = 0

        def feed() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal size
            for name in names:
                tensor = tensors[name]
                size += tensor.numel() * tensor.element_size()
                yield name, tensor.clone() if name in plan.trace.written_sources else tensor

        try:
            self._session.begin()
            self._session.load(feed())
            self._session.finish()
        except BaseException:
            self._session.abandon()
            raise
        return size

    @contextmanager
    def _pinned(self, held: Held) -> Iterator[None]:
        """Lets a GPU read an image by itself, while the engine's own loader copies tensor by tensor from it."""
        device, registered = self._device(), None
        # To pin the holes of a slice would give them memory.
        if device is not None and held.slice is None:
            try:
                registered = _windlass.Gpu.open(device.index or 0).register(held.memory())
            except WindlassError as e:
                log.warning(
                    "rank %d: the first load takes longer: the image cannot be pinned: %s", self._rank, e
                )
        try:
            yield
        finally:
            if registered is not None:
                torch.cuda.synchronize(device)
                registered.close()

    def _before(self, plan: LayoutPlan) -> Snapshot | None:
        if plan.verdict is not None or self._session.refuses_plan() is not None:
            return None
        covered = {plan.trace.targets[copy.target].name for copy in plan.trace.copies}
        return snapshot(self._session.model, self._session, covered)

    def _judge(
        self, plan: LayoutPlan, before: Snapshot | None, tensors: Mapping[str, torch.Tensor], held: Held
    ) -> str:
        """After the engine's own reload: which modules can be written to directly from now on. Why none can, if nothing but
        an error keeps them from it."""
        if before is None:
            return ""
        try:
            self._qualify(plan, before, tensors, held)
        except Exception as e:
            # The weights are right, which is what was asked for; they can go the same way next time.
            why = f"no plan could be made: {type(e).__name__}: {e}"
            log.debug("rank %d: %s", self._rank, why, exc_info=True)
            plan.drop(why)
            if not isinstance(e, (WindlassExhausted, torch.cuda.OutOfMemoryError)):
                # Otherwise there may be room next time.
                plan.verdict = Verdict(session=set(plan.table), why={"": why})
            return why
        return ""

    def _qualify(
        self, plan: LayoutPlan, before: Snapshot, tensors: Mapping[str, torch.Tensor], held: Held
    ) -> None:
        # On a GPU the sums of the live weights, which take milliseconds, say whether they are what was loaded.
        on_gpu = self._device() is not None
        source = None if on_gpu else tensors.__getitem__
        verdict = qualify(self._session.model, self._session, plan.trace, before, source)
        self._make(plan, verdict, held)
        if on_gpu and plan.device is not None:
            wrong = plan.device.difference(held, self._threads, DIGEST_S)
            if wrong:
                self._make(plan, without(plan.trace, verdict, wrong), held)
            if plan.device is not None:
                # The first delta need not.
                plan.device.sum_up(DIGEST_S)
                plan.device.reserve(held.memory().length // DELTA_SHARE)
        elif on_gpu and verdict.copies:
            raise WindlassUnsupported("the parameters are not on one GPU")
        made = plan.verdict
        assert made is not None
        for module, reason in list(made.why.items())[:REASONS]:
            log.debug("rank %d: %s is loaded by the engine: %s", self._rank, module, reason)
        log.info(
            "rank %d: %d modules are written directly, %d by the engine's own loader",
            self._rank,
            made.modules,
            len(made.why),
        )

    def _make(self, plan: LayoutPlan, verdict: Verdict, held: Held) -> None:
        """The plan of a verdict."""
        plan.verdict, plan.native, plan.device, plan.dropped = verdict, None, None, ""
        live = dict(self._session.model.named_parameters(remove_duplicate=False))
        used = sorted({copy.target for copy in verdict.copies})
        index = {target: i for i, target in enumerate(used)}
        plan.names = [plan.trace.targets[i].name for i in used]
        plan.places = [place(live[name]) for name in plan.names]
        modules = dict(self._session.model.named_modules())
        plan.holders = [
            (modules[target.module]._parameters, target.attribute)
            for target in (plan.trace.targets[i] for i in used)
        ]
        if used:
            copies = [
                (
                    c.source,
                    c.source_offset,
                    index[c.target],
                    c.target_offset,
                    list(c.sizes),
                    list(c.source_strides),
                    list(c.target_strides),
                )
                for c in verdict.copies
            ]
            rows = [(name, live[name].numel(), dtype_name(live[name].dtype)) for name in plan.names]
            plan.native = _windlass.LoadPlan(held.layout(), rows, copies)
            plan.device = device_weights(plan.native, [live[name] for name in plan.names])

    def _addresses(self, plan: LayoutPlan) -> list[int]:
        live = dict(self._session.model.named_parameters(remove_duplicate=False))
        return [live[name].data_ptr() for name in plan.names]

    def _in_place(self, plan: LayoutPlan) -> bool:
        live = dict(self._session.model.named_parameters(remove_duplicate=False))
        return all(name in live and place(live[name]) == was for name, was in zip(plan.names, plan.places))

    def _write_report(self, order: LoadOrder) -> None:
        if order.reports is None:
            return
        try:
            self.report().write(order.reports)
        except WindlassError as e:
            # The order itself went as it went.
            log.error("rank %d: %s", self._rank, e)


def _hold(order: LoadOrder, seconds: float) -> Held:
    return _windlass.open_image(order.image, seconds, min(order.timeout, 60.0), slices=True)


def _version_of(fetched: FetchedDelta) -> LiveVersion:
    return LiveVersion(
        model_id=fetched.model_id, incarnation=_number(fetched.incarnation), version=fetched.version
    )


def _begins(order: LoadOrder) -> LiveVersion:
    """The version that the delta of an order begins from."""
    assert order.delta is not None
    return dataclasses.replace(order.identity, version=order.delta.base)


def _number(incarnation: Any) -> int:
    return incarnation if isinstance(incarnation, int) else int(str(incarnation), 16)


def _let_go(held: Held) -> None:
    try:
        held.finish()
    except WindlassError as e:
        log.debug("the hold on an image was over before: %s", e)


def _left(until: float) -> float:
    return max(1.0, until - time.monotonic())


def _traced(report: Report) -> Report:
    """A load that went well is a span of its version."""
    live, last = report.live, report.last
    if report.state == "clean" and live is not None and last is not None and last.how != "skipped":
        said = {"windlass.how": last.how, "windlass.bytes": last.bytes, "windlass.rank": report.rank}
        record("windlass.load", Identity(**live.to_dict()), last.ms / 1e3, said)
    return report


def _since(began: float) -> float:
    return (time.monotonic() - began) * 1e3


def _verify_every() -> int:
    """How often the environment asks for a comparison."""
    text = os.environ.get("WINDLASS_VERIFY_EVERY", str(VERIFY_EVERY))
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise WindlassInvalid(f"WINDLASS_VERIFY_EVERY is {text!r}: expected a whole number from 1")
    return int(text)
