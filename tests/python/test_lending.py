"""What a trainer lends and what it packs, and how engines find it.

Doors, tables, turns, senders and receivers are the real ones, in one process; the driver is made up of host memory: an
allocation is a stretch of it with a number, and copies are the host's. What a GPU does is tested on one
(``tests/gpu/ipc.py``).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from windlass import WeightLoader
from windlass.errors import WindlassInvalid, WindlassNotFound, WindlassStale
from windlass.extract.chunk import WeightChunk
from windlass.transfer.base import each_tensor
from windlass.transfer.ipc import device as device_module
from windlass.transfer.ipc import handle_server
from windlass.transfer.ipc.arena import HostArena, HostOpener
from windlass.transfer.ipc.device import DeviceArena, DeviceOpener
from windlass.transfer.ipc.lending import Ledger, Look, Table, table_file
from windlass.transfer.ipc.packed import PackedCudaIpcTransferReceiver, PackedCudaIpcTransferSender
from windlass.transfer.ipc.strategy import CudaIpcTransferReceiver, CudaIpcTransferSender
from windlass.transfer.request import parse_request
from windlass.transfer.trainer import TrainerRanks

KINDS = ["cuda_ipc", "packed_cuda_ipc"]
GPU = SimpleNamespace(uuid="GPU-00000000-0000-0000-0000-000000000001", ordinal=0)


class Driver:
    """Allocations by their numbers, which are never given twice."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[torch.Tensor, int, int]] = {}
        self.numbers = 0
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.gathered = 0
        self.waits: list[str] = []

    def allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes a tensor's memory an allocation."""
        self.numbers += 1
        storage = tensor.untyped_storage()
        self.held[self.numbers] = (tensor, storage.data_ptr(), storage.nbytes())
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        del self.held[self.at(tensor.data_ptr())]

    def at(self, address: int) -> int:
        for number, (_, base, size) in self.held.items():
            if base <= address < base + size:
                return number
        raise WindlassNotFound(f"nothing at {address}")

    def module(self) -> Any:
        driver = self

        class Exported:
            granules: Sequence[int] = ()

            def __init__(self, gpu: Any, address: int, size: int) -> None:
                self.number = driver.at(address)
                _, self.base, self.size = driver.held[self.number]
                self.handle = self.number.to_bytes(64, "little")

            def is_there(self) -> bool:
                return self.number in driver.held

        class Opened:
            def __init__(self, number: int) -> None:
                self.number = number
                _, self.address, self.size = driver.held[number]
                driver.opened.append(number)

            @classmethod
            def legacy(cls, gpu: Any, handle: bytes) -> Opened:
                return cls(int.from_bytes(handle, "little"))

            def close(self) -> None:
                driver.closed.append(self.number)

        class SharedMemory(Exported):
            def __init__(self, gpu: Any, size: int) -> None:
                self._own = driver.allocate(torch.zeros(size, dtype=torch.uint8))
                self.address = self._own.data_ptr()
                super().__init__(gpu, self.address, size)

            def close(self) -> None:
                driver.held.pop(self.number, None)

        class Signal:
            def __init__(self, gpu: Any, handle: bytes = bytes(64)) -> None:
                self.handle = handle

            def record(self, stream: int) -> None: ...

            def wait(self, peer: Any = None, timeout: float = 60.0) -> None:
                driver.waits.append("wait")

            def close(self) -> None: ...

        return SimpleNamespace(
            Exported=Exported, Opened=Opened, SharedMemory=SharedMemory, Signal=Signal,
            Gpu=SimpleNamespace(open=lambda ordinal: GPU),
        )  # fmt: skip


class HostDevice(DeviceArena):
    """A device arena whose copies are the host's."""

    driver: Driver

    def follow(self) -> None: ...

    def _export(self, tensor: torch.Tensor) -> Any:
        if tensor.numel() == 0 or not tensor.is_contiguous():
            return None
        try:
            return device_module._windlass.Exported(GPU, tensor.data_ptr(), tensor.nbytes)  # type: ignore[attr-defined]
        except WindlassNotFound:
            return None

    def _gather(self, share: Any, half: int, tensors: Any, at: Any) -> None:
        base, room = share.place(half)
        for tensor, offset in zip(tensors, at, strict=True):
            assert offset + tensor.nbytes <= room
            flat = tensor.contiguous()
            ctypes.memmove(base + offset, flat.data_ptr(), flat.nbytes)
            self.driver.gathered += flat.nbytes


def view(gpu: int, address: int, size: int, owner: object) -> torch.Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


class ByAddress(WeightLoader):
    """Takes addresses, and reads them at once."""

    def __init__(self) -> None:
        self.bytes: dict[str, bytes] = {}
        self.calls = 0

    async def load_weights(self, named_tensors: Any) -> None:
        raise AssertionError("tensors were made")

    def fits(self, *_: object) -> bool:
        return True

    def load_at(self, names: Any, dtypes: Any, shapes: Any, addresses: Any) -> None:
        self.calls += 1
        for name, dtype, shape, address in zip(names, dtypes, shapes, addresses, strict=True):
            size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            self.bytes[name] = ctypes.string_at(address, size) if size else b""


class ByTensor(WeightLoader):
    """Takes tensors."""

    def __init__(self) -> None:
        self.bytes: dict[str, bytes] = {}
        self.calls = 0

    async def load_weights(self, named_tensors: Any) -> None:
        self.calls += 1
        async for name, tensor in each_tensor(named_tensors):
            self.bytes[name] = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Pair:
    """A sender and a receiver of one process."""

    def __init__(self, kind: str, driver: Driver, folder: Path, loader: Any) -> None:
        self.driver, self.loader = driver, loader
        arena = HostDevice(0, folder, timeout=20.0)
        arena.driver = driver
        packed = kind == "packed_cuda_ipc"
        sender = PackedCudaIpcTransferSender if packed else CudaIpcTransferSender
        receiver = PackedCudaIpcTransferReceiver if packed else CudaIpcTransferReceiver
        self.sender = sender(TrainerRanks(), arena, 20.0)
        self.receiver: Any = receiver(DeviceOpener(0, folder, timeout=20.0))
        self.requests: list[Any] = []

    async def update_weights(self, request: Any) -> None:
        text = request.to_json()
        self.requests.append(parse_request(text))
        await self.receiver.receive_and_load_weights(self.requests[-1], self.loader)

    def sync(self, weights: dict[str, torch.Tensor], chunks: int = 6) -> int:
        """Sends everything, and compares it; how many bytes were gathered."""
        before, self.requests = self.driver.gathered, []
        pairs = list(weights.items())
        size = -(-len(pairs) // chunks)
        made = [WeightChunk.of(pairs[at : at + size]) for at in range(0, len(pairs), size)]
        asyncio.run(self.sender.send_chunks(made, self))  # type: ignore[arg-type]
        want = {
            n: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
            for n, t in weights.items()
        }
        assert self.loader.bytes == want
        self.loader.bytes = {}
        return self.driver.gathered - before

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(device_module, "_windlass", made.module())
    monkeypatch.setattr(device_module, "view", view)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
    real = handle_server.peer_of
    # A process cannot open what it exported itself; this one can.
    monkeypatch.setattr(handle_server, "peer_of", lambda c: (real(c)[0] + 1, real(c)[1]))
    return made


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="lend-") as made:
        yield Path(made)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The questions to handle servers."""
    questions: list[dict[str, Any]] = []
    ask = handle_server.HandleClient.ask

    def noted(self: Any, words: dict[str, Any]) -> Any:
        questions.append(words)
        return ask(self, words)

    monkeypatch.setattr(handle_server.HandleClient, "ask", noted)
    return questions


def parameters(driver: Driver, count: int = 12) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {f"w{i}": driver.allocate(torch.randn(50 + i, 3)) for i in range(count)}


def stir(weights: dict[str, torch.Tensor]) -> None:
    for tensor in weights.values():
        tensor.mul_(1.5)


def pair(kind: str, driver: Driver, folder: Path, loader: Any = None) -> Pair:
    return Pair(kind, driver, folder, loader or ByAddress())


@pytest.mark.parametrize("loader", [ByAddress, ByTensor])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_stay_are_lent_in_few_requests_and_nothing_is_asked_again(
    kind: str, loader: Any, driver: Driver, folder: Path, asked: list[dict[str, Any]]
) -> None:
    both, weights = pair(kind, driver, folder, loader()), parameters(driver)
    total = sum(t.nbytes for t in weights.values())
    try:
        gathered, requests, questions, waits = [], [], [], []
        for _ in range(5):
            stir(weights)
            asked.clear()
            driver.waits.clear()
            gathered.append(both.sync(weights))
            requests.append(len(both.requests))
            questions.append(len(asked))
            waits.append(len(driver.waits))
    finally:
        both.close()
    # A strategy that packs does so once; then all is read where it is.
    assert gathered == [total if kind == "packed_cuda_ipc" else 0, 0, 0, 0, 0]
    # Six buckets: one, two, three.
    assert requests == [6, 3, 3, 3, 3]
    assert [len(r.names) for r in both.requests] == [2, 4, 6]
    # Memory, tables and allocations are had once.
    assert questions[2:] == [0, 0, 0]
    assert sorted(set(driver.opened)) == sorted(driver.opened)
    # What is settled waits for no turn: only each request for the trainer's stream, and the end for the engine's.
    assert set(waits[2:]) == {3 + 2}


def test_a_buffer_that_chunks_share_is_never_lent(driver: Driver, folder: Path) -> None:
    both, memory = pair("packed_cuda_ipc", driver, folder), driver.allocate(torch.zeros(310))
    try:
        for _ in range(4):
            weights: dict[str, torch.Tensor] = {}

            def chunks(weights: dict[str, torch.Tensor] = weights) -> Iterator[WeightChunk]:
                for i in range(4):
                    # One part after another, never quite in the same place.
                    part = memory[i : i + 300]
                    part.fill_(float(10 * i + 1))
                    weights[f"w{i}"] = part.clone()
                    yield WeightChunk.of([(f"w{i}", part)])

            both.requests = []
            asyncio.run(both.sender.send_chunks(chunks(), both))  # type: ignore[arg-type]
            assert both.loader.bytes == {n: t.numpy().tobytes() for n, t in weights.items()}
            assert len(both.requests) == 4
        assert driver.gathered == 16 * 1200
    finally:
        both.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_moves_is_packed_once_and_the_others_stay(
    kind: str, driver: Driver, folder: Path
) -> None:
    both, weights = pair(kind, driver, folder), parameters(driver)
    try:
        for _ in range(3):
            both.sync(weights)
        old = weights["w3"]
        weights["w3"] = driver.allocate(old.clone())
        driver.free(old)
        packed = kind == "packed_cuda_ipc"
        assert both.sync(weights) == (weights["w3"].nbytes if packed else 0)
        # The bucket with it goes alone.
        assert len(both.requests) == 4
        stir(weights)
        assert both.sync(weights) == 0
        assert len(both.requests) == 3
    finally:
        both.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_allocation_in_the_place_of_another_is_not_taken_for_it(
    kind: str, driver: Driver, folder: Path, asked: list[dict[str, Any]]
) -> None:
    both, weights = pair(kind, driver, folder), parameters(driver)
    try:
        for _ in range(3):
            both.sync(weights)
        # Freed and had again: the same address, and other memory to an engine that has the old one open.
        for name in ("w0", "w1"):
            driver.free(weights[name])
            driver.allocate(weights[name])
        asked.clear()
        driver.opened.clear()
        gathered = both.sync(weights)
        gathered += both.sync(weights)
        numbers = [driver.at(weights[name].data_ptr()) for name in ("w0", "w1")]
        assert set(numbers) <= set(driver.opened)
        expected = weights["w0"].nbytes + weights["w1"].nbytes
        assert gathered == (expected if kind == "packed_cuda_ipc" else 0)
        # The old ones are let go of when nothing used them for a sync.
        for _ in range(2):
            weights["new"] = driver.allocate(torch.ones(7))
            both.sync(weights)
        assert len(driver.closed) >= 2
    finally:
        both.close()


@pytest.mark.parametrize("loader", [ByAddress, ByTensor])
@pytest.mark.parametrize("kind", KINDS)
def test_only_what_cannot_be_lent_is_gathered(kind: str, loader: Any, driver: Driver, folder: Path) -> None:
    both = pair(kind, driver, folder, loader())
    weights = parameters(driver)
    weights["turned"] = driver.allocate(torch.randn(8, 9)).t()
    weights["foreign"] = torch.randn(33)
    weights["empty"] = torch.randn(0, 4)
    odd = weights["turned"].nbytes + weights["foreign"].nbytes
    try:
        for sync in range(4):
            stir(weights)
            gathered = both.sync(weights, 3)
            if sync or kind == "cuda_ipc":
                assert gathered == odd
            else:
                assert gathered == sum(t.nbytes for t in weights.values())
    finally:
        both.close()


def test_a_larger_arena_lends_what_the_smaller_one_did(driver: Driver, folder: Path) -> None:
    both, weights = pair("packed_cuda_ipc", driver, folder), parameters(driver)
    try:
        for _ in range(3):
            both.sync(weights)
        sockets = set(folder.iterdir())
        weights["large"] = driver.allocate(torch.randn(3 << 20))
        assert both.sync(weights) == weights["large"].nbytes
        assert set(folder.iterdir()) != sockets
        for _ in range(2):
            stir(weights)
            assert both.sync(weights) == 0
        both.sender.release()
        both.receiver.release()
        assert both.sync(weights) == sum(t.nbytes for t in weights.values())
        assert both.sync(weights) == 0
    finally:
        both.close()
    assert list(folder.iterdir()) == []


def test_a_request_with_another_layout_than_its_table_is_refused(driver: Driver, folder: Path) -> None:
    both, weights = pair("packed_cuda_ipc", driver, folder), parameters(driver)
    try:
        both.sync(weights)
        plain = both.requests[-1].to_dict()
        for record in plain["layout"]:
            record["offset"] += 4
        for handle in plain["ipc_handles"].values():
            handle["size"] += 4
        with pytest.raises(WindlassInvalid, match="another layout than table"):
            asyncio.run(both.receiver.receive_and_load_weights(parse_request(plain), both.loader))
        share = both.sender._arena._share  # type: ignore[attr-defined]
        session: Any = None
        for words, error in (
            ({"table": 99}, WindlassStale), ({"table": [1]}, WindlassStale), ({"allocation": 0}, WindlassInvalid),
        ):  # fmt: skip
            with pytest.raises(error):
                share._answer(session, words)
    finally:
        both.close()


def test_a_table_from_outside_is_checked() -> None:
    file = os.memfd_create("none", os.MFD_CLOEXEC)
    try:
        os.write(file, bytes(33))
        with pytest.raises(WindlassInvalid, match="a table of 33 bytes"):
            Table.read(file)
    finally:
        os.close(file)
    file = table_file(())
    try:
        empty = Table.read(file)
    finally:
        os.close(file)
    assert (empty.begins, empty.addresses(0, {}), empty.reach(0)) == ([], [], 0)
    rows = ((0, 0, 64, 8), (8, 2, 10, 0), (8, 2, 4096, 100))
    file = table_file(rows)
    try:
        table = Table.read(file)
    finally:
        os.close(file)
    assert (table.reach(0), table.reach(2), table.allocations) == (72, 4196, [2])
    assert [table.row(0, 8), table.row(8, 100)] == [0, 2]
    with pytest.raises(WindlassInvalid, match="101 bytes from 8"):
        table.row(8, 101)


def test_a_tensor_is_settled_in_the_sync_after_and_not_after_a_pause() -> None:
    memory = SimpleNamespace(base=0, size=1, is_there=lambda: True)
    ledger, tensor = Ledger(lambda _: memory), torch.ones(4)
    assert not ledger.look(["w"], [tensor], 0, all_=False).settled
    assert ledger.look(["w"], [tensor], 1, all_=False) == Look(True, [memory], [True])
    # In sync 2 it was not there, and what was there then is not known.
    assert not ledger.look(["w"], [tensor], 3, all_=False).settled
    assert ledger.look(["w"], [tensor], 4, all_=False).settled
    # A part of it is another one's, too.
    both = ["w", "part"], [tensor, tensor[2:]]
    assert [ledger.look(*both, sync, all_=False).firm for sync in (5, 6, 7)] == [
        [True, False],
        [False] * 2,
        [False] * 2,
    ]
    ledger.forget()
    lent = ledger.look(["w"], [tensor], 8, all_=True)
    assert (lent.settled, lent.memories, lent.firm) == (False, [memory], [False])


def test_a_driver_that_refuses_everything_is_asked_once_in_a_sync() -> None:
    asked: list[torch.Tensor] = []
    answer: list[Any] = [None]

    def export(tensor: torch.Tensor) -> Any:
        asked.append(tensor)
        return answer[0]

    ledger = Ledger(export)
    for sync in range(3):
        # Elsewhere each time.
        tensors = [torch.ones(4) for _ in range(5)]
        ledger.look([f"w{i}" for i in range(5)], tensors, sync, all_=False)
        tensors.clear()
    assert len(asked) == 5 + 1 + 1
    answer[0] = SimpleNamespace(base=0, size=1, is_there=lambda: True)
    held = [torch.ones(4) for _ in range(5)]
    names = [f"v{i}" for i in range(5)]
    ledger.look(names, held, 3, all_=False)
    assert ledger.look(names, held, 4, all_=False).settled
    # What could not be lent is not asked for again where it is.
    before = len(asked)
    answer[0] = None
    fixed = [torch.ones(2)]
    for sync in (5, 6, 7):
        ledger.look(["fixed"], fixed, sync, all_=False)
    assert len(asked) == before + 1


class Firm(HostArena):
    """An arena of the host that says that everything is settled."""

    def look(self, chunk: WeightChunk, *, all_: bool) -> Look:
        return Look(True, [None] * len(chunk), [True] * len(chunk))


@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_several_chunks_are_read_as_any_other(kind: str) -> None:
    packed = kind == "packed_cuda_ipc"
    sender = (PackedCudaIpcTransferSender if packed else CudaIpcTransferSender)(TrainerRanks(), Firm(), 20.0)
    receiver: Any = (PackedCudaIpcTransferReceiver if packed else CudaIpcTransferReceiver)(HostOpener())
    loader, sizes = ByTensor(), []

    class Client:
        async def update_weights(self, request: Any) -> None:
            sizes.append(len(request.names))
            await receiver.receive_and_load_weights(parse_request(request.to_json()), loader)

    weights = {f"w{i}": torch.randn(i + 1) for i in range(60)}
    try:
        chunks = [WeightChunk.of([pair]) for pair in weights.items()]
        asyncio.run(sender.send_chunks(chunks, Client()))  # type: ignore[arg-type]
    finally:
        sender.close()
        receiver.close()
    assert sizes == [1, 2, 4, 8, 16, 16, 13]
    # A request has a name once.
    sizes.clear()
    again = [WeightChunk.of([pair]) for pair in [*weights.items()][:3] * 2]
    sender = (PackedCudaIpcTransferSender if packed else CudaIpcTransferSender)(TrainerRanks(), Firm(), 20.0)
    try:
        asyncio.run(sender.send_chunks(again, Client()))  # type: ignore[arg-type]
    finally:
        sender.close()
        receiver.close()
    assert sizes == [1, 2, 3]
    assert loader.bytes == {n: t.numpy().tobytes() for n, t in weights.items()}
