"""Every framework's extractor through every sender of tensors: the engine has what was trained, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Two trainers and an engine."""
    with Ranks(3, env={"DS_ACCELERATOR": "cpu"}, group=False) as ranks:
        yield ranks


# The first time on a machine DeepSpeed compiles a part of itself.
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["broadcast", "cuda_ipc", "packed_cuda_ipc"])
@pytest.mark.parametrize(
    "framework",
    [
        "fsdp2",
        pytest.param("megatron", marks=pytest.mark.megatron),
        pytest.param("zero3", marks=pytest.mark.deepspeed),
    ],
)
def test_shards_of_every_framework_arrive_whole_by_every_sender(
    pool: Ranks, framework: str, strategy: str
) -> None:
    zero, one, engine = pool.run("matrix_ranks:sync", [framework, strategy, 2], timeout=380)
    first, second = zero
    assert first != second, "nothing was trained"
    assert zero == one
    assert engine["digests"] == second
