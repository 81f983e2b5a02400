"""Extractors on real frameworks with real ranks (C17, C19-C21): what comes out is what went in, bit by bit."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import pytest

from ranks import Run


def agree(ranks: Run, world_size: int, target: str, *args: Any, **options: Any) -> None:
    """Runs it on all ranks, none of which may find a difference."""
    target = target if ":" in target else f"extract_ranks:{target}"
    faults = ranks(world_size, target, args, timeout=options.pop("timeout", 100), **options)
    assert faults == [[]] * world_size


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 2)])
def test_fsdp2_weights_come_out_bit_by_bit(ranks: Run, shape: tuple[int, ...]) -> None:
    agree(ranks, math.prod(shape), "fsdp2", *shape)


def test_fsdp2_gives_full_precision_weights_after_a_low_precision_forward(ranks: Run) -> None:
    agree(ranks, 2, "fsdp2_mixed_precision")


def test_fsdp2_weights_follow_the_model_over_versions(ranks: Run) -> None:
    agree(ranks, 2, "fsdp2_follows_training")


def test_dtensors_of_mixed_placements_come_out_bit_by_bit(ranks: Run) -> None:
    agree(ranks, 3, "fsdp2_mixed_placements")


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_transformers_model_comes_out_as_save_pretrained_writes_it(
    ranks: Run, kind: str, tmp_path: pathlib.Path
) -> None:
    agree(ranks, 2, "fsdp2_transformers", kind, str(tmp_path))


@pytest.mark.parametrize(
    ("world_size", "strategy", "original", "mixed"),
    [
        (1, "FULL_SHARD", True, False),
        (2, "FULL_SHARD", False, False),
        (3, "FULL_SHARD", True, True),
        (2, "SHARD_GRAD_OP", True, True),
        (2, "NO_SHARD", True, False),
        (4, "HYBRID_SHARD", True, False),
    ],
)
def test_fsdp1_weights_come_out_bit_by_bit(
    ranks: Run, world_size: int, strategy: str, original: bool, mixed: bool
) -> None:
    agree(ranks, world_size, "fsdp1", strategy, original, mixed)


def test_ddp_weights_come_out_bit_by_bit(ranks: Run) -> None:
    agree(ranks, 2, "ddp")


def test_only_rank_zero_gets_chunks_when_it_alone_sends(ranks: Run) -> None:
    zero, *others = ranks(3, "extract_ranks:only_rank0", timeout=120)
    assert zero[0] > 0 and zero[1] == []
    assert others == [(0, []), (0, [])]


def test_ranks_that_stop_early_together_gather_nothing_further(ranks: Run) -> None:
    agree(ranks, 2, "stop_early")


def test_the_async_wrapper_gathers_on_all_ranks(ranks: Run) -> None:
    agree(ranks, 2, "asynchronous")


# The first time on a machine DeepSpeed compiles a part of itself.
@pytest.mark.timeout(400)
@pytest.mark.deepspeed
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 1), (2, 3), (3, 3)])
def test_deepspeed_weights_come_out_bit_by_bit(ranks: Run, world_size: int, stage: int) -> None:
    agree(ranks, world_size, "deepspeed_stage", stage, timeout=380, env={"DS_ACCELERATOR": "cpu"})


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp2", "fsdp1"])
def test_lora_adapters_are_collected_as_peft_saves_them(
    ranks: Run, kind: str, tmp_path: pathlib.Path
) -> None:
    agree(ranks, 2, "lora", kind, str(tmp_path))


# The first time on a machine DeepSpeed compiles a part of itself.
@pytest.mark.timeout(400)
@pytest.mark.deepspeed
def test_lora_adapters_are_collected_from_zero_3(ranks: Run, tmp_path: pathlib.Path) -> None:
    agree(ranks, 2, "lora", "zero3", str(tmp_path), timeout=380, env={"DS_ACCELERATOR": "cpu"})


@pytest.mark.megatron
@pytest.mark.parametrize(("world_size", "pipeline"), [(2, 1), (4, 2)])
def test_megatron_weights_come_out_bucket_by_bucket_and_bit_by_bit(
    ranks: Run, world_size: int, pipeline: int
) -> None:
    agree(ranks, world_size, "megatron_ranks:bit_by_bit", pipeline)
