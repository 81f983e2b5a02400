"""CUDA IPC between processes on one GPU: both strategies, expandable segments, killed peers, fifty syncs.

    PYTHONPATH=python python tests/gpu/ipc.py [NAME...]

Needs torch, a CUDA device and the built extension. A trainer is this process or a child of it; engines are children that
get requests as text, as a server would, and tell digests of what they hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import needs

needs.need("torch", "windlass")

import torch  # noqa: E402

from windlass import WeightLoader, WeightSyncManager, strategy_from_config  # noqa: E402
from windlass.errors import WindlassError, WindlassUnsupported  # noqa: E402
from windlass.extract import ModuleWeightExtractor  # noqa: E402
from windlass.extract.chunk import WeightChunk  # noqa: E402
from windlass.load.planned import PlannedLoader  # noqa: E402
from windlass.load.trace import Copy  # noqa: E402
from windlass.transfer.base import each_tensor  # noqa: E402
from windlass.transfer.request import parse_request  # noqa: E402

KINDS = ("cuda_ipc", "packed_cuda_ipc")
PATIENCE = 240
#: Cycles of a kernel that does nothing: about a second and a half.
LONG = 2_500_000_000


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()


def settings(kind: str) -> dict[str, Any]:
    return {"strategy": kind, "timeout": 60.0}


class Keep(WeightLoader):
    """Copies what comes, on the current stream, and is in no hurry if told so."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.idle = 0

    async def load_weights(self, named_tensors: Any) -> None:
        if self.idle:
            torch.cuda._sleep(self.idle)
        async for name, tensor in each_tensor(named_tensors):
            self.tensors[name] = tensor.clone()


FUSED = ("q", "k", "v", "turned")


class Fused:
    """A parameter of three parts, and one that is turned."""

    def __init__(self) -> None:
        bf16 = torch.bfloat16
        self.qkv = torch.zeros(96, 40, dtype=bf16, device="cuda")
        self.turned = torch.zeros(30, 50, dtype=bf16, device="cuda")
        rows = [Copy(n, 0, (40, 1), 0, i * 32 * 40, (40, 1), (32, 40)) for i, n in enumerate("qkv")]
        turn = Copy("turned", 0, (1, 30), 1, 0, (50, 1), (30, 50))
        self.loader = PlannedLoader([self.qkv, self.turned], [*rows, turn])

    def tensors(self) -> dict[str, torch.Tensor]:
        parts = dict(zip("qkv", self.qkv.split(32)))
        return {**parts, "turned": self.turned.t()}


def serve() -> None:
    """An engine: a line of JSON in, a line out."""
    receiver: Any = None
    keep, fused, loader = Keep(), None, None
    for line in sys.stdin:
        words = json.loads(line)
        op, answer = words.pop("op"), None
        try:
            if op == "init":
                strategy = strategy_from_config(settings(words["kind"]))
                receiver = strategy.create_receiver(strategy.create_sync_info())
                keep = loader = Keep()
                fused = Fused() if words.get("fused") else None
            elif op == "update":
                used = fused.loader if fused is not None else loader
                asyncio.run(receiver.receive_and_load_weights(parse_request(words["request"]), used))
            elif op == "digests":
                held = fused.tensors() if fused is not None else keep.tensors
                answer = {name: digest(tensor) for name, tensor in held.items()}
            elif op == "idle":
                keep.idle = words["cycles"]
            elif op == "facts":
                keep.tensors.clear()
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                answer = [len(os.listdir("/proc/self/fd")), threading.active_count(), allocations(receiver)]
            elif op == "release":
                receiver.release()
            elif op == "close":
                receiver.close()
        except WindlassError as e:
            say(json.dumps({"error": type(e).__name__, "message": str(e)}))
        else:
            say(json.dumps({"ok": answer}))


def allocations(receiver: Any) -> int:
    host = receiver._opener._host
    return 0 if host is None else len(host.allocations)


class Engine:
    """An engine in a process of its own, and the client that speaks to it."""

    def __init__(self, kind: str, fused: bool = False) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.requests: list[Any] = []
        self.ask("init", kind=kind, fused=fused)

    def tell(self, op: str, **words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **words}) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ConnectionError("the engine is gone")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{answer['error']}: {answer['message']}")
        return answer["ok"]

    def ask(self, op: str, **words: Any) -> Any:
        self.tell(op, **words)
        return self.hear()

    async def init_weight_transfer(self, sync_info: Any) -> None:
        """Nothing: it is ready."""

    async def update_weights(self, request: Any) -> None:
        plain = json.loads(json.dumps(request.to_dict()))
        self.requests.append(plain)
        await asyncio.to_thread(self.ask, "update", request=plain)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=30)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


@contextlib.contextmanager
def engine(kind: str, fused: bool = False) -> Iterator[Engine]:
    made = Engine(kind, fused)
    try:
        yield made
    finally:
        made.kill()


@contextlib.contextmanager
def sender(kind: str) -> Iterator[Any]:
    strategy = strategy_from_config(settings(kind))
    with strategy.create_sender(strategy.create_sync_info()) as made:
        yield made


def odd() -> dict[str, torch.Tensor]:
    """Tensors of every dtype and of odd sizes, places and strides."""
    torch.manual_seed(7)
    kinds = [
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16,
        torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
    ]  # fmt: skip
    all_ = {}
    for i, kind in enumerate(kinds):
        for size in (1, 3, 1000 + i, 70_001):
            all_[f"{kind}.{size}".replace("torch.", "")] = (
                torch.randn(size, device="cuda").abs().mul(50).to(kind)
            )
    wide = torch.randn(300, 1000, device="cuda").bfloat16()
    all_ |= {
        "large": torch.randn(3000, 2048, device="cuda").bfloat16(),
        "turned": torch.randn(65, 129, device="cuda").t(),
        "columns": wide[:, 3:300],
        "steps": wide[::3, ::2],
        "unaligned": torch.randn(5001, device="cuda").bfloat16()[1:],
        "bytes": torch.randint(0, 255, (9999,), device="cuda").to(torch.uint8)[3:],
        "scalar": torch.randn((), device="cuda"),
        "empty": torch.randn(0, 4, device="cuda"),
        "host": torch.randn(9, 9),
    }
    return all_


def step(weights: dict[str, torch.Tensor]) -> None:
    for tensor in weights.values():
        if tensor.dtype == torch.bool:
            tensor.logical_not_()
        elif tensor.numel():
            raw = tensor if tensor.itemsize == 1 and tensor.dtype == torch.uint8 else None
            if raw is not None:
                raw.add_(1)
            elif tensor.itemsize == 1 and tensor.dtype.is_floating_point:
                tensor.view(torch.uint8).bitwise_xor_(1)
            else:
                tensor.mul_(2) if not tensor.dtype.is_floating_point else tensor.mul_(1.5)


def buckets(weights: dict[str, torch.Tensor], count: int = 3) -> list[WeightChunk]:
    pairs = list(weights.items())
    return [WeightChunk.of(pairs[i::count]) for i in range(count)]


def sync(made: Any, weights: dict[str, torch.Tensor], to: Engine, count: int = 3) -> None:
    asyncio.run(made.send_chunks(buckets(weights, count), to))


def same(weights: dict[str, torch.Tensor], to: Engine, only: Any = None) -> None:
    want = {name: digest(tensor) for name, tensor in weights.items()}
    found = to.ask("digests")
    differ = [name for name in want if found.get(name) != want[name]]
    assert not differ and (only or set(found) == set(want)), differ


def test_every_dtype_size_and_stride() -> None:
    for kind in KINDS:
        with engine(kind) as to, sender(kind) as made:
            weights = odd()
            for _ in range(4):
                step(weights)
                sync(made, weights, to)
                same(weights, to)
            handles = to.requests[0]["ipc_handles"]
            assert (len(handles) > 1) == (kind == "cuda_ipc")
            key = next(iter(handles[0] if kind == "cuda_ipc" else handles))
            # As torch tells it, which asks the driver by itself.
            assert key == f"GPU-{torch.cuda.get_device_properties(0).uuid}" == made._arena.device
            say(f"  {kind}: {len(weights)} tensors, {to.ask('facts')[2]} allocations open")


def test_a_sync_casts_on_the_device_and_gives_the_cache_back() -> None:
    """By the facade: parameters of fp32 are extracted as bf16 where they are, and torch keeps nothing that it does not use."""
    model = torch.nn.Sequential(torch.nn.Linear(1000, 3000), torch.nn.Linear(3000, 501)).cuda()
    places: set[str] = set()

    class Noted(ModuleWeightExtractor):
        def extract_weights(self, *given: Any, **how: Any) -> Iterator[WeightChunk]:
            for chunk in super().extract_weights(*given, **how):
                places.update(f"{tensor.device.type} {tensor.dtype}" for tensor in chunk.tensors)
                yield chunk

    async def run(kind: str, to: Engine) -> None:
        manager = WeightSyncManager(strategy_from_config(settings(kind)), Noted(), to, timeout=60.0)
        await manager.initialize()
        for version in (1, 2, 3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_()
            # A trainer's step leaves memory behind that nobody uses.
            torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
            cached = torch.cuda.memory_reserved()
            assert await manager.sync_weights(model, "bfloat16") == version
            assert torch.cuda.memory_reserved() <= cached - (256 << 20)
            same({name: tensor.detach().bfloat16() for name, tensor in model.named_parameters()}, to)
        manager.close()

    for kind in KINDS:
        with engine(kind) as to:
            asyncio.run(run(kind, to))
    assert places == {"cuda torch.bfloat16"}, places


def test_fused_parameters_in_one_launch() -> None:
    for kind in KINDS:
        with engine(kind, fused=True) as to, sender(kind) as made:
            weights = {n: torch.randn(32, 40, device="cuda").bfloat16() for n in "qkv"}
            weights["turned"] = torch.randn(50, 30, device="cuda").bfloat16()
            for _ in range(4):
                step(weights)
                sync(made, weights, to, 2)
                same(weights, to)


def test_parameters_that_stay_are_read_where_they_are() -> None:
    for kind in KINDS:
        with engine(kind, fused=True) as to, sender(kind) as made:
            weights = {n: torch.randn(32, 40, device="cuda").bfloat16() for n in "qkv"}
            weights["turned"] = torch.randn(50, 30, device="cuda").bfloat16()
            gathered, gather = [0], made._arena._gather

            def noted(
                share: Any, half: int, tensors: Any, at: Any, count: Any = gathered, to_: Any = gather
            ) -> None:
                count[-1] += len(tensors)
                to_(share, half, tensors, at)

            made._arena._gather = noted
            requests = []
            for i in range(6):
                step(weights)
                if i == 4:
                    # One moves, and is packed once.
                    weights["k"] = weights["k"].clone()
                to.requests.clear()
                sync(made, weights, to, 4)
                same(weights, to)
                requests.append(len(to.requests))
                gathered.append(0)
            say(f"  {kind}: gathered {gathered[:-1]}, requests {requests}")
            packs = kind == "packed_cuda_ipc"
            assert gathered == [4 * packs, 0, 0, 0, 1 * packs, 0, 0], gathered
            assert requests[:4] == [4, 3, 3, 3] and requests[5] == 3, requests


def test_neither_side_waits_for_its_gpu_and_nothing_is_torn() -> None:
    for kind in KINDS:
        with engine(kind) as to, sender(kind) as made:
            weights = {f"w{i}": torch.full((1 << 22,), float(i), device="cuda") for i in range(6)}
            sync(made, weights, to, 6)
            # The trainer's stream is behind: what is sent is what it will hold.
            torch.cuda._sleep(LONG // 4)
            step(weights)
            sync(made, weights, to, 6)
            same(weights, to)
            # The engine's stream is behind: halves are not written again before its copies are done.
            to.ask("idle", cycles=LONG // 20)
            began = time.monotonic()
            sync(made, weights, to, 6)
            took = time.monotonic() - began
            # What was lent may be changed as soon as the sync is over.
            want = {name: digest(tensor) for name, tensor in weights.items()}
            step(weights)
            torch.cuda.synchronize()
            assert to.ask("digests") == want
            say(f"  {kind}: six slow buckets in {took:.2f} s")


TRAINER = """
import asyncio, json, sys, torch
sys.path.insert(0, {folder!r})
import ipc
kind, idle = sys.argv[1], int(sys.argv[2])
weights = {{f"w{{i}}": torch.arange(1 << 20, device="cuda").float() for i in range(4)}}
torch.cuda.synchronize()
class Client:
    number = 0
    async def update_weights(self, request):
        self.number += 1
        ipc.say(json.dumps(request.to_dict()))
        # The first is answered; the second never is.
        await asyncio.to_thread(sys.stdin.readline)
def chunks():
    yield from ipc.buckets(weights, 1)
    if idle:
        for _ in range(4):
            torch.cuda._sleep(ipc.LONG)
    yield from ipc.buckets(weights, 1)
with ipc.sender(kind) as made:
    asyncio.run(made.send_chunks(chunks(), Client()))
"""


def waits(pid: int) -> bool:
    """Whether a process is in a call that takes its time."""
    names = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/comm") as file:
            names.append(file.read().strip())
    return "windlass-call" in names


def test_a_trainer_that_is_killed_in_the_middle() -> None:
    program = TRAINER.format(folder=os.path.dirname(os.path.abspath(__file__)))
    for kind in KINDS:
        with engine(kind) as to:
            for idle in (0, 1):
                trainer = subprocess.Popen(
                    [sys.executable, "-c", program, kind, str(idle)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )  # fmt: skip
                assert trainer.stdout is not None and trainer.stdin is not None
                to.ask("update", request=json.loads(trainer.stdout.readline()))
                assert set(to.ask("digests").values()) == {digest(torch.arange(1 << 20).float())}
                trainer.stdin.write("\n")
                trainer.stdin.flush()
                request = json.loads(trainer.stdout.readline())
                if idle:
                    # The engine waits for work of a GPU, and the process is killed while it waits.
                    to.tell("update", request=request)
                    while not waits(to.process.pid):
                        time.sleep(0.001)
                os.kill(trainer.pid, signal.SIGKILL)
                began = time.monotonic()
                trainer.wait(timeout=30)
                try:
                    if idle == 0:
                        to.ask("update", request=request)
                    else:
                        to.hear()
                    raise AssertionError("a dead trainer's memory was taken for good")
                except RuntimeError as e:
                    assert "WindlassPeerLost" in str(e), e
                    # It may still have been asking for a file descriptor.
                    said = "waiting for the GPU work" in str(e) or "is gone" in str(e)
                    assert idle == 0 or said, e
                    say(f"  {kind}, GPU {'busy' if idle else 'idle'}: {time.monotonic() - began:.2f} s: {e}")
                assert time.monotonic() - began < 30
            # And the engine serves the next one.
            with sender(kind) as made:
                weights = {"w": torch.randn(1001, device="cuda")}
                sync(made, weights, to, 1)
                same(weights, to, only=True)


def test_an_engine_that_is_killed_in_the_middle() -> None:
    for kind in KINDS:
        with sender(kind) as made:
            weights = {f"w{i}": torch.randn(1 << 22, device="cuda") for i in range(4)}
            first = Engine(kind)
            sync(made, weights, first, 4)
            first.ask("idle", cycles=4 * LONG)
            killer = threading.Timer(1.0, first.process.kill)
            killer.start()
            began = time.monotonic()
            try:
                sync(made, weights, first, 4)
                say(f"  {kind}: all was started before it was killed")
            except (ConnectionError, RuntimeError, BrokenPipeError) as e:
                say(f"  {kind}: {type(e).__name__} after {time.monotonic() - began:.2f} s")
            assert time.monotonic() - began < 20
            killer.join()
            first.kill()
            with engine(kind) as to:
                step(weights)
                sync(made, weights, to, 4)
                same(weights, to)


def test_fifty_syncs_do_not_grow() -> None:
    for kind in KINDS:
        with engine(kind) as to, sender(kind) as made:
            weights = {f"w{i}": torch.randn(200_001 + i, device="cuda") for i in range(40)}
            facts = []
            for i in range(50):
                step(weights)
                # Temporaries of a cast, anew in every sync.
                sync(made, {name: tensor.bfloat16() for name, tensor in weights.items()}, to)
                if i % 10 == 9:
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
                    free, _ = torch.cuda.mem_get_info()
                    mine = [len(os.listdir("/proc/self/fd")), threading.active_count()]
                    facts.append((free >> 20, *mine, *to.ask("facts")))
            say(f"  {kind}: free MiB, descriptors, threads, the engine's, and its allocations: {facts}")
            # More may be free at the end: processes that were killed before give their memory back in their own time.
            assert facts[1][0] - facts[-1][0] <= 64, facts
            assert facts[-1][1] <= facts[1][1] + 1 and facts[-1][3] <= facts[1][3] + 1, facts
            assert facts[-1][2] <= facts[1][2] + 1 and facts[-1][4] <= facts[1][4], facts


def test_memory_is_released_and_had_again() -> None:
    kind = "packed_cuda_ipc"
    with engine(kind) as to, sender(kind) as made:
        weights = {"w": torch.randn(1 << 28, device="cuda")}
        free = []
        for _ in range(3):
            sync(made, weights, to, 1)
            to.ask("facts")
            full = torch.cuda.mem_get_info()[0]
            made.release()
            to.ask("release")
            free.append(torch.cuda.mem_get_info()[0] - full)
        say(f"  given back, MiB: {[f >> 20 for f in free]}")
        assert all(f >= 2 << 30 for f in free), free
        sync(made, weights, to, 1)
        same(weights, to)


def test_what_cannot_be_is_named() -> None:
    with sender("packed_cuda_ipc") as made:
        strategy = strategy_from_config(settings("packed_cuda_ipc"))
        receiver: Any = strategy.create_receiver(strategy.create_sync_info())

        class Own:
            async def update_weights(self, request: Any) -> None:
                await receiver.receive_and_load_weights(request, Keep())

        try:
            asyncio.run(made.send_chunks(buckets({"w": torch.ones(3, device="cuda")}, 1), Own()))
            raise AssertionError("a process opened its own memory")
        except WindlassUnsupported as e:
            say(f"  own process: {e}")
        from windlass import _windlass

        gpu = _windlass.Gpu.open(0)
        for work in (
            lambda: _windlass.Opened.legacy(gpu, bytes(64)),
            lambda: _windlass.Signal(gpu, bytes(64)),
            lambda: _windlass.SharedMemory(gpu, 1 << 45),
            lambda: _windlass.Exported(gpu, 4096, 1),
            lambda: _windlass.CopyTable(gpu, [(0, 0, 100, [])], []).start(
                (made._arena._share._base, 99), None
            ),
        ):
            try:
                work()
                raise AssertionError("it was not refused")
            except WindlassError as e:
                say(f"  {type(e).__name__}: {e}")
        torch.zeros(1, device="cuda").add_(1).cpu()


def test_expandable_segments() -> None:
    """This script again, with torch's other allocator."""
    if os.environ.get("PYTORCH_CUDA_ALLOC_CONF"):
        return
    names = ["every_dtype", "nothing_is_torn", "fused"]
    for ipc in ("0", "1"):
        conf = {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": ipc,
        }
        done = subprocess.run(
            [sys.executable, __file__, *names],
            env={**os.environ, **conf},
            capture_output=True,
            text=True,
            timeout=150,
        )
        say(f"  TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC={ipc}:")
        for line in (done.stdout + done.stderr).splitlines():
            say("    " + line)
        assert done.returncode == 0


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("names", nargs="*")
    arguments.add_argument("--serve", action="store_true")
    given = arguments.parse_args()
    if given.serve:
        serve()
        return
    needs.need_device("CUDA IPC")
    logging.basicConfig(level=logging.INFO, format="  log: %(message)s")
    sys.exit(needs.run_tests(globals(), given.names, patience=PATIENCE))


if __name__ == "__main__":
    main()
