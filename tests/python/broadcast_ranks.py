"""Broadcast between real processes: rank 0 is the trainer, the others are engines.

Announcements go over the test's own store as JSON text, as they would over HTTP: the engine answers each.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore

from windlass import WeightLoader, WeightSyncManager, strategy_from_config
from windlass.extract import ModuleWeightExtractor
from windlass.transfer.base import NamedTensors, each_tensor
from windlass.transfer.broadcast import BroadcastTransferStrategy
from windlass.transfer.client import InferenceEngine, InferenceEngineClient
from windlass.transfer.request import parse_request
from windlass.transfer.sync_info import EngineShape, WeightSyncInfo, engine_rank, rank_offsets

WAIT_S = 60.0


#: Which function runs: letters of one must not reach the next, on processes that several tests share.
_scene = [""]


def rank(scene: str = "") -> int:
    _scene[0] = scene or _scene[0]
    return int(os.environ["RANK"])


def board() -> TCPStore:
    """The test's own store, over which announcements go."""
    return TCPStore(
        "127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=WAIT_S)
    )


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, t in tensors.items()
    }


class Mail:
    """Letters of plain text between the trainer and one engine."""

    def __init__(self, engine: int) -> None:
        self.store, self.engine, self.sent, self.read = board(), engine, 0, 0

    def ask(self, what: str, value: Any) -> None:
        self.store.set(f"{_scene[0]}/to/{self.engine}/{self.sent}", json.dumps([what, value]))
        self.sent += 1

    def asked(self) -> tuple[str, Any]:
        letter = json.loads(self.store.get(f"{_scene[0]}/to/{self.engine}/{self.read}"))
        self.read += 1
        return letter[0], letter[1]

    def answer(self, value: Any) -> None:
        self.store.set(f"{_scene[0]}/from/{self.engine}/{self.read - 1}", json.dumps(value))

    def answered(self, timeout: float) -> Any:
        key = f"{_scene[0]}/from/{self.engine}/{self.sent - 1}"
        self.store.wait([key], timedelta(seconds=timeout))
        return json.loads(self.store.get(key))


class Posted(InferenceEngine):
    """An engine of one process at the other end of a :class:`Mail`."""

    def __init__(self, number: int, shape: EngineShape | None = None) -> None:
        self.name = f"engine {number}"
        self.shape = shape or EngineShape()
        self.mails = [Mail(number)]
        self.order: list[str] = []

    async def _tell(self, what: str, value: Any) -> None:
        self.order.append(what)
        for mail in self.mails:
            mail.ask(what, value)
        for mail in self.mails:
            said = await asyncio.to_thread(mail.answered, WAIT_S)
            if said != "ok":
                raise RuntimeError(said)

    async def init_weight_transfer(self, sync_info: WeightSyncInfo, rank_offset: int) -> None:
        await self._tell("init", [sync_info.to_dict(), rank_offset])

    async def update_weights(self, request: Any) -> None:
        await self._tell("update", request.to_dict())

    async def close(self) -> None:
        await self._tell("close", None)


class Shard(Posted):
    """An engine of several processes: all of them are told."""

    def __init__(self, first: int, shape: EngineShape) -> None:
        super().__init__(first, shape)
        self.mails = [Mail(first + i) for i in range(shape.tp * shape.pp * shape.dp)]


class Kept(WeightLoader):
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.loads: list[int] = []

    async def load_weights(self, named_tensors: NamedTensors) -> None:
        count = 0
        async for name, tensor in each_tensor(named_tensors):
            self.tensors[name] = tensor.clone()
            count += 1
        self.loads.append(count)


def config(engines: list[dict[str, int]], **more: Any) -> dict[str, Any]:
    return {
        "strategy": "broadcast",
        "engines": engines,
        "weight_sync_backend": "gloo",
        "master_addr": "127.0.0.1",
        "timeout": 30.0,
        "join_timeout": 30.0,
        **more,
    }


def serve(conf: dict[str, Any], local_rank: int, shape: EngineShape) -> dict[str, Any]:
    """An engine's process: takes letters until it is told to close."""
    strategy, mail, loader = strategy_from_config(conf), Mail(rank()), Kept()
    receiver, joined = None, None
    while True:
        what, value = mail.asked()
        try:
            if what == "init":
                joined = engine_rank(local_rank, value[1], shape)
                receiver = strategy.create_receiver(WeightSyncInfo.from_dict(value[0]), rank=joined)
            elif what == "update":
                assert receiver is not None
                asyncio.run(receiver.receive_and_load_weights(parse_request(value), loader))
            elif what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "close":
                if receiver is not None:
                    receiver.close()
                mail.answer("ok")
                return {"rank": joined, "loads": loader.loads, "digests": digests(loader.tensors)}
            mail.answer("ok")
        except Exception as e:
            mail.answer(f"{type(e).__name__}: {e}")


def sync_a_model(versions: int) -> Any:
    """Rank 0 trains; ranks 1 and 2 are an engine of tp=2, rank 3 another one."""
    from models import policy, reference

    shapes = [EngineShape(tp=2), EngineShape()]
    conf = config([{"tp": 2}, {}])
    if rank("sync") != 0:
        return serve(conf, (rank() - 1) % 2 if rank() < 3 else 0, shapes[0] if rank() < 3 else shapes[1])

    async def train() -> Any:
        engines = [Shard(1, shapes[0]), Posted(3)]
        client = InferenceEngineClient(engines, timeout=WAIT_S, prefix_cache="keep")
        strategy = strategy_from_config(conf)
        assert isinstance(strategy, BroadcastTransferStrategy)
        manager = WeightSyncManager(strategy, ModuleWeightExtractor(group_by_module=True), client)
        await manager.initialize()
        model, out = policy(), []
        for _ in range(versions):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.25)
            out.append(await manager.sync_weights(model, "bfloat16"))
        await client.aclose()
        manager.close()
        want = reference(model, "bfloat16")
        return {"versions": out, "offsets": rank_offsets(shapes), "digests": digests(want)}

    return asyncio.run(train())


def every_dtype() -> Any:
    """All dtypes that torch has a name for, a scalar, an empty tensor and a view that is not contiguous."""
    from windlass.extract.chunk import WeightChunk

    conf = config([{}])
    if rank("every_dtype") > 1:
        return None
    if rank() == 1:
        return serve(conf, 0, EngineShape())
    tensors: dict[str, torch.Tensor] = {
        str(dtype): torch.arange(24).view(4, 6).to(dtype)
        for dtype in (
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.int8,
            torch.bool,
            torch.float8_e4m3fn,
        )
    }
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.empty(0, 4)
    tensors["view"] = torch.arange(12.0).view(3, 4).t()

    async def train() -> Any:
        client = InferenceEngineClient([Posted(1)], timeout=WAIT_S)
        strategy = strategy_from_config(conf)
        info = strategy.create_sync_info()
        sender, _ = await asyncio.gather(
            asyncio.to_thread(strategy.create_sender, info), client.init_weight_transfer(info)
        )

        async def chunks() -> AsyncIterator[WeightChunk]:
            yield WeightChunk.of(tensors.items())

        await sender.send_chunks(chunks(), client)
        await client.aclose()
        sender.close()
        return digests(tensors)

    return asyncio.run(train())


class Watched:
    """A client that notes what happens when, and kills or stops its engine in the middle."""

    def __init__(self, mail: Mail, at: str) -> None:
        self.mail, self.at, self.updates = mail, at, 0

    async def init_weight_transfer(self, sync_info: WeightSyncInfo) -> None:
        self.mail.ask("init", [sync_info.to_dict(), 1])
        assert await asyncio.to_thread(self.mail.answered, WAIT_S) == "ok"

    async def update_weights(self, request: Any) -> None:
        self.updates += 1
        if self.updates == 2:
            if self.at == "die":
                self.mail.ask("die", None)
                await asyncio.sleep(WAIT_S)
            if self.at == "refuse":
                raise RuntimeError("engine 1: no such parameter")
            if self.at == "silent":
                await asyncio.sleep(WAIT_S)
        self.mail.ask("update", request.to_dict())
        said = await asyncio.to_thread(self.mail.answered, WAIT_S)
        if said != "ok":
            raise RuntimeError(said)


def an_engine_fails(how: str) -> Any:
    """The engine takes the first chunk and not the second one, which is too large for the buffers of a socket."""
    from windlass.extract.chunk import WeightChunk

    conf = config([{}], timeout=2.0)
    if rank(f"fails {how}") > 1:
        return None
    if rank() == 1:
        # In a process of its own, which may be killed.
        program = f"import broadcast_ranks as b; b.rank({_scene[0]!r}); b.serve({conf!r}, 0, b.EngineShape())"
        child = subprocess.Popen([sys.executable, "-c", program])
        try:
            board().wait([f"{_scene[0]}/done"], timedelta(seconds=WAIT_S))
        finally:
            child.kill()
            code = child.wait()
        return code
    strategy = strategy_from_config(conf)
    client = Watched(Mail(1), how)

    async def train() -> Any:
        info = strategy.create_sync_info()
        sender, _ = await asyncio.gather(
            asyncio.to_thread(strategy.create_sender, info), client.init_weight_transfer(info)
        )
        chunks = [WeightChunk.of([(f"layers.{i}.weight", torch.zeros(4_000_000))]) for i in range(3)]
        begun = time.monotonic()
        errors = []
        for _ in range(2):
            try:
                await sender.send_chunks(chunks[: client.updates or 3], client)
            except Exception as e:
                errors.append([type(e).__name__, str(e)])
        seconds = time.monotonic() - begun
        sender.close()
        board().set(f"{_scene[0]}/done", "1")
        return {"seconds": seconds, "errors": errors, "updates": client.updates}

    return asyncio.run(train())


def trainer_ranks(fail_at: int) -> Any:
    """Ranks 0 and 1 train in a group of their own, rank 2 is the engine. One barrier per chunk and no hang."""
    import torch.distributed as dist

    conf = config([{}], timeout=60.0)
    if rank(f"trainers {fail_at}") == 2:
        return serve(conf, 0, EngineShape())
    dist.init_process_group("gloo", store=dist.PrefixStore("trainers", board()), rank=rank(), world_size=2)
    meetings = []
    reduce = dist.all_reduce

    def counted(*args: Any, **named: Any) -> Any:
        meetings.append(1)
        return reduce(*args, **named)

    dist.all_reduce = counted
    # The second one does not fit into the buffers of a socket: without a receiver, its broadcast waits.
    sizes = {"a": 4, "b": 8 << 20, "c": 4}
    model = torch.nn.ParameterDict({name: torch.zeros(size) for name, size in sizes.items()})
    return asyncio.run(_train_two(conf, model, meetings, fail_at))


def _begun(nth: int) -> threading.Event:
    """Set when the sender's thread is about to make its nth broadcast."""
    from windlass.transfer.group import UpdateGroup

    event, calls, broadcast = threading.Event(), [], UpdateGroup.broadcast

    def noted(self: UpdateGroup, tensor: torch.Tensor, timeout: float, what: str) -> None:
        calls.append(what)
        if len(calls) == nth:
            event.set()
        broadcast(self, tensor, timeout, what)

    UpdateGroup.broadcast = noted  # type: ignore[method-assign]
    return event


async def _train_two(conf: dict[str, Any], model: Any, meetings: list[int], fail_at: int) -> Any:
    strategy = strategy_from_config(conf)
    engine = Posted(2) if rank() == 0 else None
    client = InferenceEngineClient([engine], timeout=60.0, prefix_cache="keep") if engine else None
    if client is not None and fail_at:
        update, count = engine.update_weights, 0  # type: ignore[union-attr]
        begun_to_send = _begun(fail_at)

        async def failing(request: Any) -> None:
            nonlocal count
            count += 1
            if count == fail_at:
                await asyncio.to_thread(begun_to_send.wait, WAIT_S)
                raise RuntimeError("the engine said no")
            await update(request)

        engine.update_weights = failing  # type: ignore[union-attr, method-assign]
    manager = WeightSyncManager(strategy, ModuleWeightExtractor(), client, timeout=60.0)
    await manager.initialize()
    before, begun = len(meetings), time.monotonic()
    error = None
    try:
        await manager.sync_weights(model)
    except Exception as e:
        error = [type(e).__name__, str(e)]
    out = {"meetings": len(meetings) - before, "error": error, "seconds": time.monotonic() - begun}
    if client is not None:
        await client.aclose()
    manager.close()
    return out


def announced_first() -> Any:
    """Notes the order of announcement and collective on the trainer."""
    from windlass.extract.chunk import WeightChunk
    from windlass.transfer.group import UpdateGroup

    conf = config([{}])
    if rank("announced_first") > 1:
        return None
    if rank() == 1:
        return serve(conf, 0, EngineShape())
    order: list[str] = []
    broadcast = UpdateGroup.broadcast

    def noted(self: UpdateGroup, tensor: torch.Tensor, timeout: float, what: str) -> None:
        order.append(f"broadcast {what}")
        broadcast(self, tensor, timeout, what)
        order.append(f"sent {what}")

    class Noted(Posted):
        async def update_weights(self, request: Any) -> None:
            order.append("announced " + " ".join(request.names))
            await super().update_weights(request)
            order.append("loaded " + " ".join(request.names))

    UpdateGroup.broadcast = noted  # type: ignore[method-assign]

    async def train() -> Any:
        client = InferenceEngineClient([Noted(1)], timeout=WAIT_S)
        strategy = strategy_from_config(conf)
        info = strategy.create_sync_info()
        sender, _ = await asyncio.gather(
            asyncio.to_thread(strategy.create_sender, info), client.init_weight_transfer(info)
        )
        chunks = [
            WeightChunk.of([("a", torch.ones(3)), ("b", torch.ones(2))]),
            WeightChunk.of([("c", torch.ones(1))]),
        ]
        await sender.send_chunks(chunks, client)
        await client.aclose()
        sender.close()
        return order

    try:
        return asyncio.run(train())
    finally:
        UpdateGroup.broadcast = broadcast  # type: ignore[method-assign]


def peak_memory(mib: int, count: int) -> Any:
    """How much the receiver's memory grows while it receives ``count`` tensors of ``mib`` MiB and keeps none."""
    import threading

    from windlass.extract.chunk import WeightChunk

    conf = config([{}])
    size = mib << 18
    if rank("memory") > 1:
        return None
    if rank() == 0:

        async def train() -> Any:
            client = InferenceEngineClient([Posted(1)], timeout=WAIT_S)
            strategy = strategy_from_config(conf)
            info = strategy.create_sync_info()
            sender, _ = await asyncio.gather(
                asyncio.to_thread(strategy.create_sender, info), client.init_weight_transfer(info)
            )
            tensor = torch.zeros(size)
            await sender.send_chunks([WeightChunk.of([(f"w{i}", tensor) for i in range(count)])], client)
            await client.aclose()
            sender.close()

        asyncio.run(train())
        return None

    class Dropped(WeightLoader):
        async def load_weights(self, named_tensors: NamedTensors) -> None:
            async for _, tensor in each_tensor(named_tensors):
                del tensor

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], resident())

    strategy, mail = strategy_from_config(conf), Mail(1)
    what, value = mail.asked()
    receiver = strategy.create_receiver(WeightSyncInfo.from_dict(value[0]), rank=1)
    mail.answer("ok")
    what, value = mail.asked()
    start = resident()
    watcher = threading.Thread(target=watch)
    watcher.start()
    asyncio.run(receiver.receive_and_load_weights(parse_request(value), Dropped()))
    done.set()
    watcher.join()
    mail.answer("ok")
    mail.asked()
    receiver.close()
    mail.answer("ok")
    return {"peak": (peak[0] - start) >> 20, "after": (resident() - start) >> 20}


def join_twice() -> Any:
    """Both processes are in a group, are refused a second one of its name, and then override the first."""
    from windlass.transfer.group import UpdateGroup, open_store
    from windlass.transfer.sync_info import TorchDistributedWeightSyncInfo

    if rank("twice") > 1:
        return None
    infos = []
    stores = []
    letters = board()
    for turn in range(2):
        if rank() == 0:
            store = open_store("127.0.0.1", 20.0)
            stores.append(store)
            letters.set(f"twice/{turn}", str(store.port))
        port = int(letters.get(f"twice/{turn}"))
        infos.append(TorchDistributedWeightSyncInfo("127.0.0.1", port, 2, backend="gloo"))
    mine = stores if rank() == 0 else [None, None]
    first = UpdateGroup(infos[0], rank(), store=mine[0], timeout=100)
    # One rank is in before the other, which would be told that a peer left if the group were overridden then.
    letters.set(f"twice/joined/{rank()}", "")
    letters.get(f"twice/joined/{1 - rank()}")
    try:
        UpdateGroup(infos[1], rank(), store=mine[1], timeout=100)
        refused = ""
    except Exception as e:
        refused = str(e)
    second = UpdateGroup(infos[1], rank(), store=mine[1], timeout=100, override=True)
    tensor = torch.full((1,), 7.0 if rank() == 0 else 0.0)
    second.broadcast(tensor, 20, "w")
    second.close()
    return {"refused": refused, "first_closed": first.closed, "received": tensor.item()}


def legacy_broadcast() -> Any:
    """The trainer announces by the older dictionaries, one for each parameter."""
    from windlass.extract.chunk import WeightChunk

    conf = config([{}])
    if rank("legacy") == 1:
        return serve(conf, 0, EngineShape())
    sent: list[Any] = []

    class Older(Posted):
        async def update_weights(self, request: Any) -> None:
            for plain in request.to_legacy_dicts():
                sent.append(plain)
                await self._tell("update", plain)

    async def train() -> Any:
        client = InferenceEngineClient([Older(1)], timeout=WAIT_S)
        strategy = strategy_from_config(conf)
        info = strategy.create_sync_info()
        sender, _ = await asyncio.gather(
            asyncio.to_thread(strategy.create_sender, info), client.init_weight_transfer(info)
        )
        tensors = {"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
        await sender.send_chunks([WeightChunk.of(tensors.items())], client)
        await client.aclose()
        sender.close()
        return {"sent": sent, "digests": digests(tensors)}

    return asyncio.run(train())


def by_the_nodes_own_address() -> Any:
    """Nobody names an address: the engine finds the trainer at the one that its sync info has."""
    from windlass.extract.chunk import WeightChunk

    conf = config([{}], master_addr=None)
    if rank("node address") > 1:
        return None
    if rank() == 1:
        return serve(conf, 0, EngineShape())

    async def train() -> Any:
        client = InferenceEngineClient([Posted(1)], timeout=WAIT_S, prefix_cache="keep")
        strategy = strategy_from_config(conf)
        info = strategy.create_sync_info()
        sender, _ = await asyncio.gather(
            asyncio.to_thread(strategy.create_sender, info), client.init_weight_transfer(info)
        )
        await sender.send_chunks([WeightChunk.of([("w", torch.arange(5.0))])], client)
        await client.aclose()
        sender.close()
        return {"address": info.to_dict()["master_addr"], "digests": digests({"w": torch.arange(5.0)})}

    return asyncio.run(train())


def caches_are_emptied(fails: bool) -> Any:
    """Ranks 0 and 1 train, rank 2 is the engine: what happens when, on each of the trainers."""
    import torch.distributed as dist

    from windlass.transfer import sync
    from windlass.transfer.trainer import TrainerRanks

    conf = config([{}], timeout=60.0)
    if rank(f"caches {fails}") == 2:
        return serve(conf, 0, EngineShape())
    dist.init_process_group("gloo", store=dist.PrefixStore("trainers", board()), rank=rank(), world_size=2)
    notes: list[str] = []
    meet = TrainerRanks.meet

    def noted(self: TrainerRanks, failure: Exception | None, timeout: float, what: str) -> None:
        notes.append(f"meet to {what}")
        meet(self, failure, timeout, what)

    class Noted(Posted):
        async def update_weights(self, request: Any) -> None:
            notes.append("update")
            if fails:
                raise RuntimeError("the engine said no")
            await super().update_weights(request)

    async def train() -> Any:
        client = InferenceEngineClient([Noted(2)], timeout=60.0, prefix_cache="keep") if rank() == 0 else None
        manager = WeightSyncManager(strategy_from_config(conf), ModuleWeightExtractor(), client, timeout=60.0)
        await manager.initialize()
        TrainerRanks.meet = noted  # type: ignore[method-assign]
        # What a process without a GPU does not do.
        sync._empty_cache = lambda: notes.append("empty")
        error = None
        try:
            await manager.sync_weights(torch.nn.ParameterDict({"w": torch.zeros(4)}))
        except Exception as e:
            error = str(e)
        if client is not None:
            await client.aclose()
        manager.close()
        return {"notes": notes, "error": error}

    return asyncio.run(train())
