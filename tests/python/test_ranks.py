"""The spawner itself: it returns results in order, and no rank outlives a failure or the deadline."""

from __future__ import annotations

import time

import pytest

from ranks import RankFailure, Ranks, run_ranks


def test_ranks_share_a_group_return_in_order_and_run_on() -> None:
    with Ranks(3) as ranks:
        assert ranks.run("ranks_selftest:add_up", [10], timeout=60) == [33, 33, 33]
        assert ranks.run("ranks_selftest:add_up", [0], timeout=60) == [3, 3, 3]


def test_a_rank_that_raises_ends_all_ranks_and_is_quoted() -> None:
    with pytest.raises(RankFailure, match="rank one cannot go on"):
        run_ranks(2, "ranks_selftest:fail_on_rank_one", timeout=60)


def test_a_rank_that_is_killed_ends_all_ranks() -> None:
    with pytest.raises(RankFailure, match="-9"):
        run_ranks(2, "ranks_selftest:die_on_rank_one", timeout=60)


def test_ranks_that_hang_are_killed_at_the_deadline() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match="not done after 6 s"):
        run_ranks(2, "ranks_selftest:hang", timeout=6)
    assert time.monotonic() - start < 20
