"""Engines that are reached by HTTP only.

Owns: :class:`VllmEngine` and :class:`SglangEngine`, the adapters of :class:`windlass.client.InferenceEngineClient` for
the two servers' own interfaces, and :class:`RemoteWeightLoader`, a loader for weights that this host has received and
the server reads from a directory. Uses ``http.client`` in threads: no further package. Must not: import an engine.

Calls, by dialect
-----------------

| call | vLLM | vLLM, older | SGLang |
|---|---|---|---|
| join | ``/init_weight_transfer_engine`` | ``/init_weight_update_communicator`` | ``/init_weights_update_group`` |
| start | ``/start_weight_update`` | – | ``/begin_weight_update`` (0.5.21 and later) |
| update | ``/update_weights`` {update_info} | ``/update_weights``, a legacy dictionary each | ``/update_weights_from_distributed`` |
| finish | ``/finish_weight_update`` | – | ``/end_weight_update``, ``/update_weight_version`` |
| adapter | ``/v1/load_lora_adapter`` in place | the same | ``/unload_lora_adapter``, ``/load_lora_adapter`` |
| pause, resume | ``/pause?mode=``, ``/resume`` | – | ``/pause_generation``, ``/continue_generation`` |
| cache | ``/reset_prefix_cache`` | the same | ``/flush_cache`` |
| leave | ``/shutdown_weight_transfer_engine`` | ``/destroy_weights_update_group`` | ``/destroy_weights_update_group`` |

vLLM's routes need ``VLLM_SERVER_DEV_MODE=1``, and the transfer backend ``windlass`` on the server
(``--weight-transfer-config '{"backend": "windlass"}'``).

Every call has a deadline. Those that may be repeated without harm (pause, resume, cache, leave, status) are retried a
few times when the connection fails or the server says that it is busy; joining and updates never are, because half of
a collective cannot be taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from windlass.client import InferenceEngine
from windlass.errors import (
    WindlassDenied,
    WindlassError,
    WindlassInvalid,
    WindlassPeerLost,
    WindlassTimeout,
    WindlassUnsupported,
)
from windlass.request import BroadcastWeightUpdateRequest, LoraDiskWeightUpdateRequest
from windlass.strategy import WeightLoader, each_tensor, strategy_from_config
from windlass.sync_info import EmptyWeightSyncInfo, EngineShape, TorchDistributedWeightSyncInfo

if TYPE_CHECKING:
    from windlass.receiver import Image
    from windlass.request import WeightUpdateRequest
    from windlass.strategy import NamedTensors
    from windlass.sync_info import WeightSyncInfo

__all__ = ["HttpServer", "RemoteEngine", "RemoteWeightLoader", "SglangEngine", "VllmEngine", "remote_engine"]

log = logging.getLogger("windlass")

#: The most that is read of an answer.
MAX_ANSWER = 16 << 20
#: What a server says when it may work a moment later.
BUSY = (502, 503, 504)


class NoRoute(WindlassUnsupported):
    """The server has no such route."""


class HttpServer:
    """One server. ``token`` goes into the Authorization header; ``retries`` is how often a call is repeated that may
    be."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        retries: int = 3,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WindlassInvalid(f"{url!r} is not the address of a server: expected http://host:port")
        if parts.username or parts.password:
            raise WindlassInvalid("the address of a server has a password in it", "give it as token")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._parts = parts
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", **(headers or {})}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout, self._retries = timeout, retries

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout: float | None = None,
        again: bool = False,
    ) -> Any:
        """Asks the server. ``again`` says that asking twice does no harm."""
        return await asyncio.to_thread(self.ask, method, path, body, timeout=timeout, again=again)

    def ask(
        self, method: str, path: str, body: Any = None, *, timeout: float | None = None, again: bool = False
    ) -> Any:
        """:meth:`call`, blocking."""
        until = time.monotonic() + (self._timeout if timeout is None else timeout)
        nap = 0.1
        for turn in range(self._retries + 1 if again else 1):
            if turn:
                time.sleep(min(nap, max(0.0, until - time.monotonic())))
                nap *= 2
            last = turn == self._retries or not again
            try:
                status, text = self._once(method, path, body, until)
            except WindlassPeerLost as e:
                if last or time.monotonic() >= until:
                    raise
                log.info("asking again: %s", e)
                continue
            if status in BUSY and not last and time.monotonic() < until:
                continue
            return self._judged(method, path, status, text)
        raise AssertionError("a loop of at least one turn")

    def _once(self, method: str, path: str, body: Any, until: float) -> tuple[int, bytes]:
        left = until - time.monotonic()
        where = f"{method} {self.url}{path.partition('?')[0]}"
        if left <= 0:
            raise WindlassTimeout(f"{where}: no answer in time")
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=left)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._parts.path.rstrip("/") + path, data, self._headers)
            answer = connection.getresponse()
            return answer.status, answer.read(MAX_ANSWER)
        except TimeoutError as e:
            raise WindlassTimeout(
                f"{where}: no answer within {left:.3g} s", "see the server's log; it may still be at it"
            ) from e
        except (OSError, http.client.HTTPException) as e:
            raise WindlassPeerLost(f"{where}: {type(e).__name__}: {e}", "see whether the server runs") from e
        finally:
            connection.close()

    def _judged(self, method: str, path: str, status: int, data: bytes) -> Any:
        text = data.decode(errors="replace")
        try:
            value: Any = json.loads(text)
        except ValueError:
            value = text
        if status < 300:
            return value
        where = f"{method} {self.url}{path.partition('?')[0]}: status {status}: {_reason(value)}"
        if status in (401, 403):
            raise WindlassDenied(where, "give the server's key as token")
        if status in (404, 405):
            raise NoRoute(
                where, "the server is older or newer, or was started without the flag for this route"
            )
        if status in (400, 409, 422):
            raise WindlassInvalid(where)
        raise WindlassError(where, "see the server's log")


def _reason(value: Any) -> str:
    """What an error of either server says."""
    for key in ("message", "error", "detail"):
        if isinstance(value, Mapping) and value.get(key):
            return _reason(value[key])
    return str(value).strip()[:500] or "no reason given"


class RemoteEngine(InferenceEngine):
    """What both adapters share. ``strategy`` is the configuration that the server builds its receiver from; engines
    that join by an interface of their own do not need it. ``shape`` counts the server's ranks."""

    def __init__(
        self,
        url: str,
        *,
        shape: EngineShape | None = None,
        strategy: Mapping[str, Any] | None = None,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        retries: int = 3,
        pause_mode: str | None = None,
        lora_name: str = "policy",
        override_existing_update_group: bool = False,
    ) -> None:
        self.server = HttpServer(url, token=token, headers=headers, timeout=timeout, retries=retries)
        self.name = self.server.url
        self.shape = shape or EngineShape()
        self._strategy = dict(strategy or {})
        self._pause_mode = pause_mode
        self._lora_name = lora_name
        self._override = override_existing_update_group
        self._group: str | None = None

    async def _post(self, path: str, body: Any = None, *, again: bool = False) -> Any:
        return await self.server.call("POST", path, body, again=again)

    def _adapters_only(self, sync_info: WeightSyncInfo) -> bool:
        """Whether only adapters will come, by files: then there is nothing to join."""
        if not isinstance(sync_info, EmptyWeightSyncInfo):
            return False
        if not self._strategy:
            return True
        return strategy_from_config(self._strategy).get_request_type() is LoraDiskWeightUpdateRequest

    def _group_body(self, info: TorchDistributedWeightSyncInfo, rank_offset: int) -> dict[str, Any]:
        return {
            "master_address": info.master_addr,
            "master_port": info.master_port,
            "rank_offset": rank_offset,
            "world_size": info.world_size,
            "group_name": info.group_name,
            "backend": info.backend,
        }

    async def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(WindlassInvalid):
                # It answers so when it knows no such group, which is what was wanted.
                await self._post("/destroy_weights_update_group", {"group_name": group}, again=True)


class VllmEngine(RemoteEngine):
    """A vLLM server. ``dialect`` "native" is that of 0.21 and later with the transfer backend ``windlass``; "legacy" is
    that of servers with ``/init_weight_update_communicator``; "auto" asks for the first and takes the second where it
    is missing. ``pause_mode`` is keep (default), wait or abort."""

    def __init__(
        self, url: str, *, dialect: Literal["auto", "native", "legacy"] = "auto", **how: Any
    ) -> None:
        super().__init__(url, **how)
        if dialect not in ("auto", "native", "legacy"):
            raise WindlassInvalid(f"dialect is {dialect!r}: expected 'auto', 'native' or 'legacy'")
        self._dialect = dialect
        self._legacy = dialect == "legacy"
        #: Whether there are updates to start and finish; adapters need neither a transfer backend nor dev mode.
        self._transfers = True

    async def init_weight_transfer(self, sync_info: WeightSyncInfo, rank_offset: int) -> None:
        """Every worker of the server makes a receiver; for adapters there is nothing to make."""
        self._transfers = not self._adapters_only(sync_info)
        if not self._transfers:
            return
        if self._dialect != "legacy":
            info = {"sync_info": sync_info.to_dict(), "strategy": self._strategy, "rank_offset": rank_offset}
            try:
                await self._post("/init_weight_transfer_engine", {"init_info": info})
                self._legacy = False
                return
            except NoRoute:
                if self._dialect == "native":
                    raise
        self._legacy = True
        if not isinstance(sync_info, TorchDistributedWeightSyncInfo):
            raise WindlassUnsupported(
                f"{self.name} has the older interface only, which joins process groups and nothing else",
                "use the strategy broadcast, or a newer vLLM",
            )
        body = self._group_body(sync_info, rank_offset) | {"override_existing": self._override}
        await self._post("/init_weight_update_communicator", body)
        self._group = sync_info.group_name

    async def start_update(self) -> None:
        """Opens the update."""
        if self._transfers and not self._legacy:
            await self._post("/start_weight_update")

    async def update_weights(self, request: WeightUpdateRequest) -> None:
        """One request; a legacy server gets its dictionaries one after the other."""
        if isinstance(request, LoraDiskWeightUpdateRequest) and not self._legacy:
            path = {"lora_name": self._lora_name, "lora_path": request.lora_disk_path, "load_inplace": True}
            await self._post("/v1/load_lora_adapter", path)
        elif self._legacy:
            for body in request.to_legacy_dicts():
                await self._post("/update_weights", body)
        else:
            await self._post("/update_weights", {"update_info": {"request": request.to_dict()}})

    async def finish_update(self, version: str | None = None) -> None:
        """Closes the update."""
        if self._transfers and not self._legacy:
            await self._post("/finish_weight_update", {"weight_version": version})

    async def pause(self) -> None:
        """Holds generation."""
        mode = self._pause_mode or "keep"
        await self._post(f"/pause?mode={mode}", again=True)

    async def resume(self) -> None:
        """Lets generation go on."""
        await self._post("/resume", again=True)

    async def reset_prefix_cache(self) -> None:
        """Forgets cached prefixes, those of running requests among them: they are computed again."""
        said = await self._post("/reset_prefix_cache?reset_running_requests=true", again=True)
        if isinstance(said, Mapping) and said.get("success") is False:
            raise WindlassError(
                f"{self.name} did not reset its prefix cache", "blocks are still in use; try again"
            )

    async def close(self) -> None:
        """The workers close their receivers."""
        if not self._transfers:
            return
        if self._legacy:
            with contextlib.suppress(NoRoute):
                await self._leave_group()
            return
        with contextlib.suppress(NoRoute):
            await self._post("/shutdown_weight_transfer_engine", again=True)


class SglangEngine(RemoteEngine):
    """An SGLang server, which joins the update group by itself. ``pause_mode`` is retract (default), in_place or abort.
    ``flush_timeout`` is how long its cache may take to become free."""

    def __init__(self, url: str, *, flush_timeout: float = 10.0, **how: Any) -> None:
        super().__init__(url, **how)
        self._flush = flush_timeout
        #: Whether updates are framed by a session; found out at the first one.
        self._session: bool | None = None
        self._open = False
        self._adapters = False

    async def init_weight_transfer(self, sync_info: WeightSyncInfo, rank_offset: int) -> None:
        """Every rank of the server joins the group."""
        if self._adapters_only(sync_info):
            return
        if not isinstance(sync_info, TorchDistributedWeightSyncInfo):
            raise WindlassUnsupported(
                f"an SGLang server joins process groups by itself, and {type(sync_info).__name__} is none",
                "use the strategy broadcast, or `windlass receive --engine sglang=URL` beside the server for tcp",
            )
        self._group, self._open, self._session = sync_info.group_name, False, None
        if self._override:
            await self._leave_group()
        await self._post("/init_weights_update_group", self._group_body(sync_info, rank_offset))
        self._group = sync_info.group_name

    async def start_update(self) -> None:
        """Opens the session, where the server has one."""
        # One that a failed sync left open goes on.
        if self._session is False or self._group is None or self._open:
            return
        try:
            await self._post("/begin_weight_update", {"selector": "all"})
        except NoRoute:
            self._session = False
        else:
            self._session = self._open = True

    async def update_weights(self, request: WeightUpdateRequest) -> None:
        """One request."""
        if isinstance(request, LoraDiskWeightUpdateRequest):
            await self._load_lora(request.lora_disk_path)
        elif isinstance(request, BroadcastWeightUpdateRequest):
            body = {
                "names": request.names,
                "dtypes": request.dtypes,
                "shapes": request.shapes,
                "group_name": self._group,
                # Once, when all of them are there.
                "flush_cache": False,
            }
            await self._post("/update_weights_from_distributed", body)
        else:
            raise WindlassUnsupported(
                f"an SGLang server takes no {type(request).__name__} over HTTP",
                "use broadcast or lora, or `windlass receive --engine sglang=URL` beside the server for tcp",
            )

    async def _load_lora(self, path: str) -> None:
        if self._adapters:
            await self._post("/unload_lora_adapter", {"lora_name": self._lora_name})
        await self._post("/load_lora_adapter", {"lora_name": self._lora_name, "lora_path": path})
        self._adapters = True

    async def finish_update(self, version: str | None = None) -> None:
        """Closes the session, and names the weights."""
        if self._open:
            await self._post("/end_weight_update", {})
            self._open = False
        if version is not None:
            with contextlib.suppress(NoRoute):
                await self._post(
                    "/update_weight_version",
                    {"new_version": version, "abort_all_requests": False},
                    again=True,
                )

    async def pause(self) -> None:
        """Holds generation."""
        await self._post("/pause_generation", {"mode": self._pause_mode or "retract"}, again=True)

    async def resume(self) -> None:
        """Lets generation go on."""
        await self._post("/continue_generation", {}, again=True)

    async def reset_prefix_cache(self) -> None:
        """Forgets cached prefixes; asks again for a while if requests are running.

        The server's own way to wait is of no use here: it waits until there are no requests at all, and those that a
        pause holds back are some.
        """
        until = time.monotonic() + self._flush
        while True:
            try:
                await self._post("/flush_cache", again=True)
                return
            except WindlassInvalid:
                if time.monotonic() >= until:
                    raise
                await asyncio.sleep(0.1)

    async def close(self) -> None:
        """Every rank of the server leaves the group."""
        await self._leave_group()


def remote_engine(kind: str, url: str, **how: Any) -> RemoteEngine:
    """The adapter for a kind of server: "vllm" or "sglang".

    >>> remote_engine("sglang", "http://127.0.0.1:30000", shape=EngineShape(tp=2)).name
    'http://127.0.0.1:30000'
    """
    kinds: dict[str, type[RemoteEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine}
    if kind not in kinds:
        raise WindlassInvalid(f"there is no adapter for {kind!r}: expected {' or '.join(kinds)}")
    return kinds[kind](url, **how)


class RemoteWeightLoader(WeightLoader):
    """Loads into a server on this host what this process has received, through a directory that the server reads.

    ``model`` is the directory that the server was started from: its configuration and tokenizer are linked beside the
    weights. An image (see :class:`windlass.strategies.tcp.ImageLoader`) is linked and not copied; tensors that come one
    by one are written once, below ``scratch``.
    """

    def __init__(
        self,
        kind: Literal["vllm", "sglang"],
        url: str,
        model: str | os.PathLike[str],
        *,
        token: str | None = None,
        timeout: float = 600.0,
        scratch: str | os.PathLike[str] = "/dev/shm",
    ) -> None:
        if kind not in ("vllm", "sglang"):
            raise WindlassInvalid(f"there is no loader for {kind!r}: expected 'vllm' or 'sglang'")
        self._kind, self._model = kind, Path(model)
        self._server = HttpServer(url, token=token, timeout=timeout)
        self._scratch = Path(scratch)

    async def load_image(self, image: Image) -> None:
        """Has the server read the image in place."""
        with self._directory() as folder:
            (folder / "model.safetensors").symlink_to(image.path)
            await self._load(folder, f"windlass:{image.incarnation}:{image.version}")

    async def load_weights(self, named_tensors: NamedTensors) -> None:
        """Writes the tensors as a file, and has the server read it. They may be a part of the model."""
        from safetensors.torch import save_file

        tensors = {name: t.detach().cpu().contiguous() async for name, t in each_tensor(named_tensors)}
        if not tensors:
            return
        with self._directory() as folder:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            tensors.clear()
            await self._load(folder, None)

    @contextlib.contextmanager
    def _directory(self) -> Any:
        """A directory that looks like the model's, without its weights."""
        folder = Path(tempfile.mkdtemp(prefix="windlass-remote-", dir=self._scratch))
        try:
            for file in self._model.iterdir():
                if (
                    file.is_file()
                    and file.suffix in (".json", ".txt", ".model", ".jinja")
                    and "index" not in file.name
                ):
                    (folder / file.name).symlink_to(file.resolve())
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _load(self, folder: Path, version: str | None) -> None:
        if self._kind == "sglang":
            body = {"model_path": str(folder), "flush_cache": True, "weight_version": version}
            await self._server.call("POST", "/update_weights_from_disk", body)
            return
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._server.call("POST", "/collective_rpc", body)
        said = await self._server.call("POST", "/reset_prefix_cache?reset_running_requests=true", again=True)
        if isinstance(said, Mapping) and said.get("success") is False:
            raise WindlassError(
                f"{self._server.url} did not reset its prefix cache", "hold generation while loading"
            )
