"""All engines behind one client.

Owns: :class:`InferenceEngineClient`, which tells any number of engines the same thing at the same time and says which
failed, and :class:`InferenceEngine`, the small adapter that each engine needs. Called by senders and by the facade.
Must not: move weights.

One sync, in calls (``begin_sync`` and ``finish_sync`` are the facade's; without a facade, whoever sends calls them):

| step | what every engine is told | on failure |
|---|---|---|
| ``begin_sync`` | the prefix cache's reset is started; ``pause`` if configured; ``start_update`` | resumed, nothing was written |
| ``update_weights`` | once per request | fenced: stays paused until a later sync succeeds |
| ``finish_sync`` | ``finish_update``; the reset is awaited; ``resume`` | fenced |

Without a pause requests run while weights change, and fill the cache again from the old ones; so there the reset is
repeated at the end, and so it is where the first one was refused because requests were running. If the engine refuses
the last one, that is an error: stale entries are wrong answers.
"""

from __future__ import annotations

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from windlass.errors import WindlassError, WindlassInvalid, WindlassTimeout, WindlassUnsupported
from windlass.transfer.request import WeightUpdateRequest, parse_request
from windlass.transfer.sync_info import EngineShape, TorchDistributedWeightSyncInfo, rank_offsets
from windlass.transfer.sync_info import world_size as world_size_of

if TYPE_CHECKING:
    from windlass.document import Document
    from windlass.transfer.sync_info import WeightSyncInfo

__all__ = ["EnginesFailed", "InferenceEngine", "InferenceEngineClient", "settings"]

log = logging.getLogger("windlass")

#: How long the others may still answer once one engine has failed, so that the error can list them all.
GRACE_S = 5.0


class EnginesFailed(WindlassError, RuntimeError):
    """Some engines failed at one step. ``failures`` has the error of each by its name."""

    def __init__(self, message: str = "", advice: str = "", name: str = "engines_failed") -> None:
        super().__init__(message, advice, name)
        self.failures: dict[str, BaseException] = {}

    @classmethod
    def at(cls, step: str, failures: Mapping[str, BaseException], of: int, fenced: str = "") -> EnginesFailed:
        """The error for these failures."""
        told = {name: str(error) or type(error).__name__ for name, error in failures.items()}
        # Errors that begin with the engine's name already are not given it twice.
        named = [
            text if re.match(rf"{re.escape(name)}\b", text) else f"{name}: {text}"
            for name, text in told.items()
        ]
        each = "; ".join(named)
        made = cls(
            f"{len(failures)} of {of} engines failed at {step}: {each}" + (f" ({fenced})" if fenced else ""),
            "see the logs of the engines named; the others did what they were told",
        )
        made.failures = dict(failures)
        return made


class InferenceEngine(ABC):
    """One engine, of one or more ranks. ``name`` is what errors call it; ``shape`` says how many ranks it has."""

    name: str = "engine"
    shape: EngineShape = EngineShape()

    @abstractmethod
    async def init_weight_transfer(self, sync_info: WeightSyncInfo, rank_offset: int) -> object:
        """Makes the receivers of all its ranks, the first of which has ``rank_offset`` in an update group."""

    @abstractmethod
    async def update_weights(self, request: WeightUpdateRequest) -> object:
        """Receives and loads one request; returns when that is done."""

    async def init_weight_update_communicator(
        self,
        master_addr: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: Literal["nccl", "gloo"] = "nccl",
        override_existing: bool = False,
    ) -> object:
        """:meth:`init_weight_transfer` for an update group, in the words that trainers had for it."""
        if override_existing:
            raise _override(f"{self.name}.init_weight_update_communicator")
        info = TorchDistributedWeightSyncInfo(master_addr, master_port, world_size, group_name, backend)
        return await self.init_weight_transfer(info, rank_offset)

    async def start_update(self) -> None:
        """Before the first request of a sync."""

    async def finish_update(self, version: str | None = None) -> None:
        """After the last request of a sync; ``version`` is what the engine should call its weights now."""

    async def pause(self) -> None:
        """Holds generation."""

    async def resume(self) -> None:
        """Lets generation go on."""

    async def reset_prefix_cache(self) -> None:
        """Forgets what was computed with other weights. Raises if the engine refuses."""

    async def empty_cache(self) -> None:
        """Gives cached device memory back."""

    async def close(self) -> None:
        """Leaves the group or closes the connection; the engine serves on."""


class InferenceEngineClient:
    """Tells all engines the same thing at the same time.

    >>> class Quiet(InferenceEngine):
    ...     async def init_weight_transfer(self, sync_info, rank_offset): self.offset = rank_offset
    ...     async def update_weights(self, request): ...
    >>> from windlass.transfer.sync_info import EmptyWeightSyncInfo
    >>> engines = [Quiet(), Quiet()]
    >>> engines[0].shape = EngineShape(tp=4)
    >>> client = InferenceEngineClient(engines)
    >>> asyncio.run(client.init_weight_transfer(EmptyWeightSyncInfo()))
    >>> [engine.offset for engine in engines]
    [1, 5]

    ``timeout`` bounds each call to each engine. ``prefix_cache`` is "reset" or "keep". ``pause`` holds generation from
    before the first write until after the last one; without it engines answer during the sync, from weights of two
    versions.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        *,
        timeout: float = 600.0,
        prefix_cache: Literal["reset", "keep"] = "reset",
        pause: bool = False,
        empty_cache: bool = False,
    ) -> None:
        if not engines:
            raise WindlassInvalid("a client needs at least one engine")
        if prefix_cache not in ("reset", "keep"):
            raise WindlassInvalid(f"prefix_cache is {prefix_cache!r}: expected 'reset' or 'keep'")
        self.engines = list(engines)
        self._names = _distinct([engine.name for engine in engines])
        self._timeout = timeout
        self._reset = prefix_cache == "reset"
        self._pause = pause
        self._empty = empty_cache
        self._resetting: asyncio.Task[None] | None = None
        #: Set between the first write and the end of a sync, cache included.
        self.dirty = False

    @classmethod
    def from_config(
        cls, cfg: object, engines: Sequence[InferenceEngine], **options: Any
    ) -> InferenceEngineClient:
        """The client of these engines as a trainer's configuration has it. Engines of which it says other numbers or
        shapes than they have are an error.

        >>> from windlass.engines.remote import VllmEngine
        >>> engines = [VllmEngine("http://127.0.0.1:8000", shape=EngineShape(tp=2))]
        >>> client = InferenceEngineClient.from_config(
        ...     {"generator": {"num_inference_engines": 1, "inference_engine_tensor_parallel_size": 2}}, engines
        ... )
        >>> client.shapes
        [EngineShape(tp=2, pp=1, dp=1)]
        """
        from windlass.document import Document

        document = Document.read(cfg)
        said = [EngineShape(**shape) for shape in document.engines] if document.names_engines else None
        made = cls(engines, **{**_options(document), **options})
        if said is not None and said != made.shapes:
            raise WindlassInvalid(
                f"the configuration says that there are {len(said)} engines, {_shapes(said)}, and these are "
                f"{len(engines)}: {_shapes(made.shapes)}",
                "give each engine its shape (shape=EngineShape(tp=...)), or correct generator.num_inference_engines "
                "and generator.inference_engine_*_parallel_size",
            )
        return made

    @property
    def shapes(self) -> list[EngineShape]:
        """The shapes of the engines, as a strategy's configuration wants them."""
        return [engine.shape for engine in self.engines]

    async def init_weight_transfer(self, sync_info: WeightSyncInfo) -> None:
        """Hands the sync info to every engine with its rank offset, and returns when each has joined."""
        offsets = rank_offsets(self.shapes)
        places = {id(engine): offset for engine, offset in zip(self.engines, offsets, strict=True)}
        await self._all(
            "init_weight_transfer", lambda engine: engine.init_weight_transfer(sync_info, places[id(engine)])
        )

    async def init_weight_update_communicator(
        self,
        master_addr: str,
        master_port: int,
        rank_offset: int = 1,
        world_size: int | None = None,
        group_name: str = "weight_update_group",
        backend: Literal["nccl", "gloo"] = "nccl",
        override_existing: bool = False,
    ) -> None:
        """:meth:`init_weight_transfer` for an update group, in the words that trainers had for it. ``rank_offset`` is
        that of the first engine."""
        own = world_size_of(self.shapes)
        if rank_offset != 1 or world_size not in (None, own):
            raise WindlassInvalid(
                f"an update group with these engines has rank_offset 1 and world_size {own}, not {rank_offset} and "
                f"{world_size}",
                "world_size is 1 and the ranks of all engines; check their shapes",
            )
        if override_existing:
            raise _override("init_weight_update_communicator")
        info = TorchDistributedWeightSyncInfo(master_addr, master_port, own, group_name, backend)
        await self.init_weight_transfer(info)

    async def update_weights(self, request: WeightUpdateRequest) -> None:
        """Hands the request to every engine, and returns when each has received and loaded it."""
        self.dirty = True
        await self._all("update_weights", lambda engine: engine.update_weights(request))

    async def update_named_weights(self, request: Mapping[str, object] | WeightUpdateRequest) -> None:
        """:meth:`update_weights` under its older name; also takes the dictionaries that have no type."""
        typed = request if isinstance(request, WeightUpdateRequest) else parse_request(request)
        await self.update_weights(typed)

    async def begin_sync(self) -> None:
        """Before the first request of a sync."""
        if self._reset:
            self._resetting = asyncio.ensure_future(self.reset_prefix_cache())
            await asyncio.sleep(0)
        try:
            if self._pause:
                await self.pause()
            if self._empty:
                await self._all("empty_cache", lambda engine: engine.empty_cache())
            await self._all("start_update", lambda engine: engine.start_update())
        except BaseException:
            await self.abort_sync()
            raise

    async def finish_sync(self, version: str | None = None) -> None:
        """After the last request: the update is finished, the cache's reset awaited, and generation goes on."""
        await self._all("finish_update", lambda engine: engine.finish_update(version))
        resetting, self._resetting = self._resetting, None
        if resetting is not None:
            try:
                await resetting
                clean = self._pause
            except EnginesFailed as e:
                # Requests were still running then; now they are held, or the failure is told.
                log.info("the prefix cache is reset once more: %s", e)
                clean = False
            if not clean:
                await self.reset_prefix_cache()
        self.dirty = False
        if self._empty:
            await self._all("empty_cache", lambda engine: engine.empty_cache())
        if self._pause:
            await self.resume()

    async def abort_sync(self) -> str:
        """After a failure: engines that nothing was written to go on; the others stay as they are, and it says so."""
        resetting, self._resetting = self._resetting, None
        if resetting is not None:
            await asyncio.wait({resetting}, timeout=GRACE_S)
            if not resetting.done():
                resetting.cancel()
            elif not resetting.cancelled():
                # Asked for, so that asyncio does not complain; the failure of the sync is the one to tell.
                resetting.exception()
        if self.dirty:
            state = "paused" if self._pause else "serving"
            return (
                "engines may hold weights of two versions, or prefixes of the old ones, and are "
                f"{state}; sync again before using them"
            )
        if self._pause:
            try:
                await self.resume()
            except WindlassError as e:
                return f"engines were paused and could not be resumed: {e}"
        return ""

    async def pause(self) -> None:
        """Holds generation on every engine."""
        await self._all("pause", lambda engine: engine.pause())

    async def resume(self) -> None:
        """Lets generation go on, on every engine."""
        await self._all("resume", lambda engine: engine.resume())

    async def reset_prefix_cache(self) -> None:
        """Forgets cached prefixes on every engine."""
        await self._all("reset_prefix_cache", lambda engine: engine.reset_prefix_cache())

    async def aclose(self) -> None:
        """Every engine leaves the group or closes its connection."""
        await self._all("close", lambda engine: engine.close())

    async def _all(self, step: str, call: Callable[[InferenceEngine], Awaitable[object]]) -> None:
        """Calls every engine at once. Waits for all, or, after a failure, a little longer for the rest."""

        async def one(engine: InferenceEngine) -> object:
            return await call(engine)

        tasks = {
            asyncio.ensure_future(one(engine)): name
            for engine, name in zip(self.engines, self._names, strict=True)
        }
        try:
            _, pending = await asyncio.wait(tasks, timeout=self._timeout, return_when=asyncio.FIRST_EXCEPTION)
            if pending and any(task.done() and task.exception() for task in tasks if not task.cancelled()):
                _, pending = await asyncio.wait(pending, timeout=min(GRACE_S, self._timeout))
            elif pending:
                for task in pending:
                    log.error("%s did not answer %s within %g s", tasks[task], step, self._timeout)
        finally:
            for task in tasks:
                if not task.done():
                    task.cancel()
        failures: dict[str, BaseException] = {}
        for task, name in tasks.items():
            if task in pending:
                failures[name] = WindlassTimeout(f"no answer to {step} within {self._timeout:g} s")
            elif task.cancelled():
                failures[name] = WindlassTimeout(f"{step} was cancelled")
            elif (error := task.exception()) is not None:
                failures[name] = error
        if failures:
            first = next(iter(failures.values()))
            raise EnginesFailed.at(step, failures, len(tasks)) from first


def _override(call: str) -> WindlassUnsupported:
    return WindlassUnsupported(
        f"{call} cannot ask for override_existing: whether an older group is left is settled when a side is made",
        "set generator.override_existing_update_group, or override_existing_update_group=True of the engine",
    )


def _options(document: Document) -> dict[str, Any]:
    """What a document says about the client."""
    timeout = document.values.get("generator.timeout")
    own = settings(document.values)
    return own if timeout is None else {**own, "timeout": float(timeout)}


def _shapes(shapes: Sequence[EngineShape]) -> str:
    return ", ".join(f"tp={shape.tp} pp={shape.pp} dp={shape.dp}" for shape in shapes)


def settings(config: Mapping[str, object]) -> dict[str, Any]:
    """The options of a client that a trainer's configuration asks for, nested or dotted: without
    ``generator.enable_prefix_caching`` there is no cache to reset.

    >>> settings({"generator": {"enable_prefix_caching": False}}), settings({})
    ({'prefix_cache': 'keep'}, {})
    """
    from windlass.document import flat

    enabled = dict(flat(config)).get("generator.enable_prefix_caching")
    if enabled not in (None, True, False):
        raise WindlassInvalid(f"generator.enable_prefix_caching is {enabled!r}: expected true or false")
    return {} if enabled is None else {"prefix_cache": "reset" if enabled else "keep"}


def _distinct(names: Sequence[str]) -> list[str]:
    """Names by which engines can be told apart."""
    return [name if names.count(name) == 1 else f"{name}[{place}]" for place, name in enumerate(names)]
