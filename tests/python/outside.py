"""A strategy as somebody else would write it: tensors by broadcast on a gloo group, between two processes.

Nothing in the package knows of it. The tests install it by an entry point, and run this file as the two processes:

    python outside.py train CONFIG    writes the sync info and then a request for each chunk, one JSON text a line
    python outside.py serve CONFIG    reads those lines, receives, loads, and writes what it has loaded
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from windlass import WeightExtractor, WeightLoader, WeightSyncManager, strategy_from_config
from windlass.extract.chunk import WeightChunk
from windlass.transfer.base import (
    InferenceClient,
    NamedTensors,
    WeightTransferReceiver,
    WeightTransferSender,
    WeightTransferStrategy,
    each_tensor,
)
from windlass.transfer.request import BroadcastWeightUpdateRequest, WeightUpdateRequest, parse_request
from windlass.transfer.sync_info import TorchDistributedWeightSyncInfo, WeightSyncInfo

DEADLINE = timedelta(seconds=60)


def join(info: WeightSyncInfo, rank: int, store: Store | None = None) -> None:
    """Joins the group; whoever has the store has it bound already."""
    assert isinstance(info, TorchDistributedWeightSyncInfo)
    if store is None:
        store = TCPStore(info.master_addr, info.master_port, is_master=False, timeout=DEADLINE)
    dist.init_process_group(
        info.backend, store=store, rank=rank, world_size=info.world_size, timeout=DEADLINE
    )


class GlooSender(WeightTransferSender):
    def __init__(self, info: WeightSyncInfo, store: Store | None) -> None:
        join(info, 0, store)

    async def send_chunks(
        self, chunks: Iterable[WeightChunk] | AsyncIterable[WeightChunk], inference_client: InferenceClient
    ) -> None:
        assert not isinstance(chunks, AsyncIterable)
        for chunk in chunks:
            # Announced first: a broadcast waits for those who do not know of it.
            await inference_client.update_weights(
                BroadcastWeightUpdateRequest(chunk.names, chunk.dtypes, chunk.shapes)
            )
            for _, tensor in chunk:
                await asyncio.to_thread(dist.broadcast, tensor.contiguous().view(torch.uint8), 0)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class GlooReceiver(WeightTransferReceiver):
    def __init__(self, info: WeightSyncInfo, rank: int) -> None:
        join(info, rank)

    async def receive_weights(self, request: WeightUpdateRequest) -> AsyncIterator[tuple[str, torch.Tensor]]:
        assert isinstance(request, BroadcastWeightUpdateRequest)
        for name, dtype, shape in zip(request.names, request.dtypes, request.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            await asyncio.to_thread(dist.broadcast, tensor.view(torch.uint8), 0)
            yield name, tensor

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class GlooStrategy(WeightTransferStrategy):
    _store: TCPStore | None = None

    def create_sync_info(self) -> WeightSyncInfo:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=DEADLINE)
        return TorchDistributedWeightSyncInfo(
            "127.0.0.1", self._store.port, self.config["engine_ranks"] + 1, backend="gloo"
        )

    def create_sender(self, sync_info: WeightSyncInfo) -> WeightTransferSender:
        return GlooSender(sync_info, self._store)

    def create_receiver(self, sync_info: WeightSyncInfo, *, rank: int = 1) -> WeightTransferReceiver:
        return GlooReceiver(sync_info, rank)

    def get_request_type(self) -> type[WeightUpdateRequest]:
        return BroadcastWeightUpdateRequest


class Kept(WeightLoader):
    """An engine that only keeps what it is given."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.loads = 0

    async def load_weights(self, named_tensors: NamedTensors) -> None:
        async for name, tensor in each_tensor(named_tensors):
            self.tensors[name] = tensor.clone()
        self.loads += 1


def weights() -> list[tuple[str, torch.Tensor]]:
    """The same on both sides."""
    random = torch.Generator().manual_seed(7)
    made = []
    for layer in range(3):
        for part, dtype in (("q", torch.bfloat16), ("k", torch.float32), ("v", torch.float8_e4m3fn)):
            tensor = torch.randn(5, 3, generator=random).to(dtype)
            made.append((f"model.layers.{layer}.attn.{part}.weight", tensor))
    return made


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, list[Any]]:
    return {
        name: [str(t.dtype), list(t.shape), hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest()]
        for name, t in tensors
    }


class Weights(WeightExtractor):
    """Gives the weights above, whatever the model."""

    def _extract_raw_weights(self, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights()


class Pipe:
    """Engines at the other end of standard output."""

    async def init_weight_transfer(self, sync_info: WeightSyncInfo) -> object:
        say(sync_info.to_dict())
        return None

    async def update_weights(self, request: WeightUpdateRequest) -> object:
        say(request.to_dict())
        return None


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def train(config: dict[str, Any]) -> None:
    async def run() -> None:
        manager = WeightSyncManager(strategy_from_config(config), Weights(group_by_module=True), Pipe())
        await manager.initialize()
        await manager.sync_weights(None)
        manager.close()

    asyncio.run(run())


def serve(config: dict[str, Any]) -> None:
    strategy = strategy_from_config(config)
    loader = Kept()
    info = WeightSyncInfo.from_json(sys.stdin.readline())
    with strategy.create_receiver(info, rank=1) as receiver:
        for line in sys.stdin:
            request = parse_request(line)
            assert isinstance(request, strategy.get_request_type())
            asyncio.run(receiver.receive_and_load_weights(request, loader))
    say({"loads": loader.loads, "tensors": digest(loader.tensors.items())})


if __name__ == "__main__":
    {"train": train, "serve": serve}[sys.argv[1]](json.loads(sys.argv[2]))
