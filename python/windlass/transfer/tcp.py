"""TCP: engines pull versions from the trainer's agent, whole or as deltas, and may come and go.

Owns: :class:`TcpTransferStrategy`, a strategy over :class:`windlass.WeightManager` and :class:`windlass.Receiver`. The
sync info carries the agent's address and its token, so it is made before there is an agent: the port is reserved by a
socket that is bound and never listens, beside which the agent may listen, and the token is written to a file of the
owner's.

1. every training rank offloads its share of the version; where it can, straight from its shards;
2. rank 0 waits until the agent has sealed it, and announces a :class:`windlass.transfer.request.PullWeightUpdateRequest`;
3. each engine pulls into its image what it does not have, proves the digest, and hands the image to the loader.

A loader that can take a whole image in place has ``load_image(image)`` (:class:`ImageLoader`); any other gets the
tensors one by one. The image is a safetensors file, and stays mapped while the loader reads it.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import shutil
import socket
import tempfile
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from windlass import _windlass
from windlass.config import Config, WeightManagerConfig
from windlass.errors import WindlassDenied, WindlassInvalid, WindlassStale
from windlass.identity import Identity
from windlass.names import AsTheyAre
from windlass.transfer.base import WeightTransferReceiver, WeightTransferSender, WeightTransferStrategy
from windlass.transfer.group import node_address
from windlass.transfer.request import PullWeightUpdateRequest
from windlass.transfer.spool import Spool
from windlass.transfer.sync_info import AgentWeightSyncInfo, info_for
from windlass.transfer.trainer import TrainerRanks, each_chunk

if TYPE_CHECKING:
    import torch

    from windlass.dtypes import Dtype
    from windlass.extract.chunk import WeightChunk
    from windlass.publish.inputs import Weights
    from windlass.publish.manager import WeightManager
    from windlass.receive.receiver import Image, Receiver
    from windlass.transfer.base import InferenceClient, WeightLoader
    from windlass.transfer.request import WeightUpdateRequest
    from windlass.transfer.sync_info import WeightSyncInfo

__all__ = [
    "ImageLoader",
    "TcpSettings",
    "TcpTransferReceiver",
    "TcpTransferSender",
    "TcpTransferStrategy",
]

log = logging.getLogger("windlass")

#: The setting with the address that engines are told.
ADVERTISED = "manager.agent.advertise_host"


@runtime_checkable
class ImageLoader(Protocol):
    """A loader that reads a whole image in place. It is valid until the call returns, and must not be written to."""

    async def load_image(self, image: Image) -> None:
        """Loads this version."""


@dataclass(frozen=True, kw_only=True)
class PullSettings(Config):
    """What strategies have in common whose engines pull. ``manager`` are fields of :class:`windlass.WeightManagerConfig`.
    ``image_dir`` is where each engine keeps its image; without it, a directory in ``/dev/shm`` that is removed at the end.
    ``timeout`` bounds a version's way from the offload to the image."""

    #: What ``link`` and ``codec`` may be, and why.
    links: ClassVar[tuple[str, ...]] = ()
    codecs: ClassVar[tuple[str, ...]] = ("delta_plain",)
    why: ClassVar[str] = "agents write plain records only"

    model_id: str = "policy"
    manager: Mapping[str, Any] = field(default_factory=dict)
    image_dir: str | None = None
    timeout: float = 600.0
    link: str | None = None
    codec: str | None = None

    def __post_init__(self) -> None:
        self._text("model_id")
        self._text("image_dir", optional=True)
        self._carries("it is", self.links, self.codecs, self.why)
        self._seconds("timeout")
        if not isinstance(self.manager, Mapping):
            raise self._bad("manager", "a dictionary of the fields of WeightManagerConfig")
        self.config()

    @classmethod
    def _hint(cls, key: str, known: Sequence[str]) -> str:
        if key in {known.name for known in fields(WeightManagerConfig)}:
            return f"it belongs under 'manager', as in {{'manager': {{{key!r}: ...}}}}"
        return super()._hint(key, known)

    def config(self) -> WeightManagerConfig:
        """How the trainer publishes."""
        return WeightManagerConfig.from_dict({"model_id": self.model_id, **self.manager})


@dataclass(frozen=True, kw_only=True)
class TcpSettings(PullSettings):
    """``mode`` is what receivers ask for, and ``codec`` "full" is the mode "full"; ``link`` "shm" keeps the agent on loopback. With
    ``manager={"agent": {"nixl": "auto"}}``, full images are read by NIXL at both ends. The others are those of :class:`PullSettings`."""

    links: ClassVar[tuple[str, ...]] = ("shm", "tcp")
    codecs: ClassVar[tuple[str, ...]] = ("full", "delta_plain")
    why: ClassVar[str] = "agents write plain records only; for whole images, codec is 'full'"

    mode: Literal["full", "delta", "auto"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._choice("mode", "full", "delta", "auto")
        if (self.codec, self.mode) in (("full", "delta"), ("delta_plain", "full")):
            raise self._bad("codec", f"the other one for the mode {self.mode!r}")

    @property
    def asks(self) -> Literal["full", "delta", "auto"]:
        """What receivers ask for."""
        return "full" if self.codec == "full" else self.mode


class TcpTransferStrategy(WeightTransferStrategy):
    """Engines pull from the trainer's agent.

    >>> strategy = TcpTransferStrategy({"model_id": "actor", "link": "shm"})
    >>> info = strategy.create_sync_info()
    >>> info.model_id, info.endpoints[0].startswith("http://127.0.0.1:")
    ('actor', True)
    """

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        super().__init__(config)
        self.settings = TcpSettings.from_dict(self._config)
        self._reserved: _Reserved | None = None

    def create_sync_info(self) -> AgentWeightSyncInfo:
        """Reserves the agent's port and mints its token. The agent comes with the first version."""
        config = self.settings.config()
        self._reserved = _Reserved.make(config, local=self.settings.link == "shm")
        return AgentWeightSyncInfo(
            endpoints=[self._reserved.endpoint], token=self._reserved.token, model_id=config.model_id
        )

    def create_sender(self, sync_info: WeightSyncInfo) -> TcpTransferSender:
        """The trainer's end; every training rank makes one, rank 0 with what it has reserved."""
        info = info_for("this strategy", sync_info, AgentWeightSyncInfo)
        reserved, self._reserved = self._reserved, None
        ranks = TrainerRanks()
        if ranks.rank == 0 and (reserved is None or reserved.endpoint != info.endpoints[0]):
            raise WindlassInvalid(
                f"this strategy has not reserved {info.endpoints[0]}",
                "the sync info is made by the same object on training rank 0, once for each sender",
            )
        if ranks.rank > 0:
            # The first rank of each further host has an agent too. All of them have the token that receivers were told.
            local = self.settings.link == "shm"
            reserved = _Reserved.make(self.settings.config(), local=local, token=info.token)
        return TcpTransferSender(self.settings, info, ranks, reserved)

    def create_receiver(self, sync_info: WeightSyncInfo, *, rank: int = 1) -> TcpTransferReceiver:
        """The engine's end, with an image of its own."""
        info = info_for("this strategy", sync_info, AgentWeightSyncInfo)
        return TcpTransferReceiver(self.settings, info, rank)

    def get_request_type(self) -> type[PullWeightUpdateRequest]:
        """Pull requests."""
        return PullWeightUpdateRequest


class _Reserved:
    """A port that is kept for an agent, and the token that receivers were told."""

    def __init__(
        self, config: WeightManagerConfig, endpoint: str, token: str, kept: Callable[[], None]
    ) -> None:
        self.config, self.endpoint, self.token = config, endpoint, token
        #: Gives up the port and removes the token; at the latest when nobody has this any more.
        self.release = weakref.finalize(self, kept)

    @classmethod
    def make(cls, config: WeightManagerConfig, *, local: bool, token: str | None = None) -> _Reserved:
        """For rank 0; with the ``token`` that rank 0 has told, for another one."""
        agent = config.agent
        bind = agent.bind
        if bind == "127.0.0.1" and not local and agent.advertise_host is None:
            # The default would be of no use to engines on other hosts.
            bind = node_address(ADVERTISED)
        host = agent.advertise_host or (node_address(ADVERTISED) if bind in ("0.0.0.0", "::") else bind)
        keeper = socket.socket(socket.AF_INET6 if ":" in bind else socket.AF_INET)
        # With it on both sockets and none of them listening, another one may be bound to the port and listen.
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            first, _, last = agent.ports.partition("-")
            for port in range(int(first), int(last or first) + 1):
                with contextlib.suppress(OSError):
                    keeper.bind((bind, port))
                    break
            else:
                raise WindlassInvalid(f"no port of {agent.ports} is free on {bind}")
            port = keeper.getsockname()[1]
            if agent.token_file is not None:
                token = _windlass.read_token(Path(agent.token_file))
                return cls._kept(config, bind, host, port, token, keeper, None)
            token, folder = token or secrets.token_hex(32), tempfile.mkdtemp(prefix="windlass-token-")
            path = os.path.join(folder, "token")
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(token)
            return cls._kept(config, bind, host, port, token, keeper, folder)
        except BaseException:
            keeper.close()
            raise

    @classmethod
    def _kept(
        cls,
        config: WeightManagerConfig,
        bind: str,
        host: str,
        port: int,
        token: str,
        keeper: socket.socket,
        folder: str | None,
    ) -> _Reserved:
        agent = dataclasses.replace(
            config.agent,
            bind=bind,
            advertise_host=host,
            ports=str(port),
            token_file=config.agent.token_file or os.path.join(folder or "", "token"),
        )

        def release() -> None:
            keeper.close()
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if config.tls_cert is None else "https"
        return cls(dataclasses.replace(config, agent=agent), f"{scheme}://{shown}:{port}", token, release)


class PublishingSender(WeightTransferSender):
    """Publishes versions through a manager; a subclass tells the engines where they are."""

    def __init__(self, config: WeightManagerConfig, ranks: TrainerRanks, timeout: float) -> None:
        self._config, self._ranks, self._timeout = config, ranks, timeout
        self._manager: WeightManager | None = None
        self._metadata: list[tuple[str, Any, Any]] | None = None

    async def send_model(
        self, model: Weights, generator_dtype: Dtype | None, version: int, inference_client: InferenceClient
    ) -> None:
        """Publishes the model as it is: shards go straight to their place, and nothing is gathered that need not be.

        ``model`` is whatever :meth:`windlass.WeightManager.offload` takes.
        """
        await self.send_named(model, generator_dtype, version, inference_client)

    async def send_named(
        self,
        weights: Weights,
        generator_dtype: Dtype | None,
        version: int,
        inference_client: InferenceClient,
        names: AsTheyAre | None = None,
    ) -> None:
        """Publishes and announces ``weights``; ``names`` are as for :class:`windlass.WeightManager`."""
        await asyncio.to_thread(self._offload, weights, version, generator_dtype, names)
        await self._announce(version, inference_client)

    async def send_chunks(
        self, chunks: Iterable[WeightChunk] | AsyncIterable[WeightChunk], inference_client: InferenceClient
    ) -> None:
        """Publishes what an extractor gives. Rank 0 writes all of it; the others take part in the gathering.

        The first time, rank 0 puts every chunk aside on disk until the last one has come, because a region is made for
        names and shapes that are known; after that, nothing is kept. A model is better sent as one.
        """
        last = self._manager.version if self._manager is not None else None
        version = 1 if last is None else last + 1
        holds = self._ranks.rank == 0
        if self._metadata is None:
            with Spool(holds=holds) as spool:
                async for chunk in each_chunk(chunks):
                    await asyncio.to_thread(spool.add, chunk)
                    del chunk
                metadata = spool.metadata()
                source = _Stream(metadata, lambda: iter(spool.items()), holds)
                await self._send_stream(source, version, inference_client)
            self._metadata = metadata
        else:
            loop = asyncio.get_running_loop()
            source = _Stream(self._metadata, lambda: _pairs(chunks, loop, holds), holds)
            await self._send_stream(source, version, inference_client)

    async def _send_stream(self, source: _Stream, version: int, client: InferenceClient) -> None:
        # An extractor has given them their names.
        names = AsTheyAre({name: tuple(shape) for name, _, shape in source.metadata()})
        await self.send_named(source, None, version, client, names)

    def _offload(self, weights: Weights, version: int, dtype: Dtype | None, names: AsTheyAre | None) -> None:
        if self._manager is None:
            from windlass.publish.manager import WeightManager

            config = self._config
            if dtype is not None and config.generator_dtype is None:
                config = dataclasses.replace(config, generator_dtype=str(dtype))
            self._manager = WeightManager(config, names=names)  # type: ignore[arg-type]
        manager = self._manager
        manager.offload(weights, version, self._ranks.rank, self._ranks.count, timeout=self._timeout)
        if self._ranks.rank == 0:
            manager.wait_delta_ready(version, self._timeout)

    async def _announce(self, version: int, client: InferenceClient) -> None:
        """Tells the engines, on the first rank."""
        manager = self._manager
        if self._ranks.rank != 0 or manager is None:
            return
        assert manager.incarnation is not None
        identity = Identity(self._config.model_id, manager.incarnation, version)
        request = await asyncio.to_thread(self._request, manager, identity)
        await client.update_weights(request)

    @abc.abstractmethod
    def _request(self, manager: WeightManager, identity: Identity) -> WeightUpdateRequest:
        """What engines are told of a version. May wait until they can have it."""

    def close(self) -> None:
        """Ends the agent, and removes its region and token."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()


class TcpTransferSender(PublishingSender):
    """Publishes versions; the engines pull them from the agent."""

    def __init__(
        self,
        settings: TcpSettings,
        info: AgentWeightSyncInfo,
        ranks: TrainerRanks,
        reserved: _Reserved | None,
    ) -> None:
        config = reserved.config if reserved is not None else settings.config()
        super().__init__(config, ranks, settings.timeout)
        self._settings, self._info, self._reserved = settings, info, reserved

    def _request(self, manager: WeightManager, identity: Identity) -> WeightUpdateRequest:
        endpoint = manager.endpoint
        if endpoint != self._info.endpoints[0]:
            raise WindlassInvalid(
                f"the agent listens at {endpoint}, and engines were told {self._info.endpoints[0]}",
                "something else took the reserved port; make new sync info",
            )
        return PullWeightUpdateRequest(identity, endpoint, self._settings.asks)

    def close(self) -> None:
        """Ends the agent, and removes its region and token."""
        super().close()
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            reserved.release()


class _Stream:
    """Chunks as :class:`windlass.WeightSource`."""

    def __init__(
        self,
        metadata: list[tuple[str, Any, Any]],
        pairs: Callable[[], Iterator[tuple[str, Any]]],
        holds: bool,
    ) -> None:
        self._metadata, self._pairs, self._holds = metadata, pairs, holds

    def metadata(self) -> list[tuple[str, Any, Any]]:
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self._pairs()

    def held_names(self) -> list[str] | None:
        return None if self._holds else []


def _pairs(
    chunks: Iterable[WeightChunk] | AsyncIterable[WeightChunk], loop: asyncio.AbstractEventLoop, holds: bool
) -> Iterator[tuple[str, Any]]:
    """The weights of all chunks, in another thread than the loop's."""
    if not isinstance(chunks, AsyncIterable):
        for chunk in chunks:
            for name, tensor in chunk:
                yield name, tensor if holds else None
        return
    walk = chunks.__aiter__()

    async def step() -> WeightChunk | None:
        return await anext(walk, None)

    while (one := asyncio.run_coroutine_threadsafe(step(), loop).result()) is not None:
        for name, tensor in one:
            yield name, tensor if holds else None


class PullingReceiver(WeightTransferReceiver):
    """Pulls into an image of its own; a subclass knows from where."""

    def __init__(self, settings: PullSettings, rank: int) -> None:
        self._settings, self._rank = settings, rank
        self._own = (
            None
            if settings.image_dir is not None
            else tempfile.mkdtemp(
                prefix=f"windlass-engine-{rank}-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
            )
        )
        self._receiver: Receiver | None = None

    @abc.abstractmethod
    def _source(self, request: WeightUpdateRequest) -> tuple[Identity, Mapping[str, Any]]:
        """The version of a request, which is checked, and where a :class:`windlass.Receiver` gets it."""

    def pull(self, request: WeightUpdateRequest) -> Receiver:
        """Brings the image to the announced version, or beyond. Blocks."""
        from windlass.receive.receiver import Receiver

        identity, source = self._source(request)
        if self._receiver is None:
            # Not before: the publisher comes with the first version.
            folder = Path(self._own or f"{self._settings.image_dir}/rank-{self._rank}")
            _windlass.make_place(folder)
            self._receiver = Receiver(
                folder,
                tls_ca=self._settings.config().tls_ca,
                name=f"engine-rank-{self._rank}",
                transfer_timeout=self._settings.timeout,
                timeout=self._settings.timeout,
                **source,
            )
        told = self._receiver.wait(identity.version, self._settings.timeout)
        log.info("rank %d pulled version %s: %s", self._rank, self._receiver.version, told)
        return self._receiver

    def _refuse_model(self, identity: Identity, model_id: str) -> None:
        if identity.model_id != model_id:
            raise WindlassInvalid(
                f"the request is for model {identity.model_id!r}, and this engine follows {model_id!r}"
            )

    @contextlib.asynccontextmanager
    async def held(self, request: WeightUpdateRequest) -> AsyncIterator[Image]:
        """The announced version in place, whole and proved, until the block ends."""
        receiver = await asyncio.to_thread(self.pull, request)
        identity, _ = self._source(request)
        hold = receiver.hold(seconds=self._settings.timeout, timeout=self._settings.timeout)
        image = await asyncio.to_thread(hold.__enter__)
        try:
            if image.incarnation < identity.incarnation:
                raise WindlassStale(
                    f"the image is of incarnation {image.incarnation:016x}, and {identity.incarnation:016x} was "
                    "announced",
                    "the trainer was restarted; sync again",
                )
            yield image
        finally:
            hold.__exit__(None, None, None)

    async def receive_weights(self, request: WeightUpdateRequest) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The tensors of the image in place; valid until the iterator ends."""
        async with self.held(request) as image:
            for name in image.tensors:
                yield name, image.tensors[name]

    async def receive_and_load_weights(self, request: WeightUpdateRequest, loader: WeightLoader) -> None:
        """Pulls, and hands the loader the image if it takes one, else the tensors."""
        async with self.held(request) as image:
            if isinstance(loader, ImageLoader):
                await loader.load_image(image)
            else:
                await loader.load_weights([(name, image.tensors[name]) for name in image.tensors])

    def close(self) -> None:
        """Lets go of the image, and removes it unless it has a place of its own."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)


class TcpTransferReceiver(PullingReceiver):
    """Pulls from the trainer's agent."""

    request_type = PullWeightUpdateRequest

    def __init__(self, settings: TcpSettings, info: AgentWeightSyncInfo, rank: int) -> None:
        super().__init__(settings, rank)
        self._info = info

    def _source(self, request: WeightUpdateRequest) -> tuple[Identity, Mapping[str, Any]]:
        if not isinstance(request, PullWeightUpdateRequest):
            raise WindlassInvalid(f"the request is {type(request).__name__}: this engine pulls from an agent")
        if request.sender_endpoint not in self._info.endpoints:
            raise WindlassDenied(
                f"the request names the agent {request.sender_endpoint}, and this engine was told "
                f"{', '.join(self._info.endpoints)}",
                "a token is given to those only for whom it is meant; make new sync info if the agent has moved",
            )
        self._refuse_model(request.identity, self._info.model_id)
        # Both ends have one configuration: what it says of the agent's NIXL is meant for receivers, too.
        agent = self._settings.config().agent
        nixl = {
            "nixl": agent.nixl,
            "nixl_library": agent.nixl_library,
            "nixl_params": agent.nixl_params,
        }
        source = {"endpoint": request.sender_endpoint, "token": self._info.token, "mode": request.mode}
        return request.identity, {**source, **nixl}
