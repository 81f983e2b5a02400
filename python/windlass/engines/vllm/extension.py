"""What a vLLM worker can be asked by ``collective_rpc``.

Owns: the worker's methods ``windlass_*`` and the one :class:`~windlass.load.live.Live` of each model. Called by the
endpoint plugin, by :class:`~windlass.engines.vllm.loader.VLLMWeightLoader` and by anything else that reaches workers by name.
Must not: start threads but those that pull and stage (:mod:`windlass.engines.vllm.staging`); raise for an order that is refused (an
exception of one worker looks to vLLM like a worker that failed), unless it is asked to: what went wrong stands in the report.

The methods are there without a flag where vLLM loads its general plugins (:func:`install` puts them on the worker
class). On versions that do not, ``--worker-extension-cls windlass.vllm.WorkerExtension`` adds the same ones.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING, Any

from windlass.errors import WindlassError, WindlassInvalid
from windlass.plain import Plain

if TYPE_CHECKING:
    import torch

    from windlass.load.live import Live

__all__ = ["METHODS", "WorkerExtension", "install", "live_of", "watch"]

log = logging.getLogger("windlass")

#: Of vLLM's worker: what changes weights behind our back.
_FOREIGN = ("discard", "load_model", "reload_weights", "reset_weights")


def live_of(
    model: torch.nn.Module, vllm_config: Any, model_config: Any | None = None, rank: int | None = None
) -> Live:
    """The state of a worker's model, made when it is first asked for."""
    found: Live | None = model.__dict__.get("_windlass_live")
    if found is not None:
        return found
    from windlass.engines.vllm.session import VllmSession
    from windlass.load.live import Live

    parallel = vllm_config.parallel_config
    if rank is None:
        index = getattr(parallel, "data_parallel_index", 0) or 0
        rank = index * parallel.world_size + getattr(parallel, "rank", 0)
    live = Live(
        VllmSession(model, vllm_config, model_config),
        rank=rank,
        engine=f"vllm {vllm_version()}",
        threads=_threads(model, parallel.world_size),
    )
    # The model owns it: both end together.
    model.__dict__["_windlass_live"] = live
    if model_config is None:
        _tell_draft(vllm_config)
    watch()
    return live


def _tell_draft(vllm_config: Any) -> None:
    """Says that versions do not reach the weights of a draft model. What it drafts is checked by the model itself, so that answers
    stay right; fewer drafts are accepted the further apart the two grow."""
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    # Where nothing but the prompt is looked at, as for n-grams, the model is its own.
    if draft is not None and draft is not getattr(speculative, "target_model_config", None):
        log.warning(
            "windlass: the draft model (%s) keeps the weights that it was started with: versions are loaded into the model alone, "
            "and fewer drafts are accepted as it changes; answers are those of the model. vLLM's own routes load a draft, too "
            "(/start_draft_weight_update)",
            getattr(speculative, "method", "speculative decoding"),
        )


def _threads(model: Any, workers: int) -> int:
    """How many threads read an image for a GPU: half of the host's cores, divided among the workers. On a CPU one: the
    others are the model's."""
    first = next(iter(model.parameters()), None)
    if first is None or first.device.type == "cpu":
        return 1
    return max(1, min(8, len(os.sched_getaffinity(0)) // (2 * max(1, workers))))


def hosts_of(vllm_config: Any) -> int:
    """On how many hosts an engine's workers are, where vLLM knows it."""
    return int(getattr(vllm_config.parallel_config, "nnodes", 1) or 1)


def vllm_version() -> str:
    import vllm

    return str(getattr(vllm, "__version__", "unknown")).partition("+")[0]


def windlass_pull(self: Any, order: Plain) -> Plain:
    """Begins to bring a version to this host, in a thread, while the model goes on computing; :func:`windlass_pulled` says when it
    is there. ``order`` is a :class:`windlass.receive.pulling.PullOrder`."""
    from windlass.engines.vllm.staging import Bringing
    from windlass.receive.pulling import PullOrder

    try:
        given = PullOrder.from_dict(order)
        before = self.__dict__.get("_windlass_bringing")
        parallel = self.vllm_config.parallel_config
        place = None
        if given.slice == "always" or (given.slice == "auto" and hosts_of(self.vllm_config) > 1):
            place = (_live(self).rank, int(getattr(parallel, "local_world_size", 1)))
        self.__dict__["_windlass_bringing"] = Bringing(given, before, place)
    except Exception as e:
        return {"done": True, "error": _plain_failure(e)}
    return {"done": False, "error": None}


def windlass_pulled(self: Any) -> Plain:
    """Whether what :func:`windlass_pull` began is ``done``; then the ``error``, or ``image``, ``incarnation``, ``version``, ``digest``
    and ``wire_bytes``."""
    bringing = self.__dict__.get("_windlass_bringing")
    if bringing is None:
        return {
            "done": True,
            "error": _plain_failure(WindlassInvalid("nothing was asked for by windlass_pull")),
        }
    layout = bringing.asks
    if layout is not None:
        try:
            _settled(self, None)
            bringing.answer(_live(self).needs(layout))
        except Exception as e:
            bringing.answer(e)
    return dict(bringing.told())


def windlass_prepare(self: Any, image: str, timeout: float = 60.0) -> Plain:
    """Rehearses loading from an image; the report."""
    return _told(self, lambda live: live.prepare(image, timeout))


def windlass_check(self: Any, order: Plain) -> Plain:
    """Whether an order could be carried out; the report, with an error if not. What it needs is brought to the GPU
    already, before the pause; nothing is written."""
    from windlass.load.order import LoadOrder

    given = LoadOrder.from_dict(order)

    def check(live: Any) -> Any:
        _settled(self, None)
        report = live.check(given)
        live.stage(given)
        return report

    return _told(self, check, alone=True)


def windlass_stage(self: Any, order: Plain) -> Plain:
    """Begins what :func:`windlass_check` does, in a thread, while the model goes on computing; :func:`windlass_staged` says
    when it is done. The report, with ``staging``: whether it goes on."""
    from windlass.engines.vllm.staging import Staging
    from windlass.load.order import LoadOrder

    def begin(live: Any) -> Any:
        _settled(self, None)
        self.__dict__["_windlass_staging"] = Staging(live, LoadOrder.from_dict(order))
        return live.report()

    return {**_told(self, begin, alone=True), **_staging(self)}


def windlass_staged(self: Any) -> Plain:
    """The report, with an error if what was begun by :func:`windlass_stage` failed, and ``staging``: whether it goes on."""
    staging = self.__dict__.get("_windlass_staging")
    if staging is not None and staging.done and staging.error is not None:
        return {**_failed(self, staging.error), **_staging(self)}
    return {**_told(self, lambda live: live.report(), alone=True), **_staging(self)}


def windlass_load(self: Any, order: Plain) -> Plain:
    """Carries out an order; the report, with an error if it was refused or failed."""
    from windlass.load.order import LoadOrder

    def load(live: Any) -> Any:
        given = LoadOrder.from_dict(order)
        _settled(self, given.timeout)
        return _then(self, live.load(given))

    return _told(self, load)


def windlass_load_or_raise(self: Any, order: Plain) -> Plain:
    """Carries out an order, for drivers that see no answers: an exception if it was refused or failed."""
    from windlass.load.order import Failure

    report = windlass_load(self, order)
    if report["error"] is not None:
        raise Failure.from_dict(report["error"]).error()
    return report


def windlass_report(self: Any) -> Plain:
    """What the worker says of itself."""
    return _told(self, lambda live: live.report())


def windlass_digest(self: Any) -> Plain:
    """Sums of the live weights."""
    try:
        return dict(_live(self).digest())
    except Exception as e:
        return {"report": _failed(self, e), "parts": None, "unseen": [], "why": str(e)}


def windlass_load_file(self: Any, path: str) -> Plain:
    """Loads the tensors of a safetensors file by vLLM's own reload. Names that are not in it keep their weights only
    if their whole layer is not in it."""
    from safetensors.torch import load_file

    return _told(self, lambda live: _then(self, live.load_tensors(load_file(path))))


def windlass_join(self: Any, sync_info: Plain, strategy: Plain, rank_offset: int = 1) -> Plain:
    """Makes this worker's end of a strategy."""
    from windlass.load.receiving import Receiving

    def join(live: Any) -> Any:
        old = self.__dict__.pop("_windlass_receiving", None)
        if old is not None:
            old.close()
        self.__dict__["_windlass_receiving"] = Receiving(live, sync_info, strategy, rank_offset)
        return live.report()

    return _told(self, join)


def windlass_update(self: Any, request: Plain) -> Plain:
    """Receives and loads what a request announces."""

    def update(live: Any) -> Any:
        receiving = self.__dict__.get("_windlass_receiving")
        if receiving is None:
            raise WindlassInvalid("this worker joined no strategy", "call windlass_join first")
        receiving.update(request)
        return live.report()

    return _told(self, update)


def windlass_finish(self: Any) -> Plain:
    """Ends a series of :func:`windlass_update`: what was loaded is post-processed."""

    def finish(live: Any) -> Any:
        receiving = self.__dict__.get("_windlass_receiving")
        if receiving is not None:
            receiving.finish()
        return live.report()

    return _told(self, finish)


METHODS = (
    windlass_pull,
    windlass_pulled,
    windlass_prepare,
    windlass_check,
    windlass_stage,
    windlass_staged,
    windlass_load,
    windlass_load_or_raise,
    windlass_report,
    windlass_digest,
    windlass_load_file,
    windlass_join,
    windlass_update,
    windlass_finish,
)


class WorkerExtension:
    """For ``--worker-extension-cls``; see the module."""


for _method in METHODS:
    setattr(WorkerExtension, _method.__name__, _method)


def install() -> None:
    """Puts the methods on vLLM's worker class in this process. Again is nothing."""
    from vllm.v1.worker.worker_base import WorkerBase

    for method in METHODS:
        setattr(WorkerBase, method.__name__, method)
        # vLLM refuses an extension whose methods the worker has.
        if hasattr(WorkerExtension, method.__name__):
            delattr(WorkerExtension, method.__name__)


def watch() -> None:
    """From now on, what else changes weights in this process makes them unknown."""
    try:
        from vllm.v1.worker.gpu_worker import Worker
    except ImportError:
        return
    for name in (*_FOREIGN, "sleep"):
        original = getattr(Worker, name, None)
        if original is not None and not hasattr(original, "_windlass_watched"):
            setattr(Worker, name, _watched(name, original))


def _watched(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        level = args[0] if args else kwargs.get("level", 1)
        staging = self.__dict__.get("_windlass_staging")
        if staging is not None:
            # It reads the weights, also those that are only taken off the device for a while.
            staging.join(None)
        if name != "sleep" or level != 1:
            try:
                live = self.get_model().__dict__.get("_windlass_live")
            except Exception:
                live = None
            if live is not None:
                _settled(self, None)
                live.forget(f"{name} was called")
        return original(self, *args, **kwargs)

    watched._windlass_watched = True  # type: ignore[attr-defined]
    return watched


def _then(worker: Any, report: Any) -> Any:
    """What vLLM does itself after a load of base weights: it forgets adapters, which were made for the old ones."""
    reset = getattr(getattr(worker, "model_runner", None), "reset_lora_state", None)
    if reset is not None and not (report.last is not None and report.last.how == "skipped"):
        reset()
    return report


def _settled(worker: Any, timeout: float | None) -> None:
    """Waits for staging that is under way: nothing else may touch what it works on."""
    staging = worker.__dict__.pop("_windlass_staging", None)
    if staging is not None:
        staging.join(timeout)


def _staging(worker: Any) -> Plain:
    staging = worker.__dict__.get("_windlass_staging")
    return {
        "staging": staging is not None and not staging.done,
        "unknown_layout": staging is not None and staging.unknown_layout,
    }


def _live(worker: Any) -> Any:
    return live_of(worker.get_model(), worker.vllm_config)


def _told(worker: Any, act: Any, *, alone: bool = False) -> Plain:
    """The report after an act, whether it succeeded or not; ``alone`` if an error of an earlier order is not to be in it."""
    try:
        told: Plain = act(_live(worker)).to_dict()
        return {**told, "error": None} if alone else told
    except Exception as e:
        if not isinstance(e, WindlassError):
            log.exception("windlass: a call failed in a worker")
        return _failed(worker, e)


def _plain_failure(e: Exception) -> Plain:
    from windlass.load.order import Failure

    return Failure.of(e).to_dict()


def _failed(worker: Any, e: Exception) -> Plain:
    from windlass.load.order import Failure, Report

    failure = Failure.of(e)
    try:
        told: Plain = _live(worker).report().to_dict()
    except Exception:
        told = Report(rank=getattr(worker, "rank", 0), worker="", engine=f"vllm {vllm_version()}").to_dict()
    return {**told, "error": failure.to_dict()}
