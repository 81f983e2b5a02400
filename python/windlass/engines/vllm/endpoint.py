"""Routes by which a production vLLM server takes versions, without its dev mode.

Owns: :class:`WindlassEndpoint`, an entry point of ``vllm.endpoint_plugins``, and the transaction that a load is: one
task of the API server, which outlives the client that asked for it. Called over HTTP by ``windlass receive`` or anybody
who has the token. Must not: attach a route without a token; leave the engine paused for any reason but one: a load
that was cut short and could not be finished.

Routes below ``/windlass/v1``, each with ``Authorization: Bearer TOKEN`` (``WINDLASS_TOKEN`` or the file named by
``WINDLASS_TOKEN_FILE`` in the server's environment):

========================  =========================================================================================
``GET  /status``          engine, incarnation, dtype, paused, fenced, weight_version, workers' reports, transaction
``POST /pull``            ``{"endpoint", "token", "model_id", "incarnation", "version", "image_dir"}``: bring a version to this
                          host, while the engine serves
``POST /prepare``         ``{"image": DIR}``: rehearse, write nothing
``POST /load``            ``{"order": {...}, "pause": {"mode", "cache", "lease"}}``: the whole transaction
``POST /verify``          sums of the live weights, by worker
``POST /resume``          lift a fence by hand, after a look at ``/status``
========================  =========================================================================================

A load goes through these phases::

    checking ─► pausing ─► loading ─► cache ─► resuming

``checking`` asks every worker whether it would take the order and brings what it needs to GPUs, while the engine serves. With
the pause mode ``keep`` the rest is one call of the engine core (:mod:`windlass.engines.vllm.core`), where the core has it: it is called
``loading``. Otherwise ``pausing`` is under the lease:
if the engine is not paused by its end, it is resumed with the old version. The first write is in ``loading``. If a
worker fails there, the order is given once more, whole (``dense``); if that fails as well, the engine stays paused:
*fenced*, and ``/status`` says why. A worker that refuses the order in ``loading`` while no other took it counts as
before the first write. The next load that succeeds lifts a fence.

A second ``/load`` of the same order joins the first; one for another order is refused while a transaction runs.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from windlass.config import Config
from windlass.engines.vllm.core import METHOD
from windlass.errors import (
    HTTP_STATUS,
    WindlassDenied,
    WindlassError,
    WindlassInvalid,
    WindlassStale,
    WindlassTimeout,
)
from windlass.load.order import Failure, LoadOrder
from windlass.plain import Plain
from windlass.receive.pulling import Pulling, PullOrder

__all__ = ["PREFIX", "PauseOptions", "WindlassEndpoint"]

log = logging.getLogger("windlass")

#: Below which all routes are.
PREFIX = "/windlass/v1"

#: How often workers are asked whether they have staged.
STAGED_S = 0.001
#: How often they are asked whether a version is on their host, and how long after the order's own deadline.
LOOK_S, GRACE_S = 0.02, 10.0
#: How long a cache that is still in use is asked again.
CACHE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class PauseOptions(Config):
    """How generation is paused around a load.

    ``mode`` is vLLM's: ``keep`` freezes requests, which go on with the new weights; ``wait`` lets them end first;
    ``abort`` ends them. ``cache`` says what becomes of the prefix cache. ``lease`` bounds the time until the first write.
    """

    mode: Literal["keep", "wait", "abort"] = "keep"
    cache: Literal["reset", "keep"] = "reset"
    lease: float = 60.0

    def __post_init__(self) -> None:
        self._choice("mode", "keep", "wait", "abort")
        self._choice("cache", "reset", "keep")
        self._seconds("lease")


class _Fenced(WindlassStale):
    """The engine stays paused."""


class _NoToken(WindlassDenied):
    """A request without the token."""


@dataclass
class _Transaction:
    """One load: its order, where it stands, and the task that carries it out."""

    order: LoadOrder
    pause: PauseOptions
    phase: str = "checking"
    #: Whether somebody else had paused generation before: then it stays so.
    paused_before: bool = False
    began: float = field(default_factory=time.monotonic)
    task: asyncio.Task[Plain] | None = None


class _Engine:
    """What is asked of vLLM, at one place."""

    def __init__(self, client: Any) -> None:
        self.client = client
        #: Whether the core has our method, once it was asked.
        self._between_steps: bool | None = None

    async def workers(self, method: str, *args: Any) -> list[Plain]:
        """Calls a method of every worker of every replica."""
        parallel = self.client.vllm_config.parallel_config
        core = getattr(self.client, "engine_core", None)
        if parallel.data_parallel_size > 1 and core is not None and hasattr(core, "call_utility_all_async"):
            # vLLM's own call answers with the first replica's workers alone.
            engines = await core.call_utility_all_async("collective_rpc", method, None, args, None)
            told = [worker for engine in engines for worker in engine]
        else:
            told = await self.client.collective_rpc(method, args=args)
        return [dict(worker) for worker in told]

    def hosts(self) -> int:
        """On how many hosts its workers are."""
        from windlass.engines.vllm.extension import hosts_of

        return hosts_of(self.client.vllm_config)

    def dtype(self) -> str:
        """What the model computes in."""
        return str(self.client.vllm_config.model_config.dtype).removeprefix("torch.")

    async def can_load_between_steps(self) -> bool:
        """Whether a load can be one call of the core. Replicas have cores of their own, which pause together."""
        if self._between_steps is None:
            core = getattr(self.client, "engine_core", None)
            one = self.client.vllm_config.parallel_config.data_parallel_size == 1
            self._between_steps = False
            if one and hasattr(core, "call_utility_async"):
                try:
                    await core.call_utility_async(METHOD, None)  # type: ignore[union-attr]
                    self._between_steps = True
                except Exception as e:
                    log.warning("windlass: pauses take longer than they could: %s", e)
        return self._between_steps

    async def load_between_steps(self, order: Plain, reset: bool, label: str, lift: bool) -> Plain:
        """See :func:`windlass.engines.vllm.core.windlass_load_between_steps`."""
        return dict(await self.client.engine_core.call_utility_async(METHOD, order, reset, label, lift))

    async def pause(self, mode: str) -> None:
        # The cache is reset once the weights are new: what is cached before that is of the old ones.
        core = getattr(self.client, "engine_core", None)
        if hasattr(core, "pause_scheduler_async"):
            # The client's own sleeps afterwards, for callers that want to see the last answers first.
            await core.pause_scheduler_async(mode=mode, clear_cache=False)  # type: ignore[union-attr]
        else:
            await self.client.pause_generation(mode=mode, clear_cache=False)

    async def resume(self) -> None:
        await self.client.resume_generation()

    async def paused(self) -> bool:
        return bool(await self.client.is_paused())

    async def reset_cache(self, mode: str) -> bool:
        """Frozen requests have blocks of the old weights: they are computed again from their tokens."""
        done = await self.client.reset_prefix_cache(reset_running_requests=mode == "keep")
        if hasattr(self.client, "reset_encoder_cache"):
            await self.client.reset_encoder_cache()
        # Older versions answer nothing.
        return done is not False

    async def label(self, text: str) -> None:
        if hasattr(self.client, "update_weight_version"):
            await self.client.update_weight_version(text)

    async def labelled(self) -> str | None:
        if not hasattr(self.client, "get_weight_version"):
            return None
        return str(await self.client.get_weight_version())


class WindlassEndpoint:
    """The plugin. One per API server."""

    name = "windlass"
    required_tasks: tuple[str, ...] | None = ("generate",)

    def __init__(self) -> None:
        self._token = _token()
        self._engine: _Engine | None = None
        self._incarnation = secrets.token_hex(8)
        self._transaction: _Transaction | None = None
        self._fenced: Failure | None = None
        self._reports: list[Plain] = []
        self._paused = False
        self._label: str | None = None
        self._pulling: Pulling | None = None
        self._pulls = asyncio.Lock()

    # vLLM's side.

    def attach_router(self, app: Any) -> None:
        """Adds the routes, if there is a token."""
        if self._token is None:
            log.error("windlass: no route is attached: set WINDLASS_TOKEN or WINDLASS_TOKEN_FILE")
            return
        from fastapi import Request
        from fastapi.responses import JSONResponse

        def route(method: str, path: str, act: Any) -> None:
            async def handle(request: Request) -> JSONResponse:
                try:
                    self._admit(request.headers.get("authorization", ""))
                    body = await _body(request) if method == "POST" else {}
                    return JSONResponse(await act(body))
                except Exception as e:
                    return _refusal(e, JSONResponse)

            # FastAPI reads the annotation by name, which is local here.
            handle.__annotations__ = {"request": Request}
            app.add_api_route(PREFIX + path, handle, methods=[method], response_model=None)

        route("GET", "/status", self._status)
        route("POST", "/pull", self._pull)
        route("POST", "/prepare", self._prepare)
        route("POST", "/load", self._load)
        route("POST", "/verify", self._verify)
        route("POST", "/resume", self._resume)

    async def init_state(self, engine_client: object, state: object, args: object) -> None:
        """Takes the way to the engine."""
        self._engine = None if engine_client is None else _Engine(engine_client)

    # Routes.

    def _admit(self, header: str) -> None:
        scheme, _, given = header.partition(" ")
        assert self._token is not None
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            given.strip().encode(), self._token.encode()
        ):
            raise _NoToken(
                "the request has no valid token",
                "send it as 'Authorization: Bearer TOKEN' (WINDLASS_TOKEN of the server)",
            )

    def _asked(self) -> _Engine:
        if self._engine is None:
            raise WindlassInvalid("this server has no engine")
        return self._engine

    async def _status(self, _: Plain) -> Plain:
        engine = self._asked()
        running = self._transaction
        if running is None:
            # While a load runs, workers and scheduler are busy with it: these are their last words.
            self._reports = await engine.workers("windlass_report")
            self._paused = await engine.paused()
            self._label = await engine.labelled()
        from windlass.engines.vllm.extension import vllm_version

        return {
            "engine": "vllm",
            "engine_version": vllm_version(),
            "incarnation": self._incarnation,
            "dtype": engine.dtype(),
            "paused": self._paused,
            "fenced": self._fenced is not None,
            "fence": None if self._fenced is None else self._fenced.to_dict(),
            "weight_version": self._label,
            "workers": self._reports,
            "transaction": None
            if running is None
            else {
                "order": running.order.to_dict(),
                "phase": running.phase,
                "seconds": time.monotonic() - running.began,
            },
        }

    async def _pull(self, body: Plain) -> Plain:
        order = PullOrder.from_dict(body)
        # The client may go away; what was begun goes on.
        return await asyncio.shield(asyncio.get_running_loop().create_task(self._bring(order)))

    async def _bring(self, order: PullOrder) -> Plain:
        if order.slice == "always" or self._asked().hosts() > 1:
            return await self._bring_by_workers(order)
        if self._pulling is not None and not self._pulling.follows(order):
            # What is awaited from a trainer that is gone must not keep the next one waiting.
            self._pulling.stop()
        async with self._pulls:
            begun = time.monotonic()
            pulling = await asyncio.to_thread(Pulling.of, order, self._pulling)
            self._pulling = pulling
            brought = await asyncio.to_thread(
                lambda: pulling.bring(order.identity, order.timeout, exact=order.exact)
            )
            synced = brought.synced
            carried = {"mode": "none", "wire_bytes": 0}
            if synced is not None:
                carried = {"mode": synced.mode, "wire_bytes": synced.wire_bytes}
            return {"image": str(brought.image), **carried, "ms": (time.monotonic() - begun) * 1e3}

    async def _bring_by_workers(self, order: PullOrder) -> Plain:
        """Has one worker of each host bring what the workers there read: other hosts have images of their own."""
        async with self._pulls:
            begun = time.monotonic()
            engine, given = self._asked(), order.to_dict()
            told = await engine.workers("windlass_pull", given)
            # A worker that began nothing would go on to tell of what it brought before.
            while not any(worker["error"] for worker in told) and not all(worker["done"] for worker in told):
                if time.monotonic() > begun + order.timeout + GRACE_S:
                    raise WindlassTimeout(
                        f"version {order.version} did not come to all hosts within {order.timeout:g} s",
                        "see the logs of the workers",
                    )
                await asyncio.sleep(LOOK_S)
                told = await engine.workers("windlass_pulled")
            for worker in told:
                if worker["error"] is not None:
                    raise Failure.from_dict(worker["error"]).error()
            modes = {worker["mode"] for worker in told} - {"none"}
            return {
                "image": told[0]["image"],
                "mode": modes.pop() if len(modes) == 1 else "fuzzy" if modes else "none",
                "wire_bytes": sum(worker["wire_bytes"] for worker in told),
                "ms": (time.monotonic() - begun) * 1e3,
            }

    async def _prepare(self, body: Plain) -> Plain:
        image = body.get("image")
        if not isinstance(image, str) or not image:
            raise WindlassInvalid(f"image is {image!r}: expected the directory of an image")
        return {"workers": self._agreed(await self._asked().workers("windlass_prepare", image))}

    async def _load(self, body: Plain) -> Plain:
        order = LoadOrder.from_dict(_part(body, "order"))
        pause = PauseOptions.from_dict(body.get("pause") or {})
        running = self._transaction
        if running is not None and running.order != order:
            raise WindlassStale(
                f"version {running.order.version} is being loaded (phase {running.phase})",
                "wait for it to end, then give the order again",
                name="busy",
            )
        if running is None:
            running = _Transaction(order, pause)
            running.task = asyncio.get_running_loop().create_task(self._carry_out(running))
            running.task.add_done_callback(lambda _: self._end(running))
            self._transaction = running
        assert running.task is not None
        # The client may go away; the load goes on.
        return await asyncio.shield(running.task)

    async def _verify(self, _: Plain) -> Plain:
        if self._transaction is not None:
            raise WindlassStale("a load is running", "ask again when it has ended", name="busy")
        return {"workers": await self._asked().workers("windlass_digest")}

    async def _resume(self, _: Plain) -> Plain:
        if self._transaction is not None:
            raise WindlassStale("a load is running", "it resumes generation when it ends", name="busy")
        self._reports = await self._asked().workers("windlass_report")
        dirty = [report["rank"] for report in self._reports if report["state"] != "clean"]
        if dirty:
            raise WindlassStale(
                f"the weights of rank {dirty} are not whole",
                "load a version first: that resumes generation too",
            )
        await self._asked().resume()
        self._fenced = None
        return {"resumed": True}

    # The transaction.

    def _end(self, transaction: _Transaction) -> None:
        if self._transaction is transaction:
            self._transaction = None
        task = transaction.task
        if task is not None and not task.cancelled() and task.exception() is not None:
            # Also where nobody waits for it any more.
            log.warning(
                "windlass: version %d was not loaded: %s", transaction.order.version, task.exception()
            )

    async def _carry_out(self, run: _Transaction) -> Plain:
        engine, order = self._asked(), run.order
        begun = await engine.workers("windlass_stage", order.to_dict())
        self._agreed([_plain_report(report) for report in begun])
        if run.pause.mode == "keep" and await engine.can_load_between_steps():
            return await self._between_steps(engine, run)
        await self._staged(engine, order)
        run.phase = "pausing"
        run.paused_before = self._fenced is None and await engine.paused()
        paused = time.monotonic()
        await self._pause(engine, run)
        self._paused = True
        run.phase = "loading"
        try:
            await self._write(engine, order)
        except _Fenced:
            raise
        except Exception:
            # Nothing was written. (A task that is cancelled knows nothing: the engine stays paused.)
            await self._serve(engine, run)
            raise
        run.phase = "cache"
        try:
            if run.pause.cache == "reset":
                await self._reset_cache(engine, run.pause.mode)
            await engine.label(order.label)
            self._label = order.label
        except Exception as e:
            raise self._fence(Failure.of(e)) from e
        run.phase = "resuming"
        self._fenced = None
        await self._serve(engine, run)
        return {
            "weight_version": order.label,
            "workers": self._reports,
            "pause_ms": (time.monotonic() - paused) * 1e3,
            "ms": (time.monotonic() - run.began) * 1e3,
        }

    async def _staged(self, engine: _Engine, order: LoadOrder) -> None:
        """Waits until workers have checked the order and brought what it needs to their GPUs, while they serve."""
        until = time.monotonic() + order.timeout
        told = await engine.workers("windlass_staged")
        while any(report["staging"] for report in told):
            await self._wait(order, until)
            told = await engine.workers("windlass_staged")
        if any(report["unknown_layout"] for report in told):
            # It is rehearsed, which must not be while a step runs.
            told = await engine.workers("windlass_check", order.to_dict())
        self._agreed([_plain_report(report) for report in told])

    @staticmethod
    async def _wait(order: LoadOrder, until: float) -> None:
        if time.monotonic() > until:
            raise WindlassTimeout(f"version {order.version} was not staged within {order.timeout:g} s")
        await asyncio.sleep(STAGED_S)

    async def _between_steps(self, engine: _Engine, run: _Transaction) -> Plain:
        """The rest of a load as one call of the core."""
        order, reset = run.order, run.pause.cache == "reset"
        until = time.monotonic() + order.timeout
        run.phase = "loading"
        # What is to be loaded before the image holds it cannot be repeated from there.
        hows = (order.how, "dense") if order.delta is None else (order.how,)
        failure = Failure(kind="bug", text="nothing was tried")
        for how in hows:
            given = {**order.to_dict(), "how": how}
            lift = self._fenced is not None
            try:
                # The core itself says whether workers are ready: asking it takes as long as a load.
                while (told := await engine.load_between_steps(given, reset, order.label, lift)).get(
                    "staging"
                ):
                    await self._wait(order, until)
                if told.get("unknown_layout"):
                    # It is rehearsed, which must not be while a step runs.
                    self._agreed(await engine.workers("windlass_check", order.to_dict()))
                    told = await engine.load_between_steps(given, reset, order.label, lift)
            except WindlassError:
                # Nothing was written.
                raise
            except Exception as e:
                # What the workers did is not known.
                failure, self._paused = Failure.of(e), True
                continue
            self._reports, self._paused = told["reports"], bool(told["paused"])
            errors = (Failure.from_dict(r["error"]) for r in self._reports if r["error"] is not None)
            error = next(errors, None)
            if not told["paused"] and error is None and told["error"] is None:
                self._fenced, self._label = None, order.label
                times = {name: told[name] for name in ("pause_ms", "drain_ms", "load_ms")}
                times["ms"] = (time.monotonic() - run.began) * 1e3
                times["stage_ms"] = times["ms"] - times["pause_ms"] - times["drain_ms"]
                listed = ", ".join(f"{name} {value:.1f}" for name, value in times.items())
                log.info("windlass: version %d is served: %s", order.version, listed)
                return {"weight_version": order.label, "workers": self._reports, **times}
            failure = error or Failure(kind="bug", text=told["error"] or "a worker does not say what failed")
            if not told["paused"]:
                # Nothing was written.
                if self._fenced is None:
                    raise failure.error()
                break
            log.warning("windlass: version %d was not loaded: %s", order.version, failure.text)
        raise self._fence(failure)

    async def _pause(self, engine: _Engine, run: _Transaction) -> None:
        pausing = asyncio.get_running_loop().create_task(engine.pause(run.pause.mode))
        done, _ = await asyncio.wait({pausing}, timeout=run.pause.lease)
        if not done:
            # It may still come about: resuming is what counts last.
            pausing.add_done_callback(lambda task: task.cancelled() or task.exception())
            await self._serve(engine, run)
            raise WindlassTimeout(
                f"generation was not paused within the lease of {run.pause.lease:g} s (mode {run.pause.mode}); the old "
                "version is served",
                "give a longer lease, or the mode keep or abort",
            )
        try:
            pausing.result()
        except Exception:
            await self._serve(engine, run)
            raise

    async def _serve(self, engine: _Engine, run: _Transaction) -> None:
        """Back to serving, unless the weights are not whole or somebody else had paused it."""
        if self._fenced is None and not run.paused_before:
            await engine.resume()
            self._paused = False

    async def _write(self, engine: _Engine, order: LoadOrder) -> None:
        """Has all workers load. Raises :class:`_Fenced` if they are not whole afterwards, and anything else if none of
        them was touched."""
        failure: Failure | None = None
        for how in (order.how, "dense") if order.delta is None else (order.how,):
            given = LoadOrder.from_dict({**order.to_dict(), "how": how})
            try:
                self._reports = await engine.workers("windlass_load", given.to_dict())
            except Exception as e:
                # Nobody knows what the workers did.
                failure = Failure.of(e)
                continue
            wanted = order.identity.to_dict()
            if all(report["state"] == "clean" and report["live"] == wanted for report in self._reports):
                return
            failure = next(
                (Failure.from_dict(r["error"]) for r in self._reports if r["error"] is not None),
                Failure(kind="bug", text="a worker did not load the version and does not say why"),
            )
            if all(report["state"] == "clean" and report["live"] != wanted for report in self._reports):
                if self._fenced is None:
                    raise failure.error()
                break
            log.warning("windlass: version %d is loaded once more: %s", order.version, failure.text)
        assert failure is not None
        raise self._fence(failure)

    async def _reset_cache(self, engine: _Engine, mode: str) -> None:
        until = time.monotonic() + CACHE_S
        while not await engine.reset_cache(mode):
            if time.monotonic() >= until:
                raise WindlassStale(
                    "the weights are new, and the prefix cache could not be reset: blocks of it are still in use",
                    "load with the pause mode wait or abort",
                    name="cache_in_use",
                )
            await asyncio.sleep(0.05)

    def _fence(self, failure: Failure) -> _Fenced:
        self._fenced = failure
        log.error("windlass: generation stays paused: %s", failure.text)
        return _Fenced(
            f"generation stays paused: {failure.text}",
            "load a version: that makes the weights whole and resumes generation",
            "fenced",
        )

    def _agreed(self, reports: list[Plain]) -> list[Plain]:
        """The reports, unless one of them is an error."""
        self._reports = reports
        for report in reports:
            if report["error"] is not None:
                raise Failure.from_dict(report["error"]).error()
        return reports


def _token() -> str | None:
    given = os.environ.get("WINDLASS_TOKEN")
    if given:
        return given.strip()
    file = os.environ.get("WINDLASS_TOKEN_FILE")
    if not file:
        return None
    try:
        return Path(file).read_text().strip() or None
    except OSError as e:
        log.error("windlass: the token file %r cannot be read: %s", file, e.strerror)
        return None


async def _body(request: Any) -> Plain:
    text = await request.body()
    if not text:
        return {}
    try:
        body = json.loads(text)
    except ValueError as e:
        raise WindlassInvalid(f"the body is not JSON: {e}", name="not_json") from e
    if not isinstance(body, dict):
        raise WindlassInvalid("the body is not a JSON object", name="not_json")
    return body


def _plain_report(told: Plain) -> Plain:
    """A report without what staging says beside it."""
    return {name: value for name, value in told.items() if name not in ("staging", "unknown_layout")}


def _part(body: Plain, name: str) -> Plain:
    part = body.get(name)
    if not isinstance(part, dict):
        raise WindlassInvalid(f"{name} is {part!r}: expected an object")
    return part


def _refusal(e: Exception, answer: Any) -> Any:
    failure = Failure.of(e)
    if not isinstance(e, WindlassError):
        log.exception("windlass: a request failed")
    status = HTTP_STATUS[failure.kind]
    if isinstance(e, (_Fenced, _NoToken)):
        status = 503 if isinstance(e, _Fenced) else 401
    return answer({"error": {**failure.to_dict(), "name": getattr(e, "name", "")}}, status_code=status)
