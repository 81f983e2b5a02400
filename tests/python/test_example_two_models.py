"""The example with an actor and a verifier, by the command line that a user types, and every load in it watched."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = [sys.executable, str(ROOT / "examples" / "05_two_models" / "run.py")]
MODELS = {"actor", "verifier"}

pytestmark = pytest.mark.timeout(420)


@contextlib.contextmanager
def start(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    run = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )
    try:
        yield run
    except subprocess.TimeoutExpired:
        # Says where it hangs.
        run.send_signal(signal.SIGABRT)
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


def homes() -> set[Path]:
    return set(Path("/dev/shm").glob("windlass-two-*"))


def processes_of(home: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, UnicodeDecodeError):
            continue
        if str(home) in words:
            found.append(words)
    return found


def watch(lines: list[dict[str, Any]], receivers: set[str]) -> dict[str, list[int]]:
    """Goes through all that receivers said, in the order in which they said it. The versions that each has served.

    Nobody begins to load a version before every receiver has staged it for both models; and no receiver has versions of
    two steps, but while one order is being carried out.
    """
    staged: dict[tuple[str, str], set[int]] = defaultdict(set)
    has: dict[tuple[str, str], int] = {}
    open_orders: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    served: dict[str, list[int]] = defaultdict(list)
    for line in lines:
        event, identity = line["event"], line.get("identity")
        assert event != "order_failed", line
        if identity is None:
            continue
        receiver, model, version = line["receiver"], identity["model_id"], identity["version"]
        if event == "staged":
            staged[receiver, model].add(version)
        elif event == "loading":
            for other in receivers:
                for each in MODELS:
                    assert version in staged[other, each], (line, other, each)
            open_orders[receiver][line["order"]].add(model)
            assert sum(map(bool, open_orders[receiver].values())) == 1, line
        elif event == "loaded":
            has[receiver, model] = version
            open_orders[receiver][line["order"]].remove(model)
            versions = {has.get((receiver, each)) for each in MODELS}
            if len(versions) == 1:
                served[receiver].append(version)
            else:
                # The other model belongs to the same order and is on its way there, from one step to the next.
                before = served[receiver][-1] if served[receiver] else None
                assert versions == {before, version}, line
    return served


def test_an_actor_and_a_verifier_of_different_speed_are_never_mixed(tmp_path: Path) -> None:
    before, log = homes(), tmp_path / "log"
    with start("--versions=6", "--receivers=2", "--json", f"--log={log}") as run:
        out, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    result = json.loads(out)
    assert result["ok"], result
    assert result["served"] == 6
    assert {r["receiver"] for r in result["rollouts"]} == {"receiver-0", "receiver-1"}
    # All that were served at the same version with the same weights have the same reward.
    rewards = defaultdict(set)
    for each in result["rollouts"]:
        rewards[each["version"]].add(each["reward"])
    assert all(len(found) == 1 for found in rewards.values()), rewards
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    served = watch(lines, {"receiver-0", "receiver-1"})
    assert set(served) == {"receiver-0", "receiver-1"}
    for versions in served.values():
        assert versions == sorted(set(versions))
        assert versions[-1] == 6
    assert homes() <= before


def test_the_watcher_of_loads_sees_a_mix() -> None:
    def line(event: str, model: str, version: int, order: int = 1) -> dict[str, Any]:
        identity = {"model_id": model, "incarnation": 1, "version": version}
        return {"event": event, "receiver": "r", "order": order, "identity": identity}

    def both(event: str, version: int, order: int) -> list[dict[str, Any]]:
        return [line(event, model, version, order) for model in sorted(MODELS)]

    right = [*both("staged", 1, 0), *both("loading", 1, 1), *both("loaded", 1, 1)]
    right += [*both("staged", 2, 0), *both("loading", 2, 2), *both("loaded", 2, 2)]
    assert watch(right, {"r"}) == {"r": [1, 2]}
    early = [*right, line("staged", "actor", 3), line("loading", "actor", 3, 3)]
    with pytest.raises(AssertionError):
        watch(early, {"r"})
    # One model goes on to another step before the other has come.
    torn = [*right, *both("staged", 3, 0), *both("staged", 4, 0)]
    torn += [line("loading", "actor", 3, 3), line("loaded", "actor", 3, 3), line("loading", "actor", 4, 4)]
    torn += [line("loaded", "actor", 4, 4)]
    with pytest.raises(AssertionError):
        watch([*torn, line("loading", "verifier", 3, 5), line("loaded", "verifier", 3, 5)], {"r"})


def test_the_example_ends_with_ctrl_c_and_leaves_nothing(tmp_path: Path) -> None:
    before = homes()
    with start("--versions=1000", "--receivers=1", f"--log={tmp_path / 'log'}") as run:
        deadline = time.monotonic() + 200.0
        while '"loaded"' not in ((tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""):
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (home,) = homes() - before
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=150)
    assert (run.returncode, "Traceback" in errors) == (130, False), errors
    assert not home.exists()
    assert processes_of(home) == []
