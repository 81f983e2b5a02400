"""An engine that shares its device with the trainer: put to sleep while it trains, woken with new weights.

Owns: the order of calls. Before training: pause, flush, release what the engine holds. After it: take back the memory of
the weights, load the new version, let the trainer release its own, take back the cache, go on. The cache comes last because
trainer and engine hold the weights twice for the time of the load; the cache would not fit beside both.

The server is started with ``--enable-memory-saver``; without it nothing is released. SGLang ends when memory is released
while requests run, or taken back that was not released: the first is checked by a flush, which is refused while there are
requests; the second by remembering what was released here.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from windlass.engines.sglang.loader import SGLangWeightLoader
from windlass.errors import WindlassInvalid, WindlassUnsupported

__all__ = ["sleep", "wake"]

log = logging.getLogger("windlass")

T = TypeVar("T")
WEIGHTS, CACHE = "weights", "kv_cache"


async def sleep(
    loader: SGLangWeightLoader, *, also: Sequence[str] = (), strict: bool = True, timeout: float = 120.0
) -> None:
    """Pauses the engine and has it release its weights and its cache, and what else is named (``cuda_graph``).

    Requests that were in flight wait, or are ended, by the loader's pause mode. ``strict`` refuses an engine that was
    started without the memory saver, and so would release nothing.
    """
    await asyncio.to_thread(_sleep, loader, (CACHE, WEIGHTS, *also), strict, time.monotonic() + timeout)


async def wake(
    loader: SGLangWeightLoader,
    load: Callable[[SGLangWeightLoader], Awaitable[T]],
    release_trainer: Callable[[], object] | None = None,
    *,
    timeout: float = 120.0,
) -> T:
    """Wakes the engine with new weights: memory for weights, ``load(loader)``, ``release_trainer()``, the cache, go on.

    If ``load`` fails the engine stays asleep but for its weights, and the call may be repeated.
    """
    if not loader.gate.released:
        raise WindlassInvalid(f"{loader.name} does not sleep", "put it to sleep with sleep() first")
    until = time.monotonic() + timeout
    await asyncio.to_thread(_take_back, loader, [WEIGHTS], until)
    loaded = await load(loader)
    if loader.dirty:
        raise WindlassInvalid(f"{loader.name}: what was to load its weights did not", "load a whole version")
    if release_trainer is not None:
        released = release_trainer()
        if inspect.isawaitable(released):
            await released
    until = time.monotonic() + timeout
    await asyncio.to_thread(
        _take_back, loader, [tag for tag in loader.gate.released if tag != WEIGHTS], until
    )
    await asyncio.to_thread(loader.gate.wake, until)
    return loaded


def _sleep(loader: SGLangWeightLoader, tags: Sequence[str], strict: bool, until: float) -> None:
    with loader.gate.alone(until):
        if loader.gate.released:
            return
        if loader.gate.pause not in ("retract", "abort"):
            raise WindlassInvalid(
                f"an engine cannot sleep with pause={loader.gate.pause!r}; use 'retract' or 'abort'"
            )
        if strict and not loader.facts(until).memory_saver:
            raise WindlassUnsupported(
                f"{loader.name} was started without --enable-memory-saver and would release nothing",
                "start it with that flag",
            )
        loader.gate.sleep(list(tags), until)


def _take_back(loader: SGLangWeightLoader, tags: list[str], until: float) -> None:
    with loader.gate.alone(until):
        loader.gate.take_back(tags, until)
