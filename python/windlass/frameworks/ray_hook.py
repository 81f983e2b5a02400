"""Getting into every worker process of Ray without a change of the program:
``RAY_RUNTIME_ENV_HOOK=windlass.frameworks.ray_hook.hook``.

Owns: :func:`hook`, which Ray calls with the runtime environment of each ``ray.init``, and :func:`setup`, which each worker process calls
first. Called by Ray. Must not: take away what the program has set itself.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Sequence
from typing import Any

from windlass.errors import WindlassInvalid, WindlassUnsupported

__all__ = ["hook", "in_every_worker", "settings_in", "setup"]

log = logging.getLogger("windlass")

#: Ray's own variable.
HOOK = "RAY_RUNTIME_ENV_HOOK"
#: Functions that each worker calls first, as "module:function", separated by commas.
SETUP = "WINDLASS_RAY_SETUP"


def in_every_worker(function: str, *variables: str) -> None:
    """Has every worker of a Ray that is started from here call a function ("module:function") first. ``variables`` of this process's
    environment go with it."""
    known = [name for name in os.environ.get(SETUP, "").split(",") if name]
    if function not in known:
        os.environ[SETUP] = ",".join([*known, function])
    passed = [name for name in os.environ.get(_PASSED, "").split(",") if name]
    os.environ[_PASSED] = ",".join(dict.fromkeys([*passed, *variables]))
    before = os.environ.get(HOOK)
    if before and before != _OURS:
        os.environ[_BEFORE] = before
    os.environ[HOOK] = _OURS


_OURS = "windlass.frameworks.ray_hook.hook"
#: A hook that was there before ours, and the variables that go with it.
_BEFORE, _PASSED = "WINDLASS_RAY_HOOK_BEFORE", "WINDLASS_RAY_PASSED"


def settings_in(variable: str, known: Sequence[str]) -> dict[str, Any]:
    """The settings of an adapter: a JSON object in a variable of the environment, with some of the known names."""
    text = os.environ.get(variable, "{}")
    try:
        settings = json.loads(text)
    except ValueError as e:
        raise WindlassInvalid(f"{variable} is not JSON: {e}") from e
    if not isinstance(settings, dict) or not set(settings) <= set(known):
        raise WindlassInvalid(f"{variable} is {text!r}: expected an object with some of {', '.join(known)}")
    return settings


def hook(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """The runtime environment, in which each worker calls :func:`setup` first."""
    env = dict(runtime_env or {})
    before = os.environ.get(_BEFORE)
    if before:
        module, _, name = before.rpartition(".")
        env = dict(getattr(importlib.import_module(module), name)(env))
    theirs = env.get("worker_process_setup_hook")
    if theirs is not None and theirs != f"{__name__}.setup":
        # A framework would quietly go its own way in workers that do not know us.
        raise WindlassUnsupported(
            f"windlass cannot be set up in Ray's workers: the program has a worker_process_setup_hook of its own ({theirs!r})",
            f"call {__name__}.setup() in that, and unset {HOOK}",
        )
    env["worker_process_setup_hook"] = f"{__name__}.setup"
    passed = [SETUP, *os.environ.get(_PASSED, "").split(",")]
    ours = {name: os.environ[name] for name in passed if name in os.environ}
    env["env_vars"] = {**ours, **(env.get("env_vars") or {})}
    return env


def setup() -> None:
    """Called by each worker process before anything else."""
    for name in filter(None, os.environ.get(SETUP, "").split(",")):
        module, _, function = name.partition(":")
        try:
            getattr(importlib.import_module(module), function)()
        except Exception:
            log.warning("windlass could not call %s in a worker of Ray:", name, exc_info=True)
