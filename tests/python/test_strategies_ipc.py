"""IPC strategies over shared memory, between real processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ipc_ranks
from ranks import Ranks, run_ranks
from windlass import (
    WindlassInvalid,
    WindlassNotFound,
    WindlassPeerLost,
    WindlassStale,
    WindlassUnsupported,
    strategy_from_config,
)
from windlass.extract.chunk import WeightChunk
from windlass.transfer.ipc.arena import HEAD, HostArena, HostOpener
from windlass.transfer.ipc.device import DeviceArena
from windlass.transfer.ipc.lending import Look
from windlass.transfer.request import (
    CudaIpcWeightUpdateRequest,
    IpcHandle,
    PackedCudaIpcWeightUpdateRequest,
    packed_layout,
    parse_request,
)
from windlass.transfer.sync_info import EmptyWeightSyncInfo, StoreWeightSyncInfo


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(2, group=False) as ranks:
        yield ranks


@pytest.mark.parametrize("kind", ["cuda_ipc", "packed_cuda_ipc"])
def test_an_engine_reads_what_the_trainer_exported_bit_by_bit(pool: Ranks, kind: str) -> None:
    trainer, engine = pool.run("ipc_ranks:sync", [kind, 1, 3], timeout=100)
    assert engine["digests"] == trainer["digests"]
    # The arena grew to its size in the first sync and is the same one in those after; the end removes it.
    assert trainer["files"][1] == trainer["files"][2]
    assert len(trainer["files"][2]) == 1
    assert trainer["after"] == []
    request = parse_request(trainer["requests"][0])
    if kind == "cuda_ipc":
        assert isinstance(request, CudaIpcWeightUpdateRequest)
        assert len(request.ipc_handles) == len(request.names) > 1
    else:
        assert isinstance(request, PackedCudaIpcWeightUpdateRequest)
        assert len(request.ipc_handles) == 1
        assert len(request.layout) == len(request.names) > 1


@pytest.mark.parametrize("kind", ["cuda_ipc", "packed_cuda_ipc"])
def test_handles_of_all_training_ranks_are_merged_by_device(kind: str) -> None:
    zero, one, engine = run_ranks(3, "ipc_ranks:sync", [kind, 2, 2], timeout=100, group=False)
    # The engine is on the device of rank 1, and opened that rank's handle.
    assert engine["digests"] == zero["digests"] == one["digests"]
    for plain in zero["requests"]:
        request: Any = parse_request(plain)
        merged = request.ipc_handles if kind == "packed_cuda_ipc" else request.ipc_handles[0]
        assert [key[:12] for key in sorted(merged)] == ["GPU-00000000", "GPU-00000001"]
        paths = {json.loads(handle.handle)["arena"] for handle in merged.values()}
        assert len(paths) == 2
    assert one["requests"] == []


@pytest.mark.parametrize("kind", ["cuda_ipc", "packed_cuda_ipc"])
def test_chunks_share_requests_while_all_ranks_find_them_settled(kind: str) -> None:
    zero, one, engine = run_ranks(3, "ipc_ranks:sync", [kind, 2, 3, True], timeout=100, group=False)
    assert engine["digests"] == zero["digests"] == one["digests"]
    first, second, third = zero["counts"]
    # Doubling: one, two, four, ... In the last version one rank has a chunk that is not settled: from there on each
    # chunk is a request of its own, on both ranks.
    assert first == second < third
    names = [len(request["names"]) for request in zero["requests"][:first]]
    assert names[0] < names[1] < names[2]
    assert one["requests"] == []


def test_the_source_outlives_a_slow_copy_and_the_next_chunk_is_packed_meanwhile(pool: Ranks) -> None:
    trainer, engine = pool.run("ipc_ranks:slow_engine", timeout=100)
    assert engine == trainer["digests"]
    # Six loads of 0.2 s, one after the other; the second chunk was packed during the first.
    assert trainer["took"] > 1.0
    assert trainer["second"] < 0.2


def test_a_killed_trainer_is_named_and_its_arena_is_removed_by_the_next() -> None:
    process = ipc_ranks.killed_trainer()
    try:
        assert process.stdout is not None
        request = parse_request(process.stdout.readline())
        assert isinstance(request, PackedCudaIpcWeightUpdateRequest)
        receiver = strategy_from_config({"strategy": "packed_cuda_ipc"}).create_receiver(
            EmptyWeightSyncInfo()
        )

        async def read() -> list[tuple[str, torch.Tensor]]:
            return [(name, t.clone()) async for name, t in receiver.receive_weights(request)]

        assert torch.equal(asyncio.run(read())[0][1], torch.arange(9.0))
        (handle,) = request.ipc_handles.values()
        path = Path(json.loads(handle.handle)["arena"])
        assert path.exists()
    finally:
        ipc_ranks.kill(process)
    with pytest.raises(WindlassPeerLost, match="the trainer that exported it is gone"):
        asyncio.run(read())
    receiver.close()
    HostArena().close()
    assert not path.exists()
    fresh = strategy_from_config({"strategy": "packed_cuda_ipc"}).create_receiver(EmptyWeightSyncInfo())

    async def again() -> None:
        async for _ in fresh.receive_weights(request):
            pass

    with pytest.raises(WindlassNotFound, match="no arena"):
        asyncio.run(again())


def test_a_half_that_was_written_again_is_stale() -> None:
    arena, opener = HostArena(), HostOpener()
    try:
        memory, half = arena.fill(16)
        memory[:16] = 1
        first = arena.handle(half, 16)
        assert opener.open(first).tolist() == [1] * 16
        arena.fill(16)
        opener.check(first)
        memory, half = arena.fill(16)
        with pytest.raises(WindlassStale, match="holds turn 2, and turn 1 was announced"):
            opener.check(first)
        # What an engine writes into its view stays with it.
        view = opener.open(arena.handle(half, 16))
        view.fill_(9)
        assert memory[:16].tolist() == [1] * 16
    finally:
        arena.close()
        opener.close()


def test_a_growing_arena_keeps_the_half_that_is_being_read() -> None:
    arena, opener, other = HostArena(), HostOpener(), HostOpener()
    try:
        memory, half = arena.fill(100)
        memory[:100] = 7
        small = arena.handle(half, 100)
        memory, half = arena.fill(1 << 20)
        memory.fill_(8)
        assert opener.open(small).tolist() == [7] * 100
        opener.check(small)
        assert other.open(arena.handle(half, 1 << 20)).sum() == 8 << 20
    finally:
        arena.close()
        opener.close()
        other.close()


@pytest.mark.parametrize(
    ("handle", "words"),
    [
        (b"not json", "says nothing of an arena"),
        (b'{"arena": "/etc/passwd", "half": 0, "turn": 1}', "no arena in"),
        (b'{"arena": "/dev/shm/../etc/windlass-arena-x", "half": 0, "turn": 1}', "no arena in"),
        (b'{"arena": "/dev/shm/windlass-arena-x", "half": 2, "turn": 1}', "no arena in"),
    ],
)
def test_a_handle_from_outside_opens_arenas_only(handle: bytes, words: str) -> None:
    with pytest.raises(WindlassInvalid, match=words):
        HostOpener().open(IpcHandle("vmm_fd", handle, 1, HEAD))


def test_a_handle_beyond_the_arena_is_refused() -> None:
    arena, opener = HostArena(), HostOpener()
    try:
        _, half = arena.fill(16)
        with pytest.raises(WindlassInvalid, match="and the arena has"):
            opener.open(arena.handle(half, 1 << 40))
    finally:
        arena.close()
        opener.close()


def test_an_engine_on_another_device_says_which_handles_there_are() -> None:
    request = parse_request(
        {
            "type": "packed_cuda_ipc", "names": ["w"], "dtypes": ["float32"], "shapes": [[1]],
            "layout": [{"offset": 0, "bytes": 4, "numel": 1}],
            "ipc_handles": {"GPU-00000000-0000-0000-0000-00000000000f": {
                "kind": "legacy", "handle": "A" * 85 + "A==", "size": 4, "offset": 0}},
        }
    )  # fmt: skip
    receiver = strategy_from_config({"strategy": "packed_cuda_ipc"}).create_receiver(EmptyWeightSyncInfo())

    async def read() -> None:
        async for _ in receiver.receive_weights(request):
            pass

    with pytest.raises(WindlassNotFound, match="handles for GPU-00000000-.*f, and this engine is on GPU-"):
        asyncio.run(read())


def test_what_is_not_host_memory_is_refused_by_an_arena_of_the_host() -> None:
    sender = strategy_from_config({"strategy": "cuda_ipc", "device": "cpu"}).create_sender(
        EmptyWeightSyncInfo()
    )
    try:
        chunk = WeightChunk.of([("w", torch.empty(4, device="meta"))])
        with pytest.raises(WindlassUnsupported, match="'w' is on meta") as refused:
            asyncio.run(sender.send_chunks([chunk], None))  # type: ignore[arg-type]
        assert "broadcast" in refused.value.advice
    finally:
        sender.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_ipc_says_so_where_one_was_asked_for() -> None:
    for kind in ("cuda_ipc", "packed_cuda_ipc"):
        strategy = strategy_from_config({"strategy": kind, "device": "cuda"})
        with pytest.raises(WindlassUnsupported, match="no CUDA device"):
            strategy.create_sender(EmptyWeightSyncInfo())
        with pytest.raises(WindlassUnsupported, match="no CUDA device"):
            strategy.create_receiver(EmptyWeightSyncInfo())
        with pytest.raises(WindlassInvalid, match="expected 'auto'"):
            strategy_from_config({"strategy": kind, "device": "gpu"})
    with pytest.raises(WindlassUnsupported, match="NVIDIA driver|nvidia-smi"):
        DeviceArena(0)


def test_a_released_arena_is_made_again_by_the_next_chunk() -> None:
    arena, opener = HostArena(), HostOpener()
    chunk = WeightChunk.of([("w", torch.arange(4.0))])
    layout = packed_layout(chunk.names, chunk.dtypes, chunk.shapes)
    try:
        for _ in range(3):
            (handle,) = arena.lend(chunk, layout, 16, Look())
            assert opener.open(handle).view(torch.float32).tolist() == [0, 1, 2, 3]
            arena.release()
            assert arena.path is None
            with pytest.raises(WindlassPeerLost):
                opener.open(handle)
            opener.release()
    finally:
        arena.close()
        opener.close()


def test_ipc_joins_nothing_and_refuses_what_is_not_its_own() -> None:
    for kind in ("cuda_ipc", "packed_cuda_ipc"):
        strategy = strategy_from_config({"strategy": kind})
        assert strategy.create_sync_info() == EmptyWeightSyncInfo()
        with pytest.raises(WindlassInvalid, match="IPC needs none"):
            strategy.create_receiver(StoreWeightSyncInfo("file:///mnt/store"))
        with pytest.raises(WindlassInvalid, match="weight_transfer_threshold_cuda_ipc_GB"):
            strategy_from_config({"strategy": kind, "weight_transfer_threshold_cuda_ipc_GB": 0})
