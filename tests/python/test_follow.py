"""An engine of one's own: two callbacks, and what happens when they fail."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from windlass import Follower, Image, Receiver, WeightManager, WindlassCorrupt


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
    assert follower.step(0.1) is None, "nothing newer"


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
