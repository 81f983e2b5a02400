"""Tensors that come in requests, into the weights of one worker.

Owns: :class:`Series`: what is known of the requests that make up one update, and the copies by which their tensors are
written to parameters directly. Called by what receives for an engine (:mod:`windlass.load.receiving`), one call at a
time, never while the model computes. Must not: receive, or know an engine.

The first series of a layout (names, dtypes, shapes) goes wholly through the engine's session, and is the reference.
Nobody keeps its tensors, so that what they held is remembered by fingerprints::

    a request ─► clones ─► rehearse them: which elements go where ─► fingerprint of each copy's source ─► the session
    finish    ─► the session post-processes ─► modules whose parameters have those fingerprints qualify

From then on each request is one launch of known copies (:class:`~windlass.load.planned.PlannedLoader`), and only what
belongs to modules that did not qualify goes to the session. A layout that changed, parameters that moved and weights
that were discarded begin over.

Invariants:

1. The worker is dirty from the first write until :meth:`Series.finish`, and stays so if that is not reached
   (``test_a_series_that_breaks_off_leaves_the_worker_dirty``).
2. A series ends only if every tensor of the plan came since it began
   (``test_a_series_without_a_tensor_is_named_and_stays_dirty``).
3. A module is written directly only if :func:`~windlass.load.qualify.qualify` says so, with the same checks as after a
   load from an image; bytes are compared by sums with a weight for each place
   (``test_what_the_engine_changes_afterwards_is_never_replayed``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from windlass.dtypes import dtype_name
from windlass.errors import WindlassError, WindlassInvalid
from windlass.load.fit import listed
from windlass.load.order import REASONS, Last, PlanSummary
from windlass.load.planned import PlannedLoader
from windlass.load.qualify import Snapshot, Verdict, qualify, snapshot
from windlass.load.trace import Copy, Target, Trace, trace

if TYPE_CHECKING:
    from windlass.load.live import Live

__all__ = ["Series", "fingerprint"]

log = logging.getLogger("windlass")

#: Bytes of small requests that are rehearsed together in a first series.
TOGETHER = 1 << 28
#: Elements of which a fingerprint is taken at a time.
PIECE = 1 << 22

Pairs = Sequence[tuple[str, torch.Tensor]]
#: Dtype and shape.
Kind = tuple[str, tuple[int, ...]]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(box: torch.Tensor) -> torch.Tensor:
    """A number of 64 bits for what a tensor holds and in which order, as a tensor on its device.

    >>> a = torch.arange(6.0).view(2, 3)
    >>> bool(fingerprint(a) == fingerprint(a.clone())), bool(fingerprint(a) == fingerprint(a.t()))
    (True, False)
    """
    out = torch.zeros((), dtype=torch.int64, device=box.device)
    box = box.detach().squeeze()
    if box.numel() == 0:
        return out
    box = box.reshape(1) if box.dim() == 0 else box
    step, at = max(1, PIECE // (box.numel() // box.shape[0])), 0
    for begin in range(0, box.shape[0], step):
        flat = box[begin : begin + step].contiguous().view(-1)
        bits = flat.view(_INTEGERS[flat.element_size()]).to(torch.int64)
        weights = torch.arange(at + 1, at + 1 + bits.numel(), dtype=torch.int64, device=box.device)
        # Odd constants of splitmix64 as signed numbers: what is added and multiplied wraps around.
        weights *= -7046029254386353131
        weights ^= weights >> 29
        weights *= -4658895280553007687
        out += ((bits + 1) * (weights ^ (weights >> 32))).sum()
        at += bits.numel()
    return out


def _box(tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], at: int) -> torch.Tensor:
    return torch.as_strided(tensor, tuple(sizes), tuple(strides), tensor.storage_offset() + at)


@dataclass
class _Learning:
    """A first series while it comes."""

    before: Snapshot
    #: Copied, and not rehearsed and fed yet.
    waiting: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    bytes: int = 0
    kinds: dict[str, Kind] = field(default_factory=dict)
    found: Trace | None = None
    sums: dict[Copy, torch.Tensor] = field(default_factory=dict)
    #: Why nothing is learnt after all.
    refusal: str | None = None


@dataclass
class _Plan:
    """What is known of a layout."""

    kinds: dict[str, Kind]
    verdict: Verdict
    #: Tensors that the session gets.
    fed: set[str]
    #: Tensors that change nothing.
    idle: set[str]
    loader: PlannedLoader | None
    names: list[str]
    places: list[tuple[int, torch.dtype, tuple[int, ...]]]

    @property
    def wanted(self) -> set[str]:
        """What must come for the weights to be whole."""
        return self.verdict.replayed | self.fed


class Series:
    """The requests of one worker; see the module."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._session = live.session
        self._plan: _Plan | None = None
        self._learning: _Learning | None = None
        self._begun = False
        #: Whether the session is open.
        self._open = False
        self._came: set[str] = set()
        self._bytes = 0
        self._at = 0.0

    def knows(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are the tensors of the updates before, neither more nor fewer."""
        return self._plan is not None and self._plan.kinds == {n: _kind(t) for n, t in tensors.items()}

    # Requests.

    def feed(self, pairs: Pairs) -> None:
        """The tensors of a request, or some of them. They may change when this returns and its copies are done."""
        kinds = {name: _kind(tensor) for name, tensor in pairs}
        self._take(kinds)
        self._bytes += sum(t.numel() * t.element_size() for _, t in pairs)
        plan, learning = self._plan, self._learning
        if learning is not None:
            # The engine keeps tensors until their layer is complete, and a receiver gives their memory to the next.
            learning.waiting += [(name, tensor.clone()) for name, tensor in pairs]
            learning.bytes += sum(t.numel() * t.element_size() for _, t in pairs)
            learning.kinds.update(kinds)
            if learning.bytes >= TOGETHER:
                self._study(learning)
            return
        fed = [(name, t.clone()) for name, t in pairs if plan is None or name in plan.fed]
        if fed:
            self._to_session(fed)
        if plan is not None and plan.loader is not None:
            plan.loader.load([(name, t) for name, t in pairs if name in plan.verdict.replayed])

    def fits(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> bool:
        """Whether a request can be had by addresses alone (:meth:`load_at`)."""
        if not self._begun:
            self._begin(_kinds(names, dtypes, shapes))
        plan = self._plan
        if self._learning is not None or plan is None or plan.loader is None or not plan.loader.fits():
            return False
        return plan.fed.isdisjoint(names)

    def load_at(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        addresses: Sequence[int],
    ) -> None:
        """The tensors of a request that :meth:`fits`, by where they are on the GPU."""
        self._take(_kinds(names, dtypes, shapes))
        plan = self._plan
        assert plan is not None and plan.loader is not None
        if not plan.idle.isdisjoint(names):
            rows = zip(names, dtypes, shapes, addresses, strict=True)
            kept = [row for row in rows if row[0] not in plan.idle]
            if not kept:
                return
            names, dtypes, shapes, addresses = zip(*kept)
        self._bytes += plan.loader.load_at(names, dtypes, shapes, addresses)

    def finish(self) -> None:
        """Ends the series. An error if it was not all: what did not come is not what it was."""
        if not self._begun:
            return
        learning, plan = self._learning, self._plan
        if learning is not None:
            self._study(learning)
        elif plan is not None and (lacking := sorted(plan.wanted - self._came)):
            raise WindlassInvalid(
                f"{listed(lacking)} did not come: the weights are of two versions",
                "send all tensors of the model in every update; if there are fewer from now on, sync again",
                name="missing_tensor",
            )
        if self._open:
            self._live.finish_tensors()
            self._open = False
        direct = learning is None and plan is not None and plan.loader is not None
        self._begun, self._learning = False, None
        if plan is not None and plan.loader is not None:
            plan.loader.wait()
        took = (time.monotonic() - self._at) * 1e3
        self._live.settle(Last(how="dense" if direct else "session", ms=took, bytes=self._bytes))
        if learning is not None:
            self._judge(learning)

    def abandon(self, why: BaseException) -> None:
        """Ends a series that failed: the worker stays dirty, and the next series must be whole."""
        if not self._begun:
            return
        if isinstance(why, WindlassError) and why.name in ("missing_tensor", "layout_changed"):
            self.drop(str(why))
        self._begun, self._learning = False, None
        was_open, self._open = self._open, False
        self._live.broken(why, was_open)

    def drop(self, why: str) -> None:
        """The copies are not to be used any more; the next series is learnt from."""
        if self._plan is not None and self._plan.loader is not None:
            log.warning(
                "rank %d: the next update is loaded by the engine, and not directly: %s", self._live.rank, why
            )
        self._plan = None

    def summary(self) -> PlanSummary | None:
        """What is written directly and what is not."""
        plan = self._plan
        if plan is None:
            return None
        why = dict(list(plan.verdict.why.items())[:REASONS])
        return PlanSummary(
            key=f"series.{self._session.parallelism}",
            replayed=plan.verdict.modules,
            session=len(plan.verdict.why),
            why=why,
        )

    # Beginning.

    def _take(self, kinds: Mapping[str, Kind]) -> None:
        """Begins a series with its first request, and sees that a later one belongs to it."""
        if not self._begun:
            self._begin(kinds)
        if not self._came.isdisjoint(kinds):
            # The update before was never finished, and this is another one.
            self._came.clear()
        self._came.update(kinds)
        plan = self._plan
        if plan is not None and (other := _other(plan.kinds, kinds)) is not None:
            raise WindlassInvalid(
                f"{other} after other tensors of the update were written",
                "sync again: the next update is loaded by the engine",
                name="layout_changed",
            )

    def _begin(self, kinds: Mapping[str, Kind]) -> None:
        self._begun, self._at, self._bytes = True, time.monotonic(), 0
        self._came = set()
        plan = self._plan
        if plan is not None:
            refusal = self._session.refuses_plan() or _other(plan.kinds, kinds)
            if refusal is None and not self._in_place(plan):
                refusal = "parameters are not where they were"
            if refusal is not None:
                self.drop(refusal)
        if self._plan is not None:
            self._live.mark("weights come from elsewhere")
            return
        refusal = self._session.refuses_plan()
        if refusal is None:
            model = self._session.model
            names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
            self._learning = _Learning(snapshot(model, self._session, names))
        else:
            log.warning("rank %d: the update is loaded by the engine: %s", self._live.rank, refusal)
        self._live.mark("weights come from elsewhere")

    def _in_place(self, plan: _Plan) -> bool:
        live = dict(self._session.model.named_parameters(remove_duplicate=False))
        return all(
            name in live and _place(live[name]) == place for name, place in zip(plan.names, plan.places)
        )

    def _to_session(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        if not self._open:
            self._open = True
            self._session.begin()
        self._live.feed_tensors(pairs)

    # Learning.

    def _study(self, learning: _Learning) -> None:
        """Rehearses what waits, remembers what it holds, and feeds it."""
        pairs, learning.waiting, learning.bytes = learning.waiting, [], 0
        if not pairs:
            return
        sources = dict(pairs)
        if learning.refusal is None:
            try:
                with self._session.rehearsal() as targets:
                    found = trace(self._session.load_weights, sources, targets)
            except Exception as e:
                # The session has the last word: it takes the tensors, or says itself why not.
                learning.refusal = str(e) if isinstance(e, WindlassError) else f"{type(e).__name__}: {e}"
            else:
                self._live.tell_extras(sorted(found.unexpected))
                pairs = [pair for pair in pairs if pair[0] not in found.unexpected]
                for copy in merge(learning, found):
                    source = sources[copy.source]
                    box = _box(source, copy.sizes, copy.source_strides, copy.source_offset)
                    learning.sums[copy] = fingerprint(box)
        if pairs:
            self._to_session(pairs)

    def _judge(self, learning: _Learning) -> None:
        """After the engine's own reload: what is written directly from now on."""
        try:
            if learning.refusal is not None:
                raise WindlassInvalid(learning.refusal)
            self._plan = self._planned(learning)
        except Exception as e:
            # The weights are right, which is what was asked for.
            log.warning(
                "rank %d: updates are loaded by the engine, no plan could be made: %s", self._live.rank, e
            )
            reason = {"": f"no plan could be made: {e}"}
            verdict = Verdict(session=set(learning.kinds), why=reason)
            self._plan = _Plan(learning.kinds, verdict, set(learning.kinds), set(), None, [], [])
            return
        why = self._plan.verdict.why
        say = log.warning if why else log.info
        say(
            "rank %d: of updates, %d modules are written directly, %d by the engine's own loader%s",
            self._live.rank,
            self._plan.verdict.modules,
            len(why),
            "".join(f"; {module or 'the model'}: {reason}" for module, reason in list(why.items())[:3]),
        )

    def _planned(self, learning: _Learning) -> _Plan:
        found = learning.found or Trace([])
        sums = {copy: int(value) for copy, value in zip(learning.sums, _numbers(learning.sums.values()))}

        def holds(copy: Copy, there: torch.Tensor) -> bool:
            return sums.get(copy) == int(fingerprint(there))

        verdict = qualify(self._session.model, self._session, found, learning.before, holds=holds)
        live = dict(self._session.model.named_parameters(remove_duplicate=False))
        used = sorted({copy.target for copy in verdict.copies})
        index = {target: i for i, target in enumerate(used)}
        names = [found.targets[i].name for i in used]
        loader = None
        if used:
            copies = [replace(copy, target=index[copy.target]) for copy in verdict.copies]
            loader = PlannedLoader([live[name] for name in names], copies)
        unseen = learning.kinds.keys() - verdict.replayed - verdict.session
        extras = unseen & set(found.unexpected)
        fed = verdict.session | (unseen - extras if self._session.hides_writes else set())
        idle = learning.kinds.keys() - verdict.replayed - fed
        places = [_place(live[name]) for name in names]
        return _Plan(learning.kinds, verdict, fed, set(idle), loader, names, places)


def merge(learning: _Learning, found: Trace) -> list[Copy]:
    """Adds what one rehearsal showed to what those before did; its copies, by the targets of all."""
    if learning.found is None:
        learning.found = Trace([])
    into = learning.found
    targets: list[Target] = list(into.targets)
    numbers = {target.name: i for i, target in enumerate(targets)}
    for target in found.targets:
        if target.name not in numbers:
            numbers[target.name] = len(targets)
            targets.append(target)
    into.targets = targets
    at = [numbers[target.name] for target in found.targets]
    copies = [replace(copy, target=at[copy.target]) for copy in found.copies]
    into.copies += copies
    into.constants += [replace(constant, target=at[constant.target]) for constant in found.constants]
    for target_index, reason in found.reasons.items():
        into.reasons.setdefault(at[target_index], reason)
    for name, reached in found.reached.items():
        into.reached.setdefault(name, set()).update(at[i] for i in reached)
    into.casts.update(found.casts)
    into.refusal = into.refusal or found.refusal
    into.unexpected += found.unexpected
    into.written_sources |= found.written_sources
    if found.loaded is not None:
        into.loaded = (into.loaded or frozenset()) | found.loaded
    return copies


def _kind(tensor: torch.Tensor) -> Kind:
    return dtype_name(tensor.dtype), tuple(tensor.shape)


def _kinds(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> dict[str, Kind]:
    return {name: (dtype, tuple(shape)) for name, dtype, shape in zip(names, dtypes, shapes, strict=True)}


def _other(known: Mapping[str, Kind], kinds: Mapping[str, Kind]) -> str | None:
    """The first tensor that is not as it was, in words."""
    for name, kind in kinds.items():
        was = known.get(name)
        if was != kind:
            before = "was not there" if was is None else f"was {was[0]} {list(was[1])}"
            return f"{name!r} came as {kind[0]} {list(kind[1])}, and {before} in the updates before,"
    return None


def _numbers(values: Iterable[torch.Tensor]) -> list[int]:
    held = list(values)
    devices = {value.device for value in held}
    if len(devices) == 1:
        # One wait for all of them.
        return [int(n) for n in torch.stack(held).tolist()]
    return [int(value) for value in held]


def _place(tensor: torch.Tensor) -> tuple[int, torch.dtype, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)
