"""Writing a version into an engine: the load plan beside the engine's own `load_weights` and beside a plain copy.

    .venv-vllm/bin/python bench/load.py [--repeats 15] [--json FILE]

Needs vLLM's environment (`make engine-venvs develop`), with the package in python/ or installed. Builds vLLM's own model
classes on the CPU with their weights unpacked, as on a GPU, and publishes random weights for them:

- `many`: a Qwen3 MoE with more than 5,000 small tensors. What counts is tensors per second.
- `large`: a dense Qwen3 with few large ones. What counts is the time beside that of copying as many bytes at once.

Everything takes turns in one run, with one thread and with as many as there are cores; medians count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_PLUGINS="",
)
ROOT = Path(__file__).resolve().parent.parent
ENGINES = ROOT / "tests" / "engines"
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "python")]

import needs  # noqa: E402

# Before the folders of tests are looked into, of which one is called as the engine is.
needs.need("torch", "vllm", "pytest", "windlass")

sys.path[:0] = [str(ENGINES / p) for p in ("", "vllm", "vllm/inside", "plugin")]

import pytest  # noqa: E402
import torch  # noqa: E402

import building  # noqa: E402
import windlass  # noqa: E402
from publishing import Publishing  # noqa: E402
from windlass import _windlass  # noqa: E402
from windlass.load.live import Live  # noqa: E402
from windlass.load.order import LoadOrder  # noqa: E402
from windlass.receive.receiver import Tensors  # noqa: E402

#: Times as fast as the engine, and times as slow as a copy, at the worst.
BAR_MANY, BAR_LARGE = 5.0, 1.5


def config(case: str) -> Any:
    from transformers import Qwen3Config, Qwen3MoeConfig

    common: dict[str, Any] = {"max_position_embeddings": 512, "tie_word_embeddings": False, "head_dim": 32}
    if case == "many":
        return Qwen3MoeConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=256,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            decoder_sparse_step=1,
            **common,
        )
    return Qwen3Config(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
        **common,
    )


def turns(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each, one after the other, over and over; the first round is not counted."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if turn:
                took[name].append((time.perf_counter() - start) * 1e3)
    return took


def measure(case: str, home: Path, repeats: int, threads: int) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    trainer = AutoModelForCausalLM.from_config(config(case), dtype=torch.float32)
    trainer.save_pretrained(home / "checkpoint")
    worker = building.session(home / "checkpoint")
    live = Live(worker, threads=threads)
    with Publishing(home) as publishing:
        order = LoadOrder.from_dict(publishing.publish(trainer, 1))
        live.load(order)
        plan = live._plan
        assert plan is not None and plan.native is not None, live.report()
        held = _windlass.open_image(order.image, 600.0, 60.0)
        try:
            tensors = Tensors(held)
            named = [(name, tensors[name]) for name in plan.table]
            flat = torch.frombuffer(bytearray(sum(t.nbytes for _, t in named)), dtype=torch.uint8)
            other = flat.clone()
            addresses = live._addresses(plan)
            out: dict[str, Any] = {"tensors": len(named), "bytes": flat.nbytes, "threads": {}}
            for count in sorted({1, threads}):
                torch.set_num_threads(count)
                took = turns(
                    {
                        "load_weights": lambda: worker.load_weights(iter(named)),
                        "replay": lambda count=count: plan.native.dense(held, addresses, count),
                        "copy": lambda: other.copy_(flat),
                    },
                    repeats,
                )
                median = {name: round(statistics.median(ms), 3) for name, ms in took.items()}
                best = {name: round(min(ms), 3) for name, ms in took.items()}
                out["threads"][count] = {
                    "median_ms": median,
                    "best_ms": best,
                    "load_weights / replay": round(median["load_weights"] / median["replay"], 2),
                    "replay / copy": round(median["replay"] / median["copy"], 2),
                }
        finally:
            held.finish()
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=needs.whole(1), default=15)
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    patch = pytest.MonkeyPatch()
    building.keep_plain(patch)
    results = {}
    for case in ("many", "large"):
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-") as home:
            results[case] = measure(case, Path(home), options.repeats, threads)
    patch.undo()
    # The worst of the thread counts must hold.
    many = min(r["load_weights / replay"] for r in results["many"]["threads"].values())
    large = max(r["replay / copy"] for r in results["large"]["threads"].values())
    bars = [
        {"name": "many: load_weights / replay", "value": many, "bar": BAR_MANY, "met": many >= BAR_MANY},
        {"name": "large: replay / copy", "value": large, "bar": BAR_LARGE, "met": large <= BAR_LARGE},
    ]
    result = {
        "bench": "load",
        "windlass": windlass.__version__,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "results": results,
        "bars": bars,
    }
    text = json.dumps(result, indent=1)
    if options.json:
        Path(options.json).write_text(text + "\n")
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
