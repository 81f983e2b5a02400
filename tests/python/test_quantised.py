"""Weights that are published quantised: the same bits as the libraries that write such checkpoints make, of one version."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import quantisers
from ranks import Run
from windlass import (
    Receiver,
    SourceMap,
    WeightManager,
    WindlassInvalid,
    WindlassStale,
    WindlassUnsupported,
)
from windlass.config import WeightManagerConfig
from windlass.names import SCHEMES, DtypeRules, checkpoint_layout, quantization_config
from windlass.publish import derived, quantise

EVERY = list(SCHEMES)
QUIET = {"enabled": False}


@pytest.fixture
def home() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="quantised-") as folder:
        yield folder


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same(got: Tensor, wanted: Tensor, name: str = "") -> None:
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), name
    assert torch.equal(bits(got), bits(wanted)), name


def hard(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Every magnitude, rows and a block of zeros, signed zeros, and values in the middle between two others."""
    made = torch.Generator().manual_seed(rows)
    value = torch.randn(rows, columns, generator=made) * torch.logspace(-4, 2, columns)
    value[3 % rows] = 0
    value[: min(rows, 128), : min(columns, 128)] *= 0 if rows > 128 else 1
    value[-1, ::3] = -0.0
    value[-1, 1::3] = torch.arange(len(value[-1, 1::3])) * 0.5
    return value.to(dtype)


def whole(scheme: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    return in_boxes(scheme, weight, [((0, weight.shape[0]), (0, weight.shape[1]))])


def in_boxes(name: str, weight: Tensor, boxes: list[Any]) -> tuple[Tensor, Tensor]:
    """Each box by itself, with the magnitudes of all of them."""
    scheme, shape, base = SCHEMES[name], tuple(weight.shape), weight.dtype
    amax = torch.zeros(scheme.scale_shape(shape))
    cut = [tuple(slice(a, b) for a, b in box) for box in boxes]
    groups = [tuple(slice(a, b) for a, b in quantise.group_box(scheme, shape, box)) for box in boxes]
    for box, at, group in zip(boxes, cut, groups, strict=True):
        amax[group] = torch.maximum(amax[group], quantise.largest(scheme, shape, box, weight[at], base))
    out = torch.empty(shape, dtype=getattr(torch, scheme.dtype))
    for box, at, group in zip(boxes, cut, groups, strict=True):
        quantise.quantised(scheme, shape, box, weight[at], base, amax[group], out[at])
    return out, quantise.scales(scheme, amax, base)


# The arithmetic.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", EVERY)
@pytest.mark.parametrize("shape", [(256, 384), (320, 200), (1, 7), (129, 1)])
def test_weights_and_scales_are_bit_by_bit_those_of_the_library(
    scheme: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight = hard(*shape, dtype)
    for got, wanted in zip(whole(scheme, weight), quantisers.by_library(scheme, weight), strict=True):
        same(got, wanted, scheme)


@pytest.mark.parametrize("scheme", EVERY)
def test_large_weights_are_made_in_chunks_with_the_same_result(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = hard(700, 260, torch.bfloat16)
    wanted = whole(scheme, weight)
    for elements in (1, 200 * 260):
        monkeypatch.setattr(quantise, "CHUNK", elements)
        for a, b in zip(whole(scheme, weight), wanted, strict=True):
            same(a, b)


@pytest.mark.parametrize("scheme", EVERY)
def test_parts_that_cut_through_groups_give_the_same_as_the_whole(scheme: str) -> None:
    weight = hard(500, 300, torch.float32)
    boxes = [
        ((a, b), (c, d))
        for a, b in [(0, 100), (100, 101), (101, 384), (384, 500)]
        for c, d in [(0, 130), (130, 256), (256, 300)]
    ]
    for a, b in zip(in_boxes(scheme, weight, boxes), whole(scheme, weight), strict=True):
        same(a, b)


def test_a_nan_is_not_hidden_by_a_scale() -> None:
    weight = torch.ones(128, 128)
    weight[5, 6] = torch.nan
    for scheme in ("fp8_block128", "fp8_channel"):
        made, _ = whole(scheme, weight)
        assert made[5, 6].isnan()


def test_scales_of_bf16_do_not_depend_on_whether_a_device_divides_or_multiplies() -> None:
    # compressed-tensors divides by a Python number, and a GPU multiplies by its reciprocal then: no bf16 tells the difference.
    every = torch.arange(0, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    for top in (448.0, 127.5):
        multiplied = (every.float() * (1.0 / torch.tensor(top))).bfloat16()
        same(every / torch.tensor(top, dtype=torch.bfloat16), multiplied)


# Which tensors.


def test_a_pattern_leaves_what_is_no_linear_layer_to_the_rules_after_it() -> None:
    rules = DtypeRules(None, {"*.weight": "fp8_block128", "*norm.weight": "float32"})
    for name, shape in {
        "model.embed_tokens.weight": (9, 9),
        "lm_head.weight": (9, 9),
        "layers.0.mlp.gate.weight": (9, 9),
        "layers.0.conv.weight": (9, 9, 9),
        "layers.0.norm.weight": (9,),
    }.items():
        assert rules.scheme_of(name, "bfloat16", shape) is None, name
    assert rules.dtype_of("layers.0.norm.weight", "bfloat16") == "float32"
    assert rules.scheme_of("layers.0.mlp.gate_proj.weight", "bfloat16", (9, 9)) == (
        "*.weight",
        SCHEMES["fp8_block128"],
    )
    assert rules.scheme_of("layers.0.ids.weight", "int64", (9, 9)) is None
    assert DtypeRules(None, {"*": "fp8_channel"}).scheme_of("a.table", "bfloat16", (9, 9)) is None


def test_the_first_rule_counts_and_a_name_that_is_spelled_out_is_obeyed() -> None:
    rules = DtypeRules(
        None, {"visual.*": "bfloat16", "lm_head.weight": "int8_channel", "*.weight": "fp8_channel"}
    )
    assert rules.scheme_of("visual.proj.weight", "float32", (9, 9)) is None
    found = rules.scheme_of("lm_head.weight", "float32", (9, 9))
    assert found is not None
    assert found[1].name == "int8_channel"


def test_weights_are_rounded_first_to_what_they_would_be_published_in() -> None:
    rules = DtypeRules("bfloat16", {"*.weight": "fp8_channel"}, {"a.weight": "F8_E4M3", "b.weight": "F32"})
    assert rules.base_of("a.weight", "float32") == "bfloat16"
    assert rules.base_of("b.weight", "float32") == "float32"
    with pytest.raises(WindlassInvalid, match=r"'a.weight' would be rounded to float64"):
        DtypeRules(None, {"*.weight": "fp8_channel"}).base_of("a.weight", "float64")


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.ones(4), "'a.weight' cannot be published as fp8_block128: it has 1 dimensions"),
        (torch.ones(4, 4, dtype=torch.int32), "it is int32"),
        (torch.ones(0, 4), "it has no elements"),
    ],
)
def test_a_spelled_out_name_that_cannot_be_quantised_is_an_error(
    home: str, tensor: Tensor, said: str
) -> None:
    with (
        WeightManager(region_dir=home, agent=QUIET, dtypes={"a.weight": "fp8_block128"}) as wm,
        pytest.raises(WindlassInvalid, match=said),
    ):
        wm.offload({"a.weight": tensor}, 1, 0, 1)


def test_a_rule_that_quantises_nothing_is_an_error_that_names_it(home: str) -> None:
    with (
        WeightManager(region_dir=home, agent=QUIET, dtypes={"*.wieght": "fp8_block128"}) as wm,
        pytest.raises(WindlassInvalid, match=r"dtypes\['\*.wieght'\] = 'fp8_block128' quantises nothing"),
    ):
        wm.offload({"a.weight": torch.ones(4, 4)}, 1, 0, 1)


def test_what_cannot_be_done_is_refused_with_its_name(home: str) -> None:
    from windlass.extract import ModuleWeightExtractor

    with pytest.raises(WindlassInvalid, match="fp8_block64"):
        WeightManagerConfig(dtypes={"*.weight": "fp8_block64"})
    with pytest.raises(WindlassUnsupported, match="extractors give weights as they are"):
        ModuleWeightExtractor(dtypes={"*.weight": "fp8_channel"})
    weight = torch.randn(64, 32)
    with WeightManager(region_dir=home, agent=QUIET, dtypes={"*.weight": "fp8_channel"}) as wm:
        wm.offload({"a.weight": weight}, 1, 0, 1)
        weight.data = torch.randn(32, 64).t()
        with pytest.raises(WindlassInvalid, match=r"the local memory of 'a.weight' was float32 \[64, 32\]"):
            wm.offload({"a.weight": weight}, 2, 0, 1)


# Publishing.


def small(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 136} if "moe" in kind else {}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes, **heads, **moe, tie_word_embeddings=False)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def image_of(home: str, name: str, given: Any, **config: Any) -> dict[str, Tensor]:
    with WeightManager(model_id=name, region_dir=home, **config) as wm:
        wm.offload(given, 1, 0, 1)
        with Receiver(f"{home}/{name}", region=wm.region) as receiver:
            receiver.wait(1, 60)
            with receiver.hold() as image:
                return {tensor: value.clone() for tensor, value in image.tensors.items()}


@pytest.mark.parametrize("scheme", EVERY)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_transformers_model_becomes_a_quantised_checkpoint(home: str, kind: str, scheme: str) -> None:
    model = small(kind)
    plain = image_of(home, "plain", model)
    wanted = quantisers.checkpoint(scheme, plain, skip=("embed_tokens", "lm_head", "mlp.gate."))
    got = image_of(home, "quantised", model, dtypes={"*.weight": scheme})
    assert sorted(got) == sorted(wanted)
    for name, tensor in wanted.items():
        same(got[name], tensor, name)
    if kind == "qwen3_moe":
        # The trainer has the experts of a layer in one parameter of three dimensions.
        assert got["model.layers.1.mlp.experts.3.up_proj.weight"].dtype == getattr(
            torch, SCHEMES[scheme].dtype
        )
        assert got["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("mode", ["copy", "delta"])
@pytest.mark.parametrize("scheme", EVERY)
@pytest.mark.parametrize("kept", [False, True], ids=["made", "kept"])
def test_masters_are_rounded_and_then_quantised_and_versions_follow(
    home: str, scheme: str, mode: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kept:
        # As on a GPU, where quantised weights stay at an address.
        monkeypatch.setattr(derived, "_device", lambda *_: torch.device("cpu"))
    weights = {
        "a.weight": hard(300, 256, torch.float32),
        "b.weight": torch.randn(256, 300).t(),
        "c.bias": torch.randn(9),
    }
    dtypes = {"*.weight": scheme}
    with WeightManager(region_dir=home, generator_dtype="bfloat16", dtypes=dtypes, offload_mode=mode) as wm:
        receiver = None
        for version in (1, 2, 3):
            weights["a.weight"][version] *= 3
            weights["b.weight"][:, version] += 1
            assert wm.offload(weights, version, 0, 1).mode == ("copy" if version == 1 else mode)
            receiver = receiver or Receiver(f"{home}/image", region=wm.region)
            receiver.wait(version, 60)
            wanted = quantisers.checkpoint(scheme, {n: t.bfloat16() for n, t in weights.items()})
            with receiver.hold() as image:
                assert sorted(image.tensors) == sorted(wanted)
                for name, tensor in wanted.items():
                    same(image.tensors[name], tensor, name)
        assert not wm.offload(weights, 3, 0, 1).new
        weights["a.weight"][0, 0] += 100
        with pytest.raises(WindlassStale, match="with other bytes"):
            wm.offload(weights, 3, 0, 1)
        assert receiver is not None
        receiver.close()


class Exported:
    """Weights that are only known by exporting them."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights.items()]

    def held_names(self) -> None:
        return None

    def __iter__(self) -> Any:
        yield from self.weights.items()


def test_exported_weights_are_quantised_one_at_a_time(home: str, caplog: pytest.LogCaptureFixture) -> None:
    weights = {"a.weight": hard(140, 200, torch.bfloat16), "norm.weight": torch.ones(3)}
    with caplog.at_level(logging.INFO, "windlass"):
        got = image_of(home, "exported", Exported(weights), dtypes={"*.weight": "fp8_block128"})
    for name, tensor in quantisers.checkpoint("fp8_block128", weights).items():
        same(got[name], tensor, name)
    assert "1 weights are published quantised (fp8_block128)" in caplog.text


def test_a_fused_export_is_split_and_then_quantised(home: str) -> None:
    fused = hard(300, 136, torch.bfloat16)
    names = SourceMap().split_rows(r"(.*)\.qkv\.weight", {r"\1.q.weight": 200, r"\1.kv.weight": 100})
    parts = {"a.q.weight": fused[:200], "a.kv.weight": fused[200:]}
    for scheme in EVERY:
        wanted = quantisers.checkpoint(scheme, parts)
        for how, given in {
            "exported": Exported({"a.qkv.weight": fused}),
            "held": {"a.qkv.weight": fused},
        }.items():
            got = image_of(home, f"{how}-{scheme}", given, names=names, dtypes={"*.weight": scheme})
            assert sorted(got) == sorted(wanted)
            for name, tensor in wanted.items():
                same(got[name], tensor, name)


def test_exports_of_which_a_weight_is_put_together_are_refused_by_name(home: str) -> None:
    names = SourceMap().merge(r"(.*)\.(?P<part>[qk])\.weight", r"\1.qk.weight", {"q": 100, "k": 156})
    given = {"a.q.weight": torch.randn(100, 64), "a.k.weight": torch.randn(156, 64)}
    got = image_of(home, "held", given, names=names, dtypes={"*.weight": "fp8_block128"})
    wanted = quantisers.checkpoint("fp8_block128", {"a.qk.weight": torch.cat(list(given.values()))})
    for name, tensor in wanted.items():
        same(got[name], tensor, name)
    with pytest.raises(WindlassUnsupported, match=r"'a.qk.weight' cannot be published as fp8_block128"):
        image_of(home, "exported", Exported(given), names=names, dtypes={"*.weight": "fp8_block128"})


def test_an_image_never_has_a_weight_of_one_version_and_the_scale_of_another(home: str) -> None:
    # Every version has other scales and other weights; a reader looks at whatever image there is.
    last = 25
    torn: list[tuple[int, str]] = []
    seen: set[int] = set()

    def weights(version: int) -> dict[str, Tensor]:
        made = torch.Generator().manual_seed(version)
        return {f"{i}.weight": torch.randn(256, 256, generator=made) * version for i in range(4)}

    wanted = {v: quantisers.checkpoint("fp8_block128", weights(v)) for v in range(1, last + 1)}
    with WeightManager(region_dir=home, dtypes={"*.weight": "fp8_block128"}) as wm:
        wm.offload(weights(1), 1, 0, 1)
        with Receiver(f"{home}/image", region=wm.region) as receiver:
            receiver.wait(1, 60)
            ended = threading.Event()

            def read() -> None:
                while not ended.is_set():
                    with receiver.hold() as image:
                        seen.add(image.version)
                        torn.extend(
                            (image.version, name)
                            for name, tensor in wanted[image.version].items()
                            if not torch.equal(bits(image.tensors[name]), bits(tensor))
                        )

            reader = threading.Thread(target=read)
            reader.start()
            try:
                for version in range(2, last + 1):
                    wm.offload(weights(version), version, 0, 1)
                    receiver.wait(version, 60)
            finally:
                ended.set()
                reader.join(60)
    assert not torn
    assert len(seen) > 3


@pytest.mark.parametrize("scheme", EVERY)
def test_a_small_change_is_a_small_delta(home: str, scheme: str) -> None:
    weights = {"a.weight": torch.randn(1024, 1024).bfloat16()}
    with WeightManager(region_dir=home, dtypes={"*.weight": scheme}) as wm:
        wm.offload(weights, 1, 0, 1)
        with Receiver(f"{home}/image", region=wm.region) as receiver:
            receiver.wait(1, 60)
            # Of the middle of the range, so that no scale changes.
            some = (torch.rand(1024, 1024) < 0.001) & (weights["a.weight"].abs() < 1)
            weights["a.weight"][some] *= 1.25
            wm.offload(weights, 2, 0, 1)
            done = receiver.wait(2, 60)
            assert done["mode"] == "delta"
            assert 0 < done["wire_bytes"] < 16_000, done
            with receiver.hold() as image:
                for name, tensor in quantisers.checkpoint(scheme, weights).items():
                    same(image.tensors[name], tensor, name)


# Ranks.


@pytest.mark.timeout(200)
@pytest.mark.parametrize("scheme", EVERY)
@pytest.mark.parametrize(
    ("dtype", "cast", "mode"), [("bfloat16", None, "copy"), ("float32", "bfloat16", "delta")]
)
def test_shards_of_fsdp2_are_quantised_where_they_are(
    ranks: Run, scheme: str, dtype: str, cast: str | None, mode: str
) -> None:
    ways = ranks(2, "quantised_ranks:sharded", [scheme, dtype, cast, mode], 180)[0]
    across = {way: count for way, count in ways.items() if "across ranks" in way}
    # Rows are whole on each rank; blocks are not, except those of one weight, and of the one that a single rank has.
    assert bool(across) == (scheme == "fp8_block128"), ways
    assert not any("gathered" in way for way in ways)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("scheme", EVERY)
def test_any_placement_is_quantised_as_the_whole(ranks: Run, scheme: str) -> None:
    ranks(2, "quantised_ranks:placed", [scheme], 180)
    ranks(2, "quantised_ranks:flat", [scheme], 180)
    ranks(2, "quantised_ranks:exported", [scheme], 180)
    ranks(2, "quantised_ranks:sharded", [scheme, "bfloat16", None, "copy", 2], 180)


@pytest.mark.timeout(200)
def test_ranks_of_a_host_that_writes_nothing_take_part_in_scales(ranks: Run) -> None:
    ranks(4, "quantised_ranks:hybrid", ["fp8_block128"], 180)


@pytest.mark.timeout(100)
def test_a_rule_that_no_rank_can_use_is_an_error_on_all(ranks: Run) -> None:
    for said in ranks(2, "quantised_ranks:unused_here_and_there", [], 90):
        assert "dtypes['*.proj'] = 'int8_channel' quantises nothing" in said


# What an engine is told.


def test_the_configuration_is_what_the_libraries_read(home: str) -> None:
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from transformers import FineGrainedFP8Config

    weights = {
        "a.weight": torch.ones(256, 128),
        "mlp.gate.weight": torch.ones(4, 128),
        "norm.weight": torch.ones(4),
    }
    found: dict[str, Any] = {}
    for scheme in EVERY:
        with WeightManager(model_id=scheme, region_dir=home, agent=QUIET, dtypes={"*.weight": scheme}) as wm:
            with pytest.raises(WindlassInvalid):
                wm.offload([], 1, 0, 1)
            wm.offload(weights, 1, 0, 1)
            config = wm.quantization_config()
            assert config is not None
            found[scheme] = config
    left = ["lm_head", "mlp.gate"]
    block = FineGrainedFP8Config(**{k: v for k, v in found["fp8_block128"].items() if k != "quant_method"})
    assert (block.weight_block_size, block.modules_to_not_convert) == ([128, 128], left)
    assert block.activation_scheme == "dynamic"
    for scheme, preset in quantisers.PRESETS.items():
        read = QuantizationConfig.model_validate(found[scheme])
        [group] = read.config_groups.values()
        wanted = preset_name_to_scheme(preset, ["Linear"])
        assert group.weights.model_dump() == wanted.weights.model_dump()
        assert group.input_activations.model_dump() == wanted.input_activations.model_dump()
        assert read.ignore == left


def test_the_configuration_of_files_and_of_mixtures(tmp_path: Path) -> None:
    made = quantisers.checkpoint("fp8_block128", {"a.weight": torch.ones(130, 128), "b.bias": torch.ones(3)})
    save_file(made, tmp_path / "model.safetensors")
    config = quantization_config(checkpoint_layout(tmp_path))
    assert config is not None
    assert config["modules_to_not_convert"] == ["lm_head"]
    assert quantization_config({"a.weight": ("bfloat16", (4, 4))}) is None
    with pytest.raises(WindlassInvalid, match=r"'a.weight' is fp8_block128 and 'c.weight' is int8_channel"):
        quantization_config(
            {
                "a.weight": ("float8_e4m3fn", (4, 4)),
                "a.weight_scale_inv": ("float32", (1, 1)),
                "c.weight": ("int8", (4, 4)),
                "c.weight_scale": ("float32", (4, 1)),
            }
        )


def test_a_quantised_checkpoint_gives_names_and_no_dtypes(
    home: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {
        "a.weight": torch.randn(130, 128),
        "norm.weight": torch.ones(3),
        "value.weight": torch.ones(3, 3),
    }
    stored = quantisers.checkpoint(
        "fp8_block128", {n: weights[n].bfloat16() for n in ("a.weight", "norm.weight")}
    )
    save_file(stored, tmp_path / "model.safetensors")
    config: dict[str, Any] = {"checkpoint": str(tmp_path), "generator_dtype": "bfloat16"}
    with caplog.at_level(logging.WARNING, "windlass"):
        got = image_of(home, "like", weights, dtypes={"*.weight": "fp8_block128"}, **config)
    assert sorted(got) == sorted(stored)
    for name, tensor in stored.items():
        same(got[name], tensor, name)
    assert "not published" not in caplog.text
