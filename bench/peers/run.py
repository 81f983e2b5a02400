"""Measures the peers in turn, and writes what was found.

Owns: the order of measurements, what a sync is, and the output. ``python bench/peers --help`` has the options.
"""

from __future__ import annotations

import argparse
import contextlib
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
from peers.device import Device, compared_by, why_unusable
from peers.model import SIZES
from peers.peer import Peer, why_not

ROOT = Path(__file__).resolve().parent.parent.parent
#: Times the weights that a pair and its peer take at the most: two models, copies of them at both ends, an image, files.
ROOM = 7
#: The same on a GPU: two models and copies of both there; in host memory two slots and an image, or two checkpoints and one being made.
ROOM_OF_DEVICE, ROOM_BESIDE_IT = 4.4, 4
#: How often the memory of a device is looked at: a sync may take no longer than a few of these.
LOOK_S = 0.002
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


def sync(
    pair: sides.Pair,
    version: int,
    roots: Sequence[int],
    looks: Sequence[contextlib.AbstractContextManager[Any]] = (),
) -> dict[str, Any]:
    """One version through a peer, while ``looks`` are entered. The step itself is not measured."""
    before, cpu = counters.loopback_bytes(), counters.Cpu(roots)
    with contextlib.ExitStack() as stack:
        for look in looks:
            stack.enter_context(look)
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


def turn(
    pair: sides.Pair,
    roots: Sequence[int],
    syncs: int,
    look: bool,
    device: Device | None = None,
    most_s: float | None = None,
) -> dict[str, Any]:
    """A peer's turn: the first version, which sets everything up, some that count, and one in which memory is looked at. After
    ``most_s``, importing and connecting aside, no further version begins that counts, except for the first of these."""
    weights = pair.weights()
    bare = counters.memory(roots, pair.home)
    taken = None if device is None else device.used()
    versions = pair.both("open")
    until = None if most_s is None else time.monotonic() + most_s
    found: dict[str, Any] = {"versions": versions[0], "bytes": weights}
    pair.trainer.ask("step")
    found["first"] = sync(pair, 1, roots)
    found["syncs"] = []
    for version in range(2, syncs + 2):
        if until is not None and version > 2 and time.monotonic() > until:
            break
        changed = pair.trainer.ask("step")
        found["syncs"].append({**sync(pair, version, roots), "changed": changed})
    if look:
        pair.trainer.ask("step")
        # What the allocator keeps of earlier versions, and of the comparison, is not what this one takes.
        pair.both("trim")
        peaks = [counters.Peak(lambda: counters.memory(roots, pair.home))]
        if device is not None:
            peaks.append(counters.Peak(device.used, LOOK_S))
        last = sync(pair, len(found["syncs"]) + 2, roots, peaks)
        found["memory"] = {"peak_bytes": peaks[0].most, "before_bytes": bare, "equal": last["equal"]}
        if taken is not None:
            found["memory"] |= {"device_peak_bytes": peaks[1].most, "device_before_bytes": taken}
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
    for key, front in (("memory", ""), ("device", "device_")):
        extra = [
            look[f"{front}peak_bytes"] - look[f"{front}before_bytes"]
            for look in looks
            if f"{front}peak_bytes" in look
        ]
        if extra:
            spread = {"median": statistics.median(extra), "least": min(extra), "most": max(extra)}
            merged[f"{key}_bytes"] = spread
    if looks:
        merged["memory_peak_bytes"] = max(look["peak_bytes"] for look in looks)
    return merged


def row_of(peer: Peer, turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A line of the table."""
    named = {"name": peer.name, "what": peer.what, "settings": peer.settings}
    return named | merge(turns, peer.by_files)


def places(modules: Sequence[str]) -> Iterator[tuple[str, Peer]]:
    """``MODULE:NAME`` of each peer, and the peer."""
    for module in modules:
        for peer in importlib.import_module(module).PEERS:
            yield f"{module}:{peer.name}", peer


def is_wanted(name: str, options: argparse.Namespace) -> bool:
    """Whether ``--only`` names it."""
    return not options.only or any(word.lower() in name.lower() for word in options.only)


def wanted(modules: Sequence[str], options: argparse.Namespace) -> Iterator[tuple[str, Peer]]:
    """Those that ``--only`` names."""
    for place, peer in places(modules):
        if is_wanted(peer.name, options):
            yield place, peer


def failed(result: dict[str, Any], peer: Peer, size: str, error: str) -> None:
    """A peer that can run here, and did not get to the end."""
    line = error.partition("\n")[0]
    say(f"{size} {peer.name}: {error}")
    result["not_run"].append(
        {"name": f"{peer.name} at {size}", "what": peer.what, "versions": peer.versions(), "reason": line}
    )
    result["errors"].append({"name": peer.name, "size": size, "text": error})


def not_run(result: dict[str, Any], name: str, reason: str, peer: Peer | None = None) -> None:
    """One that is left out, and why."""
    told = {"what": "", "versions": {}} if peer is None else {"what": peer.what, "versions": peer.versions()}
    result["not_run"].append({"name": name, **told, "reason": reason})
    say(f"{name}: not run: {reason}")


def no_room(options: argparse.Namespace, weights: int) -> str | None:
    """Why a model of so many bytes cannot be measured."""
    if options.device == "cpu":
        needed = weights * ROOM
    else:
        needed, free = weights * ROOM_BESIDE_IT, Device(options.device).free()
        if free is not None and weights * ROOM_OF_DEVICE > free:
            return f"{weights * ROOM_OF_DEVICE / 1e9:.1f} GB of the device would be needed, {free / 1e9:.1f} GB are free"
    if needed > available():
        return f"{needed >> 20} MiB of memory would be needed, {available() >> 20} MiB can be had"
    return None


def late(options: argparse.Namespace) -> bool:
    """Whether ``--deadline`` has passed, after which nothing begins."""
    return options.until is not None and time.monotonic() > options.until


def parameters_lane(options: argparse.Namespace, result: dict[str, Any], save: Callable[[], None]) -> None:
    """Every peer into a process that has nothing but parameters. ``save`` is called after each."""
    if not options.sizes:
        return
    context = sides.forks()
    device = None if options.device == "cpu" else Device(options.device)
    can = []
    for place, peer in wanted(options.modules, options):
        if reason := peer.missing():
            not_run(result, peer.name, reason, peer)
        else:
            can.append((place, peer))
    for size in options.sizes:
        weights = SIZES[size].elements() * 2
        if reason := no_room(options, weights):
            not_run(result, f"all at {size}", reason)
            continue
        lane: dict[str, Any] = {"size": size, "elements": SIZES[size].elements(), "peers": []}
        if device is not None:
            lane["compared_by"] = compared_by(weights)
        result["parameters"].append(lane)
        turns: dict[str, list[dict[str, Any]]] = {}
        left = list(can)
        for number in range(options.turns):
            for place, peer in list(left):
                if late(options):
                    if number == 0:
                        not_run(result, f"{peer.name} at {size}", "no time was left (--deadline)", peer)
                        left.remove((place, peer))
                    continue
                began = time.monotonic()
                words = (context, place, size, options.seed, options.share, free_port())
                pair = sides.Pair(*words, device=options.device)
                try:
                    roots = [pair.trainer.pid, pair.engine.pid]
                    last = number == options.turns - 1
                    found = turn(pair, roots, options.syncs, last, device, options.most)
                    turns.setdefault(peer.name, []).append(found)
                    say(
                        f"{size} turn {number + 1} {peer.name}: {time.monotonic() - began:.1f} s{brief(found, device)}"
                    )
                except (RuntimeError, OSError) as e:
                    failed(result, peer, size, str(e))
                    left.remove((place, peer))
                finally:
                    pair.close()
                lane["peers"] = [row_of(peer, turns[peer.name]) for _, peer in left if peer.name in turns]
                save()


def brief(found: dict[str, Any], device: Device | None) -> str:
    """Medians of a turn, on a device, so that a run that is cut short has told them."""
    if device is None:
        return ""
    keys = ("visible_s", "pause_s", "blocked_s")
    told = [report.seconds(statistics.median(one[key] for one in found["syncs"])) for key in keys]
    equal = all(one["equal"] for one in (found["first"], *found["syncs"]))
    return f"; visible {told[0]}, pause {told[1]}, blocked {told[2]}, {'equal' if equal else 'WRONG BYTES'}"


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
        "--device",
        default="cpu",
        help="of all weights: cpu, cuda, cuda:N; cpu:0 runs what is for GPUs on the host, whose times mean nothing",
    )
    parser.add_argument(
        "--sizes",
        type=numbers_of,
        help=f"some of {', '.join(SIZES)}; '' for none; 0.1B,0.5B if not given, on a GPU 0.6B,8B",
    )
    parser.add_argument(
        "--served",
        type=numbers_of,
        help="sizes in real vLLM and SGLang servers; '' for none; 0.1B if not given, on a GPU none",
    )
    parser.add_argument(
        "--turns", type=at_least(1), help="of each peer, one after the other; 2 if not given, on a GPU 1"
    )
    parser.add_argument(
        "--syncs",
        "--steps",
        dest="syncs",
        type=at_least(1),
        help="versions that count, in a turn; 3 if not given, on a GPU 5",
    )
    parser.add_argument(
        "--most", type=float, help="seconds of a turn after which it measures no further version; on a GPU 25"
    )
    parser.add_argument("--deadline", type=float, help="seconds after which no turn begins; on a GPU 390")
    parser.add_argument(
        "--patience", type=float, help="seconds that a process may take to answer; 240, on a GPU 120"
    )
    parser.add_argument(
        "--vllm-python",
        default=os.environ.get("WINDLASS_VLLM_PYTHON", sys.executable),
        help="on a GPU: a Python that has vLLM",
    )
    parser.add_argument(
        "--compile", action="store_true", help="on a GPU: vLLM compiles; otherwise it is eager"
    )
    parser.add_argument(
        "--share", type=float, default=0.01, help="of the elements that a step changes, about"
    )
    parser.add_argument("--rate", help="of loopback, as tc takes it (1gbit); needs root and tc")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", action="append", default=[], help="a part of a peer's name; may be repeated"
    )
    parser.add_argument("--modules", nargs="+", help="modules with lists of peers")
    parser.add_argument("--note", default="", help="about the machine, for the output")
    parser.add_argument("--out", type=Path, default=ROOT / "target" / "peers", help="a folder for the output")
    found = parser.parse_args(given)
    # torch wants a number in some places.
    found.device = "cuda:0" if found.device == "cuda" else found.device
    for name, value in (OF_HOST if found.device == "cpu" else OF_DEVICE).items():
        if getattr(found, name) is None:
            setattr(found, name, value)
    found.until = None if found.deadline is None else time.monotonic() + found.deadline
    return found


#: What is taken where nothing is asked for.
OF_HOST = {
    "sizes": ["0.1B", "0.5B"],
    "served": ["0.1B"],
    "turns": 2,
    "syncs": 3,
    "modules": ["peers.listed"],
    "patience": 240.0,
}
OF_DEVICE = {
    "sizes": ["0.6B", "8B"],
    "served": [],
    "turns": 1,
    "syncs": 5,
    "modules": ["peers.listed_on_device"],
    "most": 25.0,
    "deadline": 390.0,
    "patience": 120.0,
}


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
    sides.ANSWER_S = options.patience
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
    # A driver that has been used may have threads.
    if reason := why_unusable(options.device):
        sys.stderr.write(f"*** --device: {reason}; nothing was measured\n")
        return 2
    result: dict[str, Any] = {
        "bench": "peers",
        "command": command(sys.argv[1:] if given is None else given),
        **about(),
        "device": options.device,
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
    if options.device != "cpu":
        result["machine"] += f"; {Device(options.device).about()}"

    def save() -> None:
        result["seconds"] = round(time.monotonic() - began, 1)
        result["load_after"] = os.getloadavg()
        report.write(result, options.out)

    parameters_lane(options, result, save)
    if options.served:
        module = "peers.served" if options.device == "cpu" else "peers.served_on_device"
        if reason := why_not(lambda: importlib.import_module(module)):
            not_run(result, "a real server", reason)
        else:
            importlib.import_module(module).lane(options, result, save)
    save()
    say((options.out / "peers.md").read_text())
    wrong = [
        row["name"]
        for lane in ("parameters", "served")
        for found in result[lane]
        for row in found["peers"]
        if not row["equal"]
    ]
    return 1 if wrong or result["errors"] else 0
