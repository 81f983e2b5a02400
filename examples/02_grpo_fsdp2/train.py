"""The program of every rank: FSDP2 over gloo, a few GRPO steps, and one call per step that publishes the weights.

run.py starts it with torchrun. Rank 0 also starts the receivers, which stand for engines on other machines, and prints
events as lines of JSON. The lines that a trainer adds for Windlass are marked with `# Windlass`.
"""

from __future__ import annotations

import _thread
import json
import os
import queue
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from changes import Changes, local_shards
from policy import Task, grpo_loss, make_model, make_tokenizer, next_token_loss, sample, text, windows
from settings import SIZES, Settings, parse
from tokenizers import Tokenizer
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from windlass import Receiver, WeightManager

#: Timeout of every wait.
TIMEOUT_S = 120.0
#: Grace period for the cleanup of a rank after the launcher has ended.
GRACE_S = 5.0


def main() -> None:
    home = Path(sys.argv[1])
    # The options are in a file, because torchrun would parse some of them itself.
    settings = parse(json.loads((home / "arguments.json").read_text()), __doc__ or "")
    gone = _end_with_launcher()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.ranks))
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    try:
        _train(settings, home)
        dist.destroy_process_group()
    except BaseException:
        # After the launcher has ended, errors are expected.
        if not gone.is_set():
            raise


def _train(settings: Settings, home: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, task = _ready(settings, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)

    with WeightManager(model_id="policy", region_dir=str(home), generator_dtype="bfloat16") as wm:  # Windlass
        wm.prepare(model, rank, world)  # Windlass: optional; otherwise the first offload does it
        with Engines(settings, home, wm) as engines:
            changes = Changes(model, settings.stats is not None, settings.learning_rate)
            told: dict[str, Any] = {}
            for version in range(settings.steps + 1):
                if version > 0:
                    told = _step(model, optimizer, task, settings) | {"changes": changes.step()}
                begun = time.perf_counter()
                done = wm.offload(model, version, rank, world)  # Windlass
                took = torch.tensor([done.wait_ms, done.copy_ms, done.commit_ms])
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if rank == 0:
                    digest = wm.wait_delta_ready(
                        version
                    )  # Windlass: optional; the digest that receivers verify
                    synced = engines.wait(version, digest)
                    everywhere = (time.perf_counter() - begun) * 1e3
                    parts = dict(zip(("wait", "copy", "commit"), took.tolist(), strict=True))
                    told |= {"offload_ms": parts, "everywhere_ms": everywhere, "synced": synced}
                    _say("version", version=version, **told)
                if version == settings.steps // 2:
                    changes.set_base()
                dist.barrier()
            _say("compared", **_compare(model, engines, wm.region))


def _ready(settings: Settings, rank: int) -> tuple[nn.Module, Task]:
    """A policy after a short warm-up, with master weights in float32."""
    vocab = SIZES[settings.size].vocab
    corpus = text()
    words = [make_tokenizer(vocab, corpus).to_str() if rank == 0 else ""]
    dist.broadcast_object_list(words)
    tokenizer = Tokenizer.from_str(words[0])
    torch.manual_seed(settings.seed)
    # Ranks sample different prompts and completions from the same policy.
    task = Task(tokenizer, settings.digits, settings.seed * 1000 + rank)
    model = make_model(settings.size, vocab, task.end)
    known = settings.init is not None and settings.init.exists()
    if known:
        model.load_state_dict(torch.load(str(settings.init)))
    torch.manual_seed(settings.seed * 1000 + rank)

    # FSDP computes in bf16 and keeps float32. Weights stay gathered from the first sampled token to the backward pass.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    counts = [p.numel() for p in model.parameters()]
    _say("model", parameters=sum(counts), tensors=len(counts))
    if not known:
        _warm_up(model, task, settings.warm_up, torch.tensor(tokenizer.encode(corpus[:1_000_000]).ids))
        if settings.init is not None:
            _keep(model, settings.init)
    if settings.start == "bf16":
        with torch.no_grad():
            for _, shard in local_shards(model):
                shard.copy_(shard.bfloat16())
    return model, task


def _warm_up(model: nn.Module, task: Task, steps: int, ids: torch.Tensor) -> None:
    """Trains on half text, half solved tasks, with a learning rate that decays to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / (steps / 8 + 1)) * (1 - i / max(steps, 1))
    )
    draws = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        loss = next_token_loss(model, windows(ids, 4, 64, draws)) + next_token_loss(model, task.solved(32))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 9 or step + 1 == steps:
            _say("warm-up", step=step + 1, steps=steps, loss=loss.item() / 2)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, settings: Settings
) -> dict[str, Any]:
    """One GRPO step."""
    begun = time.perf_counter()
    tokens, start, rewards = sample(model, task, settings.prompts, settings.group)
    sampled = time.perf_counter()
    loss = grpo_loss(model, tokens, start, rewards, task.end)
    loss.backward()
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    ended = time.perf_counter()
    means = torch.tensor([rewards.mean().item(), loss.item()])
    dist.all_reduce(means)
    reward, loss_ = (means / dist.get_world_size()).tolist()
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return {
        "reward": reward,
        "loss": loss_,
        "grad_norm": float(norm),
        "sample_s": sampled - begun,
        "train_s": ended - sampled,
    }


def _full(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gathers every parameter. A collective: all ranks call it."""
    sharded: dict[str, Any] = dict(model.named_parameters())
    return {name: p.detach().full_tensor() for name, p in sharded.items()}


def _keep(model: nn.Module, path: Path) -> None:
    whole = _full(model)
    if dist.get_rank() == 0:
        whole["lm_head.weight"] = whole["model.embed_tokens.weight"]
        torch.save(whole, path)


def _compare(model: nn.Module, engines: Engines, region: str | None) -> dict[str, Any]:
    """Compares each image bit by bit with the gathered weights, after the receivers have ended."""
    wanted = {name: whole.bfloat16() for name, whole in _full(model).items()}
    if dist.get_rank() != 0:
        return {}
    engines.ended()
    equal = []
    for home in engines.homes:
        with Receiver(home, region=region) as receiver, receiver.hold() as image:
            names = set(image.tensors) - {"lm_head.weight"} == set(wanted)
            equal.append(
                names
                and all(
                    torch.equal(image.tensors[name].view(torch.int16), value.view(torch.int16))
                    for name, value in wanted.items()
                )
            )
    return {"equal": equal, "bytes": sum(value.nbytes for value in wanted.values()), "tensors": len(wanted)}


class Engines:
    """Receiver processes. In production each runs on the host of an engine; here rank 0 starts them.

    Each is a ``windlass receive`` with the agent's address and token. It prints one line per version, and ends after the
    last version or with this process.
    """

    def __init__(self, settings: Settings, home: Path, wm: WeightManager) -> None:
        count = settings.engines if dist.get_rank() == 0 else 0
        self.homes = [home / f"engine-{i}" for i in range(count)]
        self._lines: list[queue.Queue[str]] = [queue.Queue() for _ in self.homes]
        self._processes: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []
        for place, lines in zip(self.homes, self._lines, strict=True):
            command = [sys.executable, "-m", "windlass", "receive", "--json", "--with-parent"]
            command += [f"--from={wm.endpoint}", f"--token-file={wm.token_file}", f"--dir={place}"]
            command += [f"--name={place.name}", f"--until={settings.steps}", "--threads=1"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._processes.append(process)
            self._threads.append(threading.Thread(target=_read, args=(process, lines), daemon=True))
            self._threads[-1].start()

    def wait(self, version: int, digest: str) -> list[dict[str, Any]]:
        """The event of each receiver for this version; raises unless its digest equals the trainer's."""
        until = time.monotonic() + TIMEOUT_S
        said = []
        for place, lines in zip(self.homes, self._lines, strict=True):
            try:
                line = lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                late = f"{place.name} did not get version {version} within {TIMEOUT_S:g} s"
                raise TimeoutError(late) from None
            told = json.loads(line) if line else {}
            if told.get("event") != "synced":
                raise RuntimeError(f"{place.name} ended at version {version}: {line.strip()!r}")
            image = told["image"]
            if (image["identity"]["version"], image["digest"]) != (version, digest):
                raise RuntimeError(f"{place.name} has {image}, not version {version} with digest {digest}")
            said.append({key: told[key] for key in ("mode", "wire_bytes", "wire_ms", "apply_ms", "total_ms")})
        return said

    def ended(self) -> None:
        """Waits until every receiver has loaded the last version and ended."""
        for place, process in zip(self.homes, self._processes, strict=True):
            code = process.wait(TIMEOUT_S)
            if code != 0:
                raise RuntimeError(f"{place.name} ended with {code}")

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *exception: object) -> None:
        for process, thread in zip(self._processes, self._threads, strict=True):
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            thread.join()
            process.stdout.close()


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def _say(event: str, **what: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps({"event": event, **what}), flush=True)


def _end_with_launcher() -> threading.Event:
    """Interrupts this rank when the launcher ends, which closes the pipe that is this rank's standard input."""
    gone = threading.Event()

    def watch() -> None:
        while os.read(0, 1):
            pass
        gone.set()
        _thread.interrupt_main()
        # A collective that is under way does not notice the interrupt.
        time.sleep(GRACE_S)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    return gone


if __name__ == "__main__":
    main()
