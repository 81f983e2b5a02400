"""Versions for many hosts that pass them on to each other, compared with one host, and with hosts that do not.

    sudo .venv/bin/python bench/relay.py [--hosts 16] [--rate 50mbit] [--mib 64] [--repeats 3] [--json FILE]

Needs root, `ip`, `tc` and `unshare` (`tests/hosts/hosts.py`), torch, and a release build of the package (`make gpu-build`). A publisher and
the receivers are processes on hosts of their own: namespaces of this machine, whose links have a rate in both directions. All
receivers have the version before when the next one is published. Measured is the time from its seal until the last receiver has it, by
one clock, and the bytes that leave the publisher's host, headers included:

- `one`: one receiver.
- `relay`: all of them, which pass versions on.
- `killed`: the same, and two hosts die at random moments of the transfer; those that live count.
- `slow`: the same, and one host has a tenth of the rate; the others count.
- `apart`: all of them, with `--no-relay`.

`full` changes every element, which makes an image, and `delta` one in a hundred, on slower links, so that it takes long enough to be
measured. Medians count. The bars are about links, not processors: `cpu` is the share of this machine's processors that the hosts'
processes took, and all processes. Where the first is near 1, take a lower rate.

`windlass bench scale` predicts both from a model of the same links; it must come within a fifth.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "tests" / "hosts"), str(ROOT / "python")]

import needs  # noqa: E402

needs.need("torch", "safetensors", "windlass")

from hosts import Bench, Host, bench, missing  # noqa: E402
from swarm import Service, Swarm  # noqa: E402

import windlass  # noqa: E402

#: Of the time of one host; of the image; of the time of one host again.
BAR_TIME, BAR_BYTES, BAR_DELAY = 1.5, 2.0, 1.0
#: How far a prediction may lie from what is measured.
BAR_MODEL = 0.2
#: How long all receivers may take for one version.
PATIENCE = 600.0


class Cores:
    """How busy the machine's processors are from here on: with everything, and with the processes of the hosts."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts, self._before = hosts, self._ticks(hosts)

    @staticmethod
    def _ticks(hosts: Sequence[Host]) -> tuple[int, int, int]:
        user, nice, system, idle, wait, *rest = map(int, Path("/proc/stat").read_text().split()[1:9])
        own = 0
        for stat in (path for host in hosts for path in host.path("/proc").glob("[0-9]*/stat")):
            # Some end meanwhile.
            with contextlib.suppress(OSError):
                own += sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13]))
        return user + nice + system + sum(rest), idle + wait, own

    def shares(self) -> dict[str, float]:
        """Of all processors' time. Hosts that died meanwhile do not count."""
        busy, idle, own = (a - b for a, b in zip(self._ticks(self._hosts), self._before, strict=True))
        return {"cpu": busy / max(1, busy + idle), "own_cpu": max(0, own) / max(1, busy + idle)}


class Runs:
    """One publisher and its versions."""

    def __init__(self, home: Path, hosts: Bench, options: argparse.Namespace) -> None:
        self.rates = {"full": options.rate, "delta": options.delta_rate}
        self.random = random.Random(options.seed)
        self.swarm = Swarm(home, hosts, options.rate, options.hosts, options.mib)
        self.bytes = self.swarm.bytes
        # Every so many elements change.
        self.every = {"full": 1, "delta": round(100 / options.change)}
        self.swarm.publish()

    def shape(self, kind: str) -> None:
        """Gives all links the rate for a kind of version."""
        for host in (self.swarm.source, *self.swarm.hosts):
            host.shape(self.rates[kind])

    def all_have(self, receivers: Sequence[Service]) -> list[tuple[float, dict[str, Any]]]:
        """Waits until all have the newest version; when, and by what."""
        return [receiver.wait(self.swarm.version, PATIENCE) for receiver in receivers]

    def start(self, hosts: Sequence[Host], *options: str) -> list[Service]:
        """Receivers that have the newest version."""
        receivers = [self.swarm.receive(host, *options) for host in hosts]
        self.all_have(receivers)
        return receivers

    def measure(
        self, kind: str, counted: Sequence[Service], meanwhile: Callable[[int], None] = lambda sent: None
    ) -> dict[str, float]:
        """One version to receivers that have the one before. ``meanwhile`` gets the bytes that the publisher had sent."""
        sent = self.swarm.source.sent()
        sealed = self.swarm.next(self.every[kind])
        cores = Cores([self.swarm.source, *(receiver.host for receiver in counted)])
        meanwhile(sent)
        have = self.all_have(counted)
        wrong = {event["mode"] for _, event in have} - {kind}
        assert not wrong, f"a {kind} version came as {wrong}"
        relayed, wire = (sum(event[key] for _, event in have) for key in ("relayed_bytes", "wire_bytes"))
        return {
            "seconds": max(at for at, _ in have) - sealed,
            "first": min(at for at, _ in have) - sealed,
            "sent": self.swarm.source.sent() - sent,
            "payload": wire / len(have),
            "relayed": relayed / wire,
            "lost": sum(event["relays_lost"] for _, event in have),
            **cores.shares(),
        }

    def kill(self, hosts: Sequence[Host], sent: int) -> None:
        """Kills hosts, each when the publisher has sent a random part of the image."""
        for host, part in zip(hosts, sorted(self.random.uniform(0.1, 1.0) for _ in hosts), strict=True):
            self.swarm.under_way(sent, part)
            host.kill()


def several(repeats: int, measure: Callable[[], dict[str, float]]) -> dict[str, Any]:
    """Medians, and all that was measured."""
    rounds = [measure() for _ in range(repeats)]
    return {**{key: statistics.median(r[key] for r in rounds) for key in rounds[0]}, "rounds": rounds}


def measured(runs: Runs, hosts: Bench, repeats: int, cases: Sequence[str]) -> dict[str, dict[str, Any]]:
    swarm, out = runs.swarm, {}

    def both(case: str, receivers: Sequence[Service], repeats: int = repeats) -> None:
        for kind in ("full", "delta"):
            runs.shape(kind)
            out[f"{case}, {kind}"] = several(repeats, lambda kind=kind: runs.measure(kind, receivers))
            row(f"{case}, {kind}", out[f"{case}, {kind}"], runs.bytes)
        runs.shape("full")

    alone = runs.start(swarm.hosts[:1])
    both("one", alone)
    everybody = [*alone, *runs.start(swarm.hosts[1:])]
    both("relay", everybody)
    if "slow" in cases:

        def among_fast() -> dict[str, float]:
            swarm.hosts[-1].shape(tenth(runs.rates["full"]))
            found = runs.measure("full", everybody[:-1])
            swarm.hosts[-1].shape(runs.rates["full"])
            runs.all_have(everybody)
            return found

        out["slow, full"] = several(repeats, among_fast)
        row("slow, full", out["slow, full"], runs.bytes)
    if "apart" in cases:
        for receiver in everybody:
            receiver.stop()
        everybody = [swarm.receive(host, "--no-relay") for host in swarm.hosts]
        swarm.next(runs.every["delta"])
        runs.all_have(everybody)
        # It takes as many times as long as there are hosts, and says nothing new the next time.
        both("apart", everybody, 1)
        for receiver in everybody:
            receiver.stop()
        everybody = [swarm.receive(host) for host in swarm.hosts]
        swarm.next(runs.every["delta"])
        runs.all_have(everybody)
    if "killed" in cases:

        def with_deaths() -> dict[str, float]:
            nonlocal everybody
            victims = runs.random.sample(range(len(everybody)), 2)
            rest = [r for n, r in enumerate(everybody) if n not in victims]
            found = runs.measure(
                "full", rest, lambda sent: runs.kill([swarm.hosts[n] for n in victims], sent)
            )
            for n in victims:
                swarm.hosts[n] = hosts.host(swarm.hosts[n].name, runs.rates["full"])
                (everybody[n],) = runs.start([swarm.hosts[n]])
            return found

        out["killed, full"] = several(repeats, with_deaths)
        row("killed, full", out["killed, full"], runs.bytes)
    return out


def tenth(rate: str) -> str:
    """A tenth of a rate such as ``50mbit``."""
    number = rate.rstrip("abcdefghijklmnopqrstuvwxyz")
    return f"{float(number) / 10:g}{rate[len(number) :]}"


def row(name: str, found: dict[str, Any], image: int) -> None:
    """A line of the table."""
    took = sorted(r["seconds"] for r in found["rounds"])
    sys.stdout.write(
        f"{name:14} {found['seconds']:8.2f} [{took[0]:.2f}..{took[-1]:.2f}] s   first {found['first']:7.2f} s"
        f"   publisher sent {found['sent'] / image:6.3f} images, {found['sent'] / found['payload']:6.2f} payloads"
        f"   relayed {found['relayed']:4.0%}   lost {found['lost']:3.0f}   cpu {found['own_cpu']:4.0%} of {found['cpu']:4.0%}\n"
    )
    sys.stdout.flush()


def bars(results: dict[str, dict[str, Any]], image: int) -> list[dict[str, Any]]:
    def at_most(name: str, value: float, bar: float) -> dict[str, Any]:
        return {"name": name, "value": round(value, 3), "bar": bar, "met": value <= bar}

    one, relay = results["one, full"]["seconds"], results["relay, full"]["seconds"]
    found = [
        at_most("full: relay / one, time", relay / one, BAR_TIME),
        at_most("full: sent / image", results["relay, full"]["sent"] / image, BAR_BYTES),
        at_most(
            "delta: relay / one, time",
            results["relay, delta"]["seconds"] / results["one, delta"]["seconds"],
            BAR_TIME,
        ),
        at_most(
            "delta: sent / payload",
            results["relay, delta"]["sent"] / results["relay, delta"]["payload"],
            BAR_BYTES,
        ),
    ]
    for name in ("killed", "slow"):
        if f"{name}, full" in results:
            late = (results[f"{name}, full"]["seconds"] - relay) / one
            found.append(at_most(f"full: ({name} - relay) / one, time", late, BAR_DELAY))
    return found


def bits(rate: str) -> float:
    """A rate such as ``50mbit`` in bits a second."""
    for unit, scale in {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}.items():
        with contextlib.suppress(ValueError):
            if rate.endswith(unit) and (number := float(rate.removesuffix(unit))) > 0:
                return number * scale
    raise ValueError(f"{rate!r} is not a rate: give a number and kbit, mbit or gbit, such as 50mbit")


def a_rate(text: str) -> str:
    try:
        bits(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
    return text


def predicted(kind: str, rate: str, image: int, payload: float, hosts: int) -> float:
    """How many times as long as one host all of them take, by the model."""
    # What the hosts' links let stand in front of them (`hosts.py`).
    queue = 100 + 65536 * 8e3 / bits(rate)
    words = ["--bytes", str(image), "--delta-bytes", str(round(payload)), "--gbit", str(bits(rate) / 1e9)]
    words += ["--receivers", str(hosts), "--trainers", "1", "--queue-ms", str(queue), "--deaths", "0"]
    command = [sys.executable, "-m", "windlass", "bench", "scale", "--json", *words]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    (row,) = (row for row in rows if row["mode"] == kind)
    return row["relay_s"] / row["alone_s"]


def compared(
    results: dict[str, dict[str, Any]], image: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """What the model says of what was measured."""
    found = []
    for kind, rate in (("full", options.rate), ("delta", options.delta_rate)):
        one, relay = results[f"one, {kind}"], results[f"relay, {kind}"]
        model = predicted(kind, rate, image, relay["payload"], options.hosts)
        off = model / (relay["seconds"] / one["seconds"]) - 1
        name = f"{kind}: relay / one by the model: {model:.2f}, off by"
        found.append({"name": name, "value": round(off, 3), "bar": BAR_MODEL, "met": abs(off) <= BAR_MODEL})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=needs.whole(4), default=16, help="receivers' hosts")
    parser.add_argument("--rate", type=a_rate, default="50mbit", help="of every link, as tc takes it")
    parser.add_argument(
        "--delta-rate", type=a_rate, default="2mbit", help="of every link while deltas are measured"
    )
    parser.add_argument("--mib", type=needs.whole(1), default=64, help="MiB of the image")
    parser.add_argument(
        "--change", type=float, default=1.0, help="percent of the elements that a delta changes"
    )
    parser.add_argument("--repeats", type=needs.whole(1), default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--cases", default="slow,apart,killed", help="which to measure besides `one` and `relay`"
    )
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args()
    if lacks := missing():
        needs.end(f"no bench of hosts: {lacks}", 2)
    began = time.monotonic()
    # Hosts have a /tmp and a /dev/shm of their own.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="windlass-relay-") as home, bench() as hosts:
        runs = Runs(Path(home), hosts, options)
        results = measured(runs, hosts, options.repeats, options.cases.split(","))
    result = {
        "bench": "relay",
        "windlass": windlass.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "hosts": options.hosts,
        "rate": options.rate,
        "delta_rate": options.delta_rate,
        "change_percent": options.change,
        "bytes": runs.bytes,
        "seconds": round(time.monotonic() - began, 1),
        "results": results,
        "bars": [*bars(results, runs.bytes), *compared(results, runs.bytes, options)],
    }
    for bar in result["bars"]:
        sys.stdout.write(
            f"{bar['name']:46} {bar['value']:7.3f}   bar {bar['bar']:.1f}   {'met' if bar['met'] else 'MISSED'}\n"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
