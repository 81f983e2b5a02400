"""WeightChunk (C22): its columns agree with each other and with the tensors, or it does not exist."""

from __future__ import annotations

import pytest
import torch

from windlass.errors import WindlassInvalid
from windlass.extract.chunk import WeightChunk


def chunk(**columns: object) -> WeightChunk:
    given: dict[str, object] = {
        "names": ["a.weight", "a.bias"],
        "tensors": [torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(3)],
        "dtypes": ["bfloat16", "float32"],
        "shapes": [[2, 3], [3]],
    }
    return WeightChunk(**{**given, **columns})  # type: ignore[arg-type]


def test_a_weight_chunk_computes_its_size_and_iterates_its_weights() -> None:
    made = chunk()
    assert made.total_size_bytes == 12 + 12
    assert len(made) == 2
    assert [(name, tuple(tensor.shape)) for name, tensor in made] == [("a.weight", (2, 3)), ("a.bias", (3,))]
    assert (made.module_name, made.packed) == (None, False)


@pytest.mark.parametrize("column", ["names", "tensors", "dtypes", "shapes"])
def test_a_weight_chunk_with_a_column_of_another_length_is_refused(column: str) -> None:
    with pytest.raises(WindlassInvalid, match="2 names|1 names"):
        chunk(**{column: getattr(chunk(), column)[:1]})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"names": ["a", "a"]}, "'a' twice"),
        ({"dtypes": ["bfloat16", "float16"]}, "'a.bias' is float32, but its chunk says float16"),
        ({"shapes": [[3, 2], [3]]}, r"'a.weight' has shape \[2, 3\], but its chunk says \[3, 2\]"),
    ],
)
def test_a_weight_chunk_that_contradicts_its_tensors_is_refused(
    columns: dict[str, object], message: str
) -> None:
    with pytest.raises(WindlassInvalid, match=message):
        chunk(**columns)


def test_a_weight_chunk_keeps_dtypes_in_their_canonical_spelling() -> None:
    assert chunk(dtypes=["BF16", "torch.float32"]).dtypes == ["bfloat16", "float32"]
    assert WeightChunk.of([("x", torch.zeros(0, 4, dtype=torch.float8_e4m3fn))]).dtypes == ["float8_e4m3fn"]


def test_a_weight_chunk_of_no_elements_and_of_a_scalar_has_their_sizes() -> None:
    made = WeightChunk.of([("empty", torch.zeros(0, 4)), ("scalar", torch.tensor(1.0))], module_name="m")
    assert (made.shapes, made.total_size_bytes, made.module_name) == ([[0, 4], []], 4, "m")
