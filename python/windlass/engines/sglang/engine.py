"""SGLang's control routes, of a server or of an ``sglang.Engine`` in this process.

Owns: which routes there are and what their answers mean. A server is asked over HTTP; an engine in this process through
the same requests, made from SGLang's own classes. Called by the loader and the adapters. Must not: decide what to load,
or in which order.

Calls block, each with a deadline; callers in an event loop use a thread. An engine in this process has a loop of its own.
If that loop runs (the engine is used by ``async_generate``), requests are handed to it; if not, it is run here.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windlass.errors import WindlassInvalid, WindlassPeerLost, WindlassTimeout, WindlassUnsupported
from windlass.http import HttpClient

__all__ = ["Embedded", "Engine", "Facts", "Reply", "Server", "connect"]


@dataclass(frozen=True)
class Reply:
    """What an engine says to a request."""

    ok: bool
    message: str
    #: Whether it knows the request at all.
    known: bool = True


@dataclass(frozen=True)
class Facts:
    """What an engine was started with. It does not change while it lives."""

    version: str
    checkpoint: str
    tp: int
    pp: int
    dp: int
    #: Functions that it may call to load weights.
    loaders: tuple[str, ...]
    lora: bool
    max_lora_rank: int | None
    lora_targets: frozenset[str] | None
    memory_saver: bool

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Facts:
        """From ``/server_info``."""

        def number(name: str) -> int:
            value = info.get(name)
            return value if isinstance(value, int) and value > 0 else 1

        targets = info.get("lora_target_modules")
        rank = info.get("max_lora_rank")
        return cls(
            version=str(info.get("version") or "of unknown version"),
            checkpoint=str(info.get("model_path") or ""),
            tp=number("tp_size"),
            pp=number("pp_size"),
            dp=number("dp_size"),
            loaders=tuple(info.get("custom_weight_loader") or ()),
            lora=bool(info.get("enable_lora")),
            max_lora_rank=rank if isinstance(rank, int) else None,
            lora_targets=frozenset(map(str, targets)) if targets else None,
            memory_saver=bool(info.get("enable_memory_saver")),
        )


class Engine(ABC):
    """One engine, wherever it runs."""

    #: What messages call it.
    name: str

    @abstractmethod
    def facts(self, *, timeout: float) -> Facts:
        """What it was started with."""

    @abstractmethod
    def weight_version(self, *, timeout: float) -> str | None:
        """The label of the weights that it serves."""

    @abstractmethod
    def ask(
        self,
        route: str,
        body: Mapping[str, object],
        *,
        stage: str,
        timeout: float,
    ) -> Reply:
        """One request by the name of its route. An engine that says no is a :class:`Reply`; one that cannot be
        reached or answers something else is an error."""

    @abstractmethod
    def payloads(self, data: bytes, ranks: int) -> list[Any]:
        """What a request carries for ``serialized_named_tensors``: the same for every rank."""


class Server(Engine):
    """A server, by HTTP."""

    def __init__(self, client: HttpClient, token: str | None) -> None:
        self._client = client
        self.name = client.name
        #: For those that drive it by other ways.
        self.address = (client.url, token or client.token)

    def facts(self, *, timeout: float) -> Facts:
        return Facts.of(self._look("server_info", timeout))

    def weight_version(self, *, timeout: float) -> str | None:
        label = self._look("model_info", timeout).get("weight_version")
        return None if label is None else str(label)

    def _look(self, route: str, timeout: float) -> dict[str, Any]:
        answer = self._client.get(f"/{route}", stage="look at the engine", timeout=timeout, accept=(404,))
        if answer.status == 404:
            # What it was called before.
            answer = self._client.get(f"/get_{route}", stage="look at the engine", timeout=timeout)
        return answer.object()

    def ask(self, route: str, body: Mapping[str, object], *, stage: str, timeout: float) -> Reply:
        answer = self._client.post(
            f"/{route}",
            dict(body),
            stage=stage,
            timeout=timeout,
            accept=(400, 404, 405),
        )
        if answer.status in (404, 405):
            return Reply(False, f"{self.name} has no route /{route}", known=False)
        told: Any = {}
        if answer.body[:1] == b"{":
            told = answer.json()
        ok = answer.status < 400 and bool(told.get("success", True))
        return Reply(ok, str(told.get("message") or told.get("error_message") or answer.text))

    def payloads(self, data: bytes, ranks: int) -> list[Any]:
        return [base64.b64encode(data).decode()] * ranks


#: Routes and the classes of their requests in ``sglang.srt.managers.io_struct``.
_REQUESTS = {
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "load_lora_adapter": "LoadLoRAAdapterReqInput",
    "load_lora_adapter_from_tensors": "LoadLoRAAdapterFromTensorsReqInput",
    "pause_generation": "PauseGenerationReqInput",
    "release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqInput",
    "unload_lora_adapter": "UnloadLoRAAdapterReqInput",
    "update_weight_version": "UpdateWeightVersionReqInput",
    "update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
}


class Embedded(Engine):
    """An ``sglang.Engine`` in this process."""

    def __init__(self, engine: Any, name: str | None) -> None:
        self._engine = engine
        self.name = name or "the engine in this process"

    def facts(self, *, timeout: float) -> Facts:
        import sglang

        args = self._engine.server_args
        resolved = args.resolved_dict() if hasattr(args, "resolved_dict") else vars(args)
        return Facts.of({**resolved, "version": sglang.__version__})

    def weight_version(self, *, timeout: float) -> str | None:
        if hasattr(self._engine, "get_model_info"):
            label = self._engine.get_model_info().get("weight_version")
        else:
            label = getattr(self._engine.server_args, "weight_version", None)
        return None if label is None else str(label)

    def ask(self, route: str, body: Mapping[str, Any], *, stage: str, timeout: float) -> Reply:
        from sglang.srt.managers import io_struct

        manager = self._engine.tokenizer_manager
        kind = getattr(io_struct, _REQUESTS[route], None)
        if kind is None or not hasattr(manager, route):
            return Reply(False, f"{self.name} has no {route}", known=False)
        request = kind(**body)
        alone = route in ("pause_generation", "continue_generation", "update_weight_version")
        call = getattr(manager, route)
        return _reply_of(self._run(call(request) if alone else call(request, None), stage, timeout))

    def payloads(self, data: bytes, ranks: int) -> list[Any]:
        return [data] * ranks

    def flush(self, *, timeout: float) -> Reply:
        """Empties the prefix cache, or says no at once if requests run. (Its own waiting counts requests that a pause
        has put back into the queue, and so would last until the deadline.)"""
        work = self._engine.tokenizer_manager.flush_cache()
        return _reply_of(self._run(work, "flush the prefix cache", timeout))

    def _run(self, work: Any, stage: str, timeout: float) -> Any:
        loop = self._engine.loop
        try:
            if loop.is_running():
                return asyncio.run_coroutine_threadsafe(work, loop).result(timeout)
            return loop.run_until_complete(asyncio.wait_for(work, timeout))
        except (asyncio.TimeoutError, concurrent.futures.TimeoutError) as e:
            raise WindlassTimeout(
                f"{self.name}: no answer within {timeout:g} s ({stage})",
                "see whether the engine's processes are alive and busy, or raise the deadline",
            ) from e
        except AssertionError as e:
            # How its manager says that a request does not go with its configuration.
            raise WindlassUnsupported(f"{self.name}: {e} ({stage})") from e
        except RuntimeError as e:
            raise WindlassPeerLost(f"{self.name}: {e} ({stage})", "see the log of the engine") from e


def _reply_of(told: Any) -> Reply:
    if told is None:
        return Reply(True, "")
    if isinstance(told, tuple):
        return Reply(bool(told[0]), str(told[1]))
    message = getattr(told, "message", None) or getattr(told, "error_message", None)
    return Reply(bool(getattr(told, "success", True)), str(message or ""))


def connect(
    engine: object, *, name: str | None = None, api_key: str | None = None, timeout: float = 30.0
) -> Server | Embedded:
    """The engine behind a URL or a connection, or an ``sglang.Engine``."""
    if isinstance(engine, (Server, Embedded)):
        return engine
    if isinstance(engine, HttpClient):
        return Server(engine, api_key)
    if isinstance(engine, str):
        return Server(HttpClient(engine, name=name or "SGLang", token=api_key, timeout=timeout), api_key)
    if hasattr(engine, "tokenizer_manager") and hasattr(engine, "loop"):
        return Embedded(engine, name)
    raise WindlassInvalid(
        f"{type(engine).__name__} is not an engine: give the URL of an SGLang server, or an sglang.Engine"
    )
