"""How many elements of a quantised image change from step to step, and how large its deltas are, beside the bf16 image.

    python bench/quantised.py [--size medium] [--steps 16] [--learning-rate 3e-6] [--init warm.pt] [--json FILE]

Needs torch and transformers, and no GPU. Trains the policy of examples/02_grpo_fsdp2 in this process (float32 masters, GRPO
steps with AdamW) and publishes every step as bf16 and in each scheme. A real receiver follows each of them: what changed is counted
in its images, and a delta is as large as what it fetched. Only Linear layers are counted, which are what is quantised.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "gpu"))

import needs  # noqa: E402

needs.need("torch", "windlass", "transformers")

import torch  # noqa: E402

from windlass import Receiver, WeightManager  # noqa: E402
from windlass.names import SCHEMES  # noqa: E402

sys.path.insert(0, str(ROOT / "examples" / "02_grpo_fsdp2"))

from policy import (  # noqa: E402
    Task,
    grpo_loss,
    make_model,
    make_tokenizer,
    next_token_loss,
    sample,
    text,
    windows,
)
from settings import SIZES  # noqa: E402

PATIENCE_S = 120.0
PROMPTS, GROUP, DIGITS, SEED = 8, 8, 4, 1


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Image:
    """One way to publish the model, and the receiver that follows it."""

    def __init__(self, stack: ExitStack, home: str, scheme: str | None) -> None:
        name = scheme or "bf16"
        rules = {} if scheme is None else {"*.weight": scheme}
        options: dict[str, Any] = {"region_dir": home, "generator_dtype": "bfloat16", "dtypes": rules}
        self._stack, self._home = stack, f"{home}/image-{name}"
        self._manager = stack.enter_context(WeightManager(model_id=name, timeout=PATIENCE_S, **options))
        self._receiver: Receiver | None = None
        self._before: dict[str, torch.Tensor] = {}

    def step(self, model: torch.nn.Module, version: int) -> dict[str, Any]:
        """Publishes a version, and counts what changed in the image."""
        begun = time.perf_counter()
        self._manager.offload(model, version, 0, 1)
        took = (time.perf_counter() - begun) * 1e3
        if self._receiver is None:
            self._receiver = self._stack.enter_context(Receiver(self._home, region=self._manager.region))
        told = self._receiver.wait(version, PATIENCE_S)
        counts = {"elements": 0, "changed": 0, "scales": 0, "scales_changed": 0, "image_bytes": 0}
        with self._receiver.hold() as image:
            now = {name: bits(tensor) for name, tensor in image.tensors.items()}
        for name, tensor in now.items():
            counts["image_bytes"] += tensor.nbytes
            kind = "scales" if "_scale" in name else "elements"
            if self._before and (kind == "scales" or "_proj.weight" in name):
                counts[kind] += tensor.numel()
                changed = int((tensor != self._before[name]).sum())
                counts["changed" if kind == "elements" else "scales_changed"] += changed
        self._before = now
        return counts | {"mode": told["mode"], "wire_bytes": told["wire_bytes"], "offload_ms": took}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy as integers, because signed zeros are bits like any others."""
    wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.contiguous().view(wide).clone()


def warm(given: argparse.Namespace) -> tuple[torch.nn.Module, Task]:
    """A policy that knows a little of the task."""
    vocab, corpus = SIZES[given.size].vocab, text()
    tokenizer = make_tokenizer(vocab, corpus)
    torch.manual_seed(SEED)
    task = Task(tokenizer, DIGITS, SEED)
    model = make_model(given.size, vocab, task.end)
    if given.init is not None and given.init.exists():
        model.load_state_dict(torch.load(given.init))
        return model, task
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    ids = torch.tensor(tokenizer.encode(corpus[:1_000_000]).ids)
    draws = torch.Generator().manual_seed(SEED)
    for step in range(given.warm_up):
        rate = min(1.0, (step + 1) / (given.warm_up / 8 + 1)) * (1 - step / given.warm_up)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * rate
        loss = next_token_loss(model, windows(ids, 4, 64, draws)) + next_token_loss(model, task.solved(32))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            say(f"warm-up {step + 1} of {given.warm_up}: loss {loss.item() / 2:.2f}")
    if given.init is not None:
        torch.save(model.state_dict(), given.init)
    return model, task


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--size", choices=list(SIZES), default="medium")
    arguments.add_argument("--steps", type=needs.whole(1), default=16)
    arguments.add_argument("--warm-up", type=needs.whole(1), default=60)
    arguments.add_argument("--learning-rate", type=float, default=3e-6)
    arguments.add_argument("--init", type=Path, help="weights to start from; the warm-up makes the file")
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    torch.manual_seed(SEED)
    model, task = warm(given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.learning_rate, weight_decay=0.01)
    versions = []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="windlass-bench-") as home, ExitStack() as stack:
        images = {scheme or "bf16": Image(stack, home, scheme) for scheme in (None, *SCHEMES)}
        for version in range(given.steps + 1):
            if version > 0:
                with torch.autocast("cpu", torch.bfloat16):
                    tokens, start, rewards = sample(model, task, PROMPTS, GROUP)
                    loss = grpo_loss(model, tokens, start, rewards, task.end)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            told = {name: image.step(model, version) for name, image in images.items()}
            versions.append(told)
            if version > 0:
                shares = [f"{name} {share(row):.4%}" for name, row in told.items()]
                say(f"step {version}: reward {rewards.mean():.2f}, changed: {', '.join(shares)}")
    summary = {name: steady([row[name] for row in versions[1:]]) for name in images}
    for name, row in summary.items():
        say(
            f"{name:13} {row['share']:.4%} of elements, {row['scales_share']:.2%} of scales; delta {row['wire_bytes'] / 1024:.0f} KiB, "
            f"{row['of_image']:.2%} of the image of {row['image_bytes'] / 1e6:.1f} MB"
        )
    if given.json is not None:
        settings = {"size": given.size, "steps": given.steps, "learning_rate": given.learning_rate}
        machine = {"python": platform.python_version(), "torch": torch.__version__}
        document = {"settings": settings, "machine": machine, "steady": summary, "versions": versions}
        given.json.write_text(json.dumps(document) + "\n")


def share(row: dict[str, Any]) -> float:
    """Of the elements of Linear layers."""
    return row["changed"] / max(row["elements"], 1)


def steady(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The second half of a run: fresh moments make the first steps of AdamW larger."""
    late = rows[len(rows) // 2 :]
    wire, image = statistics.mean(row["wire_bytes"] for row in late), late[-1]["image_bytes"]
    return {
        "share": statistics.mean(map(share, late)),
        "scales_share": statistics.mean(row["scales_changed"] / max(row["scales"], 1) for row in late),
        "wire_bytes": wire,
        "image_bytes": image,
        "of_image": wire / image,
        "modes": sorted({row["mode"] for row in late}),
    }


if __name__ == "__main__":
    main()
