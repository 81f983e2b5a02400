"""A load between two steps of vLLM's engine core.

Owns: :func:`windlass_load_between_steps`, a method that :func:`install` puts on the engine core of this process. Called by
the endpoint plugin, as a utility call: the core carries it out in its loop, where no step can begin. Must not: leave the
scheduler paused for any reason but one: workers that are not whole.

Requests in flight need not be paused by a call of their own, waited for and resumed by another: the core stops scheduling,
takes in the steps that are under way, has the workers write, resets the caches that the order asks for, and goes on. That is
one call instead of five, each of which would wait for the end of a step. The pause is the time from the end of the last step
with the old weights to the moment from which on the next one may begin.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from windlass.plain import Plain

__all__ = ["METHOD", "install", "windlass_load_between_steps"]

log = logging.getLogger("windlass")

#: By which the core is called.
METHOD = "windlass_load_between_steps"
#: How long steps that are under way may take.
DRAIN_S = 60.0


def windlass_load_between_steps(
    self: Any, order: Any, reset: bool = True, label: str = "", lift: bool = False
) -> Plain:
    """Has all workers carry out an order, and goes on unless one of them is not whole. Without an order it does nothing.

    While workers are still bringing what it needs to their GPUs, the answer is ``{"staging": True}``, and nothing is done; if they
    have to check it first, ``{"unknown_layout": True}``.

    Answers the workers' ``reports``; ``paused``, whether generation stays paused, and ``error``, why, if it is not for the
    reports; the milliseconds of each part. ``reset`` is whether cached prefixes and what was computed of running requests
    are given up; ``label`` is what the version is called from then on; ``lift`` resumes generation that an earlier load left
    paused.
    """
    if order is None:
        return {}
    from vllm.v1.core.sched.interface import PauseState

    staged = [dict(told) for told in self.model_executor.collective_rpc("windlass_staged")]
    for what in ("staging", "unknown_layout"):
        if any(told.pop(what) for told in staged):
            return {what: True}
    if any(told["error"] is not None for told in staged):
        return _answer(staged)
    scheduler = self.scheduler
    before = scheduler.pause_state
    began = time.monotonic()
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    reports: list[Plain] = []
    error: str | None = None
    untouched = True
    stopped = loaded = began
    try:
        while self.batch_queue:
            if time.monotonic() > began + DRAIN_S:
                raise TimeoutError(f"a step that was under way did not end within {DRAIN_S:g} s")
            self._process_engine_step()
        stopped = loaded = time.monotonic()
        untouched = False
        reports = [dict(told) for told in self.model_executor.collective_rpc("windlass_load", args=(order,))]
        loaded = time.monotonic()
        wanted = (order["model_id"], order["incarnation"], order["version"])
        whole = all(told["state"] == "clean" and _live(told) == wanted for told in reports)
        untouched = all(told["state"] == "clean" and _live(told) != wanted for told in reports)
        if whole:
            _settle(self, reset, label)
    except Exception as e:
        log.exception("windlass: a load between two steps failed")
        error, whole = f"{type(e).__name__}: {e}", False
    paused = not (whole or untouched)
    if not paused:
        scheduler.set_pause_state(PauseState.UNPAUSED if lift and whole else before)
    ended = time.monotonic()
    return _answer(reports, paused, error, stopped - began, loaded - stopped, ended - stopped)


def _answer(
    reports: list[Plain],
    paused: bool = False,
    error: str | None = None,
    drain: float = 0.0,
    load: float = 0.0,
    pause: float = 0.0,
) -> Plain:
    times = {"drain_ms": drain * 1e3, "load_ms": load * 1e3, "pause_ms": pause * 1e3}
    return {"reports": reports, "paused": paused, "error": error, **times}


def _live(report: Plain) -> tuple[Any, Any, Any] | None:
    live = report["live"]
    return None if live is None else (live["model_id"], live["incarnation"], live["version"])


def _settle(core: Any, reset: bool, label: str) -> None:
    """What follows on new weights: nothing that was computed with the old ones is used where that is not wanted."""
    if reset:
        if core.reset_prefix_cache(reset_running_requests=True) is False:
            raise RuntimeError("the prefix cache could not be reset")
        if getattr(core.vllm_config.model_config, "is_multimodal_model", True):
            core.reset_encoder_cache()
    if hasattr(core, "set_weight_version"):
        core.set_weight_version(label)


def install() -> None:
    """Puts the method on the engine core, if this process has one. Again is nothing."""
    module = sys.modules.get("vllm.v1.engine.core")
    core = getattr(module, "EngineCoreProc", None)
    needs = ("_process_engine_step", "pause_scheduler", "reset_prefix_cache")
    if core is not None and all(hasattr(core, name) for name in needs):
        setattr(core, METHOD, windlass_load_between_steps)
