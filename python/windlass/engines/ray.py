"""Trainers and engines as Ray actors, with the facade on the controller.

Owns: :class:`RayWeightSync`, the controller's two calls; :class:`TrainerActor` and :class:`EngineActor`, which an actor
class inherits from to take part; :class:`RayEngine`, the client's adapter for engines that are actors. Must not: start
Ray, place actors, or make process groups of a trainer.

::

    controller                    trainer actors                          engine actors
    RayWeightSync ── windlass() ─► TrainerActor (WeightSyncManager) ── windlass() ─► EngineActor (receiver, loader)
                                              ╚══════ weights, by the strategy ══════╝

Each actor has one remote method of ours, ``windlass(call)``. It takes a dictionary of JSON and returns one:
``{"ok": value}`` or ``{"error": {"kind", "text", "advice", "name"}}``. Ray itself pickles what it carries, so nothing
but plain data is given to it, errors included; the only other thing that crosses are Ray's own handles of actors, once.

An actor that dies, or does not answer within the deadline, is an error that names it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from windlass import errors
from windlass.errors import WindlassBug, WindlassError, WindlassInvalid, WindlassPeerLost, WindlassTimeout
from windlass.plain import Plain, text_of
from windlass.transfer.base import strategy_from_config
from windlass.transfer.client import EnginesFailed, InferenceEngine, InferenceEngineClient
from windlass.transfer.request import parse_request
from windlass.transfer.sync_info import EngineShape, engine_rank, parse_sync_info

if TYPE_CHECKING:
    from windlass.dtypes import Dtype
    from windlass.extract import WeightExtractor
    from windlass.transfer.base import WeightLoader, WeightTransferReceiver
    from windlass.transfer.request import WeightUpdateRequest
    from windlass.transfer.sync import WeightSyncManager
    from windlass.transfer.sync_info import WeightSyncInfo

__all__ = ["EngineActor", "RayEngine", "RayWeightSync", "TrainerActor"]

log = logging.getLogger("windlass")

T = TypeVar("T")


def plain(value: object, what: str) -> Any:
    """The value as JSON would bring it to the other side; an error if it is not plain data.

    >>> plain({"shape": (2, 3)}, "call")
    {'shape': [2, 3]}
    """
    return json.loads(text_of(value, what))


async def answer(work: Callable[[], Awaitable[Any]]) -> Plain:
    """What a remote method returns: a value, or an error as plain data."""
    try:
        out: Plain = plain({"ok": await work()}, "answer")
        return out
    except Exception as e:
        if not isinstance(e, WindlassError):
            log.exception("a call from another actor failed")
        return {
            "error": {
                "kind": type(e).__name__,
                "text": str(e) or type(e).__name__,
                "advice": getattr(e, "advice", ""),
                "name": getattr(e, "name", ""),
            }
        }


def result(said: object, who: str) -> Any:
    """The value of an answer; its error is raised here, with who said it."""
    if not isinstance(said, Mapping) or not {"ok", "error"} & set(said):
        raise WindlassBug(f"{who} answered {said!r}")
    if "ok" in said:
        return said["ok"]
    told = said["error"]
    kind = {**vars(errors), "EnginesFailed": EnginesFailed}.get(str(told["kind"]))
    if not (isinstance(kind, type) and issubclass(kind, WindlassError)):
        kind, told = WindlassError, {**told, "text": f"{told['kind']}: {told['text']}"}
    raise kind(f"{who}: {told['text']}", told["advice"], told["name"])


def _is_dead(error: BaseException) -> bool:
    from ray.exceptions import RayActorError, RaySystemError

    return isinstance(error, (RayActorError, RaySystemError))


def _lost(error: BaseException, who: str) -> WindlassError:
    """What became of an actor, from Ray's own error."""
    from ray.exceptions import GetTimeoutError

    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, (GetTimeoutError, TimeoutError, asyncio.TimeoutError)):
        return WindlassTimeout(f"{who} did not answer in time", "see its log; it may still be at it")
    if _is_dead(error):
        return WindlassPeerLost(f"{who} died: {first}", "start it again, and make new sync info for all")
    return WindlassError(f"{who}: {first}")


class EngineActor:
    """What an engine's actor class inherits from.

    >>> class MyEngine(EngineActor):                                     # doctest: +SKIP
    ...     def __init__(self, config):
    ...         self.model = ...
    ...         self.attach_weights(config, MyLoader(self.model))
    >>> engine = ray.remote(MyEngine).remote(config)                     # doctest: +SKIP
    """

    _side: _EngineSide | None = None

    def attach_weights(
        self,
        config: Mapping[str, object],
        loader: WeightLoader,
        *,
        local_rank: int = 0,
        shape: EngineShape | None = None,
    ) -> None:
        """Says what strategy the trainers use and who loads. For an engine of several actors, which of its ranks this
        one is."""
        self._side = _EngineSide(config, loader, local_rank, shape or EngineShape())

    async def windlass(self, call: Plain) -> Plain:
        """The remote method."""
        if self._side is None:
            return await answer(_unattached)
        side = self._side
        return await answer(lambda: side.do(call))


async def _unattached() -> None:
    raise WindlassInvalid("this actor takes no weights: call attach_weights() when it is made")


class _EngineSide:
    """The receiver and the loader of one engine rank."""

    def __init__(
        self, config: Mapping[str, Any], loader: WeightLoader, rank: int, shape: EngineShape
    ) -> None:
        self._strategy = strategy_from_config(config)
        self._loader, self._rank, self._shape = loader, rank, shape
        self._receiver: WeightTransferReceiver | None = None

    async def do(self, call: Plain) -> Any:
        """One call: join, receive and load, a hook of the loader's, or leave."""
        step = call.get("step")
        if step == "init":
            self._close()
            rank = engine_rank(self._rank, int(call["rank_offset"]), self._shape)
            self._receiver = await asyncio.to_thread(
                self._strategy.create_receiver, parse_sync_info(call["sync_info"]), rank=rank
            )
            return {"rank": rank}
        if step == "update":
            if self._receiver is None:
                raise WindlassInvalid("a request came before the sync info")
            await self._receiver.receive_and_load_weights(parse_request(call["request"]), self._loader)
            return None
        if step == "close":
            self._close()
            return None
        if step in HOOKS:
            hook = getattr(self._loader, str(step), None)
            if hook is not None:
                await hook(*([call["version"]] if step == "finish_update" else []))
            return None
        raise WindlassInvalid(f"an engine is not called to {step!r}")

    def _close(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()


#: Steps of a sync that a loader may have methods for, all of them ``async``.
HOOKS = ("start_update", "finish_update", "pause", "resume", "reset_prefix_cache", "empty_cache")


class RayEngine(InferenceEngine):
    """An engine of one actor per rank, in the order of its ranks."""

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        name: str = "engine",
        shape: EngineShape | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.shape = shape or EngineShape(tp=len(actors))
        if self.shape.tp * self.shape.pp * self.shape.dp != len(actors):
            raise WindlassInvalid(f"{name} has {len(actors)} actors and the shape {self.shape}")
        self.name, self._actors, self._timeout = name, list(actors), timeout

    async def _all(self, call: Plain) -> list[Any]:
        """Calls every rank at once."""
        call = plain(call, "call to an engine")
        said = await asyncio.gather(
            *(self._one(place, actor, call) for place, actor in enumerate(self._actors)),
            return_exceptions=True,
        )
        failed = [error for error in said if isinstance(error, BaseException)]
        if failed:
            raise failed[0]
        return list(said)

    async def _one(self, place: int, actor: Any, call: Plain) -> Any:
        who = self.name if len(self._actors) == 1 else f"{self.name} rank {place}"
        try:
            said = await asyncio.wait_for(_awaited(actor.windlass.remote(call)), self._timeout)
        except Exception as e:
            raise _lost(e, who) from e
        return result(said, who)

    async def init_weight_transfer(self, sync_info: WeightSyncInfo, rank_offset: int) -> None:
        """Every actor makes its receiver."""
        await self._all({"step": "init", "sync_info": sync_info.to_dict(), "rank_offset": rank_offset})

    async def update_weights(self, request: WeightUpdateRequest) -> None:
        """Every actor receives and loads."""
        await self._all({"step": "update", "request": request.to_dict()})

    async def start_update(self) -> None:
        """Before the first request."""
        await self._all({"step": "start_update"})

    async def finish_update(self, version: str | None = None) -> None:
        """After the last request."""
        await self._all({"step": "finish_update", "version": version})

    async def pause(self) -> None:
        """Holds generation."""
        await self._all({"step": "pause"})

    async def resume(self) -> None:
        """Lets generation go on."""
        await self._all({"step": "resume"})

    async def reset_prefix_cache(self) -> None:
        """Forgets cached prefixes."""
        await self._all({"step": "reset_prefix_cache"})

    async def empty_cache(self) -> None:
        """Gives cached device memory back."""
        await self._all({"step": "empty_cache"})

    async def close(self) -> None:
        """Every actor closes its receiver."""
        await self._all({"step": "close"})


async def _awaited(reference: Any) -> Any:
    return await reference


class TrainerActor:
    """What a trainer's actor class inherits from. It says what it trains with :meth:`attach_model`.

    >>> class MyTrainer(TrainerActor):                                   # doctest: +SKIP
    ...     def __init__(self, config):
    ...         self.model = ...
    ...         self.attach_model(config, self.model, FSDPWeightExtractor())
    """

    _trainer: _TrainerSide | None = None

    def attach_model(
        self,
        config: Mapping[str, object],
        model: object,
        extractor: WeightExtractor,
        *,
        generator_dtype: Dtype | None = None,
        timeout: float = 600.0,
        prefix_cache: Literal["reset", "keep"] = "reset",
        pause: bool = False,
    ) -> None:
        """Says what to send and how. ``prefix_cache`` and ``pause`` are those of the client."""
        self._trainer = _TrainerSide(
            config, model, extractor, generator_dtype, timeout, {"prefix_cache": prefix_cache, "pause": pause}
        )

    async def windlass(self, call: Plain, *engines: object) -> Plain:
        """The remote method. ``engines`` are handles of actors, when they are told of."""
        if self._trainer is None:
            return await answer(_no_model)
        side = self._trainer
        return await answer(lambda: side.do(call, engines))


async def _no_model() -> None:
    raise WindlassInvalid("this actor sends no weights: call attach_model() when it is made")


class _TrainerSide:
    def __init__(
        self,
        config: Mapping[str, Any],
        model: Any,
        extractor: WeightExtractor,
        dtype: Dtype | None,
        timeout: float,
        how: dict[str, Any],
    ) -> None:
        self._config, self._model, self._extractor = dict(config), model, extractor
        self._dtype, self._timeout, self._how = dtype, timeout, how
        self._manager: WeightSyncManager | None = None
        self._client: InferenceEngineClient | None = None

    async def do(self, call: Plain, handles: Sequence[Any]) -> Any:
        step = call.get("step")
        if step == "initialize":
            await self._initialize(call["engines"], handles)
            return None
        if step == "sync":
            if self._manager is None:
                raise WindlassInvalid("initialize() comes before sync_weights()")
            return await self._manager.sync_weights(self._model, self._dtype, call["version"])
        if step == "close":
            await self._close()
            return None
        raise WindlassInvalid(f"a trainer is not called to {step!r}")

    async def _initialize(self, engines: Sequence[Plain], handles: Sequence[Any]) -> None:
        from windlass.transfer.sync import WeightSyncManager
        from windlass.transfer.trainer import TrainerRanks

        try:
            await self._close()
        except EnginesFailed as e:
            # An engine that has died does not leave, and may be why all of them join again.
            log.warning("not every engine has left: %s", e)
        left = list(handles)
        adapters = []
        for engine in engines:
            shape = EngineShape(**engine["shape"])
            actors = [left.pop(0) for _ in range(engine["actors"])]
            adapters.append(RayEngine(actors, name=engine["name"], shape=shape, timeout=self._timeout))
        if TrainerRanks().rank == 0:
            self._client = InferenceEngineClient(adapters, timeout=self._timeout, **self._how)
        manager = WeightSyncManager(
            strategy_from_config(self._config), self._extractor, self._client, timeout=self._timeout
        )
        await manager.initialize()
        self._manager = manager

    async def _close(self) -> None:
        manager, self._manager = self._manager, None
        client, self._client = self._client, None
        try:
            if client is not None and manager is not None:
                await client.aclose()
        finally:
            if manager is not None:
                manager.close()


class RayWeightSync:
    """The controller's two calls, for trainers and engines that are actors.

    >>> sync = RayWeightSync(trainers, [RayEngine([engine]) for engine in engines])     # doctest: +SKIP
    >>> sync.initialize()                                                                # doctest: +SKIP
    >>> sync.sync_weights()                                                              # doctest: +SKIP
    1

    ``trainers`` are the actors of all training ranks, rank 0 first. Every call has the deadline ``timeout``.
    """

    def __init__(
        self, trainers: Sequence[Any], engines: Sequence[RayEngine], *, timeout: float = 600.0
    ) -> None:
        if not trainers or not engines:
            raise WindlassInvalid("there is nothing to sync without trainers and engines")
        self._trainers, self._engines, self._timeout = list(trainers), list(engines), timeout
        self.version: int | None = None

    def initialize(self) -> None:
        """Trainers and engines join. Ready when it returns."""
        engines = [
            {
                "name": engine.name,
                "shape": {"tp": engine.shape.tp, "pp": engine.shape.pp, "dp": engine.shape.dp},
                "actors": len(engine._actors),
            }
            for engine in self._engines
        ]
        handles = [actor for engine in self._engines for actor in engine._actors]
        self._all({"step": "initialize", "engines": engines}, handles)

    def sync_weights(self, version: int | None = None) -> int:
        """Sends the weights, and returns their version when every engine has loaded them."""
        said = self._all({"step": "sync", "version": version}, [])
        self.version = int(said[0])
        return self.version

    def close(self) -> None:
        """Both sides leave. The actors stay."""
        self._all({"step": "close"}, [])

    def _all(self, call: Plain, handles: Sequence[Any]) -> list[Any]:
        """Calls every trainer at once, and waits for all of them unless one has failed."""
        import ray

        call = plain(call, "call to a trainer")
        calls = {actor.windlass.remote(call, *handles): rank for rank, actor in enumerate(self._trainers)}
        values: dict[int, Any] = {}
        failures: dict[str, WindlassError] = {}
        pending, wait = list(calls), self._timeout
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=wait)
            if not done:
                for reference in pending:
                    who = f"trainer rank {calls[reference]}"
                    failures[who] = WindlassTimeout(f"{who} did not answer within {wait:g} s")
                break
            who = f"trainer rank {calls[done[0]]}"
            try:
                values[calls[done[0]]] = result(ray.get(done[0]), who)
            except WindlassError as e:
                failures[who] = e
            except Exception as e:
                failures[who] = _lost(e, who)
            if failures:
                # The others fail soon as well, and may know better why.
                wait = min(wait, 10.0)
        if failures:
            # Rank 0 speaks to the engines, so its error says most; that of a dead rank says more than those it caused.
            first = min(
                failures.values(),
                key=lambda e: (not isinstance(e, (WindlassPeerLost, EnginesFailed)), str(e)),
            )
            if len(failures) == 1:
                raise first
            text = "; ".join(str(error) for error in failures.values())
            raise type(first)(text, first.advice, first.name) from first
        return [values[rank] for rank in range(len(self._trainers))]
