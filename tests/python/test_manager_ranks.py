"""Every framework, placement and dtype: what a receiver gets is the gathered state, bit by bit.

The cases of one world size run in one group of ranks, which is started by the first test that asks.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import pytest

from ranks import RankFailure, run_ranks

BF16 = ["bfloat16"]
CAST = ["float32", "bfloat16"]
FSDP1 = [
    ["FULL_SHARD", False, False],
    ["FULL_SHARD", True, True],
    ["SHARD_GRAD_OP", False, True],
    ["NO_SHARD", False, False],
]
EVERY_WORLD: list[tuple[str, list[Any]]] = [
    ("replicated", BF16),
    ("replicated", CAST),
    ("exported", [None]),
    ("exported", ["bfloat16"]),
    ("streamed", BF16),
    ("streamed", CAST),
]
OF_WORLD: dict[int, list[tuple[str, list[Any]]]] = {
    1: [],
    2: [("replicated", [d]) for d in ("float16", "float64", "float8_e4m3fn", "float8_e5m2")]
    + [("fsdp1", case) for case in FSDP1]
    + [("fsdp2", ["float32", (2,), "bfloat16", True])]
    + [
        ("by_delta", ["fsdp1", FSDP1[0]]),
        ("by_delta", ["exported", [None]]),
        ("by_delta", ["streamed", BF16]),
    ],
    3: [("fsdp1", case) for case in FSDP1] + [("two_hosts", BF16), ("by_delta", ["two_hosts", BF16])],
    4: [
        ("fsdp2", ["bfloat16", (2, 2)]),
        ("placements", ["float32"]),
        ("placements", BF16),
        ("fsdp2_over_tp", []),
        ("another_host", []),
        ("two_hosts", BF16),
        ("two_hosts", CAST),
        ("by_delta", ["placements", BF16]),
        ("by_delta", ["fsdp2_over_tp", []]),
        ("by_delta", ["two_hosts", CAST]),
    ],
}


def cases(world: int) -> list[tuple[str, list[Any]]]:
    sharded = [("fsdp2", [d, (world,), c]) for d, c in [("bfloat16", None), CAST, ("float32", None)]]
    deltas: list[tuple[str, list[Any]]] = [
        ("by_delta", ["replicated", BF16]),
        ("by_delta", ["fsdp2", ["float32", (world,), "bfloat16"]]),
    ]
    return EVERY_WORLD + sharded + deltas + OF_WORLD[world]


@functools.cache
def outcome(world: int) -> list[dict[str, int]] | str:
    """What came of a group; its failure is kept like its success."""
    try:
        found: list[dict[str, int]] = run_ranks(world, "manager_ranks:several", [cases(world)], 300.0)[0]
    except RankFailure as e:
        return str(e)
    return found


def results(world: int) -> list[dict[str, int]]:
    """Which way the parameters of each case went, on rank 0."""
    found = outcome(world)
    if isinstance(found, str):
        raise RankFailure(found)
    return found


def of(world: int, name: str) -> list[dict[str, int]]:
    found = [r for (n, _), r in zip(cases(world), results(world), strict=True) if n == name]
    assert found
    return found


@pytest.mark.timeout(330)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_replicas_share_the_work(world: int) -> None:
    for ways in of(world, "replicated"):
        assert sum(ways.values()) == 7


@pytest.mark.timeout(330)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_fsdp2_shards_go_straight_to_their_place(world: int) -> None:
    for ways in of(world, "fsdp2"):
        assert set(ways) == {"shards", "whole"}


@pytest.mark.timeout(330)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_versions_handed_out_by_delta_are_the_gathered_state_too(world: int) -> None:
    assert len(of(world, "by_delta")) >= 2


@pytest.mark.timeout(330)
def test_mixed_placements_are_direct_and_partial_ones_are_gathered() -> None:
    for ways in of(4, "placements"):
        assert [count for reason, count in ways.items() if "neither" in reason] == [1]
        assert set(ways) > {"shards", "replicas"}


@pytest.mark.timeout(330)
def test_strided_shards_of_fsdp2_over_tensor_parallelism_are_direct() -> None:
    assert set(of(4, "fsdp2_over_tp")[0]) <= {"shards", "replicas"}


@pytest.mark.timeout(330)
@pytest.mark.parametrize("world", [2, 3])
def test_fsdp1_flat_parameters_are_taken_apart(world: int) -> None:
    for ways in of(world, "fsdp1"):
        assert set(ways) == {"FSDP1 shards"}


@pytest.mark.timeout(330)
@pytest.mark.parametrize("world", [1, 3])
def test_exports_of_which_each_rank_holds_some(world: int) -> None:
    for ways in of(world, "exported"):
        assert set(ways) == {"exported"}


@pytest.mark.timeout(330)
def test_a_whole_replica_on_one_host_publishes_alone() -> None:
    assert of(4, "another_host") != []


@pytest.mark.timeout(330)
@pytest.mark.parametrize("world", [3, 4])
def test_hosts_that_hold_parts_publish_a_whole_image(world: int) -> None:
    for ways in of(world, "two_hosts"):
        assert set(ways) == {"shards", "whole"}


@pytest.mark.deepspeed
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("world", "stage", "dtype"), [(2, 3, "bfloat16"), (3, 3, "float32"), (2, 1, "bfloat16")]
)
def test_zero_partitions_go_straight_to_their_place(world: int, stage: int, dtype: str) -> None:
    # DeepSpeed compiles with ninja, which is installed beside the interpreter.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    env = {"DS_ACCELERATOR": "cpu", "PATH": path}
    ways = run_ranks(world, "manager_ranks:zero", [stage, dtype], 180.0, env=env)
    assert set(ways[0]) == ({"ZeRO-3 shards"} if stage == 3 else {"whole"})
