"""An engine of one's own: two callbacks, and what happens when they fail."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from windlass import (
    Follower,
    Image,
    Receiver,
    WeightManager,
    WindlassCorrupt,
    WindlassDenied,
    WindlassPeerLost,
)
from windlass.receive import follow
from windlass.receive.receiver import Synced


class Engine:
    """Serves a linear layer, and notes when it stands still."""

    def __init__(self) -> None:
        self.model = nn.Linear(8, 8)
        self.paused = False
        self.seen: list[str] = []
        self.broken = 0

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        self.paused = True
        self.seen.append("pause")
        yield
        self.paused = False
        self.seen.append("resume")

    def load(self, image: Image) -> None:
        assert self.paused
        self.seen.append(f"load {image.version}")
        self.model.weight.data.copy_(image.tensors["weight"])
        if self.broken:
            self.broken -= 1
            raise RuntimeError("half of it")
        self.model.bias.data.copy_(image.tensors["bias"])


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[WeightManager, Receiver]]:
    with WeightManager(model_id="own", region_dir=str(tmp_path / "out")) as wm:
        wm.offload(nn.Linear(8, 8), 1, 0, 1)
        wm.wait_delta_ready(1)
        with Receiver(tmp_path / "image", region=wm.region) as receiver:
            yield wm, receiver


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()


def same(a: nn.Linear, b: nn.Linear) -> bool:
    return torch.equal(a.weight, b.weight) and torch.equal(a.bias, b.bias)


def test_an_engine_of_ones_own_follows_by_two_callbacks(pair: tuple[WeightManager, Receiver]) -> None:
    wm, receiver = pair
    engine = Engine()
    follower = Follower(receiver, engine.load, engine.pause)
    assert follower.live is None
    follower.step()
    for version in (2, 3):
        model = nn.Linear(8, 8)
        wm.offload(model, version, 0, 1)
        wm.wait_delta_ready(version)
        loaded = follower.step()
        assert loaded is not None and loaded.version == version
        assert follower.live == (loaded.incarnation, version)
        assert same(engine.model, model)
    assert engine.seen == [s for v in (1, 2, 3) for s in ("pause", f"load {v}", "resume")]
    assert follower.step(1.0) is None, "nothing newer"


def test_what_can_be_staged_is_before_the_pause(
    pair: tuple[WeightManager, Receiver], caplog: pytest.LogCaptureFixture
) -> None:
    wm, receiver = pair
    engine = Engine()

    def stage(image: Image) -> None:
        assert not engine.paused
        engine.seen.append(f"stage {image.version}")
        if image.version == 2:
            raise RuntimeError("no room")

    follower = Follower(receiver, engine.load, engine.pause, stage)
    follower.step()
    model = nn.Linear(8, 8)
    wm.offload(model, 2, 0, 1)
    wm.wait_delta_ready(2)
    # Staging only helps: a load does without.
    assert follower.step() is not None and same(engine.model, model)
    assert engine.seen == [s for v in (1, 2) for s in (f"stage {v}", "pause", f"load {v}", "resume")]
    assert "version 2 could not be staged, and is loaded nevertheless: no room" in caplog.text


def test_an_image_of_an_earlier_run_is_loaded_into_a_new_engine(pair: tuple[WeightManager, Receiver]) -> None:
    _, receiver = pair
    receiver.sync()
    engine = Engine()
    loaded = Follower(receiver, engine.load, engine.pause).step()
    assert loaded is not None and (loaded.version, loaded.mode) == (1, "none")


def test_a_load_that_failed_once_is_finished_while_the_engine_is_paused(
    pair: tuple[WeightManager, Receiver],
) -> None:
    _, receiver = pair
    engine = Engine()
    engine.broken = 1
    follower = Follower(receiver, engine.load, engine.pause)
    assert follower.step() is not None
    assert engine.seen == ["pause", "load 1", "load 1", "resume"]
    assert not follower.fenced


def test_an_engine_whose_load_fails_twice_is_fenced_until_one_succeeds(
    pair: tuple[WeightManager, Receiver],
) -> None:
    _, receiver = pair
    engine = Engine()
    engine.broken = 2
    follower = Follower(receiver, engine.load, engine.pause)
    with pytest.raises(WindlassCorrupt, match="version 1 could not be loaded, twice: half of it"):
        follower.step()
    assert follower.fenced and follower.live is None
    assert engine.paused, "left with the error, it must not have resumed"
    loaded = follower.step()
    assert loaded is not None and loaded.version == 1
    assert not follower.fenced and not engine.paused


def test_following_ends_at_the_version_asked_for(pair: tuple[WeightManager, Receiver]) -> None:
    _, receiver = pair
    engine = Engine()
    versions: list[Any] = [v.version for v in Follower(receiver, engine.load, engine.pause).run(until=1)]
    assert versions == [1]


class Away:
    """A receiver whose publisher cannot be reached until some attempts have failed, and a clock that only rests move."""

    def __init__(self, failures: int, newest: list[tuple[int, int] | None]) -> None:
        self.failures = failures
        self.newest = newest
        self.now = 0.0
        self.attempts: list[float] = []
        self.version: int | None = None

    def sync(self, timeout: float) -> dict[str, Any]:
        self.attempts.append(self.now)
        if len(self.attempts) <= self.failures:
            raise WindlassPeerLost("the agent is away")
        self.version = 1
        return {"mode": "full"}

    def wait_newer(self, timeout: float) -> tuple[int, int] | None:
        if len(self.newest) > 1:
            return self.newest.pop(0)
        return self.newest[0]

    @contextlib.contextmanager
    def hold(self) -> Iterator[Any]:
        yield SimpleNamespace(incarnation="1", version=1, digest=None, tensors={})

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def rests(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.attempts)]


def followed(away: Away, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.setattr(follow.time, "sleep", away.sleep)
    monkeypatch.setattr(follow.time, "monotonic", lambda: away.now)
    follower = Follower(cast("Receiver", away), lambda image: None)
    assert [v.version for v in follower.run(until=1)] == [1]
    return away.rests()


def test_a_publisher_that_stays_away_is_tried_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "windlass")
    rests = followed(Away(15, [None]), monkeypatch)
    assert len(rests) == 15
    for n, rest in enumerate(rests):
        longest = min(60.0, 0.1 * 2**n)
        assert 0.75 * longest - 1e-6 <= rest <= longest + 1e-6, f"rest {n} of {rests}"
    # The length of the rest is said when it changes, and not with every attempt: 0.1, 0.2, … 51.2, 60.
    assert len([r for r in caplog.records if "trying again in" in r.message]) == 11


def test_something_newer_is_tried_without_resting_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # Version 7 cannot be fetched, again and again; after sixty looks there is a version 8.
    looks: list[tuple[int, int] | None] = [(1, 7)] * 60
    rests = followed(Away(12, [*looks, (1, 8)]), monkeypatch)
    cut = next((n for n, rest in enumerate(rests) if rest < 0.075 * 2**n - 1e-6), len(rests))
    assert cut + 1 < len(rests), f"nothing was tried early: {rests}"
    assert rests[cut + 1] <= 0.1 + 1e-6, f"what is newer had not failed yet: {rests}"


def test_a_publisher_that_is_back_is_not_left_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    # It says nothing sixty times, and then has a version that cannot be fetched.
    looks: list[tuple[str, int] | None] = [None] * 60
    rests = followed(Away(14, [*looks, (1, 7)]), monkeypatch)
    least = [0.75 * min(60.0, 0.1 * 2**n) - 1e-6 for n in range(len(rests))]
    cut = [n for n, rest in enumerate(rests) if rest < least[n]]
    assert len(cut) == 1, f"rests that ended early: {cut} of {rests}"
    assert rests[-1] >= least[-1], f"what failed before fails now, and counts on: {rests}"


def test_a_wrong_token_is_named_by_its_file_and_so_is_an_image_by_who_has_it(
    pair: tuple[WeightManager, Receiver], tmp_path: Path
) -> None:
    wm, receiver = pair
    receiver.sync()
    wrong = tmp_path / "wrong"
    wrong.write_text("not-the-token-0123456789")
    wrong.chmod(0o600)
    with pytest.raises(WindlassDenied, match=f"that of the file {wrong}") as refused:
        Receiver(tmp_path / "other", endpoint=wm.endpoint, token_file=wrong)
    assert "`token` in the directory of its region" in str(refused.value)
    assert wm.token_file is not None
    with pytest.raises(WindlassDenied, match="another receiver") as taken:
        Receiver(tmp_path / "image", endpoint=wm.endpoint, token_file=wm.token_file)
    assert "the file" not in str(taken.value) and str(os.getpid()) in str(taken.value)


class Scheduler(Engine):
    """The engine of the guide's snippet."""

    def stop_scheduling(self) -> None:
        self.paused = True

    def reset_prefix_cache(self) -> None:
        self.seen.append("reset")

    def resume_scheduling(self) -> None:
        self.paused = False


def test_the_snippet_of_the_guide_for_engines_of_ones_own_runs(
    pair: tuple[WeightManager, Receiver], tmp_path: Path
) -> None:
    wm, receiver = pair
    text = (Path(__file__).parent.parent.parent / "docs" / "own-engine.md").read_text()
    snippet = re.findall(r"```python\n(.*?)```", text, re.S)[0]
    engine = Scheduler()
    assert wm.token_file is not None
    scope = {
        "engine": engine,
        "endpoint": wm.endpoint,
        "token": Path(wm.token_file).read_text().strip(),
        "last": 1,
    }
    exec(
        compile(snippet.replace("/dev/shm/images", str(tmp_path / "mine")), "docs/own-engine.md", "exec"),
        scope,
    )
    assert engine.seen == ["reset"] and not engine.paused
    receiver.sync()
    with receiver.hold() as image:
        assert torch.equal(engine.model.weight, image.tensors["weight"])


def test_results_are_records_with_one_incarnation_and_flat_metrics(tmp_path: Path) -> None:
    with WeightManager(model_id="actor", region_dir=str(tmp_path)) as wm:
        done = wm.offload({"w": torch.ones(64)}, 1, 0, 1)
        with Receiver(tmp_path / "image", region=wm.region) as receiver:
            told = receiver.wait(1, 60)
            assert isinstance(told, Synced)
            assert (told.mode, told["mode"]) == ("full", "full")
            assert told.image is not None
            loaded = Follower(receiver, lambda image: None).step(60)
            assert loaded is not None
            with receiver.hold() as image:
                lives = {done.incarnation, wm.incarnation, image.incarnation, loaded.incarnation}
            lives |= {told.image.identity.incarnation, wm.status()["incarnation"]}
            assert lives == {done.incarnation}
            assert isinstance(done.incarnation, int)
            wm.offload({"w": torch.zeros(64)}, 2, 0, 1)
            assert receiver.wait_newer(60) == (done.incarnation, 2)
    for record in (done, told, loaded):
        metrics = record.metrics()
        assert metrics and all(type(value) in (int, float) for value in metrics.values())
        assert {name.split("/")[0] for name in metrics} == {"windlass"}
    assert done.metrics("sync/")["sync/version"] == 1
