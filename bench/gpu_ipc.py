"""Weights from a trainer's process into fused parameters of an engine's on the same GPU, by the wall clock.

    PYTHONPATH=python python bench/gpu_ipc.py [--size 0.6B 1.7B 8B] [--repeats 10] [--json FILE]

Needs a CUDA device, torch and the built extension. Layouts are those of `bench/gpu.py`, in bf16.

| figure | what |
|---|---|
| copy | one device-to-device copy of as many bytes, until it is done |
| STRATEGY, load | the engine's side: from the text of a request to parameters that hold it, summed over the requests of a sync; reading the request, control and waiting for the GPU included |
| STRATEGY, sync | the trainer's side, all of it, by the wall clock: requests, answers, until no copy is under way |
| STRATEGY, moved, sync | the same when every parameter lies elsewhere than in the sync before: what is packed is packed |
| torch, load | parameters by torch's own reductions, each copied to its place: from the pickle to the end of the copies |

The bar, for 8B and buckets of 1 GB, the default: sync <= 1.8 of copy. How many requests a sync has, and how much of it was
packed, is printed with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "bench")]

from multiprocessing.reduction import ForkingPickler  # noqa: E402

import needs  # noqa: E402

needs.need("torch", "windlass")

import torch  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

MODELS = {
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "1.7B": (2048, 6144, 28, 16, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def shapes(model: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and fused parameter of every tensor."""
    hidden, inner, layers, heads, kv, tied = MODELS[model]
    vocab, head = 151_936, 128
    found: list[tuple[str, tuple[int, ...], str]] = [("embed", (vocab, hidden), "embed")]
    if not tied:
        found.append(("lm_head", (vocab, hidden), "lm_head"))
    for i in range(layers):
        p = f"model.layers.{i}."
        found += [
            (p + "self_attn.q_proj.weight", (heads * head, hidden), p + "qkv"),
            (p + "self_attn.k_proj.weight", (kv * head, hidden), p + "qkv"),
            (p + "self_attn.v_proj.weight", (kv * head, hidden), p + "qkv"),
            (p + "self_attn.o_proj.weight", (hidden, heads * head), p + "o"),
            (p + "mlp.gate_proj.weight", (inner, hidden), p + "gate_up"),
            (p + "mlp.up_proj.weight", (inner, hidden), p + "gate_up"),
            (p + "mlp.down_proj.weight", (hidden, inner), p + "down"),
            (p + "input_layernorm.weight", (hidden,), p + "in"),
            (p + "post_attention_layernorm.weight", (hidden,), p + "post"),
            (p + "self_attn.q_norm.weight", (head,), p + "qn"),
            (p + "self_attn.k_norm.weight", (head,), p + "kn"),
        ]
    return [*found, ("model.norm.weight", (hidden,), "norm")]


def engine(pipe: Any, model: str) -> None:
    """Fused parameters, and whatever is asked for."""
    from windlass import strategy_from_config
    from windlass.load.planned import PlannedLoader
    from windlass.load.trace import Copy
    from windlass.transfer.request import parse_request

    rows = shapes(model)
    sizes: dict[str, int] = {}
    for _, shape, parameter in rows:
        sizes[parameter] = sizes.get(parameter, 0) + torch.Size(shape).numel()
    names = list(sizes)
    parameters = [torch.zeros(n, dtype=torch.bfloat16, device="cuda") for n in sizes.values()]
    filled, copies, places = dict.fromkeys(names, 0), [], {}
    for name, shape, parameter in rows:
        count, at = torch.Size(shape).numel(), filled[parameter]
        copies.append(Copy(name, 0, (1,), names.index(parameter), at, (1,), (count,)))
        places[name] = parameters[names.index(parameter)][at : at + count].view(shape)
        filled[parameter] += count
    loader = PlannedLoader(parameters, copies)
    receiver: Any = None
    # As a server, which has one.
    loop = asyncio.new_event_loop()
    pipe.send("ready")
    while True:
        op = pipe.recv()
        answer: Any = None
        if op == "end":
            return
        if op in ("cuda_ipc", "packed_cuda_ipc"):
            if receiver is not None:
                receiver.close()
            strategy = strategy_from_config({"strategy": op})
            receiver = strategy.create_receiver(strategy.create_sync_info())
        elif op == "copy":
            total = sum(sizes.values())
            one, two = (torch.zeros(total, dtype=torch.bfloat16, device="cuda") for _ in range(2))
            answer = []
            for _ in range(14):
                torch.cuda.synchronize()
                began = time.perf_counter()
                two.copy_(one)
                torch.cuda.synchronize()
                answer.append((time.perf_counter() - began) * 1e3)
            answer = answer[4:]
            del one, two
            torch.cuda.empty_cache()
        elif op == "update":
            text = pipe.recv_bytes()
            began = time.perf_counter()
            loop.run_until_complete(receiver.receive_and_load_weights(parse_request(text), loader))
            torch.cuda.synchronize()
            answer = (time.perf_counter() - began) * 1e3
        elif op == "go":
            # As a server would: it answers as soon as everything is started.
            request = parse_request(pipe.recv_bytes())
            loop.run_until_complete(receiver.receive_and_load_weights(request, loader))
        elif op == "torch":
            text = pipe.recv_bytes()
            began = time.perf_counter()
            for name, tensor in pickle.loads(text):
                places[name].copy_(tensor)
            torch.cuda.synchronize()
            answer = (time.perf_counter() - began) * 1e3
        elif op == "sums":
            answer = {
                name: place.view(torch.int16).sum(dtype=torch.int64).item() for name, place in places.items()
            }
        pipe.send(answer)


class Client:
    """Requests by a pipe. With `waits`, the engine's GPU is waited for in every request, and its time told."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.waits, self.spent, self.requests = pipe, True, 0.0, 0

    async def update_weights(self, request: Any) -> None:
        self.requests += 1
        if self.waits:
            # What is packed for this request is there when the engine begins.
            torch.cuda.synchronize()
        self.pipe.send("update" if self.waits else "go")
        self.pipe.send_bytes(request.to_json().encode())
        told = await asyncio.to_thread(self.pipe.recv)
        self.spent += told or 0.0


def buckets(weights: dict[str, torch.Tensor], size: int) -> list[Any]:
    from windlass.extract.chunk import WeightChunk

    made: list[list[tuple[str, torch.Tensor]]] = [[]]
    room = size
    for name, tensor in weights.items():
        if made[-1] and tensor.nbytes > room:
            made.append([])
            room = size
        made[-1].append((name, tensor))
        room -= tensor.nbytes
    return [WeightChunk.of(pairs) for pairs in made]


def measure(model: str, repeats: int) -> dict[str, Any]:
    from windlass import strategy_from_config

    here, there = mp.Pipe()
    child = mp.Process(target=engine, args=(there, model), daemon=True)
    child.start()
    assert here.poll(120) and here.recv() == "ready"
    told: dict[str, list[float]] = {}

    def ask(op: str) -> Any:
        here.send(op)
        return here.recv()

    def note(name: str, values: list[float]) -> float:
        told[name] = values
        say(f"  {name:34} {statistics.median(values):9.3f} ms [{min(values):.3f}..{max(values):.3f}]")
        return statistics.median(values)

    weights = {
        n: torch.empty(s, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02) for n, s, _ in shapes(model)
    }
    size = sum(t.nbytes for t in weights.values())
    want = {name: t.view(torch.int16).sum(dtype=torch.int64).item() for name, t in weights.items()}
    say(f"{model}: {len(weights)} tensors, {size / 1e9:.2f} GB")
    copy = note("copy", ask("copy"))
    client, ratio = Client(here), {}
    held: list[dict[str, torch.Tensor]] = []
    for kind, gigabytes in (
        ("packed_cuda_ipc", 1),
        ("cuda_ipc", 1),
        ("packed_cuda_ipc", 64),
    ):
        chunks = buckets(weights, gigabytes << 30)
        strategy = strategy_from_config({"strategy": kind})
        ask(kind)
        label = f"{kind}, {len(chunks)} of {gigabytes} GB"
        with strategy.create_sender(strategy.create_sync_info()) as sender:
            loads, syncs = [], []
            for _ in range(3 + repeats):
                client.waits, client.spent = True, 0.0
                asyncio.run(sender.send_chunks(chunks, client))
                loads.append(client.spent)
                client.waits, client.requests = False, 0
                torch.cuda.synchronize()
                began = time.perf_counter()
                asyncio.run(sender.send_chunks(chunks, client))
                syncs.append((time.perf_counter() - began) * 1e3)
            assert ask("sums") == want
            ratio[f"{label}, load"] = note(f"{label}, load", loads[3:]) / copy
            ratio[f"{label}, sync"] = note(f"{label}, sync", syncs[3:]) / copy
            of_copy = f"load {ratio[label + ', load']:.2f}, sync {ratio[label + ', sync']:.2f}"
            met = " (bar 1.8)" if model == "8B" and gigabytes == 1 else ""
            say(f"  {'of copy':34} {of_copy}{met}, {client.requests} requests")
            if gigabytes == 1:
                moved = []
                for i in range(2 + min(repeats, 4)):
                    # Other memory, which the allocator has had before: nothing is freed in between.
                    held.append({name: tensor.clone() for name, tensor in weights.items()})
                    del held[:-2]
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    asyncio.run(sender.send_chunks(buckets(held[-1], gigabytes << 30), client))
                    if i > 1:
                        moved.append((time.perf_counter() - began) * 1e3)
                assert ask("sums") == want
                ratio[f"{label}, moved"] = note(f"{label}, moved", moved) / copy
                say(f"  {'of copy':34} sync {ratio[label + ', moved']:.2f}")
                held.clear()
            ask(kind)
        torch.cuda.empty_cache()
    times = []
    for _ in range(3 + repeats):
        here.send("torch")
        here.send_bytes(bytes(ForkingPickler.dumps(list(weights.items()))))
        times.append(here.recv())
    assert ask("sums") == want
    ratio["torch, load"] = note("torch, load", times[3:]) / copy
    say(f"  {'of copy':34} load {ratio['torch, load']:.2f}")
    here.send("end")
    child.join(30)
    return {"bytes": size, "ms": told, "of_copy": ratio}


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "--size", "--sizes", dest="sizes", nargs="+", type=needs.one_of(MODELS), default=list(MODELS)
    )
    arguments.add_argument("--repeats", type=needs.whole(1), default=10)
    arguments.add_argument("--json", help="where to write everything that was measured")
    given = arguments.parse_args()
    needs.need_device()
    mp.set_start_method("spawn")
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    result = {model: measure(model, given.repeats) for model in given.sizes}
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
