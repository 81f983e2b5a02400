"""A trainer and a real vLLM on one GPU: both IPC strategies, device to device, with sleeping in between.

    PYTHONPATH=python WINDLASS_VLLM_PYTHON=python3 python tests/gpu/vllm_ipc.py [--size 0.6B] [--syncs 5] [--json FILE]
    ... --device cpu --size tiny                  # without a GPU, by the host's memory; a CPU cannot sleep

Needs torch, a CUDA device unless ``--device cpu``, the built extension, and vLLM in the Python that
``WINDLASS_VLLM_PYTHON`` or ``--vllm-python`` names. The trainer is this process: random weights of a Qwen3, of which
about 1 % change before each sync. The engine is an ``LLM`` in a child process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``,
eager), made of a configuration alone. After each sync the sums of all parameters of the engine, fused ones included,
must be those of the trainer's tensors put together here by torch.

| printed | what |
|---|---|
| how | `session`: by vLLM's own reload; `dense`: directly |
| sync | by the wall clock, from the first request until vLLM has finished; medians of `--syncs` |
| of copy | the same by one device copy of as many bytes |

Each load must be done as expected: the first one and the one after sleep(2) by the session, all others directly.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "gpu"))

import needs  # noqa: E402

needs.need("torch", "windlass")

import torch  # noqa: E402

KINDS = ("packed_cuda_ipc", "cuda_ipc")
#: hidden, inner, layers, heads, kv heads, vocabulary, size of a head, tied
SIZES = {
    "tiny": (128, 256, 2, 4, 2, 512, 32, False),
    "0.6B": (1024, 3072, 28, 16, 8, 151_936, 128, True),
    "1.7B": (2048, 6144, 28, 16, 8, 151_936, 128, True),
    "8B": (4096, 12_288, 36, 32, 8, 151_936, 128, False),
}
START, PATIENCE = 400.0, 120.0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def shapes(size: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape of every tensor of the checkpoint, and the parameter of vLLM that it is a part of, in the parts' order."""
    hidden, inner, layers, heads, kv, vocabulary, head, tied = SIZES[size]
    found: dict[str, tuple[tuple[int, ...], str]] = {}

    def add(name: str, shape: tuple[int, ...], parameter: str | None = None) -> None:
        found[f"{name}.weight"] = (shape, f"{parameter or name}.weight")

    add("model.embed_tokens", (vocabulary, hidden))
    for i in range(layers):
        p = f"model.layers.{i}."
        for part, rows in (("q", heads), ("k", kv), ("v", kv)):
            add(f"{p}self_attn.{part}_proj", (rows * head, hidden), f"{p}self_attn.qkv_proj")
        add(f"{p}self_attn.o_proj", (hidden, heads * head))
        for part in ("gate", "up"):
            add(f"{p}mlp.{part}_proj", (inner, hidden), f"{p}mlp.gate_up_proj")
        add(f"{p}mlp.down_proj", (hidden, inner))
        add(f"{p}input_layernorm", (hidden,))
        add(f"{p}post_attention_layernorm", (hidden,))
        add(f"{p}self_attn.q_norm", (head,))
        add(f"{p}self_attn.k_norm", (head,))
    add("model.norm", (hidden,))
    if not tied:
        add("lm_head", (vocabulary, hidden))
    return found


def make(folder: Path, size: str, dtype: str) -> Path:
    """The configuration of a model; its weights come by syncs."""
    hidden, inner, layers, heads, kv, vocabulary, head, tied = SIZES[size]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "head_dim": head,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def total(tensor: torch.Tensor) -> list[int]:
    """Two sums over the bits of a tensor, one with the places as weights; made without Windlass."""
    kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    flat, plain, placed = tensor.detach().contiguous().view(-1).view(kind), 0, 0
    for at in range(0, flat.numel(), 1 << 24):
        bits = flat[at : at + (1 << 24)].to(torch.int64)
        places = torch.arange(at, at + bits.numel(), device=bits.device) % 65_521 + 1
        plain += int(bits.sum())
        placed += int((bits * places).sum())
    return [plain, placed]


# The engine.


def serve(model: str, device: str, memory: float) -> None:
    """An engine in this process: a line of JSON in, a line out, by descriptors of their own."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_PLUGINS", "windlass")
    on_cpu = device == "cpu"
    if on_cpu:
        os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", WINDLASS_TEST_PLAIN_WEIGHTS="1")
        # It says that vLLM is a build for CPUs, which vLLM believes.
        sys.path.insert(0, str(ROOT / "tests" / "engines" / "plugin"))
        importlib.import_module("plain_weights").register()
    questions, answers = (os.fdopen(int(n), m) for n, m in zip(os.environ["ENGINE_PIPES"].split(), "rw"))

    from vllm import LLM, SamplingParams
    from windlass.engines.vllm import extension

    extension.install()
    how: dict[str, Any] = {"gpu_memory_utilization": memory, "enable_sleep_mode": True}
    llm = LLM(
        model=model,
        dtype="float32" if on_cpu else "bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        **({} if on_cpu else how),
    )

    def call(method: str, *args: Any) -> Any:
        return llm.collective_rpc(method, args=args)[0]

    def act(op: str, words: dict[str, Any]) -> Any:
        if op == "sums":
            told = llm.apply_model(lambda m: {n: total(p) for n, p in m.named_parameters()})
            return told[0]
        if op == "sleep":
            llm.sleep(level=words["level"])
            return None
        if op == "wake":
            llm.wake_up()
            return None
        if op == "generate":
            sampling = SamplingParams(max_tokens=4, temperature=0.0, detokenize=False, ignore_eos=True)
            out = llm.generate([{"prompt_token_ids": [5, 77, 130]}], sampling, use_tqdm=False)
            return list(out[0].outputs[0].token_ids)
        return call(f"windlass_{op}", *words["args"])

    def tell(words: dict[str, Any]) -> None:
        answers.write(json.dumps(words) + "\n")
        answers.flush()

    import vllm

    tell({"ok": vllm.__version__})
    for line in questions:
        words = json.loads(line)
        try:
            tell({"ok": act(words.pop("op"), words)})
        except Exception as e:
            import traceback

            traceback.print_exc()
            tell({"error": f"{type(e).__name__}: {e}"})


class Engine:
    """The child, and the client that senders speak to."""

    def __init__(self, given: argparse.Namespace, model: Path) -> None:
        theirs, mine = os.pipe()
        heard, told = os.pipe()
        words = [given.vllm_python, __file__, "--serve", str(model), "--device", given.device]
        self.process = subprocess.Popen(
            [*words, "--memory", str(given.memory)],
            pass_fds=(theirs, told),
            env={**os.environ, "ENGINE_PIPES": f"{theirs} {told}"},
            stdin=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(told)
        self._to, self._from = os.fdopen(mine, "w"), os.fdopen(heard, "r")
        self.requests = 0

    def hear(self) -> Any:
        line = self._from.readline()
        if not line:
            raise ConnectionError(f"vLLM ended with {self.process.wait(30)}: its own output says why")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["ok"]

    def ask(self, op: str, **words: Any) -> Any:
        self._to.write(json.dumps({"op": op, **words}) + "\n")
        self._to.flush()
        return self.hear()

    def worker(self, method: str, *args: Any) -> Any:
        report = self.ask(method, args=args)
        if report.get("error") is not None:
            raise RuntimeError(report["error"])
        return report

    async def update_weights(self, request: Any) -> None:
        self.requests += 1
        await asyncio.to_thread(self.worker, "update", request.to_dict())

    def close(self) -> None:
        self._to.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)


# The trainer.


class Trainer:
    """Weights, and the sums that an engine must have."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.rows = given, shapes(given.size)
        torch.manual_seed(1)
        kind = torch.float32 if given.device == "cpu" else torch.bfloat16
        self.weights = {
            name: torch.empty(shape, dtype=kind, device=given.device).normal_(0, 0.02)
            for name, (shape, _) in self.rows.items()
        }
        self.bytes = sum(t.nbytes for t in self.weights.values())

    def step(self, seed: int) -> None:
        """Changes about 1 % of every tensor."""
        torch.manual_seed(seed)
        for tensor in self.weights.values():
            flat = tensor.view(-1)
            at = torch.randint(0, flat.numel(), (max(1, flat.numel() // 100),), device=flat.device)
            flat[at] *= -1.25

    def chunks(self) -> list[Any]:
        from windlass.extract.chunk import WeightChunk

        room = int(self.given.bucket_gb * (1 << 30))
        made: list[list[tuple[str, torch.Tensor]]] = [[]]
        left = room
        for name, tensor in self.weights.items():
            if made[-1] and tensor.nbytes > left:
                made.append([])
                left = room
            made[-1].append((name, tensor))
            left -= tensor.nbytes
        return [WeightChunk.of(pairs) for pairs in made]

    def sums(self) -> dict[str, list[int]]:
        """Of vLLM's parameters, put together by torch."""
        parts: dict[str, list[torch.Tensor]] = {}
        for name, (_, parameter) in self.rows.items():
            parts.setdefault(parameter, []).append(self.weights[name])
        return {name: total(torch.cat(held) if len(held) > 1 else held[0]) for name, held in parts.items()}

    def copy_ms(self) -> float:
        one = torch.zeros(self.bytes, dtype=torch.uint8, device=self.given.device)
        two, times = torch.empty_like(one), []
        for _ in range(8):
            _wait(self.given.device)
            began = time.perf_counter()
            two.copy_(one)
            _wait(self.given.device)
            times.append((time.perf_counter() - began) * 1e3)
        return statistics.median(times[3:])


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def run(
    given: argparse.Namespace, engine: Engine, trainer: Trainer, kind: str, first: bool
) -> dict[str, Any]:
    """All syncs of one strategy."""
    from windlass import strategy_from_config

    config = {"strategy": kind, "timeout": 60.0, "device": "cpu" if given.device == "cpu" else "cuda"}
    strategy = strategy_from_config(config)
    info = strategy.create_sync_info()
    engine.worker("join", info.to_dict(), config)
    seeds, hows = iter(range(100 * (1 + KINDS.index(kind)), 10_000)), []
    with strategy.create_sender(info) as sender:

        def sync(expected: str, what: str, compare: bool = True) -> float:
            trainer.step(next(seeds))
            _wait(given.device)
            engine.requests = 0
            chunks = trainer.chunks()
            began = time.perf_counter()
            asyncio.run(sender.send_chunks(chunks, engine))  # type: ignore[arg-type]
            report = engine.worker("finish")
            took = (time.perf_counter() - began) * 1e3
            hows.append(report["last"]["how"])
            if compare:
                want, found = trainer.sums(), engine.ask("sums")
                differ = sorted(name for name in {*want, *found} if want.get(name) != found.get(name))
                assert not differ, f"{kind}, {what}: {len(differ)} parameters differ: {differ[:5]}"
                plan = report["plan"] or {}
                say(
                    f"  {what:22} {hows[-1]:8} {took:9.1f} ms, {engine.requests} requests of {len(chunks)} buckets, "
                    f"{plan.get('replayed')} modules directly, {plan.get('session')} by vLLM: equal"
                )
            assert (report["state"], hows[-1]) == ("clean", expected), (what, report)
            return took

        sync("session" if first else "dense", "first")
        sync("dense", "second")
        sync("dense", "third")
        times = [sync("dense", "timed", compare=False) for _ in range(given.syncs)]
        sync("dense", "after the timed ones")
        if given.device == "cpu":
            say("  sleeping: SKIPPED, a CPU cannot")
        else:
            for level, expected in ((1, "dense"), (2, "session")):
                engine.ask("sleep", level=level)
                engine.ask("wake")
                sync(expected, f"after sleep({level})")
                sync("dense", f"second after sleep({level})")
        say(f"  generates {engine.ask('generate')}")
    return {"hows": hows, "sync_ms": times}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=needs.one_of(SIZES), default="0.6B")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--syncs", type=needs.whole(1), default=5, help="that are timed")
    parser.add_argument("--bucket-gb", type=float, default=1.0)
    parser.add_argument("--memory", type=float, default=0.3, help="vLLM's gpu_memory_utilization")
    parser.add_argument("--vllm-python", default=os.environ.get("WINDLASS_VLLM_PYTHON", sys.executable))
    parser.add_argument("--json", help="where to write everything that was measured")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.device, given.memory)
        return
    if given.device != "cpu":
        needs.need_device("IPC into vLLM", "--device cpu --size tiny works without")
    asked = [
        given.vllm_python,
        "-c",
        "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)",
    ]
    if subprocess.run(asked, timeout=60, check=False).returncode:
        needs.end(
            f"SKIPPED: no vLLM in {given.vllm_python}: name a Python that has it by WINDLASS_VLLM_PYTHON", 0
        )
    faulthandler.dump_traceback_later(START + PATIENCE, exit=True)
    with tempfile.TemporaryDirectory(prefix="vllm-ipc-") as folder:
        dtype = "float32" if given.device == "cpu" else "bfloat16"
        began = time.perf_counter()
        engine = Engine(given, make(Path(folder), given.size, dtype))
        try:
            trainer = Trainer(given)
            version = engine.hear()
            copy = trainer.copy_ms()
            say(
                f"vLLM {version} in {time.perf_counter() - began:.0f} s, torch {torch.__version__}; {given.size}: "
                f"{len(trainer.weights)} tensors, {trainer.bytes / 1e9:.2f} GB, a copy {copy:.2f} ms"
            )
            result: dict[str, Any] = {"vllm": version, "size": given.size, "copy_ms": copy}
            for i, kind in enumerate(KINDS):
                say(kind)
                result[kind] = run(given, engine, trainer, kind, i == 0)
                middle = statistics.median(result[kind]["sync_ms"])
                result[kind]["of_copy"] = middle / copy
                say(f"  sync {middle:.2f} ms, {middle / copy:.2f} of copy")
        finally:
            engine.close()
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=1))
    say("passed")


if __name__ == "__main__":
    main()
