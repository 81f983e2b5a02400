"""The loader that runs inside SGLang's workers.

The server is started with ``--custom-weight-loader windlass.sglang.custom.load``. A driver then sends an order (see
:mod:`windlass.load.order`) in place of tensors, as a tensor of a few hundred bytes named ``__windlass_order__``: through
``update_weights_from_tensor`` with this function as its ``load_format``. Every worker maps the image, checks that it is
what was ordered and fits what it serves, and brings its weights to it (:mod:`windlass.load.live`): by the model's own
``load_weights`` the first time, and from then on directly, where a rehearsal of that loader and the first load showed that
to be the same; sparsely, if only some elements changed. Weights travel neither over HTTP nor through a pickle, and no file
is copied.

What the tensor holds is JSON: ``order``; ``served``, the checkpoint and the :class:`~windlass.engines.sglang.served.Rules` by which
the image is judged; ``ends``, whether ``/end_weight_update`` follows. ``{"prove": DIR}`` instead of an order has each worker
write sums of its live weights to ``DIR/<rank>.json``.

``{"receive": {...}}`` instead of an order is a step of an update whose weights are in memory of the trainer
(:mod:`windlass.engines.sglang.handles`): ``update`` has each worker open the handles of a ``request`` for its device and load what
is there, ``finish`` ends the update, ``close`` lets go of the trainer's memory. Ranks do not agree first: from the first
request on the engine holds weights of two versions, and stays paused until an update is finished.

Owns: what happens in one worker between order and report. Must not: raise. SGLang ends when a loader does. What went
wrong stands in the report, ``<reports>/<rank>.json``; the driver gives a fresh directory with every order, so a report
that is missing is an error too.

A model whose loader cannot be rehearsed (one that writes in threads of its own) is loaded by that loader each time, as
long as the image fits the checkpoint; the report's ``plan`` says why.

| | invariant | test |
|---|---|---|
| SGLANG-1 | nothing is written unless all ranks can write: they agree first | `test_a_rank_that_refuses_holds_back_the_others` |
| SGLANG-2 | a problem before the first write leaves the weights and says `clean` | `test_an_image_that_does_not_fit_is_refused_by_the_worker` |
| SGLANG-3 | a problem after it says `dirty`, until a whole load is done | `test_a_load_that_breaks_says_dirty_and_the_next_one_heals` |
| SGLANG-4 | the function never raises | `test_no_order_makes_the_loader_raise` |
| SGLANG-5 | weights that another route changed are not patched | `test_weights_that_another_driver_loaded_are_not_patched` |
| SGLANG-6 | an update of requests ends only if every tensor of the checkpoint came | `test_requests_of_handles_are_loaded_whole_or_said_to_be_dirty` |
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass import _windlass
from windlass.atomic import replacing
from windlass.engines.sglang.payload import ORDER
from windlass.engines.sglang.served import Fit, Rules, Served, Shape
from windlass.errors import (
    WindlassCancelled,
    WindlassCorrupt,
    WindlassError,
    WindlassInvalid,
    WindlassNotFound,
    WindlassStale,
    WindlassUnsupported,
)
from windlass.load.order import EXTRAS, Failure, Last, LiveVersion, LoadOrder, PlanSummary, Report

if TYPE_CHECKING:
    import torch

    from windlass._windlass import Held
    from windlass.load.receiving import Receiving

__all__ = ["PATH", "load"]

log = logging.getLogger("windlass")

#: What to write behind ``--custom-weight-loader``.
PATH = "windlass.sglang.custom.load"

#: Refusals of a rehearsal that are about the order, not about what a rehearsal can see.
_MEANT = ("extra_tensors", "shape_changed", "dtype_changed")
#: Requests carry what the trainer extracts, which engines cast.
_BY_HANDLE = Rules(cast=True)


def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Carries out the order that is among ``named_tensors``. Never raises."""
    try:
        text = next((tensor for name, tensor in named_tensors if name == ORDER), None)
        if text is None:
            raise WindlassInvalid(f"{PATH} was called without an order: only Windlass's loader sends one")
        _Worker.of(model).carry_out(json.loads(text.cpu().numpy().tobytes()))
    except Exception:
        log.exception("an order could not be read; the weights are as they were")


class _Worker:
    """What one model of this process is known to hold."""

    def __init__(self, model: torch.nn.Module) -> None:
        from windlass.engines.sglang.session import SglangSession, watch
        from windlass.load.live import Live

        self._session = SglangSession(model)
        self._live = Live(self._session, rank=_rank(), engine=_engine())
        self._served: dict[str, Served] = {}
        #: What was loaded without a plan.
        self._unplanned: LiveVersion | None = None
        #: Why there was none, as it was told.
        self._why: str | None = None
        #: The end of a trainer's strategy, what it was made of, and the tensors that came in this update.
        self._receiving: Receiving | None = None
        self._strategy: Mapping[str, Any] = {}
        self._came: set[str] = set()
        watch(_forget)

    @classmethod
    def of(cls, model: torch.nn.Module) -> _Worker:
        found = model.__dict__.get("_windlass_worker")
        if found is None:
            # The model owns it: both end together.
            found = model.__dict__["_windlass_worker"] = cls(model)
        worker: _Worker = found
        return worker

    def forget(self, why: str) -> None:
        """Another driver changed the weights."""
        self._unplanned = None
        self._live.forget(why)

    def carry_out(self, plain: Mapping[str, Any]) -> None:
        """An order, or a question."""
        timeout = 0.0
        self._session.enter(bool(plain.get("ends")))
        try:
            if "prove" in plain:
                self._prove(str(plain["prove"]))
                return
            if "receive" in plain:
                self._receive(plain["receive"])
                return
            order = LoadOrder.from_dict(plain["order"])
            timeout = order.timeout
            self._obey(order, plain.get("served") or {})
        finally:
            self._session.settle(timeout)

    def _obey(self, order: LoadOrder, told: Mapping[str, Any]) -> None:
        """Loads, and writes the report. Never raises."""
        begin = time.monotonic()
        try:
            held, fit, why = self._prepare(order, told)
            try:
                if why is None:
                    report = self._live.load(replace(order, reports=None))
                    self._unplanned = None
                else:
                    report = self._without_plan(order, held, fit, why, begin)
            finally:
                held.finish()
        except Exception as e:
            report = replace(self._report(), last=None, error=Failure.of(e))
        _tell(report, order.label, order.reports)

    def _receive(self, told: Mapping[str, Any]) -> None:
        """A step of an update by handles, and its report. Never raises."""
        step, error = told.get("step"), None
        try:
            if step == "update":
                self._update(told)
            elif step == "finish":
                self._finish()
            elif step == "close":
                self._let_go()
            else:
                raise WindlassInvalid(f"{step!r} is no step of an update")
        except Exception as e:
            error = Failure.of(e)
        report = self._report()
        if error is not None:
            report = replace(report, last=None, error=error)
        _tell(report, f"the step {step!r} of an update", told.get("reports"))

    def _update(self, told: Mapping[str, Any]) -> None:
        """Loads what a request says."""
        from windlass.load.receiving import Receiving
        from windlass.transfer.sync_info import EmptyWeightSyncInfo

        if self._receiving is None or self._strategy != told["strategy"]:
            self._let_go()
            self._receiving = Receiving(self._live, EmptyWeightSyncInfo().to_dict(), told["strategy"])
            self._strategy = told["strategy"]
        if told.get("first"):
            self._came = set()
            self._receiving.start()
        request = told["request"]
        names, dtypes, shapes = request["names"], request["dtypes"], request["shapes"]
        offered = {name: (dtype, tuple(shape)) for name, dtype, shape in zip(names, dtypes, shapes)}
        served = self._comparison()
        if served is not None and (known := {n: kind for n, kind in offered.items() if n in served.tensors}):
            served.check(known, _BY_HANDLE, what="what the trainer sends", whole=False)
        self._unplanned = None
        self._receiving.update(request)
        self._came.update(names)

    def _finish(self) -> None:
        """The end of an update, if all of it came."""
        from windlass.engines.sglang.session import synchronize
        from windlass.load.fit import listed

        if self._receiving is None:
            return
        served = self._comparison()
        lacking = [] if served is None else served.missing(self._came, _BY_HANDLE)
        if lacking:
            error = WindlassInvalid(
                f"{listed(lacking)} did not come: the weights are of two versions",
                "send all tensors of the model in every update",
                "missing_tensor",
            )
            self._receiving.abandon(error)
            raise error
        self._receiving.finish()
        # Requests are answered when their copies are started; the trainer writes again after this answer.
        synchronize()

    def _let_go(self) -> None:
        receiving, self._receiving = self._receiving, None
        if receiving is not None:
            receiving.close()

    def _comparison(self) -> Served | None:
        """The checkpoint that this worker was started from, if it can be read."""
        try:
            return self._served_by(None)
        except (WindlassInvalid, WindlassNotFound, WindlassUnsupported):
            return None

    def _report(self) -> Report:
        report = self._live.report()
        return report if self._unplanned is None else replace(report, live=self._unplanned)

    def _prepare(self, order: LoadOrder, told: Mapping[str, Any]) -> tuple[Held, Fit, str | None]:
        """The image, held, what of it to take, and why that cannot be by a plan: everything that can be found wrong before
        the first write."""
        held: Held | None = None
        problem: Exception | None = None
        fit, why = Fit([], []), None
        try:
            held = _windlass.open_image(order.image, order.timeout, order.timeout)
            check_identity(order, held)
            fit, why = self._judge(order, held, told)
        except Exception as e:
            problem = e
        try:
            # Every rank comes here, whatever it found: a rank that stayed away would be waited for.
            agreed = _all_ranks(problem is None)
        except Exception as e:
            problem, agreed = problem or e, False
        if held is not None and problem is None and agreed:
            return held, fit, why
        if held is not None:
            held.finish()
        raise problem or WindlassCancelled(
            f"{order.label} was not loaded because another rank refused it", "see the report of that rank"
        )

    def _judge(self, order: LoadOrder, held: Held, told: Mapping[str, Any]) -> tuple[Fit, str | None]:
        """Whether an image fits, by the checkpoint and by a rehearsal."""
        rules = Rules(**{k: v for k, v in told.items() if k != "checkpoint"})
        try:
            served: Served | None = self._served_by(told.get("checkpoint"))
        except (WindlassNotFound, WindlassUnsupported):
            # Nothing to compare with: what the rehearsal says is all there is.
            served = None
        fit = Fit([], []) if served is None else served.check(shapes_of(held), rules, what=order.label)
        try:
            report = self._live.check(order)
        except WindlassError as e:
            if served is None or isinstance(e, WindlassStale) or e.name in _MEANT:
                raise
            return fit, self._tell_why(f"its loader cannot be rehearsed: {e}")
        if served is None or self._session.partial is not None:
            return fit, None
        # What the model takes from the checkpoint and the rehearsal saw reach no parameter: it may be a buffer.
        lost = sorted(set(served.missing(set(fit.take) - set(report.extras), rules)) & set(fit.take))
        if lost or len(report.extras) == EXTRAS:
            named = lost[0] if lost else report.extras[-1]
            return fit, self._tell_why(f"the rehearsal saw {named} reach no parameter")
        return fit, None

    def _tell_why(self, why: str) -> str:
        if why != self._why:
            self._why = why
            log.warning("every version is loaded whole by the model's own load_weights: %s", why)
        return why

    def _served_by(self, checkpoint: str | None) -> Served:
        path = checkpoint or _checkpoint()
        if path not in self._served:
            self._served[path] = Served.from_checkpoint(path)
        return self._served[path]

    def _without_plan(self, order: LoadOrder, held: Held, fit: Fit, why: str, begin: float) -> Report:
        """Everything from the first write on, by the model's own loader."""
        from windlass.receive.receiver import Tensors

        size, tensors = 0, Tensors(held)

        def views() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal size
            for name in fit.take:
                tensor = tensors[name]
                size += tensor.numel() * tensor.element_size()
                yield name, tensor

        self._unplanned = None
        try:
            self._live.begin_tensors()
            self._live.feed_tensors(views())
            self._live.finish_tensors()
        except Exception as e:
            self._live.abandon_tensors(e)
            raise WindlassCorrupt(
                f"the model's own load_weights failed with {order.label}: {type(e).__name__}: {e}",
                "the weights may be of two versions: load a whole version again before generating",
            ) from e
        self._unplanned = order.identity
        return replace(
            self._report(),
            plan=PlanSummary(key="", replayed=0, session=1, why={"": why}),
            last=Last(how="session", ms=(time.monotonic() - begin) * 1e3, bytes=size),
            extras=tuple(fit.extras[:EXTRAS]),
        )

    def _prove(self, directory: str) -> None:
        """Writes sums of the live weights, whole or not at all."""
        try:
            told = self._live.digest()
        except Exception as e:
            told = {"report": self._report().to_dict(), "parts": None, "unseen": [], "why": str(e)}
        final = Path(directory) / f"{_rank()}.json"
        with replacing(final) as draft:
            draft.write_text(json.dumps(told))


def _tell(report: Report, what: str, directory: str | None) -> None:
    """Logs what went wrong, and writes the report."""
    if report.error is not None:
        log.error("%s was not loaded (%s): %s", what, report.state, report.error.text)
    if directory is not None:
        try:
            report.write(directory)
        except Exception:
            log.exception("the report on %s could not be written", what)


def _forget(model: torch.nn.Module, why: str) -> None:
    worker = model.__dict__.get("_windlass_worker")
    if worker is not None:
        worker.forget(why)


def check_identity(order: LoadOrder, held: Held) -> None:
    have = (held.model_id, int(held.incarnation, 16), held.version)
    want = (order.model_id, order.incarnation, order.version)
    if have != want:
        raise WindlassStale(
            f"the image at {order.image} holds version {held.version} of {held.model_id} "
            f"(incarnation {held.incarnation}), {order.label} of {order.model_id} was ordered",
            "order what the image holds",
        )
    if held.digest is None or (order.digest and held.digest != order.digest):
        raise WindlassCorrupt(
            f"the image at {order.image} has digest {held.digest}, ordered was {order.digest or 'a known one'}",
            "let the receiver verify or fetch the version again",
        )


def shapes_of(held: Held) -> dict[str, Shape]:
    """What the image offers, further names of tied tensors included."""
    layout = held.layout()
    shapes = {name: (dtype, tuple(shape)) for name, dtype, shape, _at, _size in layout.tensors()}
    shapes.update({alias: shapes[name] for alias, name in layout.aliases().items()})
    return shapes


def _all_ranks(ready: bool) -> bool:
    """Whether all ranks that share this model are ready."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return ready
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group().cpu_group
    if dist.get_world_size(group) == 1:
        return ready
    flag = torch.tensor([int(ready)])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


def _rank() -> int:
    import torch.distributed as dist

    return int(dist.get_rank()) if dist.is_initialized() else 0


def _engine() -> str:
    try:
        import sglang

        return f"sglang {sglang.__version__}"
    except Exception:
        return "sglang"


def _checkpoint() -> str:
    """What this process was started with."""
    try:
        from sglang.srt.runtime_context import get_server_args
    except ImportError:
        from sglang.srt.server_args import get_global_server_args as get_server_args
    path = getattr(get_server_args(), "model_path", None)
    if not path or not isinstance(path, (str, os.PathLike)):
        raise WindlassInvalid(
            "this worker does not know which checkpoint it was started from",
            "name it in the order's 'served'",
        )
    return str(path)
