"""Trainers, data loaders and eval runners with a real controller and real receivers."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import windlass
from children import environment
from controlled import PATIENCE, World, until, world
from windlass import (
    Controller,
    WeightManager,
    WindlassDenied,
    WindlassInvalid,
    WindlassNotFound,
    WindlassPeerLost,
    WindlassStale,
    WindlassTimeout,
    open_image,
)
from windlass.controller import EvalTask, Served
from windlass.transfer.request import Identity

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="controlled-") as folder:
        yield Path(folder)


def manager(there: World, model_id: str = "policy", **fields: Any) -> WeightManager:
    return WeightManager(
        model_id=model_id,
        region_dir=str(there.home),
        controller=there.url,
        controller_token_file=str(there.token_file),
        agent={"token_file": str(there.token_file)},
        timeout=60.0,
        **fields,
    )


def weights(step: int) -> dict[str, torch.Tensor]:
    values = torch.zeros(4096)
    values[step % 4096] = step
    return {"w": values}


def test_a_version_that_was_announced_is_served_and_opens_the_gate(home: Path) -> None:
    with world(home) as there, manager(there) as wm:
        there.receiver("r1", "policy")
        there.receiver("r2", "policy")
        controller = Controller(there.url, token_file=there.token_file)
        assert controller.service_version() is None
        for step in range(1, 4):
            wm.offload(weights(step), step, 0, 1)
            told = wm.notify_version(sync=True, timeout=PATIENCE)
            assert told is not None
            assert (told.wait, told.set) == (False, "policy")
            assert told.served == Served(step, (Identity("policy", wm.incarnation or 0, step),))
            assert windlass.gate(step, controller=controller, timeout=PATIENCE) == told.served
            assert wm.gate(step, timeout=PATIENCE) == told.served
        # What is served is what the receivers' images hold.
        for name in ("r1", "r2"):
            with open_image(home / name / "policy") as image:
                assert (image.version, image.incarnation) == (3, wm.incarnation)
                assert image.tensors["w"].equal(weights(3)["w"])
        syncs = controller.status()["sets"][0]["syncs"]
        lanes = {span["lane"] for span in syncs[-1]["spans"]}
        assert {"trainer", "agent", "wire"} <= lanes, syncs
        # An agent that is busy for seconds is not waited for.
        assert any(sync["models"][0]["delta_ratio"] is not None for sync in syncs), syncs


def test_a_trainer_that_is_closed_takes_leave_and_one_that_is_killed_falls_silent(home: Path) -> None:
    with world(home, "--heartbeat=2") as there:
        controller = Controller(there.url, token_file=there.token_file)

        def state(model_id: str) -> str:
            return next(t["state"] for t in controller.status()["trainers"] if t["model_id"] == model_id)

        with manager(there) as wm:
            wm.offload(weights(1), 1, 0, 1)
            wm.notify_version(timeout=PATIENCE)
            assert state("policy") == "here"
        assert state("policy") == "left"
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, there.url, str(there.token_file), str(home)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert child.stdout is not None and child.stdout.readline() == "announced\n"
        child.kill()
        child.wait(PATIENCE)
        until("silence", lambda: state("killed") == "silent")
        assert state("policy") == "left"
        assert controller.status()["errors"] == []


#: A trainer that announces a version and waits to be killed.
KILLED = """
import sys, time
from pathlib import Path
from test_controller import manager, weights
from types import SimpleNamespace

url, token_file, home = sys.argv[1:]
wm = manager(SimpleNamespace(url=url, token_file=token_file, home=Path(home)), "killed")
wm.offload(weights(1), 1, 0, 1)
wm.notify_version(timeout=60)
print("announced", flush=True)
time.sleep(600)
"""


def test_a_trainer_that_does_not_wait_is_followed_to_its_last_version(home: Path) -> None:
    """What a receiver said of a version that it had already was refused, and the version was never served."""
    with world(home) as there, manager(there) as wm:
        receiver = there.receiver("r1", "policy")
        for last in (3, 6, 9):
            futures = []
            for step in range(last - 2, last + 1):
                wm.offload(weights(step), step, 0, 1)
                futures.append(wm.notify_version_async())
            assert [f.result(PATIENCE) is not None for f in futures] == [True] * 3
            windlass.gate(last, controller=there.url, token=there.token, timeout=PATIENCE)
        modes = [line["mode"] for line in receiver.lines() if line.get("event") == "staged"]
        # However many were skipped, images are fetched at the start only.
        assert modes.count("full") <= 1, modes
        assert "delta" in modes


def test_an_eval_runs_on_what_is_served_and_its_result_comes_back(home: Path) -> None:
    seen: list[EvalTask] = []

    def evaluate(task: EvalTask) -> dict[str, Any]:
        seen.append(task)
        if task.eval["suite"] == "broken":
            raise ValueError("no such suite")
        return {"version": task.served.version, "score": 0.5}

    with world(home) as there, manager(there) as wm, ThreadPoolExecutor(1) as pool:
        there.receiver("r1", "policy")
        controller = Controller(there.url, token=there.token)
        stop = threading.Event()
        serving = pool.submit(controller.serve_evals, evaluate, stop=stop)
        wm.offload(weights(1), 1, 0, 1)
        told = wm.notify_version(eval={"suite": "short"}, timeout=PATIENCE)
        assert told is not None
        assert told.eval == {"version": 1, "score": 0.5}
        wm.offload(weights(2), 2, 0, 1)
        told = wm.notify_version(eval={"suite": "broken"}, timeout=PATIENCE)
        assert told is not None
        assert told.served is not None
        # The version is served all the same.
        assert (told.eval, told.served.version) == (None, 2)
        assert "no such suite" in (told.eval_error or "")
        stop.set()
        assert serving.result(PATIENCE) == 2
        assert [task.eval["suite"] for task in seen] == ["short", "broken"]


def test_a_gate_that_does_not_open_says_what_it_waits_for(home: Path) -> None:
    with world(home, "--set=main=actor,verifier") as there, manager(there, "actor") as wm:
        begun = time.monotonic()
        with pytest.raises(WindlassTimeout, match="announced nothing"):
            windlass.gate(1, controller=there.url, token=there.token, timeout=0.3)
        assert time.monotonic() - begun < 10.0
        wm.offload(weights(1), 1, 0, 1)
        with pytest.raises(WindlassTimeout, match="verifier"):
            wm.notify_version(sync=True, timeout=2.0)
        with pytest.raises(WindlassNotFound, match="other"):
            windlass.gate(1, controller=there.url, token=there.token, set="other", timeout=1.0)
        with pytest.raises(WindlassDenied):
            windlass.gate(1, controller=there.url, token="not-the-token-0123456789", timeout=1.0)


def test_a_trainer_that_runs_ahead_is_told_to_wait(home: Path) -> None:
    with world(home, "--max-ahead=2") as there, manager(there) as wm:
        waits = []
        for step in range(1, 5):
            wm.offload(weights(step), step, 0, 1)
            told = wm.notify_version()
            assert told is not None
            waits.append((told.wait, told.ahead))
        # Nobody receives.
        assert waits == [(False, 1), (False, 2), (True, 3), (True, 4)]
        there.receiver("r1", "policy")
        windlass.gate(4, controller=there.url, token=there.token, timeout=PATIENCE)
        wm.offload(weights(5), 5, 0, 1)
        told = wm.notify_version(sync=True, timeout=PATIENCE)
        assert told is not None
        assert not told.wait


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    said: list[Any] = []

    def run() -> None:
        try:
            said.append(call())
        except Exception as e:
            said.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, said


def test_who_waits_at_the_gate_outlives_the_controller(home: Path) -> None:
    with world(home, "--set=main=policy") as there, manager(there) as wm:
        controller = Controller(there.url, token=there.token)
        there.receiver("r1", "policy")
        wm.offload(weights(1), 1, 0, 1)
        wm.notify_version(sync=True, timeout=PATIENCE)
        thread, said = in_background(lambda: controller.gate(2, timeout=PATIENCE))
        until("somebody waits", lambda: controller.status()["waits"] == 1)
        there.commands[0].end(kill=True)
        with pytest.raises(WindlassPeerLost):
            controller.gate(2, timeout=0.2)
        wm.offload(weights(2), 2, 0, 1)
        with pytest.raises(WindlassPeerLost):
            wm.notify_version()
        there.start_controller()
        # The next word of the trainer is enough.
        told = wm.notify_version(sync=True, timeout=PATIENCE)
        assert told is not None
        thread.join(PATIENCE)
        assert said == [told.served]


def test_a_restarted_controller_hears_of_a_trainer_that_waits(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer waited at the gate for a controller that waited for its next word."""
    monkeypatch.setattr("windlass.controller.REMIND_S", 0.2)
    with world(home, "--set=main=policy", "--max-ahead=2") as there, manager(there) as wm:
        controller = Controller(there.url, token=there.token)
        for version in range(1, 5):
            wm.offload(weights(version), version, 0, 1)
            told = wm.notify_version()
        assert told is not None
        assert told.wait
        thread, said = in_background(lambda: wm.gate(2, timeout=PATIENCE))
        until("somebody waits", lambda: controller.status()["waits"] == 1)
        there.commands[0].end(kill=True)
        there.start_controller()
        there.receiver("r1", "policy")
        thread.join(PATIENCE)
        assert [getattr(one, "version", one) for one in said] == [4]


def test_an_eval_that_nobody_runs_ends_in_time_and_says_so(home: Path) -> None:
    with world(home, "--set=main=policy") as there, manager(there) as wm:
        there.receiver("r1", "policy")
        wm.offload(weights(1), 1, 0, 1)
        wm.notify_version(sync=True, timeout=PATIENCE)
        with pytest.raises(WindlassTimeout, match="serve_evals"):
            wm.notify_version(eval={"suite": "short"}, timeout=1.0)


def test_a_gate_waits_for_a_controller_that_is_away_as_long_as_it_may() -> None:
    began = time.monotonic()
    with pytest.raises(WindlassPeerLost):
        windlass.gate(1, controller="http://127.0.0.1:9", timeout=1.0)
    assert time.monotonic() - began >= 1.0


def test_a_trainer_whose_clock_went_back_is_followed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = 1 << 62
    with world(home, "--set=main=policy", "--retry=0.2") as there:
        receiver = there.receiver("r1", "policy")
        with monkeypatch.context() as patch:
            # The clock of the first life is many years ahead.
            patch.setattr(WeightManager, "_beyond", lambda _: f"{ahead:x}")
            with manager(there) as wm:
                wm.offload(weights(7), 7, 0, 1)
                wm.notify_version(sync=True, timeout=PATIENCE)
                assert wm.incarnation is not None
                assert wm.incarnation == ahead
                region = wm.region
        assert region is not None
        shutil.rmtree(region, ignore_errors=True)
        # Only the receivers know of it, for the controller is new, too.
        seen = len(receiver.lines())
        there.commands[0].end(kill=True)
        there.start_controller()
        receiver.event("joined", seen)
        with manager(there) as wm:
            wm.offload(weights(3), 3, 0, 1)
            told = wm.notify_version(sync=True, timeout=PATIENCE)
            assert told is not None
            assert wm.incarnation is not None
            assert wm.incarnation == ahead + 1
            with open_image(home / "r1" / "policy") as image:
                assert (image.version, image.incarnation) == (3, wm.incarnation)


def test_a_wait_on_behalf_of_a_superseded_trainer_ends(home: Path) -> None:
    with world(home, "--set=main=policy", "--retry=0.2") as there, manager(there) as wm:
        controller = Controller(there.url, token=there.token)
        receiver = there.receiver("r1", "policy")
        wm.offload(weights(7), 7, 0, 1)
        wm.notify_version(sync=True, timeout=PATIENCE)
        old = wm.incarnation
        thread, said = in_background(
            lambda: controller.gate(8, model_id="policy", incarnation=old, timeout=PATIENCE)
        )
        until("somebody waits", lambda: controller.status()["waits"] == 1)
        # Back to an older checkpoint: receivers follow, and nothing of the dead life opens a gate.
        wm.resume()
        wm.offload(weights(3), 3, 0, 1)
        told = wm.notify_version(sync=True, timeout=PATIENCE)
        assert told is not None
        assert told.served is not None
        assert told.served.version == 3
        thread.join(PATIENCE)
        assert isinstance(said[0], WindlassStale), said
        with pytest.raises(WindlassStale, match="superseded"):
            controller.gate(1, model_id="policy", incarnation=old, timeout=1.0)
        with pytest.raises(WindlassTimeout, match="7"):
            wm.gate(7, timeout=0.2)
        served = controller.gate(3, model_id="policy", incarnation=wm.incarnation, timeout=PATIENCE)
        assert served.version == 3
        with open_image(home / "r1" / "policy") as image:
            assert (image.version, image.incarnation) == (3, wm.incarnation)
        assert receiver.end() == 0


def test_what_is_not_named_or_makes_no_sense_is_said(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.delenv("WINDLASS_CONTROLLER", raising=False)
    with pytest.raises(WindlassInvalid, match="no controller"):
        windlass.gate(1)
    monkeypatch.setenv("WINDLASS_CONTROLLER", "http://127.0.0.1:9")
    with pytest.raises(WindlassPeerLost, match=r"127\.0\.0\.1:9"):
        windlass.gate(1, timeout=0.1)
    with pytest.raises(WindlassInvalid, match="version"):
        windlass.gate(-1)
    with pytest.raises(WindlassInvalid, match="incarnation"):
        windlass.gate(1, model_id="a", incarnation="no number", timeout=0.1)
    with pytest.raises(WindlassInvalid, match="timeout"):
        windlass.gate(1, timeout=-1.0)
    with pytest.raises(WindlassNotFound, match="token file"):
        Controller(token_file=home / "nothing")
    with pytest.raises(WindlassInvalid, match="not both"):
        Controller(token="a", token_file=home / "nothing")
    assert repr(Controller()) == "Controller('http://127.0.0.1:9')"
