"""Trains a small language model with GRPO under FSDP2, and brings the weights of every step to two receivers.

    python examples/02_grpo_fsdp2/run.py
    python examples/02_grpo_fsdp2/run.py --quick --json

Starts the ranks (train.py) with torchrun, prints their progress, and cleans up, also after Ctrl-C.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from settings import Settings, parse

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent.parent / "python"
#: Grace period before the ranks are terminated.
GRACE_S = 10.0
HEADS = (
    "step",
    "reward",
    "loss",
    "changed",
    "sent",
    "of image",
    "wait/copy/commit ms",
    "sync ms",
    "everywhere",
)
ROW = "{:>4} {:>7} {:>8} {:>9} {:>10} {:>9}   {:>19}   {:>15} {:>10}"


def main() -> int:
    settings = parse(sys.argv[1:], (__doc__ or "").splitlines()[0])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    home = Path(tempfile.mkdtemp(prefix="windlass-grpo-", dir="/dev/shm"))
    begun = time.monotonic()
    try:
        result = _run(settings, home)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(home, ignore_errors=True)
    result["seconds"] = round(time.monotonic() - begun, 1)
    if settings.stats is not None and result["ok"]:
        settings.stats.write_text(json.dumps(_statistics(settings, result), indent=1) + "\n")
    if settings.json:
        print(json.dumps(result))
    else:
        _print_end(settings, result)
    return 0 if result["ok"] else 1


def _run(settings: Settings, home: Path) -> dict[str, Any]:
    """Runs the ranks and collects the events that rank 0 prints."""
    result: dict[str, Any] = {"settings": settings.plain(), "versions": [], "equal": []}
    launcher = _start(settings, home)
    try:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            try:
                told = json.loads(line)
                event = told.pop("event")
            except (ValueError, KeyError, AttributeError):
                # Not an event: output of torchrun or of a library.
                sys.stderr.write(line)
                continue
            if event == "version":
                result["versions"].append(told)
            elif event != "warm-up":
                result.update(told)
            if not settings.json:
                _print(event, told, result)
        code = launcher.wait()
    finally:
        _end(launcher)
    followed = len(result["versions"]) == settings.steps + 1 and len(result["equal"]) == settings.engines
    result["ok"] = code == 0 and followed and all(result["equal"])
    return result


def _start(settings: Settings, home: Path) -> subprocess.Popen[str]:
    (home / "arguments.json").write_text(json.dumps(sys.argv[1:]))
    # In a checkout, the package that `make develop` built; otherwise the installed one.
    here = [str(PACKAGE)] if any(PACKAGE.glob("windlass/_windlass*.so")) else []
    path = os.pathsep.join([*here, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        # Temporary files of torchrun and of the agent are removed with the run's directory.
        "TMPDIR": str(home),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={settings.ranks}", str(HERE / "train.py"), str(home)]
    # In a session of its own, Ctrl-C reaches only this process, which then closes the ranks' standard input.
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _end(launcher: subprocess.Popen[str]) -> None:
    """Stops the ranks. The agent and the receivers stop with them, because their standard input closes."""
    assert launcher.stdin is not None and launcher.stdout is not None
    launcher.stdin.close()
    try:
        launcher.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        launcher.terminate()
        try:
            launcher.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()
    launcher.stdout.close()


def _print(event: str, told: dict[str, Any], result: dict[str, Any]) -> None:
    if event == "model":
        print(f"{told['parameters'] / 1e6:.1f} M parameters in {told['tensors']} tensors, published as bf16")
    elif event == "warm-up":
        print(f"warm-up {told['step']}/{told['steps']}: loss {told['loss']:.3f}")
    elif event == "version":
        if len(result["versions"]) == 1:
            print("\n" + ROW.format(*HEADS))
        print(_row(told, result["parameters"] * 2), flush=True)


def _row(told: dict[str, Any], image: int) -> str:
    synced = told["synced"]
    sent = max(s["wire_bytes"] for s in synced)
    first = "changes" not in told
    return ROW.format(
        told["version"],
        "-" if first else f"{told['reward']:.3f}",
        "-" if first else f"{told['loss']:+.4f}",
        "-" if first else f"{told['changes']['share']:.3%}",
        f"{sent / 1024:.0f} KiB",
        f"{sent / image:.2%}",
        "/".join(f"{ms:.1f}" for ms in told["offload_ms"].values()),
        ", ".join(f"{s['total_ms']:.1f}" for s in synced),
        f"{told['everywhere_ms']:.0f} ms",
    )


def _print_end(settings: Settings, result: dict[str, Any]) -> None:
    if not result["ok"]:
        print("failed; the output of the ranks is above", file=sys.stderr)
        return
    steps = result["versions"][1:]
    image = result["bytes"]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    sent = mean([s["synced"][0]["wire_bytes"] for s in steps])
    changed = mean([s["changes"]["share"] for s in steps])
    offload = mean([sum(s["offload_ms"].values()) for s in steps])
    sync = mean([mean([e["total_ms"] for e in s["synced"]]) for s in steps])
    print(f"\n{len(steps)} steps at learning rate {settings.learning_rate:g}, mean values")
    print(f"  changed          {changed:.3%} of bf16 elements")
    print(f"  sent             {sent / 1024:.1f} KiB of {image / 1024:.0f} KiB, 1/{image / sent:.0f}")
    print(f"  offload, sync    {offload:.1f} ms, {sync:.1f} ms")
    print(f"  images           all {len(result['equal'])} bit-equal to full_tensor()")
    print(f"  total time       {result['seconds']} s")


def _statistics(settings: Settings, result: dict[str, Any]) -> dict[str, Any]:
    """Statistics of the weight changes: of every step, and over the second half of the steps."""
    steps = []
    for told in result["versions"][1:]:
        sent = told["synced"][0]["wire_bytes"]
        changes = told["changes"]
        bits = 8 * sent / max(changes["changed"], 1)
        row = {key: told[key] for key in ("version", "reward", "loss", "grad_norm")}
        steps.append({**row, "delta_bytes": sent, "bits_per_change": bits, **changes})
    return {
        "settings": result["settings"],
        "parameters": result["parameters"],
        "image_bytes": result["bytes"],
        "equal": result["equal"],
        "steady": _steady(steps[len(steps) // 2 :], result["bytes"]),
        "steps": steps,
    }


def _steady(steps: list[dict[str, Any]], image: int) -> dict[str, Any]:
    """Statistics over several steps, each step weighted by its number of elements."""

    def total(*path: str) -> int:
        return sum(functools.reduce(operator.getitem, path, step) for step in steps)  # type: ignore[misc]

    changed, sent = max(total("changed"), 1), total("delta_bytes")
    return {
        "versions": [step["version"] for step in steps],
        "share": changed / total("elements"),
        "kinds": {
            kind: total("kinds", kind, "changed") / total("kinds", kind, "elements")
            for kind in steps[0]["kinds"]
        },
        "ulps": {bin: total("ulps", bin) / changed for bin in steps[0]["ulps"]},
        "octaves": _by_octave(steps),
        "blocks_untouched": total("blocks_untouched") / max(total("blocks"), 1),
        "tensors_untouched": total("tensors_untouched") / total("tensors"),
        "mean_step": sum(step["mean_step"] for step in steps) / len(steps),
        "delta_bytes": sent / len(steps),
        "of_image": sent / len(steps) / image,
        "bits_per_change": 8 * sent / changed,
    }


def _by_octave(steps: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """P(change) by the power of two of the old weight, and each octave's share of the changes; at least 1000 weights."""
    totals: dict[str, list[int]] = {}
    for step in steps:
        for octave, (every, changed) in step["octaves"].items():
            sums = totals.setdefault(octave, [0, 0])
            sums[0] += every
            sums[1] += changed
    weights = sum(every for every, _ in totals.values())
    changes = sum(changed for _, changed in totals.values())
    return {
        octave: {
            "of_weights": every / weights,
            "of_changes": changed / max(changes, 1),
            "p_change": changed / every,
        }
        for octave, (every, changed) in sorted(totals.items(), key=_octave)
        if every >= 1000
    }


def _octave(item: tuple[str, list[int]]) -> int:
    return -1000 if item[0] == "zero" else int(item[0])


if __name__ == "__main__":
    sys.exit(main())
