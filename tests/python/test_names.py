"""Names by rules alone: views, the source map, selection, dtypes and checkpoint headers."""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from windlass import WindlassCorrupt, WindlassInvalid, WindlassNotFound
from windlass.names import (
    DtypeRules,
    Selection,
    SourceMap,
    View,
    canonical_dtype,
    checkpoint_layout,
    split_rows,
    transpose,
)
from windlass.names.view import compose, tile_exactly, whole


def places(view: View) -> dict[tuple[int, ...], tuple[int, ...]]:
    """By element of the image tensor, the element of the parameter: a view taken literally."""
    found = {}
    for element in itertools.product(*(range(start, stop) for start, stop in view.box)):
        image = tuple(
            at + element[dim] - view.box[dim][0] for at, dim in zip(view.at, view.dims, strict=True)
        )
        found[image] = element
    return found


def random_grid(rng: random.Random, shape: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """Boxes that tile a shape: cut one at random, again and again."""
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(rng.randrange(6)):
        box = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        start, stop = box[dim]
        cut = rng.randint(start, stop)
        for part in ((start, cut), (cut, stop)):
            if part[0] < part[1]:
                boxes.append((*box[:dim], part, *box[dim + 1 :]))
    return boxes


def random_rule(rng: random.Random, name: str, shape: tuple[int, ...]) -> list[View]:
    """Views that tile a tensor, each a tensor of its own with its dimensions permuted."""
    views = []
    for index, box in enumerate(random_grid(rng, shape)):
        dims = list(range(len(shape)))
        rng.shuffle(dims)
        dims = [dim for dim in dims if box[dim][1] - box[dim][0] != 1 or rng.random() < 0.5]
        extent = [box[dim][1] - box[dim][0] for dim in dims]
        at = [rng.randrange(3) for _ in dims]
        size = tuple(a + e + rng.randrange(2) for a, e in zip(at, extent, strict=True))
        views.append(View(box, f"{name}.{index}", size, tuple(at), tuple(dims)))
    return views


def test_a_plain_parameter_is_one_whole_view() -> None:
    [view] = SourceMap().views("model.norm.weight", (4, 3))
    assert view == View(((0, 4), (0, 3)), "model.norm.weight", (4, 3), (0, 0), (0, 1))
    [scalar] = SourceMap().views("scale", ())
    assert scalar == View((), "scale", (), (), ())
    [empty] = SourceMap().rename("^", "x.").views("none", (0, 3))
    assert empty.box == ((0, 0), (0, 3))


@pytest.mark.parametrize("seed", range(40))
def test_composed_views_lead_where_one_after_the_other_leads(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 3)))
    for first in random_rule(rng, "a", shape):
        second = random_rule(rng, first.name, first.shape) if first.shape else [whole("b", ())]
        inner = places(first)
        expected = {}
        for view in second:
            for image, middle in places(view).items():
                if middle in inner:
                    expected[(view.name, image)] = inner[middle]
        found = {}
        for view in compose(first, second):
            for image, element in places(view).items():
                assert (view.name, image) not in found
                found[(view.name, image)] = element
        assert found == expected


@pytest.mark.parametrize("seed", range(40))
def test_tiling_is_told_from_gaps_and_overlaps(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
    boxes = random_grid(rng, shape)
    assert tile_exactly(boxes, shape)
    assert not tile_exactly([*boxes, boxes[0]], shape)
    if math.prod(shape) > 1:
        # Same volume, but one element twice and another never.
        singles = [tuple((i, i + 1) for i in e) for e in itertools.product(*(range(n) for n in shape))]
        assert tile_exactly(singles, shape)
        assert not tile_exactly([*singles[1:], singles[1]], shape)


@pytest.mark.parametrize("seed", range(20))
def test_every_element_of_a_split_parameter_is_placed_exactly_once(seed: int) -> None:
    rng = random.Random(seed)
    experts, inner, hidden = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 4)
    names = SourceMap.for_model_type("qwen3_moe")
    shape = (experts, 2 * inner, hidden)
    views = names.views("model.layers.0.mlp.experts.gate_up_proj", shape)
    assert len(views) == 2 * experts
    assert tile_exactly([view.box for view in views], shape)
    for view in views:
        assert view.extent == view.shape == (inner, hidden)


def test_a_malformed_view_is_refused_with_its_name() -> None:
    for box, shape, at, dims in [
        (((0, 2),), (2,), (1,), (0,)),  # sticks out
        (((0, 2), (0, 2)), (2,), (0,), (0,)),  # a left-out dimension that is not 1
        (((0, 2),), (2, 2), (0, 0), (0, 0)),  # a dimension twice
        (((2, 1),), (2,), (0,), (0,)),  # ends before it starts
        (((0, 2),), (2,), (0, 0), (0,)),  # lengths differ
    ]:
        with pytest.raises(WindlassInvalid, match=r"odd\.name"):
            View(box, "odd.name", shape, at, dims)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("module.model.norm.weight", "model.norm.weight"),
        ("module.module.model.norm.weight", "model.norm.weight"),
        ("_orig_mod.module.model.norm.weight", "model.norm.weight"),
        ("module._orig_mod.model.norm.weight", "model.norm.weight"),
        ("_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.w", "model.layers.0.w"),
        ("model.layers.3._checkpoint_wrapped_module._orig_mod.mlp.w", "model.layers.3.mlp.w"),
        ("model.module.weight", "model.module.weight"),
        ("encoder.module.0.weight", "encoder.module.0.weight"),
        ("module", "module"),
        ("base_model.model.model.layers.0.q_proj.base_layer.weight", "model.layers.0.q_proj.weight"),
        ("base_model.model.lm_head.original_module.weight", "lm_head.weight"),
        ("model.layers.0.mlp.experts.base_layer.base_layer.router", "model.layers.0.mlp.experts.router"),
        ("model.embed_tokens.token_adapter.base_layer.weight", "model.embed_tokens.weight"),
    ],
)
def test_wrappers_and_peft_are_taken_off_a_name(given: str, expected: str) -> None:
    assert [view.name for view in SourceMap().views(given, (2,))] == [expected]


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.q_proj.lora_A.default.weight",
        "model.layers.0.q_proj.lora_B.other.weight",
        "model.embed_tokens.lora_embedding_A.default",
        "model.layers.0.q_proj.lora_magnitude_vector.default.weight",
        "model.layers.0.mlp.ia3_l.default",
        "prompt_encoder.default.embedding.weight",
        "base_model.model.lm_head.modules_to_save.default.weight",
        "model.embed_tokens.token_adapter.trainable_tokens_delta.default",
    ],
)
def test_adapter_parameters_are_no_part_of_the_base_image(name: str) -> None:
    assert SourceMap().views(name, (2, 2)) == ()
    assert len(SourceMap(peft=False).views(name, (2, 2))) == 1


def test_a_trained_copy_stands_for_its_module_only_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    copy = "base_model.model.lm_head.modules_to_save.default.weight"
    original = "base_model.model.lm_head.original_module.weight"
    with caplog.at_level(logging.WARNING, logger="windlass"):
        names = SourceMap()
        assert names.views(copy, (2,)) == () == names.views(copy, (2,))
    assert sum("saved_modules" in record.message for record in caplog.records) == 1
    trained = SourceMap(saved_modules="default")
    assert [view.name for view in trained.views(copy, (2,))] == ["lm_head.weight"]
    assert trained.views(original, (2,)) == ()
    assert SourceMap(saved_modules="other").views(copy, (2,)) == ()


def test_a_flat_parameter_has_no_name() -> None:
    with pytest.raises(WindlassInvalid, match=r"model\.layers\.0\._flat_param") as caught:
        SourceMap().views("model.layers.0._flat_param", (12,))
    assert "use_orig_params=True" in caught.value.advice


def test_fused_experts_of_an_unknown_architecture_are_an_error_that_names_the_remedy() -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(WindlassInvalid, match=name) as caught:
        SourceMap().views("module." + name, (4, 8, 2))
    assert "from_model" in caught.value.advice
    assert "for_model_type" in caught.value.advice
    assert [view.name for view in SourceMap().keep(r".*experts\..*").views(name, (4, 8, 2))] == [name]
    assert [view.name for view in SourceMap.for_model_type("gpt_oss").views(name, (4, 2, 8))] == [name]
    # Neither a module list of experts nor a shared expert is fused.
    for plain in ("mlp.experts.0.down_proj.weight", "mlp.shared_expert.down_proj.weight"):
        assert len(SourceMap().views(plain, (4, 8))) == 1


def test_an_unknown_model_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(WindlassInvalid, match="qwen3_moe") as caught:
        SourceMap.for_model_type("no_such_model")
    assert "from_config" in caught.value.advice


def test_mixtral_experts_move_to_their_old_block() -> None:
    names = SourceMap.for_model_type("mixtral")
    views = names.views("model.layers.1.mlp.experts.gate_up_proj", (2, 6, 4))
    assert [view.name for view in views] == [
        f"model.layers.1.block_sparse_moe.experts.{expert}.{part}.weight"
        for expert in range(2)
        for part in ("w1", "w3")
    ]
    assert [(view.box[1], view.shape) for view in views[:2]] == [((0, 3), (3, 4)), ((3, 6), (3, 4))]
    [gate] = names.views("model.layers.1.mlp.gate.weight", (2, 4))
    assert gate.name == "model.layers.1.block_sparse_moe.gate.weight"


def test_rules_apply_in_the_order_they_were_added() -> None:
    first = SourceMap().rename("^a$", "b").rename("^b$", "c")
    second = SourceMap().rename("^b$", "c").rename("^a$", "b")
    assert [view.name for view in first.views("a", (1,))] == ["c"]
    assert [view.name for view in second.views("a", (1,))] == ["b"]
    # A method leaves the map that it was called on as it was.
    start = SourceMap()
    start.drop("a")
    assert len(start.views("a", (1,))) == 1


def test_a_split_after_a_transpose_cuts_what_was_transposed() -> None:
    names = SourceMap().transpose("qkv").split_rows("qkv", {"q": 4, "k": 2})
    q, k = names.views("qkv", (3, 6))
    assert (q.name, q.box, q.dims, q.shape) == ("q", ((0, 3), (0, 4)), (1, 0), (4, 3))
    assert (k.name, k.box, k.dims, k.shape) == ("k", ((0, 3), (4, 6)), (1, 0), (2, 3))


def test_merged_parameters_fill_one_tensor_exactly_once() -> None:
    sizes = {"q": 8, "k": 4, "v": 4}
    names = SourceMap().merge(r"(.*)\.(?P<part>[qkv])\.weight", r"\1.qkv.weight", sizes)
    boxes = []
    for part, rows in sizes.items():
        [view] = names.views(f"attn.{part}.weight", (rows, 6))
        assert (view.name, view.shape) == ("attn.qkv.weight", (16, 6))
        boxes.append(view.image_box)
    assert tile_exactly(boxes, (16, 6))
    with pytest.raises(WindlassInvalid, match=r"attn\.k\.weight"):
        names.views("attn.k.weight", (5, 6))
    with pytest.raises(WindlassInvalid, match="part"):
        SourceMap().merge("(q|k)", "qk", sizes)


def test_a_split_that_leaves_rows_out_must_say_so() -> None:
    def without_padding(name: str, shape: tuple[int, ...]) -> list[View]:
        return [View(((0, 5), (0, shape[1])), name, (5, shape[1]), (0, 0), (0, 1))]

    with pytest.raises(WindlassInvalid, match=r"embed\.weight.*exactly once"):
        SourceMap().split(r"embed\.weight", without_padding).views("embed.weight", (8, 2))
    [view] = SourceMap().split(r"embed\.weight", without_padding, partial=True).views("embed.weight", (8, 2))
    assert view.shape == (5, 2)


def test_errors_of_a_rule_name_the_parameter() -> None:
    names = SourceMap().rename("^old", "new").split_rows("new", {"a": 2, "b": 3})
    with pytest.raises(WindlassInvalid, match=r"'module\.old'.*a 2, b 3"):
        names.views("module.old", (6, 1))
    with pytest.raises(WindlassInvalid, match="regular expression"):
        SourceMap().rename("(", "")
    with pytest.raises(WindlassInvalid, match="permutation"):
        transpose("x", (2, 3), (0, 0))
    with pytest.raises(WindlassInvalid, match="dimension 2"):
        split_rows("x", (2, 3), {"a": 2}, dim=2)


def test_a_rule_of_ones_own_is_a_function() -> None:
    def halves(name: str, shape: tuple[int, ...]) -> list[View] | None:
        return split_rows(name, shape, {name + ".0": 1, name + ".1": 1}) if name == "pair" else None

    names = SourceMap(rules=[halves])
    assert [view.name for view in names.views("pair", (2, 2))] == ["pair.0", "pair.1"]
    assert [view.name for view in names.views("other", (2, 2))] == ["other"]


def test_extras_are_told_by_the_checkpoint_or_by_their_usual_names(caplog: pytest.LogCaptureFixture) -> None:
    names = ["model.a", "lm_head.weight", "v_head.weight", "score.weight"]
    with caplog.at_level(logging.INFO, logger="windlass"):
        chosen = Selection().choose(names)
    assert chosen.kept == ("model.a", "lm_head.weight")
    assert chosen.extras == ("v_head.weight", "score.weight")
    assert sum("v_head.weight, score.weight" in record.message for record in caplog.records) == 1
    # A classifier's checkpoint has its score, and lacks what the trainer added.
    known = Selection().choose(
        [*names, "probe"], checkpoint=["model.a", "lm_head.weight", "score.weight", "b"]
    )
    assert known.kept == ("model.a", "lm_head.weight", "score.weight")
    assert known.extras == ("v_head.weight", "probe")
    assert known.missing == ("b",)


def test_include_and_exclude_are_globs_of_image_names() -> None:
    names = ["model.a", "model.b", "v_head.weight"]
    assert Selection(exclude=["*.b"]).choose(names).kept == ("model.a",)
    assert Selection(include=["model.*"], exclude=["*.b"]).choose(names).kept == ("model.a",)
    # What was asked for by name is no extra.
    assert Selection(include=["v_head.*"]).choose(names, checkpoint=["model.a"]).kept == ("v_head.weight",)


def test_extras_may_be_an_error_and_an_empty_image_is_one() -> None:
    with pytest.raises(WindlassInvalid, match=r"v_head\.weight"):
        Selection(extras="error").choose(["model.a", "v_head.weight"])
    with pytest.raises(WindlassInvalid, match="none of the 1"):
        Selection().choose(["wrong.model.a"], checkpoint=["model.a"])
    with pytest.raises(WindlassInvalid, match="list of globs"):
        Selection(include="model.*")
    with pytest.raises(WindlassInvalid, match="extras"):
        Selection(extras="drop")  # type: ignore[arg-type]


def test_dtypes_are_decided_per_tensor_first() -> None:
    rules = DtypeRules("BF16", {"*.bias": "float32"}, {"a.norm": "torch.float32", "a.bias": "float16"})
    assert rules.dtype_of("a.bias", "bfloat16") == "float32"
    assert rules.dtype_of("a.norm", "bfloat16") == "float32"
    assert rules.dtype_of("a.weight", "float32") == "bfloat16"
    assert DtypeRules().dtype_of("a.weight", "torch.float16") == "float16"


def test_integers_and_booleans_are_never_cast() -> None:
    rules = DtypeRules("bfloat16", {"*": "float32"}, {"ids": "int32"})
    for dtype in ("int64", "uint8", "bool"):
        assert rules.dtype_of("ids", dtype) == dtype


@pytest.mark.parametrize(
    ("held", "rules"),
    [
        ("bfloat16", DtypeRules(dtypes={"w": "int8"})),
        ("bfloat16", DtypeRules(checkpoint={"w": "int32"})),
        ("bfloat16", DtypeRules(checkpoint={"w": "F8_E4M3"})),
        ("bfloat16", DtypeRules(dtypes={"w": "F4"})),
        ("float4_e2m1fn_x2", DtypeRules("bfloat16")),
        ("float8_e8m0fnu", DtypeRules(dtypes={"w": "float32"})),
        ("float8_e8m0fnu", DtypeRules("bfloat16")),
    ],
)
def test_a_cast_that_changes_the_meaning_is_an_error(held: str, rules: DtypeRules) -> None:
    with pytest.raises(WindlassInvalid, match="'w'") as caught:
        rules.dtype_of("w", held)
    assert held in caught.value.advice


def test_a_user_may_ask_for_eight_bit_floats() -> None:
    assert DtypeRules("float8_e4m3fn").dtype_of("w", "bfloat16") == "float8_e4m3fn"
    assert DtypeRules(dtypes={"w": "float32"}).dtype_of("w", "float8_e4m3fn") == "float32"
    assert DtypeRules("bfloat16").dtype_of("w", "float8_e4m3fn") == "bfloat16"


def test_unknown_dtypes_are_refused_where_they_are_given() -> None:
    for make in (
        lambda: DtypeRules("bf17"),
        lambda: DtypeRules(dtypes={"*": "bf17"}),
        lambda: DtypeRules(checkpoint={"a": "bf17"}),
    ):
        with pytest.raises(WindlassInvalid, match="bf17"):
            make()
    with pytest.raises(WindlassInvalid, match="floating"):
        DtypeRules("int8")


def test_dtype_names_agree_with_the_core() -> None:
    from windlass import _windlass

    short = {"half": "float16", "float": "float32", "double": "float64", "long": "int64", "bf16": "bfloat16"}
    for spelling, name in short.items():
        assert canonical_dtype(spelling) == name
    for name in _windlass.dtypes():
        for spelling in (name, f"torch.{name}", _windlass.dtype_safetensors(name)):
            assert canonical_dtype(spelling) == _windlass.dtype_name(spelling) == name


def safetensors(path: Path, header: object, data: int = 0, *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data))
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_the_layout_of_a_checkpoint_is_read_from_a_file_a_directory_or_an_index(tmp_path: Path) -> None:
    one = {"a": entry([2, 3], 0, 24), "__metadata__": {"format": "pt"}}
    two = {"b": entry([4], 0, 8, "BF16"), "s": entry([], 8, 12)}
    expected = {"a": ("float32", (2, 3)), "b": ("bfloat16", (4,)), "s": ("float32", ())}
    safetensors(tmp_path / "x-1.safetensors", one, 24)
    safetensors(tmp_path / "x-2.safetensors", two, 12)
    safetensors(tmp_path / "adapter_model.safetensors", {"lora": entry([1], 0, 4)}, 4)
    assert checkpoint_layout(tmp_path / "x-1.safetensors") == {"a": expected["a"]}
    assert checkpoint_layout(tmp_path) == expected
    index = {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint_layout(str(tmp_path)) == {"a": expected["a"], "b": expected["b"]}
    assert DtypeRules(checkpoint=tmp_path).dtype_of("b", "float32") == "bfloat16"


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        (b"", 0, None, "not JSON"),
        ({}, 0, 1 << 62, "announces a header"),
        ({}, 0, 3, "announces a header"),
        (b"[]", 0, None, "no JSON object"),
        (b'{"a": 1, "a": 2}', 0, None, "twice"),
        (b"[" * 100_000, 0, None, "not JSON"),
        ({"a": 1}, 0, None, "no JSON object"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, None, "lacks"),
        ({"a": entry([-1], 0, 4)}, 4, None, "lacks"),
        ({"a": entry([True], 0, 4)}, 4, None, "lacks"),
        ({"a": entry([1], 0, 4)}, 3, None, "byte range"),
        ({"a": entry([2], 0, 4)}, 4, None, "byte range"),
        ({"a": entry([1], 4, 0)}, 4, None, "byte range"),
        ({"a": entry([1 << 62, 1 << 62], 0, 4)}, 4, None, "byte range"),
        ({"a": entry([1], 0, 0, "F4")}, 4, None, "byte range"),
    ],
)
def test_a_hostile_header_is_corrupt(
    tmp_path: Path, header: object, data: int, length: int | None, message: str
) -> None:
    file = safetensors(tmp_path / "x.safetensors", header, data, length=length)
    with pytest.raises(WindlassCorrupt, match=message):
        checkpoint_layout(file)


def test_an_index_leads_nowhere_but_to_its_own_files(tmp_path: Path) -> None:
    safetensors(tmp_path / "x.safetensors", {"a": entry([1], 0, 4)}, 4)
    index = tmp_path / "model.safetensors.index.json"
    for content, error in [
        ({"weight_map": {"a": "../x.safetensors"}}, WindlassCorrupt),
        ({"weight_map": {"a": "/etc/passwd"}}, WindlassCorrupt),
        ({"weight_map": {"a": 3}}, WindlassCorrupt),
        ({"weight_map": {"b": "x.safetensors"}}, WindlassCorrupt),
        ({"weight_map": {"a": "y.safetensors"}}, WindlassNotFound),
        ({"weight_map": 3}, WindlassCorrupt),
        ([], WindlassCorrupt),
    ]:
        index.write_text(json.dumps(content))
        with pytest.raises(error):
            checkpoint_layout(index)
    with pytest.raises(WindlassNotFound):
        checkpoint_layout(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WindlassNotFound):
        checkpoint_layout(tmp_path / "empty")


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path: Path) -> None:
    for file in ("x.safetensors", "y.safetensors"):
        safetensors(tmp_path / file, {"a": entry([1], 0, 4)}, 4)
    with pytest.raises(WindlassInvalid, match=r"x\.safetensors and y\.safetensors"):
        checkpoint_layout(tmp_path)


def test_importing_names_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, windlass.names; print({'torch', 'transformers', 'peft'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"
