"""Trains an actor and a verifier at different speeds, and always serves both at the same version.

    python examples/05_two_models/run.py
    python examples/05_two_models/run.py --versions 8 --receivers 3 --json

Two trainer processes publish one tiny model each; the verifier's steps take four times as long. Every receiver serves both
models. The controller orders the load of a version once every receiver has it for both models. A rollout therefore never
scores the actor of one step with the verifier of another. This script starts all processes and cleans up after them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

try:
    import windlass
except ModuleNotFoundError:
    # In a checkout, the package that `make develop` built.
    package = str(Path(__file__).resolve().parent.parent.parent / "python")
    sys.path.append(package)
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), package])
    import windlass

MODELS = ("actor", "verifier")
#: Seconds that a training step of each model takes.
STEP_S = {"actor": 0.05, "verifier": 0.2}
WIDTH = 64
TIMEOUT_S = 120.0


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


# A trainer: one process, one model, one agent.


def train(model_id: str, home: Path, versions: int) -> None:
    # Ctrl-C reaches the whole process group; the parent process handles it and sends SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    torch.manual_seed(len(model_id))
    model, token_file = network(), str(home / "token")
    # The rate is small, as in real training: a step changes few bf16 weights, and deltas are small.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    with windlass.WeightManager(
        model_id=model_id,
        region_dir=str(home),
        generator_dtype="bfloat16",
        controller=os.environ["WINDLASS_CONTROLLER"],
        controller_token_file=token_file,
        agent={"token_file": token_file},
    ) as wm:
        for version in range(1, versions + 1):
            time.sleep(STEP_S[model_id])
            batch = torch.randn(16, WIDTH)
            loss = (model(batch) - batch.roll(1, dims=-1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            wm.offload(model, version)
            notified = wm.notify_version()
            if notified is not None and notified.wait:
                # This trainer is too far ahead of the other model or of the receivers.
                wm.gate(version - 2, timeout=TIMEOUT_S)
        wm.gate(versions, timeout=TIMEOUT_S)


# A rollout: both models of one receiver, at one version.


def rollout(place: Path, timeout: float) -> tuple[int, float]:
    """Loads both models of a receiver at one version; the verifier scores the actor's answer: (version, reward)."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        with contextlib.ExitStack() as held:
            images = [held.enter_context(windlass.open_image(place / name, 30.0, 10.0)) for name in MODELS]
            if images[0].version == images[1].version:
                actor, verifier = network(), network()
                actor.load_state_dict(dict(images[0].tensors))
                verifier.load_state_dict(dict(images[1].tensors))
                with torch.no_grad():
                    reward = verifier(actor(torch.ones(1, WIDTH))).mean().item()
                return images[0].version, reward
        # The receiver is between the loads of the two models.
        time.sleep(0.002)
    raise TimeoutError(f"{place} had no common version within {timeout:g} s")


def rollouts(place: Path, controller: windlass.Controller, versions: int, out: list[dict[str, Any]]) -> None:
    seen = 0
    while seen < versions:
        controller.gate(seen + 1, set="main", timeout=TIMEOUT_S)
        seen, reward = rollout(place, TIMEOUT_S)
        out.append({"receiver": place.name, "version": seen, "reward": reward})


# The launcher.


def start(output: IO[bytes], url: str | None, *arguments: str) -> subprocess.Popen[bytes]:
    variables = {**os.environ, **({"WINDLASS_CONTROLLER": url} if url else {})}
    variables.pop("WINDLASS_TOKEN", None)
    # With --with-parent, a process ends when its standard input closes, even if this process is killed.
    return subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE, stdout=output, env=variables)


def endpoint_of(log: Path, process: subprocess.Popen[bytes]) -> str:
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until and process.poll() is None:
        lines = log.read_bytes().splitlines(keepends=True)
        if lines and lines[0].endswith(b"\n"):
            return str(json.loads(lines[0])["endpoint"])
        time.sleep(0.02)
    raise RuntimeError("the controller did not start")


@contextlib.contextmanager
def ended(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    try:
        yield
    finally:
        # Receivers and trainers first, then the controller.
        for group in (processes[1:], processes[:1]):
            for process in group:
                process.terminate()
                if process.stdin is not None:
                    process.stdin.close()
            until = time.monotonic() + 10.0
            for process in group:
                try:
                    process.wait(max(until - time.monotonic(), 0.1))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def run(versions: int, receivers: int, log: Path, home: Path) -> dict[str, Any]:
    (home / "token").touch(0o600)
    (home / "token").write_text(secrets.token_hex(16))
    token = f"--token-file={home / 'token'}"
    windlass_command = ("-m", "windlass")
    processes: list[subprocess.Popen[bytes]] = []
    with ended(processes), log.open("ab") as events, (home / "controller").open("ab") as output:
        options = ("controller", "--set=main=actor,verifier", f"--floor={receivers}", token)
        processes.append(start(output, None, *windlass_command, *options, "--with-parent", "--json"))
        url = endpoint_of(home / "controller", processes[0])
        places = [home / f"receiver-{i}" for i in range(receivers)]
        for place in places:
            options = ("receive", f"--controller={url}", token, f"--dir={place}", f"--name={place.name}")
            models = [f"--model={name}" for name in MODELS]
            processes.append(
                start(events, None, *windlass_command, *options, *models, "--with-parent", "--json")
            )
        begun = time.monotonic()
        trainers = [
            start(output, url, __file__, "--train", name, "--home", str(home), "--versions", str(versions))
            for name in MODELS
        ]
        processes += trainers
        controller = windlass.Controller(url, token_file=home / "token")
        results: list[dict[str, Any]] = []
        threads = [
            threading.Thread(target=rollouts, args=(place, controller, versions, results), daemon=True)
            for place in places
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        codes = [trainer.wait(TIMEOUT_S) for trainer in trainers]
        served = controller.service_version("main")
        syncs = controller.status()["sets"][0]["syncs"]
    finished = {each["receiver"] for each in results if each["version"] == versions}
    return {
        "ok": codes == [0, 0] and finished == {place.name for place in places},
        "seconds": round(time.monotonic() - begun, 1),
        "served": None if served is None else served.version,
        "rollouts": results,
        "syncs": [
            {key: sync.get(key) for key in ("version", "state", "latency_ms", "bytes", "full", "delta")}
            for sync in syncs
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three versions, unless --versions is given")
    parser.add_argument("--versions", type=int, help="training steps of each trainer (default: 6)")
    parser.add_argument(
        "--receivers", type=int, default=2, help="number of receivers, each of which serves both models"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--log", type=Path, help="keep the receivers' events in this file, one JSON object per line"
    )
    parser.add_argument("--train", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.train is not None:
        train(given.train, given.home, given.versions)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    versions = given.versions or (3 if given.quick else 6)
    home = Path(tempfile.mkdtemp(prefix="windlass-two-", dir="/dev/shm"))
    try:
        result = run(versions, given.receivers, given.log or home / "receivers", home)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    finally:
        shutil.rmtree(home, ignore_errors=True)
    if given.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        table(result)
    return 0 if result["ok"] else 1


def table(result: dict[str, Any]) -> None:
    print("version  notify to served  by delta  in full   rewards")
    for sync in result["syncs"]:
        rewards = [r["reward"] for r in result["rollouts"] if r["version"] == sync["version"]]
        latency = "skipped" if sync["latency_ms"] is None else f"{sync['latency_ms']:.0f} ms"
        print(
            f"{sync['version']:>7}  {latency:>16}  {sync['delta']:>8}  {sync['full']:>7}   "
            + " ".join(f"{reward:+.6f}" for reward in rewards)
        )
    print(f"{'passed' if result['ok'] else 'failed'} in {result['seconds']} s")


if __name__ == "__main__":
    sys.exit(main())
