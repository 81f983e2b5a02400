"""Engines that are reached by HTTP only.

Owns: :class:`VllmEngine` and :class:`SglangEngine`, the adapters of :class:`windlass.transfer.client.InferenceEngineClient` for
the two servers' own interfaces, and :class:`RemoteWeightLoader`, a loader for weights that this host has received and
the server reads from a directory. Must not: import an engine.

Calls, by dialect
-----------------

| call | vLLM | vLLM, older | SGLang |
|---|---|---|---|
| join | ``/init_weight_transfer_engine`` | ``/init_weight_update_communicator`` | ``/init_weights_update_group`` |
| start | ``/start_weight_update`` | – | ``/begin_weight_update`` (0.5.21 and later) |
| update | ``/update_weights`` {update_info} | ``/update_weights``, a legacy dictionary each | ``/update_weights_from_distributed``; ``/update_weights_from_tensor`` for handles |
| finish | ``/finish_weight_update`` | – | ``/end_weight_update``, ``/update_weight_version`` |
| adapter | ``/v1/load_lora_adapter`` in place | the same | ``/unload_lora_adapter``, ``/load_lora_adapter`` |
| pause, resume | ``/pause?mode=``, ``/resume`` | – | ``/pause_generation``, ``/continue_generation`` |
| cache | ``/reset_prefix_cache`` | the same | ``/flush_cache`` |
| leave | ``/shutdown_weight_transfer_engine`` | ``/destroy_weights_update_group`` | ``/destroy_weights_update_group`` |

vLLM's routes need ``VLLM_SERVER_DEV_MODE=1``, and the transfer backend ``windlass`` on the server
(``--weight-transfer-config '{"backend": "windlass"}'``).

A server is paused, resumed, flushed and named by :class:`windlass.engines.driver.EngineDriver`: if this process ends before its
first write, the server goes on with its old weights; after it, the server stays paused until an update is finished.

Every call has a deadline. Those that may be repeated without harm (pause, resume, cache, leave, status) are retried a
few times when the connection fails or the server says that it is busy; joining and updates never are, because half of
a collective cannot be taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from windlass import _windlass
from windlass.engines.driver import EngineDriver
from windlass.errors import WindlassInvalid, WindlassStale, WindlassUnsupported
from windlass.http import Answer, HttpClient
from windlass.transfer.base import WeightLoader, each_tensor, strategy_from_config
from windlass.transfer.client import InferenceEngine
from windlass.transfer.request import (
    BroadcastWeightUpdateRequest,
    CudaIpcWeightUpdateRequest,
    LoraDiskWeightUpdateRequest,
    PackedCudaIpcWeightUpdateRequest,
)
from windlass.transfer.sync_info import (
    AgentWeightSyncInfo,
    EmptyWeightSyncInfo,
    EngineShape,
    TorchDistributedWeightSyncInfo,
)

if TYPE_CHECKING:
    from windlass.engines.sglang.handles import Handles
    from windlass.receive.receiver import Image
    from windlass.transfer.base import NamedTensors, WeightTransferReceiver
    from windlass.transfer.request import WeightUpdateRequest
    from windlass.transfer.sync_info import WeightSyncInfo

__all__ = ["RemoteEngine", "RemoteWeightLoader", "SglangEngine", "VllmEngine", "remote_engine"]

#: What a server says that has no such route.
NO_ROUTE = (404, 405)


class RemoteEngine(InferenceEngine):
    """What both adapters share. ``strategy`` is the configuration that the server builds its receiver from; engines
    that join by an interface of their own do not need it. ``shape`` counts the server's ranks. ``dir`` is where the lock and
    the journal of the server are; programs that load one server must name the same."""

    #: What drives it, and how it is paused unless that is said.
    kind: Literal["vllm", "sglang"]
    default_pause: str

    def __init__(
        self,
        url: str,
        *,
        shape: EngineShape | None = None,
        strategy: Mapping[str, object] | None = None,
        token: str | None = None,
        timeout: float = 600.0,
        attempts: int = 3,
        pause_mode: str | None = None,
        dir: str | os.PathLike[str] | None = None,
        lora_name: str = "policy",
        override_existing_update_group: bool = False,
    ) -> None:
        self.server = HttpClient(url, token=token, timeout=timeout, attempts=attempts)
        self.name = self.server.url
        self.shape = shape or EngineShape()
        self._strategy = dict(strategy or {})
        self._dir = dir
        self._driver = EngineDriver(
            self.kind, self.name, key=token, pause=pause_mode or self.default_pause, timeout=timeout, dir=dir
        )
        #: What this process has done to a server that it has paused.
        self._state: Literal["free", "paused", "written", "whole"] = "free"
        self._lora_name = lora_name
        self._override = override_existing_update_group
        self._group: str | None = None

    async def _post(
        self,
        path: str,
        body: object = None,
        *,
        stage: str,
        again: bool = False,
        accept: Collection[int] = (),
    ) -> Answer:
        """Asks the server. ``again`` says that asking twice does no harm."""
        return await asyncio.to_thread(
            self.server.post, path, body, stage=stage, idempotent=again, accept=accept
        )

    async def pause(self) -> None:
        """Holds generation."""
        limit = self.server.timeout
        await asyncio.to_thread(self._driver.core.pause, None, limit, limit)
        self._state = "paused"

    async def resume(self) -> None:
        """Lets generation go on. A server that has weights of no version stays paused, and that is an error."""
        if self._state == "whole":
            await asyncio.to_thread(self._driver.core.resume)
        elif await asyncio.to_thread(self._driver.core.fail, "it was to go on"):
            raise WindlassStale(
                f"{self.name} stays paused: an update of its weights began and did not finish", "sync again"
            )
        self._state = "free"

    async def reset_prefix_cache(self) -> None:
        """Forgets cached prefixes; waits a while for requests that hold them. Those that a pause holds back are computed again."""
        await asyncio.to_thread(self._driver.core.clear, self.server.timeout)

    async def _write(self) -> None:
        """Before a write."""
        if self._state in ("paused", "whole"):
            await asyncio.to_thread(self._driver.core.touch, True)
            self._state = "written"

    def _written(self) -> None:
        """After the last write."""
        if self._state == "written":
            self._state = "whole"

    def _adapters_only(self, sync_info: WeightSyncInfo) -> bool:
        """Whether only adapters will come, by files: then there is nothing to join."""
        if not isinstance(sync_info, EmptyWeightSyncInfo):
            return False
        if not self._strategy:
            return True
        return strategy_from_config(self._strategy).get_request_type() is LoraDiskWeightUpdateRequest

    async def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            # It answers 400 when it knows no such group, which is what was wanted.
            body, fine = {"group_name": group}, (400, *NO_ROUTE)
            await self._post(
                "/destroy_weights_update_group", body, stage="leave the group", again=True, accept=fine
            )


class VllmEngine(RemoteEngine):
    """A vLLM server. ``dialect`` "native" is that of 0.21 and later with the transfer backend ``windlass``; "legacy" is
    that of servers with ``/init_weight_update_communicator``; "auto" asks for the first and takes the second where it
    is missing. ``pause_mode`` is keep (default), wait or abort."""

    kind, default_pause = "vllm", "keep"

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
            accept = NO_ROUTE if self._dialect == "auto" else ()
            said = await self._post(
                "/init_weight_transfer_engine", {"init_info": info}, stage="join", accept=accept
            )
            if said.status not in NO_ROUTE:
                self._legacy = False
                return
        self._legacy = True
        if not isinstance(sync_info, TorchDistributedWeightSyncInfo):
            raise WindlassUnsupported(
                f"{self.name} has the older interface only, which joins process groups and nothing else",
                "use the strategy broadcast, or a newer vLLM",
            )
        body = sync_info.joined_at(rank_offset) | {"override_existing": self._override}
        await self._post("/init_weight_update_communicator", body, stage="join")
        self._group = sync_info.group_name

    async def start_update(self) -> None:
        """Opens the update."""
        if self._transfers and not self._legacy:
            await self._post("/start_weight_update", stage="start")

    async def update_weights(self, request: WeightUpdateRequest) -> None:
        """One request; a legacy server gets its dictionaries one after the other."""
        await self._write()
        if isinstance(request, LoraDiskWeightUpdateRequest) and not self._legacy:
            path = {"lora_name": self._lora_name, "lora_path": request.lora_disk_path, "load_inplace": True}
            await self._post("/v1/load_lora_adapter", path, stage="load an adapter")
        elif self._legacy:
            for body in request.to_legacy_dicts():
                await self._post("/update_weights", body, stage="update")
        else:
            info = {"update_info": {"request": request.to_dict()}}
            await self._post("/update_weights", info, stage="update")

    async def finish_update(self, version: str | None = None) -> None:
        """Closes the update."""
        if self._transfers and not self._legacy:
            await self._post("/finish_weight_update", {"weight_version": version}, stage="finish")
        self._written()

    async def close(self) -> None:
        """The workers close their receivers."""
        if not self._transfers:
            return
        if self._legacy:
            await self._leave_group()
            return
        await self._post("/shutdown_weight_transfer_engine", stage="leave", again=True, accept=NO_ROUTE)


class SglangEngine(RemoteEngine):
    """An SGLang server, which joins the update group by itself. ``pause_mode`` is retract (default), in_place or abort.

    On this host it also takes versions that are pulled (``tcp``): this process has the image, and the server reads it in
    place. ``model`` is the directory that the server was started from; without it, the server is asked.

    With ``strategy`` one of the IPC strategies, and a server that has our loader, its workers open the trainer's memory
    (:mod:`windlass.engines.sglang.handles`). Closing then holds generation for a moment: workers are only told between updates."""

    kind, default_pause = "sglang", "retract"

    def __init__(self, url: str, *, model: str | os.PathLike[str] | None = None, **how: Any) -> None:
        super().__init__(url, **how)
        self._model = model
        #: This process's end, and what has the server read its image.
        self._pulled: tuple[WeightTransferReceiver, RemoteWeightLoader] | None = None
        #: What its workers open.
        self._handles: Handles | None = None
        #: Whether updates are framed by a session; found out at the first one.
        self._session: bool | None = None
        self._open = False
        #: Whether a request may have been written of an update that is not finished.
        self._mixed = False
        self._adapters = False

    async def init_weight_transfer(self, sync_info: WeightSyncInfo, rank_offset: int) -> None:
        """Every rank of the server joins the group; for adapters and handles there is nothing to join."""
        if self._adapters_only(sync_info):
            return
        if isinstance(sync_info, EmptyWeightSyncInfo):
            from windlass.engines.sglang.handles import Handles

            self._handles = await asyncio.to_thread(Handles.of, self.server, self._strategy)
            self._open, self._session = False, None
            return
        if isinstance(sync_info, AgentWeightSyncInfo) and await asyncio.to_thread(self._is_here):
            await self._pull_beside(sync_info, rank_offset)
            return
        if not isinstance(sync_info, TorchDistributedWeightSyncInfo):
            raise WindlassUnsupported(
                f"an SGLang server joins process groups by itself, and {type(sync_info).__name__} is none",
                "use the strategy broadcast, or `windlass receive --engine sglang=URL` beside the server for tcp",
            )
        self._group, self._open, self._session = sync_info.group_name, False, None
        if self._override:
            await self._leave_group()
        body = sync_info.joined_at(rank_offset)
        await self._post("/init_weights_update_group", body, stage="join")
        self._group = sync_info.group_name

    def _is_here(self) -> bool:
        """Whether the server is on this host, and so sees what this process has received."""
        host = urlsplit(self.server.url).hostname
        with contextlib.suppress(OSError):
            for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
                with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as own:
                    # Only an address of this host can be bound.
                    own.bind(address)
                    return True
        return False

    async def _pull_beside(self, sync_info: AgentWeightSyncInfo, rank_offset: int) -> None:
        await self._forget()
        model = self._model
        if model is None:
            said = await asyncio.to_thread(self.server.get, "/model_info", stage="ask for its model")
            model = self._model = str(said.object().get("model_path", ""))
        if not os.path.isdir(model):
            raise WindlassInvalid(
                f"{self.name} serves {os.fspath(model)!r}, which is no directory of this host",
                "give model=, the directory with the configuration and tokenizer of the model",
            )
        config = self._strategy or {"strategy": "tcp", "model_id": sync_info.model_id}
        strategy = strategy_from_config(config)
        receiver = await asyncio.to_thread(strategy.create_receiver, sync_info, rank=rank_offset)
        self._pulled = (
            receiver,
            RemoteWeightLoader("sglang", self.server.url, model, server=self.server, dir=self._dir),
        )

    async def _forget(self) -> None:
        pulled, self._pulled = self._pulled, None
        if pulled is not None:
            await asyncio.to_thread(pulled[0].close)

    async def start_update(self) -> None:
        """Opens the session, where the server has one."""
        self._mixed = False
        # One that a failed sync left open goes on.
        if self._session is False or (self._group is None and self._handles is None) or self._open:
            return
        body = {"selector": "target" if self._group is None else "all"}
        said = await self._post("/begin_weight_update", body, stage="start", accept=(400, *NO_ROUTE))
        if said.status == 400 and "already open" not in said.text:
            raise WindlassInvalid(f"{said.what}: {said.text}")
        # One that is open already is of a trainer that is gone, and this update is whole.
        self._session = self._open = said.status not in NO_ROUTE

    async def update_weights(self, request: WeightUpdateRequest) -> None:
        """One request."""
        await self._write()
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
            await self._post("/update_weights_from_distributed", body, stage="update")
        elif self._pulled is not None:
            receiver, loader = self._pulled
            await receiver.receive_and_load_weights(request, loader)
        elif self._handles is not None:
            first, self._mixed = not self._mixed, True
            await asyncio.to_thread(self._handles.update, request, first=first, ends=self._open)
        elif isinstance(request, (CudaIpcWeightUpdateRequest, PackedCudaIpcWeightUpdateRequest)):
            raise WindlassInvalid(
                f"{self.name} was not told that handles would come",
                "give SglangEngine the configuration of the trainer's strategy, as strategy=",
            )
        else:
            raise WindlassUnsupported(
                f"an SGLang server takes no {type(request).__name__} over HTTP",
                "use broadcast, IPC or lora, or `windlass receive --engine sglang=URL` beside the server for tcp",
            )

    async def _load_lora(self, path: str) -> None:
        if self._adapters:
            await self._post(
                "/unload_lora_adapter", {"lora_name": self._lora_name}, stage="unload the adapter"
            )
        body = {"lora_name": self._lora_name, "lora_path": path}
        await self._post("/load_lora_adapter", body, stage="load an adapter")
        self._adapters = True

    async def finish_update(self, version: str | None = None) -> None:
        """Closes the session, and names the weights."""
        if self._mixed and self._handles is not None:
            await asyncio.to_thread(self._handles.finish, ends=self._open)
        self._mixed = False
        if self._open:
            await self._post("/end_weight_update", {}, stage="finish")
            self._open = False
        if version is not None:
            await asyncio.to_thread(self._driver.core.label, version, self.server.timeout)
        self._written()

    async def pause(self) -> None:
        """Holds generation. What is pulled is loaded by a driver that pauses by itself."""
        if self._pulled is None:
            await super().pause()

    async def resume(self) -> None:
        """Lets generation go on."""
        if self._pulled is None:
            await super().resume()

    async def close(self) -> None:
        """Every rank of the server leaves the group, or what was pulled or opened is let go of."""
        await self._forget()
        await self._shut_handles()
        await self._leave_group()

    async def _shut_handles(self) -> None:
        handles = self._handles
        if handles is not None and handles.opened:
            if self._mixed or self._open or self._session is False:
                # One that a failed sync left stays as it is, paused and with its session.
                await asyncio.to_thread(handles.close, ends=self._open)
            else:
                # A session undoes packing, so that nothing may be computed meanwhile.
                await self.pause()
                await self._write()
                await self.start_update()
                await asyncio.to_thread(handles.close, ends=self._open)
                await self.finish_update()
                await self.resume()
        self._handles = None


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
    weights. An image (see :class:`windlass.transfer.tcp.ImageLoader`) is linked and not copied; tensors that come one
    by one are written once, below ``scratch``. ``server`` is a connection to use in place of one of its own. ``dir`` is where
    the lock and the journal of the server are.

    SGLang itself waits for its requests to end; vLLM is paused, and its requests go on with the new weights. A load that
    fails after its first write leaves the server paused for the next one (:class:`windlass.engines.driver.EngineDriver`).
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
        server: HttpClient | None = None,
        dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if kind not in ("vllm", "sglang"):
            raise WindlassInvalid(f"there is no loader for {kind!r}: expected 'vllm' or 'sglang'")
        self._kind, self._model = kind, Path(model)
        self._server = server or HttpClient(url, token=token, timeout=timeout)
        self._scratch = Path(scratch)
        self._driver = EngineDriver(
            kind,
            self._server.url,
            key=self._server.token,
            pause="wait" if kind == "sglang" else "keep",
            timeout=self._server.timeout,
            dir=dir,
        )

    async def load_image(self, image: Image) -> None:
        """Has the server read the image in place."""
        label = f"windlass:{image.incarnation:016x}:{image.version}"
        with tempfile.TemporaryDirectory(prefix="windlass-remote-", dir=self._scratch) as folder:
            if self._kind == "vllm":
                await asyncio.to_thread(self._read, Path(folder), image.path)
                return
            await asyncio.to_thread(
                self._driver.load, image.path.parent, folder, label=label, model_dir=self._model
            )

    async def load_weights(self, named_tensors: NamedTensors) -> None:
        """Writes the tensors as a file, and has the server read it. They may be a part of the model."""
        from safetensors.torch import save_file

        tensors = {name: t.detach().cpu().contiguous() async for name, t in each_tensor(named_tensors)}
        if not tensors:
            return
        with tempfile.TemporaryDirectory(prefix="windlass-remote-", dir=self._scratch) as folder:
            file = Path(folder) / "tensors"
            save_file(tensors, file, metadata={"format": "pt"})
            tensors.clear()
            await asyncio.to_thread(self._read, Path(folder) / "model", file)

    def _read(self, folder: Path, weights: Path) -> None:
        """Has the server read a file, which may hold a part of the model, through a directory of links."""
        _windlass.link_model(folder, weights, self._model)
        # SGLang flushes its cache by itself, inside the call that waits for requests.
        sglang = self._kind == "sglang"
        with self._driver.paused(clear=not sglang) as writing:
            writing.touched()
            if sglang:
                body: dict[str, Any] = {"model_path": str(folder), "flush_cache": True}
                self._server.post("/update_weights_from_disk", body, stage="load")
            else:
                body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                self._server.post("/collective_rpc", body, stage="load")
