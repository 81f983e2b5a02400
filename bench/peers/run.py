"""Measures the peers in turn, and writes what was found.

Owns: the order of measurements, what a sync is, and the output. ``python bench/peers --help`` has the options.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib
import os
import platform
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from peers import counters, report, sides
from peers.model import SIZES
from peers.peer import Peer, why_not

ROOT = Path(__file__).resolve().parent.parent.parent
#: Times the weights that a pair and its peer take at the most: two models, copies of them at both ends, an image, files.
ROOM = 7
#: Figures of one sync.
FIGURES = ("visible_s", "pause_s", "blocked_s", "wire_bytes", "cpu_s")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def available() -> int:
    """Bytes of memory that can be had."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return min(int(lines["MemAvailable"].split()[0]) << 10, shutil.disk_usage("/dev/shm").free * 2)


def sync(pair: sides.Pair, version: int, roots: Sequence[int]) -> dict[str, Any]:
    """One version through a peer. The step itself is not measured."""
    before, cpu = counters.loopback_bytes(), counters.Cpu(roots)
    trainer, engine = pair.both("version", version)
    pair.both("settle")
    # Some libraries compute all the time. That is found out with the first version.
    cpu_s, idle = cpu.until_idle(2.0 if pair.rests else 0.0)
    pair.rests = idle
    return {
        "visible_s": engine["ended"] - trainer["began"],
        "pause_s": engine["pause"],
        "blocked_s": trainer["ended"] - trainer["began"],
        "cpu_s": cpu_s,
        "idle": idle,
        "wire_bytes": counters.loopback_bytes() - before,
        "equal": pair.equal(),
    }


def turn(pair: sides.Pair, roots: Sequence[int], syncs: int, look: bool) -> dict[str, Any]:
    """A peer's turn: the first version, which sets everything up, some that count, and one in which memory is looked at."""
    weights = pair.weights()
    bare = counters.memory(roots, pair.home)
    versions = pair.both("open")
    found: dict[str, Any] = {"versions": versions[0], "bytes": weights}
    pair.trainer.ask("step")
    found["first"] = sync(pair, 1, roots)
    found["syncs"] = []
    for version in range(2, syncs + 2):
        changed = pair.trainer.ask("step")
        found["syncs"].append({**sync(pair, version, roots), "changed": changed})
    if look:
        pair.trainer.ask("step")
        with counters.Peak(lambda: counters.memory(roots, pair.home)) as peak:
            last = sync(pair, syncs + 2, roots)
        found["memory"] = {"peak_bytes": peak.most, "before_bytes": bare, "equal": last["equal"]}
    return found


def merge(turns: Sequence[dict[str, Any]], by_files: bool) -> dict[str, Any]:
    """What the turns of a peer say together."""
    syncs = [one for found in turns for one in found["syncs"]]
    looks = [found["memory"] for found in turns if "memory" in found]
    checked = [*syncs, *(found["first"] for found in turns), *looks]
    merged: dict[str, Any] = {
        "versions": turns[0]["versions"],
        "bytes": turns[0]["bytes"],
        "equal": all(one["equal"] for one in checked),
        "compared": len(checked),
        "changed_share": statistics.median(one["changed"] for one in syncs) / (turns[0]["bytes"] / 2),
        "first": {key: statistics.median(found["first"][key] for found in turns) for key in FIGURES},
        "syncs": syncs,
    }
    for key in FIGURES:
        values = [one[key] for one in syncs]
        merged[key] = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    if by_files:
        merged["file_bytes"] = turns[0]["bytes"]
    if looks:
        extra = [look["peak_bytes"] - look["before_bytes"] for look in looks]
        merged["memory_bytes"] = {"median": statistics.median(extra), "least": min(extra), "most": max(extra)}
        merged["memory_peak_bytes"] = max(look["peak_bytes"] for look in looks)
    return merged


def places(modules: Sequence[str]) -> Iterator[tuple[str, Peer]]:
    """``MODULE:NAME`` of each peer, and the peer."""
    for module in modules:
        for peer in importlib.import_module(module).PEERS:
            yield f"{module}:{peer.name}", peer


def wanted(modules: Sequence[str], options: argparse.Namespace) -> Iterator[tuple[str, Peer]]:
    """Those that ``--only`` names."""
    for place, peer in places(modules):
        if not options.only or any(word.lower() in peer.name.lower() for word in options.only):
            yield place, peer


def failed(result: dict[str, Any], peer: Peer, size: str, error: str) -> None:
    """A peer that can run here, and did not get to the end."""
    line = error.partition("\n")[0]
    say(f"{size} {peer.name}: {error}")
    result["not_run"].append(
        {"name": f"{peer.name} at {size}", "what": peer.what, "versions": peer.versions(), "reason": line}
    )
    result["errors"].append({"name": peer.name, "size": size, "text": error})


def parameters_lane(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Every peer into a process that has nothing but parameters."""
    context = sides.forks()
    can = []
    for place, peer in wanted(options.modules, options):
        if reason := peer.missing():
            found = {"name": peer.name, "what": peer.what, "versions": peer.versions(), "reason": reason}
            result["not_run"].append(found)
            say(f"{peer.name}: not run: {reason}")
        else:
            can.append((place, peer))
    for size in options.sizes:
        weights = SIZES[size].elements() * 2
        if weights * ROOM > available():
            reason = (
                f"{weights * ROOM >> 20} MiB of memory would be needed, {available() >> 20} MiB can be had"
            )
            result["not_run"].append({"name": f"all at {size}", "what": "", "versions": {}, "reason": reason})
            say(f"{size}: not run: {reason}")
            continue
        turns: dict[str, list[dict[str, Any]]] = {}
        left = list(can)
        for number in range(options.turns):
            for place, peer in list(left):
                began = time.monotonic()
                pair = sides.Pair(context, place, size, options.seed, options.share, free_port())
                try:
                    roots = [pair.trainer.pid, pair.engine.pid]
                    last = number == options.turns - 1
                    turns.setdefault(peer.name, []).append(turn(pair, roots, options.syncs, last))
                    say(f"{size} turn {number + 1} {peer.name}: {time.monotonic() - began:.1f} s")
                except (RuntimeError, TimeoutError) as e:
                    failed(result, peer, size, str(e))
                    left.remove((place, peer))
                finally:
                    pair.close()
        rows = [
            {"name": peer.name, "what": peer.what, "settings": peer.settings}
            | merge(turns[peer.name], peer.by_files)
            for _, peer in left
        ]
        result["parameters"].append({"size": size, "elements": SIZES[size].elements(), "peers": rows})


def numbers_of(text: str) -> list[str]:
    found = [word for word in text.split(",") if word]
    for word in found:
        if word not in SIZES:
            raise argparse.ArgumentTypeError(f"{word!r}: take some of {', '.join(SIZES)}")
    return found


def at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/peers", description="Windlass and what is used instead, in one run."
    )
    parser.add_argument(
        "--sizes", type=numbers_of, default=["0.1B", "0.5B"], help=f"some of {', '.join(SIZES)}"
    )
    parser.add_argument(
        "--served",
        type=numbers_of,
        default=["0.1B"],
        help="sizes in real vLLM and SGLang servers; '' for none",
    )
    parser.add_argument("--turns", type=at_least(1), default=2, help="of each peer, one after the other")
    parser.add_argument("--syncs", type=at_least(1), default=3, help="versions that count, in a turn")
    parser.add_argument(
        "--share", type=float, default=0.01, help="of the elements that a step changes, about"
    )
    parser.add_argument("--rate", help="of loopback, as tc takes it (1gbit); needs root and tc")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", action="append", default=[], help="a part of a peer's name; may be repeated"
    )
    parser.add_argument("--modules", nargs="+", default=["peers.listed"], help="modules with lists of peers")
    parser.add_argument("--note", default="", help="about the machine, for the output")
    parser.add_argument("--out", type=Path, default=ROOT / "target" / "peers", help="a folder for the output")
    return parser.parse_args(given)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def build() -> str:
    """How the extension was built: it is the one of a folder of cargo's, or it is not known."""
    extension = ROOT / "python" / "windlass" / "_windlass.abi3.so"
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    for folder, name in (("release", "release build"), ("debug", "development build")):
        built = target / folder / "lib_windlass.so"
        if built.exists() and filecmp.cmp(built, extension, shallow=False):
            return name
    return "not built in this tree"


def about() -> dict[str, Any]:
    """The machine and the code."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    memory = int(Path("/proc/meminfo").read_text().split()[1]) >> 20
    return {
        "machine": f"{os.cpu_count()} virtual cores, {processor()}, {memory} GiB",
        "load_before": os.getloadavg(),
        "python": platform.python_version(),
        "torch_threads": int(os.environ["OMP_NUM_THREADS"]),
        "windlass_build": build(),
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def command(given: Sequence[str]) -> str:
    """Without what says nothing about the measurement."""
    words = iter(given)
    kept = []
    for word in words:
        if word in ("--out", "--note"):
            next(words, None)
        elif not word.startswith(("--out=", "--note=")):
            kept.append(word)
    return shlex.join(["bench/peers", *kept])


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    began = time.monotonic()
    # As Ctrl-C does, so that processes and files go.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    own = counters.own_network()
    if options.rate:
        if not own:
            raise SystemExit(
                "--rate: no network of its own can be made here, and the machine's is left alone"
            )
        counters.shape(options.rate)
    result: dict[str, Any] = {
        "bench": "peers",
        "command": command(sys.argv[1:] if given is None else given),
        **about(),
        "note": options.note,
        "own_network": own,
        "rate": options.rate,
        "share": options.share,
        "parameters": [],
        "served": [],
        "not_run": [],
        "errors": [],
    }
    if not own:
        say("bytes are those of the machine's loopback device: no network of its own can be made here")
    parameters_lane(options, result)
    if options.served:
        served: Any = None
        reason = why_not(lambda: importlib.import_module("peers.served"))
        if reason is None:
            served = importlib.import_module("peers.served")
            served.lane(options, result)
        else:
            result["not_run"].append({"name": "a real server", "what": "", "versions": {}, "reason": reason})
    result["seconds"] = round(time.monotonic() - began, 1)
    result["load_after"] = os.getloadavg()
    report.write(result, options.out)
    say((options.out / "peers.md").read_text())
    wrong = [
        row["name"]
        for lane in ("parameters", "served")
        for found in result[lane]
        for row in found["peers"]
        if not row["equal"]
    ]
    return 1 if wrong or result["errors"] else 0
