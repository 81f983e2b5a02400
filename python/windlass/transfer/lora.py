"""LoRA: only the adapter moves; the base weights are where they were.

Owns: :class:`LoraTransferStrategy`. Two ways, by ``link``:

- **file**: the adapter is written as a PEFT directory of its own version on ``lora_sync_path``, which both sides see,
  and announced by its path (:class:`windlass.transfer.request.LoraDiskWeightUpdateRequest`). The last few versions are kept, because
  an engine may still be reading one.
- **shm, tcp**: the adapter's tensors are a model of their own (``<model_id>.lora``) with versions, deltas and digests;
  engines pull it into an image, beside which the adapter's configuration makes a PEFT directory. The configuration
  does not change from version to version, so it stands in the strategy's own (``adapter_config``), on both sides.

A loader that loads adapters from a directory has ``load_lora(path)`` (:class:`LoraLoader`); any other gets the tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from windlass.atomic import discard
from windlass.errors import WindlassInvalid, WindlassNotFound
from windlass.extract.lora import CONFIG, WEIGHTS, LoraState, collect_lora, is_lora, save_lora
from windlass.names import AsTheyAre
from windlass.transfer.base import WeightTransferReceiver, WeightTransferSender, WeightTransferStrategy
from windlass.transfer.request import LoraDiskWeightUpdateRequest, PullWeightUpdateRequest
from windlass.transfer.spool import Spool
from windlass.transfer.sync_info import AgentWeightSyncInfo, EmptyWeightSyncInfo
from windlass.transfer.tcp import (
    TcpSettings,
    TcpTransferReceiver,
    TcpTransferSender,
    TcpTransferStrategy,
)
from windlass.transfer.trainer import TrainerRanks, each_chunk

if TYPE_CHECKING:
    import torch

    from windlass.dtypes import Dtype
    from windlass.extract.chunk import WeightChunk
    from windlass.receive.receiver import Image
    from windlass.transfer.base import InferenceClient, WeightLoader
    from windlass.transfer.request import WeightUpdateRequest
    from windlass.transfer.sync_info import WeightSyncInfo

__all__ = ["LoraLoader", "LoraSettings", "LoraTransferReceiver", "LoraTransferSender", "LoraTransferStrategy"]


@runtime_checkable
class LoraLoader(Protocol):
    """A loader that loads adapters from a PEFT directory."""

    async def load_lora(self, path: Path) -> None:
        """Loads the adapter in ``path``, in place of the one before. The directory may go away afterwards."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings(TcpSettings):
    """``keep`` versions stay on ``lora_sync_path``. ``adapter_config`` is PEFT's, needed where there is no such path or
    where chunks are sent; ``name`` begins the names of the directories. An adapter that is written as a file travels whole."""

    links: ClassVar[tuple[str, ...]] = ("file", "shm", "tcp")

    lora_sync_path: str | None = None
    adapter_config: Mapping[str, Any] | None = None
    keep: int = 3
    name: str = "adapter"
    manager: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._text("name")
        self._text("lora_sync_path", optional=True)
        self._count("keep", 1, 1 << 20)
        if self.adapter_config is not None and not isinstance(self.adapter_config, Mapping):
            raise self._bad("adapter_config", "a dictionary, as in adapter_config.json")
        if self.by_file and self.codec not in (None, "full"):
            raise self._bad("codec", "'full', since an adapter that is written as a file travels whole")
        if self.by_file and self.lora_sync_path is None:
            raise self._bad("lora_sync_path", "a directory that trainers and engines see, for link 'file'")
        if not self.by_file and self.adapter_config is None:
            raise WindlassInvalid(
                "an adapter that is pulled needs its adapter_config in the configuration, on both sides",
                "take it from collect_lora(model).config, or set lora_sync_path to send adapters as files",
            )

    @property
    def by_file(self) -> bool:
        """Whether adapters go by files."""
        return self.link == "file" or (self.link is None and self.lora_sync_path is not None)


class LoraTransferStrategy(WeightTransferStrategy):
    """Sends adapters.

    >>> LoraTransferStrategy({"lora_sync_path": "/mnt/adapters"}).get_request_type().type_name
    'lora_disk'
    """

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        super().__init__(config)
        self.settings = LoraSettings.from_dict(self._config)
        self._pulled: TcpTransferStrategy | None = None
        if not self.settings.by_file:
            own = ("manager", "image_dir", "timeout", "mode", "link", "codec")
            plain = self.settings.to_dict()
            self._pulled = TcpTransferStrategy(
                {"model_id": f"{self.settings.model_id}.lora", **{key: plain[key] for key in own}}
            )

    def create_sync_info(self) -> WeightSyncInfo:
        """Nothing for files; the agent's address and token for adapters that are pulled."""
        return EmptyWeightSyncInfo() if self._pulled is None else self._pulled.create_sync_info()

    def create_sender(self, sync_info: WeightSyncInfo) -> LoraTransferSender:
        """The trainer's end; every training rank makes one."""
        inner = None if self._pulled is None else self._pulled.create_sender(sync_info)
        return LoraTransferSender(self.settings, TrainerRanks(), inner)

    def create_receiver(self, sync_info: WeightSyncInfo, *, rank: int = 1) -> LoraTransferReceiver:
        """The engine's end."""
        if self._pulled is None:
            if isinstance(sync_info, AgentWeightSyncInfo):
                raise WindlassInvalid("the trainer sends adapters by an agent, and this engine expects files")
            return LoraTransferReceiver(self.settings, None)
        inner = self._pulled.create_receiver(sync_info, rank=rank)
        return LoraTransferReceiver(self.settings, inner)

    def get_request_type(self) -> type[WeightUpdateRequest]:
        """LoRA requests for files, pull requests otherwise."""
        return LoraDiskWeightUpdateRequest if self._pulled is None else PullWeightUpdateRequest


class LoraTransferSender(WeightTransferSender):
    """Collects the adapter on all ranks, writes or publishes it on rank 0, and announces it."""

    def __init__(self, settings: LoraSettings, ranks: TrainerRanks, inner: TcpTransferSender | None) -> None:
        self._settings, self._ranks, self._inner = settings, ranks, inner
        self._version = 0
        self._written: list[Path] = []

    async def send_model(
        self, model: Any, generator_dtype: Dtype | None, version: int, inference_client: InferenceClient
    ) -> None:
        """Sends the adapter of ``model`` and nothing else."""
        if not is_lora(model):
            raise WindlassInvalid(
                f"{type(model).__name__} has no LoRA adapters, and this strategy sends nothing else",
                "choose another strategy for a model that is trained whole",
            )
        state = await asyncio.to_thread(collect_lora, model)
        if generator_dtype is not None:
            from windlass.dtypes import torch_dtype

            to = torch_dtype(generator_dtype)
            cast = {name: t.to(to) if t.is_floating_point() else t for name, t in state.tensors.items()}
            state = LoraState(cast, state.config)
        await self._send(state, version, inference_client)

    async def send_chunks(
        self, chunks: Iterable[WeightChunk] | AsyncIterable[WeightChunk], inference_client: InferenceClient
    ) -> None:
        """Sends the adapter that an extractor gives; its configuration is the strategy's ``adapter_config``."""
        if self._settings.adapter_config is None:
            raise WindlassInvalid(
                "chunks have no adapter_config: give it in the configuration, or send the model itself"
            )
        own = _of_an_adapter(chunks)
        if self._inner is not None:
            await self._inner.send_chunks(own, inference_client)
            self._version += 1
            return
        with Spool(holds=self._ranks.rank == 0) as spool:
            async for chunk in own:
                await asyncio.to_thread(spool.add, chunk)
                del chunk
            state = LoraState(spool, dict(self._settings.adapter_config))
            await self._send(state, self._version + 1, inference_client)

    async def _send(self, state: LoraState, version: int, client: InferenceClient) -> None:
        self._version = version
        if self._inner is not None:
            told = dict(self._settings.adapter_config or {})
            if _essence(state.config) != _essence(told):
                raise WindlassInvalid(
                    f"the adapter has the configuration {_essence(state.config)}, and engines were told {_essence(told)}",
                    "set adapter_config to collect_lora(model).config on both sides",
                )
            tensors = {name: t.contiguous() for name, t in state.tensors.items()}
            names = AsTheyAre({name: tuple(t.shape) for name, t in tensors.items()})
            await self._inner.send_named(tensors, None, version, client, names)
            return
        if self._ranks.rank != 0:
            return
        assert self._settings.lora_sync_path is not None
        folder = Path(self._settings.lora_sync_path).absolute()
        path = await asyncio.to_thread(self._write, state, folder, version)
        await client.update_weights(LoraDiskWeightUpdateRequest(str(path)))

    def _write(self, state: LoraState, folder: Path, version: int) -> Path:
        """Writes a version, and takes away those that no engine reads any more. A restarted run writes its own."""
        name, number = self._settings.name, re.compile(rf"{re.escape(self._settings.name)}-(\d+)")
        target = folder / f"{name}-{version}"
        if target.exists() and target not in self._written:
            # Left by a run before this one: an engine that was told the path must not see it change under its feet.
            discard(target)
        path = save_lora(state, folder, version, name=name)
        self._written.append(path)
        while len(self._written) > self._settings.keep:
            oldest = self._written.pop(0)
            if number.fullmatch(oldest.name):
                with contextlib.suppress(OSError):
                    discard(oldest)
        return path

    def close(self) -> None:
        """Ends the agent, if there is one. Written versions stay."""
        if self._inner is not None:
            self._inner.close()


async def _of_an_adapter(
    chunks: Iterable[WeightChunk] | AsyncIterable[WeightChunk],
) -> AsyncIterator[WeightChunk]:
    """The chunks; an error at their end, before anything is sent, if there was nothing of an adapter among them."""
    count = fitting = 0
    async for chunk in each_chunk(chunks):
        count += len(chunk)
        fitting += sum("lora_" in name or "modules_to_save" in name for name in chunk.names)
        yield chunk
        del chunk
    if not fitting:
        raise WindlassInvalid(
            f"none of the {count} tensors belongs to an adapter; make the extractor with lora=True"
        )


def _essence(config: Mapping[str, Any]) -> dict[str, Any]:
    """What makes an engine load an adapter differently."""
    keys = (
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "target_modules",
        "rank_pattern",
        "alpha_pattern",
    )
    plain: dict[str, Any] = json.loads(
        json.dumps({key: config[key] for key in keys if key in config}, default=list)
    )
    if isinstance(plain.get("target_modules"), list):
        plain["target_modules"].sort()
    return plain


class LoraTransferReceiver(WeightTransferReceiver):
    """Loads adapters from directories, or pulls them and makes the directory."""

    def __init__(self, settings: LoraSettings, inner: TcpTransferReceiver | None) -> None:
        self._settings, self._inner = settings, inner

    async def receive_weights(self, request: WeightUpdateRequest) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The adapter's tensors, under the names of an adapter file."""
        if self._inner is not None:
            async for name, tensor in self._inner.receive_weights(request):
                yield name, tensor
            return
        from safetensors import safe_open

        with safe_open(self._folder(request) / WEIGHTS, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)

    async def receive_and_load_weights(self, request: WeightUpdateRequest, loader: WeightLoader) -> None:
        """Hands the loader a PEFT directory if it takes one, else the tensors."""
        if not isinstance(loader, LoraLoader):
            await loader.load_weights(self.receive_weights(request))
        elif self._inner is None:
            await loader.load_lora(self._folder(request))
        else:
            async with self._inner.held(request) as image:
                with tempfile.TemporaryDirectory(prefix="windlass-adapter-") as parent:
                    await loader.load_lora(self._directory(image, Path(parent)))

    def _folder(self, request: WeightUpdateRequest) -> Path:
        if not isinstance(request, LoraDiskWeightUpdateRequest):
            raise WindlassInvalid(
                f"the request is {type(request).__name__}: this engine loads adapters from files"
            )
        path = Path(request.lora_disk_path)
        missing = [name for name in (WEIGHTS, CONFIG) if not (path / name).is_file()]
        if missing:
            raise WindlassNotFound(
                f"{path} has no {' and no '.join(missing)}",
                "lora_sync_path must be a directory that this engine sees as the trainer does",
            )
        return path

    def _directory(self, image: Image, parent: Path) -> Path:
        """A PEFT directory whose weights are the image itself."""
        path = parent / f"{self._settings.name}-{image.version}"
        path.mkdir()
        (path / WEIGHTS).symlink_to(image.path)
        config = dict(self._settings.adapter_config or {})
        (path / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        return path

    def close(self) -> None:
        """Lets go of the image, if there is one."""
        if self._inner is not None:
            self._inner.close()
