"""Ranks that die, stall or disagree: the others hear of it in time, the version before is still served, and a trainer
that is started again publishes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from children import environment
from fault_ranks import SHORT, Stem

#: What an error may take beyond the deadline, on a busy machine.
SLACK = 3.0


@pytest.fixture(scope="module")
def stem() -> Iterator[Stem]:
    made = Stem()
    yield made
    made.close()


@pytest.fixture
def home() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="faults-") as folder:
        yield folder


def failed(told: Any, *words: str) -> None:
    assert told["kind"].startswith("Windlass"), told
    assert told["seconds"] < SHORT + SLACK, told
    assert all(re.search(word, told["said"]) for word in words), told["said"]


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("phase", ["begin", "copy", "slot", "commit"])
def test_a_rank_killed_in_an_offload_fails_it_for_all_and_spoils_nothing(
    stem: Stem, home: str, victim: int, phase: str
) -> None:
    results = stem.run(3, "killed", home, victim, phase)
    for file in Path(home).glob("told-*"):
        file.unlink()
    assert results[victim] is None
    for rank in {0, 1, 2} - {victim}:
        failed(results[rank], rf"rank {victim}\b")
        assert results[rank]["version"] == 1
    if victim != 0:
        assert results[0]["served"]
    assert stem.run(3, "published", home, 1) == [True, True, True]
    assert os.listdir(home) == []


@pytest.mark.parametrize(
    ("victim", "phase"),
    [(0, "describe"), (1, "describe"), (2, "describe"), (0, "create"), (1, "open"), (2, "open")],
)
def test_a_rank_killed_before_the_first_version_leaves_nothing_behind(
    stem: Stem, home: str, victim: int, phase: str
) -> None:
    results = stem.run(3, "killed_at_first", home, victim, phase)
    assert results[victim] is None
    for rank in {0, 1, 2} - {victim}:
        failed(results[rank])
    assert stem.run(3, "published", home, 1) == [True, True, True]
    assert os.listdir(home) == []


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_never_calls_offload_is_named(stem: Stem, home: str, first: bool) -> None:
    results = stem.run(3, "absent", home, first)
    for rank in (0, 1):
        failed(results[rank], r"rank 2\b")
        assert results[rank]["seconds"] > SHORT / 2


@pytest.mark.parametrize(
    ("what", "word"),
    [("dtype", "'small'"), ("shape", "'small'"), ("meta", "'small'"), ("raising", "the trainer's own")],
)
def test_ranks_with_other_tensors_fail_at_once_everywhere_and_may_try_again(
    stem: Stem, home: str, what: str, word: str
) -> None:
    results = stem.run(2, "disagreeing", home, what)
    first, later = zip(*results, strict=True)
    # The first version is agreed on, so all ranks know why.
    assert all(word in told["said"] for told in first), first
    # Later ones are not: one rank knows why, and it tells the others only that it gave up.
    assert word in later[1]["said"]
    failed(later[0], "given up by another rank")
    for told in (*first, *later):
        assert told["kind"], told
        assert told["seconds"] < SHORT / 2 + 1.0, told


def test_ranks_with_other_versions_fail_everywhere(stem: Stem, home: str) -> None:
    for told in zip(*stem.run(3, "disagreeing", home, "version"), strict=True):
        failed(told[2], "version 1[12]", "rank 2")
        for other in told[:2]:
            # Whoever comes when it is over already waits for rank 0 to begin again, and says so.
            failed(other, "given up by (another rank|rank 1 while waiting for rank 0)")


def test_a_version_given_again_is_judged_by_all_ranks_together(stem: Stem, home: str) -> None:
    """A rank whose bytes were the same used to go on as if nothing had happened, or to wait for the others' gathers."""
    for told in stem.run(3, "repeated", home):
        assert [t["kind"] for t in told] == ["", "", "WindlassStale"], told


def test_ctrl_c_ends_the_wait_for_other_ranks_to_agree(stem: Stem, home: str) -> None:
    """The wait was inside torch, where signals are not looked for until its own deadline."""
    took = stem.run(2, "interrupted", home)[0]
    assert took is not None
    assert took < 0.5


def test_a_rank_whose_host_does_not_publish_says_so_and_announces_nothing(stem: Stem, home: str) -> None:
    """It was told to call offload() first, which it had."""
    silent, asked, answer = stem.run(2, "other_host", home)[1]
    assert (silent, asked) == ("None", "None")
    assert "rank 0 publishes on another one" in answer


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_agent_that_is_killed_or_stopped_does_not_stall_offloads(
    stem: Stem, home: str, number: int
) -> None:
    results = stem.run(2, "unlucky_agent", home, int(number))
    assert all(r["good"] for r in results)
    # A stopped agent is waited for once, for a few seconds, until it is found to be silent.
    assert max(r["slowest"] for r in results) < 10.0, results


def test_a_killed_trainer_leaves_no_agent_and_the_next_one_or_gc_cleans_up(stem: Stem, home: str) -> None:
    for cleaner in ("trainer", "gc"):
        assert stem.run(2, "orphan", home) == [None, None]
        agent = int(Path(home, "agent").read_text())
        end = time.monotonic() + 20.0
        while Path(f"/proc/{agent}").exists():
            assert time.monotonic() < end, "the agent lives on"
            time.sleep(0.01)
        os.remove(Path(home, "agent"))
        assert os.listdir(home) == ["windlass-faulty"]
        if cleaner == "trainer":
            assert stem.run(2, "published", home, 1) == [True, True]
        else:
            command = [sys.executable, "-m", "windlass", "gc", "--yes", home]
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
        assert os.listdir(home) == []


#: The first rank of a trainer without a process group, until it is killed.
FIRST = """
import sys
from windlass._windlass import Layout, Publisher
publisher = Publisher.create(sys.argv[1], "alone", Layout([("w", "F32", [5000])]), ranks=2)
print(publisher.incarnation, flush=True)
sys.stdin.read()
"""


def test_a_rank_without_a_process_group_waits_for_the_next_life_of_a_dead_trainer(home: str) -> None:
    """Rank 1 joined the region that the dead trainer had left, and rank 0 was refused because of that."""
    from windlass import WindlassTimeout
    from windlass._windlass import Layout, Publisher

    region, layout = f"{home}/windlass-alone", Layout([("w", "F32", [5000])])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", FIRST, region]
    first = subprocess.Popen(command, env=environment(), text=True, **pipes)
    assert first.stdout is not None
    dead = first.stdout.readline().strip()
    assert dead
    # While the first rank lives, the other one finds it.
    other = Publisher.open(region, layout, rank=1, timeout=60.0)
    assert other.incarnation == dead
    other.close()
    del other
    first.kill()
    first.communicate()
    with pytest.raises(WindlassTimeout, match="the trainer that made it is dead"):
        Publisher.open(region, layout, rank=1, timeout=0.1)
    # One that waits does not keep the first rank from making the new region, and joins it.
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Publisher.open, region, layout, rank=1, timeout=60.0)
        made = Publisher.create(region, "alone", layout, ranks=2, timeout=60.0)
        joined = waiting.result()
    assert joined.incarnation == made.incarnation != dead
    joined.close()
    made.close()
