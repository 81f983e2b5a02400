"""One process of a host pulls for all: who it is, what the others do, and who takes over."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass import WindlassCancelled, WindlassInvalid, WindlassTimeout
from windlass.frameworks.sender import Sender
from windlass.identity import Identity
from windlass.receive.pulling import Brought, Pulling, PullOrder


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pulling-") as folder:
        yield Path(folder)


class Trainer:
    """Publishes versions of one tensor."""

    def __init__(self, home: Path, model_id: str) -> None:
        self.sender = Sender({"model_id": model_id, "region_dir": str(home), "timeout": 30.0})
        self.images = home / "images"

    def publish(self) -> Identity:
        done = self.sender.publish([("w", torch.full((1000,), float(self.sender.version)))])
        return done.identity

    def pulling(self) -> Pulling:
        source = self.sender.source()
        return Pulling(self.images, endpoint=source.endpoint, token=source.token)


@pytest.fixture
def trainer(home: Path) -> Iterator[Callable[[str], Trainer]]:
    made: list[Trainer] = []

    def make(model_id: str) -> Trainer:
        made.append(Trainer(home, model_id))
        return made[-1]

    yield make
    for one in made:
        one.sender.close()


def in_thread(act: Callable[[], Brought]) -> tuple[threading.Thread, list[Any]]:
    out: list[Any] = []

    def run() -> None:
        try:
            out.append(act())
        except Exception as e:
            out.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, out


def test_one_pulls_and_the_others_find_it(trainer: Callable[[str], Trainer]) -> None:
    policy = trainer("policy")
    first, second = policy.pulling(), policy.pulling()
    for _ in range(2):
        wanted = policy.publish()
        one, two = first.bring(wanted, 30.0), second.bring(wanted, 30.0)
        assert one.synced is not None and two.synced is None
        assert (
            (one.identity, one.digest) == (two.identity, two.digest) == (wanted, policy.sender.sealed(30.0))
        )
    assert f"process {os.getpid()}" == second._holder("policy")
    first.close()
    second.close()


def test_one_that_is_asked_no_more_lets_another_take_over(trainer: Callable[[str], Trainer]) -> None:
    policy = trainer("policy")
    removed, stays = policy.pulling(), policy.pulling()
    removed.bring(policy.publish(), 30.0)
    wanted = policy.publish()
    # Nobody tells the first of it, which lives and keeps its image open.
    brought = stays.bring(wanted, 30.0)
    assert brought.identity == wanted and brought.synced is not None
    # And back again.
    wanted = policy.publish()
    assert removed.bring(wanted, 30.0).identity == wanted
    removed.close()
    stays.close()


def test_models_of_two_runs_do_not_wait_for_each_other(trainer: Callable[[str], Trainer]) -> None:
    one, two = trainer("one"), trainer("two")
    pullings = [one.pulling(), two.pulling()]
    wanted = [one.publish(), two.publish()]
    got = [pulling.bring(identity, 30.0) for pulling, identity in zip(pullings, wanted)]
    assert [brought.identity for brought in got] == wanted
    assert all(brought.synced is not None for brought in got)
    for pulling in pullings:
        pulling.close()


def test_a_pull_that_is_called_off_ends_at_once(trainer: Callable[[str], Trainer]) -> None:
    policy = trainer("policy")
    wanted = policy.publish()
    never = Identity("policy", wanted.incarnation, 99)
    puller, waiter = policy.pulling(), policy.pulling()
    puller.bring(wanted, 30.0)
    threads = [in_thread(lambda p=p: p.bring(never, 600.0)) for p in (puller, waiter)]  # type: ignore[misc]
    begun = time.monotonic()
    for pulling in (puller, waiter):
        pulling.close()
    for thread, out in threads:
        thread.join(60.0)
        assert isinstance(out[0], WindlassCancelled)
    assert time.monotonic() - begun < 60.0
    with pytest.raises(WindlassTimeout, match="did not come within"):
        policy.pulling().bring(never, 1.0)


def test_another_incarnation_counts_only_if_it_may(trainer: Callable[[str], Trainer]) -> None:
    policy = trainer("policy")
    puller, waiter = policy.pulling(), policy.pulling()
    wanted = policy.publish()
    before = Identity("policy", wanted.incarnation - 1, 1)
    puller.bring(wanted, 30.0)
    assert waiter.bring(before, 30.0, exact=False).identity == wanted
    with pytest.raises(WindlassTimeout, match=f"policy@{before.incarnation:016x}.1 did not come"):
        waiter.bring(before, 0.5)
    puller.close()
    waiter.close()


def test_an_order_is_checked() -> None:
    good = {"endpoint": "http://trainer:1", "model_id": "policy", "incarnation": 1, "version": 3}
    assert PullOrder.from_dict(good).identity == Identity("policy", 1, 3)
    for name, value in [
        ("endpoint", "trainer"),
        ("model_id", "../x"),
        ("version", -1),
        ("timeout", 0),
        ("exact", 1),
    ]:
        with pytest.raises(WindlassInvalid, match=name):
            PullOrder.from_dict({**good, name: value})
    assert "secret" not in repr(PullOrder.from_dict({**good, "token": "secret"}))
