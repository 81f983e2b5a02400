"""The disk bridge: checkpoints that another program writes become versions, and directories on other hosts again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from controlled import PATIENCE, Command, World, until
from windlass import Controller, WindlassInvalid, WindlassTimeout
from windlass.disk import MARKER, finished, published


class Disk(World):
    """A publisher and receivers, each with a directory for what a real program would think is one."""

    def publisher(self, *options: str) -> Command:
        command = Command(
            self.home / f"publish-{len(self.commands)}.log",
            "publish",
            f"--follow={self.home}/trainer/weight_v%06d",
            "--model=policy",
            f"--region={self.home}/region",
            f"--controller={self.url}",
            f"--token-file={self.token_file}",
            *options,
        )
        self.commands.append(command)
        command.event("following")
        return command

    def host(self, name: str, *options: str) -> Command:
        pattern = f"--as-dir={self.home}/{name}-w/weight_v%06d"
        return self.receiver(name, "policy", pattern, f"--model-dir={self.home}/model", *options)

    def write(self, version: int, weights: dict[str, torch.Tensor], shards: int = 1) -> Path:
        """A checkpoint as transformers writes it."""
        path = self.home / "trainer" / f"weight_v{version:06d}"
        path.mkdir(parents=True)
        names = sorted(weights)
        files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        for i, file in enumerate(files):
            save_file({name: weights[name] for name in names[i::shards]}, path / file)
        if shards > 1:
            index = {name: files[i % shards] for i, name in enumerate(names)}
            (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        (path / "config.json").write_text("{}")
        return path

    def seen(self, name: str, version: int) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = load_file(self.dir(name, version) / "model.safetensors")
        return found

    def dir(self, name: str, version: int) -> Path:
        return self.home / f"{name}-w" / f"weight_v{version:06d}"

    def controller(self) -> Controller:
        return Controller(self.url, token=self.token)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_text("not these")
    try:
        made.start_controller("--set=rollout=policy")
        yield made
    finally:
        made.close()


def weights(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (300, 200), "b.weight": (500, 70), "c.bias": (33,)}
    return {name: torch.randn(shape, generator=made).bfloat16() for name, shape in shapes.items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_each_checkpoint_is_on_every_host_when_the_hook_returns(disk: Disk) -> None:
    publisher = disk.publisher()
    hosts = [disk.host(name, "--marker=STABLE") for name in ("one", "two")]
    first = weights(1)
    identity = finished(disk.write(1, first, shards=2), controller=disk.controller(), timeout=60)
    assert (identity.model_id, identity.version) == ("policy", 1)
    assert same(disk.seen("one", 1), first) and same(disk.seen("two", 1), first)
    assert (disk.dir("one", 1) / "tokenizer.json").read_text() == "{}"
    assert sorted(file.name for file in disk.dir("one", 1).iterdir() if not file.name.startswith(".")) in (
        ["STABLE", "model.safetensors", "tokenizer.json"],
        ["model.safetensors", "tokenizer.json"],
    )
    until("STABLE on both", lambda: all((disk.dir(n, 1) / "STABLE").exists() for n in ("one", "two")))

    second = {name: value.clone() for name, value in first.items()}
    second["a.weight"][7, 5] += 1
    kept = disk.seen("one", 1)
    checkpoint = disk.write(2, second)
    finished(checkpoint, controller=disk.controller(), timeout=60)
    # As slime does.
    shutil.rmtree(checkpoint)
    assert same(disk.seen("one", 2), second) and same(disk.seen("two", 2), second)
    # What a program has open, or reads still, does not change.
    assert same(kept, first) and same(disk.seen("one", 1), first)
    staged = [line for line in hosts[0].lines() if line.get("event") == "staged"]
    assert [line["mode"] for line in staged] == ["full", "delta"]

    # A receiver that was killed comes back to the version that it has, and takes the next.
    hosts[0].end(kill=True)
    shutil.rmtree(disk.dir("one", 2))
    begun = disk.home / "one-w" / ".weight_v000001.windlass-tmp"
    begun.mkdir()
    disk.host("one")
    until("put up again", lambda: disk.dir("one", 2).exists())
    assert not begun.exists(), "what it had begun when it was killed"
    finished(disk.write(3, first), controller=disk.controller(), timeout=60)
    assert same(disk.seen("one", 3), first) and same(disk.seen("two", 3), first)
    assert not disk.dir("two", 1).exists(), "two versions are kept"

    # A publisher that was killed publishes what is there again, and goes on.
    publisher.end(kill=True)
    disk.publisher()
    finished(disk.write(4, second), controller=disk.controller(), timeout=60)
    assert same(disk.seen("one", 4), second) and same(disk.seen("two", 4), second)


def test_a_run_that_begins_again_replaces_what_has_its_numbers(disk: Disk) -> None:
    disk.publisher()
    disk.host("one")
    for version in (1, 10, 11):
        last = finished(disk.write(version, weights(version)), controller=disk.controller(), timeout=60)
    # The same files are the same version, whoever says again that they are finished.
    there = disk.home / "trainer" / "weight_v000011"
    assert finished(there, controller=disk.controller(), timeout=60) == last
    shutil.rmtree(disk.home / "trainer")
    again = weights(9)
    again["d.weight"] = torch.ones(10)
    before = finished(disk.write(1, again), controller=disk.controller(), timeout=60)
    assert same(disk.seen("one", 1), again)
    shutil.rmtree(disk.home / "trainer")
    after = finished(disk.write(1, weights(5)), controller=disk.controller(), timeout=60)
    assert after.incarnation > before.incarnation and same(disk.seen("one", 1), weights(5))
    finished(disk.write(2, weights(6)), controller=disk.controller(), timeout=60)
    assert same(disk.seen("one", 1), weights(5)) and same(disk.seen("one", 2), weights(6))
    assert not disk.dir("one", 11).exists(), "of the run before"


def test_a_bad_checkpoint_is_refused_by_name_and_the_next_one_is_taken(disk: Disk) -> None:
    publisher = disk.publisher()
    disk.host("one")
    torn = disk.write(1, weights(1))
    shard = torn / "model-00001-of-00001.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(WindlassInvalid, match=r"weight_v000001' is not published.*model-00001-of-00001"):
        finished(torn, controller=disk.controller(), timeout=60)
    assert str(shard) in publisher.event("refused")["error"]
    # Without its marker nothing is read.
    disk.write(2, weights(2))
    finished(disk.write(3, weights(3)), controller=disk.controller(), timeout=60)
    assert same(disk.seen("one", 3), weights(3)) and not disk.dir("one", 2).exists()
    assert [line["identity"]["version"] for line in publisher.lines() if line["event"] == "published"] == [3]


def test_a_directory_of_somebody_else_is_not_touched_and_the_hook_does_not_return(disk: Disk) -> None:
    disk.publisher()
    host = disk.host("one")
    disk.dir("one", 1).mkdir(parents=True)
    (disk.dir("one", 1) / "mine").write_text("mine")
    disk.host("two", "--marker=STABLE")
    with pytest.raises(WindlassTimeout, match="not on 1 of the receivers: one .*not made by windlass"):
        finished(disk.write(1, weights(1)), controller=disk.controller(), timeout=10)
    assert same(disk.seen("two", 1), weights(1)) and not (disk.dir("two", 1) / "STABLE").exists()
    assert "not made by windlass" in host.event("order_failed")["reason"]
    assert [file.name for file in disk.dir("one", 1).iterdir()] == ["mine"]
    finished(disk.write(2, weights(2)), controller=disk.controller(), timeout=60)
    assert same(disk.seen("one", 2), weights(2)) and same(disk.seen("two", 2), weights(2))


def test_without_a_controller_a_receiver_follows_alone(disk: Disk) -> None:
    for version, seconds in ((7, 10), (8, 30), (9, 20)):
        marker = disk.write(version, weights(version)) / "STABLE"
        marker.touch()
        os.utime(marker, (seconds, seconds))
    words = [f"--follow={disk.home}/trainer/weight_v%06d", "--marker=STABLE", "--model=policy"]
    publisher = Command(disk.home / "p.log", "publish", *words, f"--region={disk.home}/region")
    disk.commands.append(publisher)
    assert publisher.event("published")["identity"]["version"] == 8, "of those that were there, the last"
    assert "was finished later" in (disk.home / "trainer/weight_v000007/.windlass-published").read_text()
    again = Command(disk.home / "again.log", "publish", *words, f"--region={disk.home}/region")
    assert again.process.wait(PATIENCE) == 2 and "another publisher" in again.log.read_text()
    words = [f"--region={disk.home}/region", f"--dir={disk.home}/images", "--marker=STABLE"]
    words += [f"--as-dir={disk.home}/one-w/weight_v%06d", "--until=8"]
    receiver = Command(disk.home / "r.log", "receive", *words)
    disk.commands.append(receiver)
    receiver.event("placed")
    assert receiver.process.wait(60) == 0
    assert same(disk.seen("one", 8), weights(8)) and (disk.dir("one", 8) / "STABLE").exists()


def test_one_receiver_of_a_host_puts_directories_up(disk: Disk) -> None:
    disk.host("one")
    words = [f"--region={disk.home}/region", f"--dir={disk.home}/other"]
    other = Command(disk.home / "o.log", "receive", *words, f"--as-dir={disk.home}/one-w/weight_v%06d")
    assert other.process.wait(PATIENCE) == 2 and "another receiver" in other.log.read_text()


def test_a_publisher_or_controller_that_is_missing_is_named(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = disk.write(1, weights(1))
    with pytest.raises(WindlassTimeout, match="no publisher took it"):
        finished(checkpoint, controller=disk.controller(), timeout=0.2)
    assert (checkpoint / MARKER).exists()
    with pytest.raises(WindlassInvalid, match="leaves no time"):
        finished(checkpoint, controller=disk.controller(), timeout=0)
    with pytest.raises(WindlassInvalid, match="is not a directory"):
        finished(disk.home / "nowhere", controller=disk.controller())
    monkeypatch.delenv("WINDLASS_CONTROLLER", raising=False)
    with pytest.raises(WindlassInvalid, match="WINDLASS_CONTROLLER"):
        published(None, str(checkpoint))
    monkeypatch.setenv("WINDLASS_DISK_TIMEOUT", "soon")
    with pytest.raises(WindlassInvalid, match="WINDLASS_DISK_TIMEOUT is 'soon'"):
        published(None, str(checkpoint))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["publish", "--follow=/w", "--model=m"], "DIR/step_%d"),
        (["publish", "--follow=/w/%d", "--model=m", "--marker=a/b"], "is not the name of a file"),
        (["publish", "--follow=/w/%d", "--model=m", "--json", "--with-parent", "--", "--prots=1"], "--prots"),
        (["receive", "--region=/a", "--as-dir=/w"], "DIR/step_%d"),
        (["receive", "--region=/a", "--region=/b", "--as-dir=/w/%d"], "run a receiver for each"),
        (["receive", "--region=/a", "--model-dir=/"], "--engine or --as-dir"),
        (["receive", "--region=/a", "--marker=STABLE"], "--as-dir"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, words: list[str], said: str) -> None:
    command = Command(tmp_path / "log", *words)
    assert command.process.wait(PATIENCE) == 2
    assert said in command.log.read_text()
