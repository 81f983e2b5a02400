"""The loader that runs inside SGLang's workers.

The server is started with ``--custom-weight-loader windlass.sglang.custom.load``. A driver then sends an order (see
:mod:`windlass.load.order`) in place of tensors, as a tensor of a few hundred bytes named ``__windlass_order__``: through
``update_weights_from_tensor`` with this function as its ``load_format``. Every worker maps the image, checks that it is
what was ordered and fits what it serves, and hands views of it to the model's own ``load_weights``. Weights travel neither
over HTTP nor through a pickle, and no file is copied.

Owns: what happens in one worker between order and report. Must not: raise. SGLang ends when a loader does. What went
wrong stands in the report, ``<reports>/<rank>.json``; the driver gives a fresh directory with every order, so a report
that is missing is an error too.

| | invariant | test |
|---|---|---|
| S-1 | nothing is written unless all ranks can write: they agree first | `test_a_rank_that_refuses_holds_back_the_others` |
| S-2 | a problem before the first write leaves the weights and says `clean` | `test_an_image_that_does_not_fit_is_refused_by_the_worker` |
| S-3 | a problem after it says `dirty`, until a whole load is done | `test_a_load_that_breaks_says_dirty_and_the_next_one_heals` |
| S-4 | the function never raises | `test_no_order_makes_the_loader_raise` |
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from windlass import _windlass
from windlass.errors import WindlassCancelled, WindlassCorrupt, WindlassInvalid, WindlassStale
from windlass.load.order import EXTRAS, Failure, Last, LiveVersion, LoadOrder, Report
from windlass.sglang.payload import ORDER
from windlass.sglang.served import Fit, Rules, Served, Shape

if TYPE_CHECKING:
    import torch

    from windlass._windlass import Held

__all__ = ["PATH", "load"]

log = logging.getLogger("windlass")

#: What to write behind ``--custom-weight-loader``.
PATH = "windlass.sglang.custom.load"

#: This process, until it ends: an engine that was restarted is another worker.
_WORKER = secrets.token_hex(8)


def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Carries out the order that is among ``named_tensors``. Never raises."""
    try:
        text = next((tensor for name, tensor in named_tensors if name == ORDER), None)
        if text is None:
            raise WindlassInvalid(f"{PATH} was called without an order: only Windlass's loader sends one")
        plain = json.loads(bytes(text.cpu().tolist()))
        _Worker.of(model).obey(LoadOrder.from_dict(plain["order"]), plain.get("served") or {})
    except Exception:
        log.exception("an order could not be read; the weights are as they were")


class _Worker:
    """What one model of this process is known to hold."""

    _all: weakref.WeakKeyDictionary[Any, _Worker] = weakref.WeakKeyDictionary()

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._live: LiveVersion | None = None
        self._state: str = "clean"
        self._served: dict[str, Served] = {}

    @classmethod
    def of(cls, model: torch.nn.Module) -> _Worker:
        if model not in cls._all:
            cls._all[model] = cls(model)
        return cls._all[model]

    def obey(self, order: LoadOrder, told: Mapping[str, Any]) -> None:
        """Loads, and writes the report. Never raises once the order was read."""
        begin = time.monotonic()
        last: Last | None = None
        error: Failure | None = None
        fit = Fit([], [])
        try:
            held, fit = self._prepare(order, told)
            try:
                size = self._write(order, held, fit)
            finally:
                held.finish()
            self._live, self._state = order.identity, "clean"
            last = Last(how="session", ms=(time.monotonic() - begin) * 1e3, bytes=size)
        except Exception as e:
            error = Failure.of(e)
            log.error("%s was not loaded (%s): %s", order.label, self._state, error.text)
        report = Report(
            rank=_rank(),
            worker=_WORKER,
            engine=_engine(),
            live=self._live,
            state="dirty" if self._state == "dirty" else "clean",
            last=last,
            extras=tuple(fit.extras[:EXTRAS]),
            error=error,
        )
        if order.reports is not None:
            try:
                report.write(order.reports)
            except Exception:
                log.exception("the report on %s could not be written", order.label)

    def _prepare(self, order: LoadOrder, told: Mapping[str, Any]) -> tuple[Held, Fit]:
        """The image, held, and what of it to take: everything that can be found wrong before the first write."""
        held: Held | None = None
        problem: Exception | None = None
        fit = Fit([], [])
        try:
            held = _windlass.open_image(order.image, order.timeout, order.timeout)
            _check_identity(order, held)
            rules = Rules(**{k: v for k, v in told.items() if k != "checkpoint"})
            fit = self._served_by(told.get("checkpoint")).check(_shapes(held), rules, what=order.label)
        except Exception as e:
            problem = e
        try:
            # Every rank comes here, whatever it found: a rank that stayed away would be waited for.
            agreed = _all_ranks(problem is None)
        except Exception as e:
            problem, agreed = problem or e, False
        if held is not None and problem is None and agreed:
            return held, fit
        if held is not None:
            held.finish()
        raise problem or WindlassCancelled(
            f"{order.label} was not loaded because another rank refused it", "see the report of that rank"
        )

    def _served_by(self, checkpoint: str | None) -> Served:
        path = checkpoint or _checkpoint()
        if path not in self._served:
            self._served[path] = Served.from_checkpoint(path)
        return self._served[path]

    def _write(self, order: LoadOrder, held: Held, fit: Fit) -> int:
        """Everything from the first write on."""
        model = self._model()
        if model is None:
            raise WindlassStale("the model is gone")
        size = 0

        def views() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal size
            from windlass.receiver import _Tensors

            tensors = _Tensors(held)
            for name in fit.take:
                tensor = tensors[name]
                size += tensor.numel() * tensor.element_size()
                yield name, tensor

        self._state, self._live = "dirty", None
        try:
            model.load_weights(views())  # type: ignore[operator]
            _settled()
        except Exception as e:
            raise WindlassCorrupt(
                f"the model's own load_weights failed with {order.label}: {type(e).__name__}: {e}",
                "the weights may be of two versions: load a whole version again before generating",
            ) from e
        return size


def _check_identity(order: LoadOrder, held: Held) -> None:
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


def _shapes(held: Held) -> dict[str, Shape]:
    """What the image offers, further names of tied tensors included."""
    layout = held.layout()
    shapes = {name: (dtype, tuple(shape)) for name, dtype, shape, _at, _size in layout.tensors()}
    shapes.update({alias: shapes[name] for alias, name in layout.aliases().items()})
    return shapes


def _settled() -> None:
    """Returns when the device has read what it was given: the image is let go of after this."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


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
