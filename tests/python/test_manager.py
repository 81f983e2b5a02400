"""What a WeightManager publishes, in one process: every kind of tensor, every rule of versions and names."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from windlass import (
    Receiver,
    SourceMap,
    WeightManager,
    WindlassInvalid,
    WindlassNotFound,
    WindlassStale,
    WindlassUnsupported,
)
from windlass.receive.receiver import Tensors

QUIET = {"enabled": False}
EVERY_DTYPE = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
    ),
]


@pytest.fixture
def home() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="manager-") as folder:
        yield folder


@pytest.fixture
def quiet(home: str) -> Iterator[WeightManager]:
    """A manager without an agent."""
    with WeightManager(model_id="quiet", region_dir=home, agent=QUIET, timeout=20.0) as wm:
        yield wm


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all, NaNs and subnormal numbers among them; a bool has two values only."""
    made = torch.Generator().manual_seed(seed)
    raw = torch.randint(
        0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), generator=made, dtype=torch.uint8
    )
    return raw.view(dtype).reshape(shape)


def published(wm: WeightManager) -> dict[str, torch.Tensor]:
    """The newest version as it lies in the region."""
    assert wm._open is not None
    assert wm._open.publisher is not None
    held = wm._open.publisher.hold(30.0)
    try:
        return {name: tensor.clone() for name, tensor in Tensors(held).items()}
    finally:
        held.finish()


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


class Scaled(nn.Parameter):
    """A parameter as quantisation libraries make them."""


def every_kind() -> dict[str, torch.Tensor]:
    """One tensor of each kind that trainers have."""
    base = random_bits((6, 8), torch.bfloat16, 1)
    kinds = {f"dtype.{str(d)[6:]}": random_bits((3, 5), d, i) for i, d in enumerate(EVERY_DTYPE)}
    kinds |= {f"single.{str(d)[6:]}": random_bits((), d, 50 + i) for i, d in enumerate(EVERY_DTYPE)}
    if hasattr(torch, "float4_e2m1fn_x2"):
        kinds["dtype.float4"] = random_bits((4, 3), torch.uint8, 7).view(torch.float4_e2m1fn_x2)
    kinds |= {
        "turned": base.t(),
        "stepped": base[::2, 1::3],
        "column": base[:, 3],
        "spread": base[:, :1].expand(6, 5),
        "cube": random_bits((2, 3, 4), torch.float32, 2).permute(2, 0, 1),
        "no_rows": torch.empty(0, 4, dtype=torch.bfloat16),
        "no_columns": torch.empty(3, 0),
        "nothing": torch.empty(0),
        "one": torch.tensor(1.5),
        "grad": torch.randn(3, requires_grad=True),
        "frozen": nn.Parameter(torch.randn(3), requires_grad=False),
        "subclass": Scaled(torch.randn(4)),
        "part": base[1:3],
        "other_part": base[3:5],
        "overlapping_part": base[2:4],
        "tied.first": base,
        "tied.second": base,
        "tied.view": base.view(6, 8),
    }
    with torch.inference_mode():
        kinds["inference"] = torch.randn(5, 2)
        kinds["inference.turned"] = torch.randn(5, 2).t()
    return kinds


# Tensors.


def test_every_kind_of_tensor_reaches_a_receiver_bit_by_bit(home: str) -> None:
    kinds = every_kind()
    with WeightManager(model_id="kinds", region_dir=home) as wm, torch.no_grad():
        wm.offload(kinds, 1, 0, 1)
        with Receiver(f"{home}/image", region=wm.region) as receiver:
            for version in (1, 2):
                if version == 2:
                    kinds["part"].add_(1)
                    kinds["one"].mul_(2)
                    kinds["turned"].copy_(kinds["turned"].neg())
                    with torch.inference_mode():
                        kinds["inference"].add_(1)
                        wm.offload(iter(kinds.items()), 2, 0, 1)
                receiver.wait(version, 30.0)
                with receiver.hold() as image:
                    same({n: t.clone() for n, t in image.tensors.items()}, kinds)
        assert wm._open is not None
        aliases = wm._open.plan.layout.aliases()
        assert aliases == {"tied.second": "tied.first", "tied.view": "tied.first"}


def test_an_image_is_a_mapping_that_knows_what_it_does_not_have(home: str) -> None:
    """`in` and `get` raised, because the error for a missing tensor was no KeyError."""
    model, engine = nn.Linear(3, 2), nn.Linear(3, 2)
    with WeightManager(model_id="mapping", region_dir=home) as wm:
        wm.offload(model, 1, 0, 1)
        with Receiver(f"{home}/image", region=wm.region) as receiver:
            receiver.wait(1, 30.0)
            with receiver.hold() as image:
                assert "weight" in image.tensors
                assert "nothing" not in image.tensors
                assert image.tensors.get("nothing") is None
                assert len(image.tensors) == 2
                with pytest.raises(WindlassNotFound) as e:
                    image.tensors["nothing"]
                assert str(e.value) == "the image has no tensor 'nothing'"
                engine.load_state_dict(image.tensors)
    same(dict(engine.named_parameters()), dict(model.named_parameters()))


def test_a_plan_of_many_ranks_takes_no_more_than_its_share(home: str) -> None:
    """It took time by the square of the ranks, for every tensor."""
    from windlass.exchange import Alone
    from windlass.publish.plan import make_plan
    from windlass.publish.sources import Naming, describe_sources

    def seconds(world: int) -> float:
        sources = describe_sources((f"p{i}", torch.zeros(2)) for i in range(20))
        naming = Naming(SourceMap(), frozenset, lambda _, dtype: dtype)
        begun = time.process_time()
        make_plan(sources, naming, rank=0, node="here", exchange=Alone(world), timeout=5.0)
        return time.process_time() - begun

    few, many = min(seconds(1000) for _ in range(3)), min(seconds(8000) for _ in range(3))
    assert many < 30 * few, (few, many)


def test_casts_are_those_of_torch(home: str) -> None:
    wide = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    sources = {str(d)[6:]: random_bits((33, 7), d, i) for i, d in enumerate(wide)}
    sources["turned"] = random_bits((7, 9), torch.float32, 9).t()
    sources["number"] = random_bits((), torch.float32, 10)
    for number, target in enumerate([*wide, torch.float8_e4m3fn, torch.float8_e5m2]):
        options = {"model_id": f"cast-{number}", "region_dir": home, "agent": QUIET}
        with WeightManager(generator_dtype=str(target), **options) as wm:
            kept = {"integers": torch.arange(5), "flags": torch.tensor([True, False])}
            wm.offload({**sources, **kept}, 1, 0, 1)
            same(published(wm), {**{n: t.to(target) for n, t in sources.items()}, **kept})


def test_dtypes_and_selection_follow_the_configuration(home: str) -> None:
    from safetensors.torch import save_file

    save_file(
        {"a.weight": torch.zeros(2, dtype=torch.float16), "c.weight": torch.zeros(2)}, f"{home}/c.safetensors"
    )
    tensors = {f"{n}.weight": torch.randn(2) for n in "abcd"} | {"v_head.weight": torch.randn(2)}
    common = {"region_dir": home, "agent": QUIET}

    def image(name: str, **more: Any) -> dict[str, str]:
        with WeightManager(model_id=name, **common, **more) as wm:
            wm.offload(tensors, 1, 0, 1)
            return {n: str(t.dtype)[6:] for n, t in published(wm).items()}

    assert image("plain") == dict.fromkeys(["a.weight", "b.weight", "c.weight", "d.weight"], "float32")
    globs = image("globs", generator_dtype="bfloat16", dtypes={"a.*": "float32", "b.*": "float8_e4m3fn"})
    assert globs == {
        "a.weight": "float32",
        "b.weight": "float8_e4m3fn",
        "c.weight": "bfloat16",
        "d.weight": "bfloat16",
    }
    stored = image("stored", generator_dtype="bfloat16", checkpoint=f"{home}/c.safetensors")
    assert stored == {"a.weight": "float16", "c.weight": "float32"}
    assert list(image("some", include=["a.*", "v_head.*"])) == ["a.weight", "v_head.weight"]
    assert list(image("others", exclude=["a.*", "[cd].*"])) == ["b.weight"]
    with pytest.raises(WindlassInvalid, match=r"v_head\.weight"):
        image("strict", extras="error")
    with pytest.raises(WindlassInvalid, match="include and exclude") as e:
        image("none", include=["x.*"])
    assert e.value.advice == "" or "include" in str(e.value) + e.value.advice


def test_buffers_are_published_when_asked_for(home: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    for buffers in (False, True):
        with WeightManager(model_id="buffers", region_dir=home, agent=QUIET, buffers=buffers) as wm:
            wm.offload(model, 1, 0, 1)
            wm.offload(model, 2, 0, 1)
            wanted = model.state_dict() if buffers else dict(model.named_parameters())
            same(published(wm), wanted)


BAD: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("meta", lambda: torch.empty(2, device="meta"), WindlassInvalid, "materialise"),
    ("sparse", lambda: torch.eye(2).to_sparse(), WindlassInvalid, "to_dense"),
    ("compressed", lambda: torch.eye(2).to_sparse_csr(), WindlassInvalid, "to_dense"),
    (
        "quantised",
        lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
        WindlassInvalid,
        "int_repr",
    ),
    ("conjugate", lambda: torch.zeros(2, dtype=torch.complex64).conj(), WindlassInvalid, "resolve_conj"),
    ("double", lambda: torch.zeros(2, dtype=torch.complex128), WindlassUnsupported, "cast it"),
    ("lazy", lambda: nn.LazyLinear(3).weight, WindlassInvalid, "run a lazy module once"),
    (
        "nested",
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        WindlassInvalid,
        "its parts",
    ),
    ("number", lambda: 3.5, WindlassInvalid, "not a tensor"),
    ("array", lambda: [1.0, 2.0], WindlassInvalid, "not a tensor"),
    ("nobody", lambda: None, WindlassInvalid, "not a tensor"),
]


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_published_is_refused_by_name_with_a_remedy(quiet: WeightManager) -> None:
    for name, make, kind, remedy in BAD:
        given = make()
        with pytest.raises(kind) as e:
            quiet.offload({"good": torch.ones(2), f"bad.{name}": given}, 1, 0, 1)
        assert f"bad.{name}" in str(e.value), name
        assert remedy in f"{e.value} {e.value.advice}", (name, str(e.value))
    # And the manager is none the worse for it.
    assert quiet.offload({"good": torch.ones(2)}, 1, 0, 1).new


def test_a_tensor_that_is_left_out_may_have_any_dtype(home: str) -> None:
    with WeightManager(model_id="left-out", region_dir=home, agent=QUIET, exclude=["phase"]) as wm:
        wm.offload({"a": torch.ones(2), "phase": torch.zeros(2, dtype=torch.complex128)}, 1, 0, 1)
        assert list(published(wm)) == ["a"]


def test_names_and_shapes_of_arguments_are_checked(quiet: WeightManager) -> None:
    good = torch.ones(2)
    cases: list[tuple[Any, str]] = [
        ([("a", good), ("a", good)], "'a' comes twice"),
        ({"": good}, "empty name"),
        ({"n" * 70000: good}, "1 to 1024 bytes"),
        (nn.Linear(2, 2).parameters(), "named_parameters"),
        ([good, good], "named_parameters"),
        (torch.ones(2, 2), "shape"),
        (None, "takes a model"),
        (7, "takes a model"),
        ("weights", "takes a model"),
        ([("a", good, 3)], "pairs"),
        ([(3, good)], "pairs"),
        ({}, "no tensors"),
        ([], "no tensors"),
    ]
    for given, text in cases:
        with pytest.raises(WindlassInvalid) as e:
            quiet.offload(given, 1, 0, 1)
        assert text in f"{e.value} {e.value.advice}", (text, str(e.value))
    with pytest.raises(ZeroDivisionError):
        quiet.offload((("a", good / (1 // 0)) for _ in range(1)), 1, 0, 1)
    for rank, world in [(1, 1), (-1, 2), ("0", 1), (0, 1 << 16)]:
        with pytest.raises(WindlassInvalid, match="rank"):
            quiet.offload({"a": good}, 1, rank, world)  # type: ignore[arg-type]
    for timeout in (-1, float("nan"), "5", True):
        with pytest.raises(WindlassInvalid, match="timeout"):
            quiet.offload({"a": good}, 1, 0, 1, timeout=timeout)  # type: ignore[arg-type]
    assert quiet.offload({"a": good}, 1, 0, 1).new


def test_an_exotic_name_is_kept(quiet: WeightManager) -> None:
    tensors = {
        "Gewichte/größe.0": torch.ones(2),
        'a"b\\c': torch.ones(3),
        "x y": torch.ones(1),
        "..": torch.ones(1),
    }
    quiet.offload(tensors, 1, 0, 1)
    same(published(quiet), tensors)


# Sources.


class Export:
    """A source that knows its shapes before its values."""

    def __init__(self) -> None:
        self.tensors = {"a": torch.randn(3, 2), "b": torch.randn(4, dtype=torch.float64)}
        self.said = [(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()]

    def metadata(self) -> list[tuple[str, Any, Any]]:
        return self.said

    def held_names(self) -> None:
        return None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return iter(list(self.tensors.items()))


def test_an_export_is_followed_and_its_contradictions_are_named(home: str) -> None:
    source = Export()
    with WeightManager(model_id="export", region_dir=home, agent=QUIET, generator_dtype="bfloat16") as wm:
        source.said = [("a", "float32", [3, 2]), ("b", "torch.float64", [4]), ("a", "F32", [1])]
        with pytest.raises(WindlassInvalid, match="'a' twice"):
            wm.offload(source, 1, 0, 1)
        source.said = source.said[:2]
        wm.offload(source, 1, 0, 1)
        good = dict(source.tensors)
        same(published(wm), {n: t.bfloat16() for n, t in good.items()})
        assert not wm.offload(source, 1, 0, 1).new
        for change, text in [
            ({"a": torch.randn(2, 3)}, "'a' came as float32 [2, 3]"),
            ({"a": torch.randn(3, 2).half()}, "'a' came as float16"),
            ({"c": torch.ones(1)}, "'c' was exported"),
            ({"b": None}, "'b' is among held_names"),
        ]:
            source.tensors = {**good, **change}  # type: ignore[dict-item]
            with pytest.raises(WindlassInvalid) as e:
                wm.offload(source, 2, 0, 1)
            assert text in str(e.value)
        source.tensors = {"a": good["a"]}
        with pytest.raises(WindlassInvalid, match="first 'b'"):
            wm.offload(source, 2, 0, 1)
        with pytest.raises(WindlassInvalid, match="WeightSource"):
            wm.offload(good, 2, 0, 1)
        source.tensors = {n: t + 1 for n, t in good.items()}
        assert wm.offload(source, 2, 0, 1).new
        same(published(wm), {n: (t + 1).bfloat16() for n, t in good.items()})


def test_a_model_that_becomes_an_export_is_refused(quiet: WeightManager) -> None:
    source = Export()
    quiet.offload(source.tensors, 1, 0, 1)
    source.tensors = {n: t + 1 for n, t in source.tensors.items()}
    with pytest.raises(WindlassInvalid, match=r"resume\(\)"):
        quiet.offload(source, 2, 0, 1)
    assert quiet.version == 1


# Versions.


def test_versions_only_grow(quiet: WeightManager) -> None:
    weight = torch.ones(4)
    for version in (True, -1, 1.0, "1", 1 << 64, None):
        with pytest.raises(WindlassInvalid, match="version"):
            quiet.offload({"a": weight}, version, 0, 1)  # type: ignore[arg-type]
    assert quiet.version is None
    assert quiet.offload({"a": weight}, 5, 0, 1).new
    again = quiet.offload({"a": weight}, 5, 0, 1)
    assert (again.new, again.bytes, again.version) == (False, 0, 5)
    weight[0] = -0.0
    weight[1] = float("nan")
    with pytest.raises(WindlassStale, match="other bytes"):
        quiet.offload({"a": weight}, 5, 0, 1)
    same(published(quiet), {"a": torch.ones(4)})
    with pytest.raises(WindlassStale) as e:
        quiet.offload({"a": weight}, 4, 0, 1)
    assert "resume()" in e.value.advice
    assert quiet.version == 5
    assert quiet.offload({"a": weight}, (1 << 64) - 1, 0, 1).new
    same(published(quiet), {"a": weight})
    assert not quiet.offload({"a": weight}, (1 << 64) - 1, 0, 1).new


def test_a_cast_version_given_again_is_the_same(home: str) -> None:
    with WeightManager(model_id="again", region_dir=home, agent=QUIET, generator_dtype="float16") as wm:
        weights = {
            "a": torch.randn(5, 3).t(),
            "b": torch.tensor(2.5),
            "c": torch.empty(0),
            "d": torch.arange(3),
        }
        wm.offload(weights, 1, 0, 1)
        assert not wm.offload(weights, 1, 0, 1).new


def test_changed_parameters_are_named_and_the_manager_stays_usable(quiet: WeightManager) -> None:
    good = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    quiet.offload(good, 1, 0, 1)
    changes: list[tuple[Any, list[str]]] = [
        ({**good, "b": torch.randn(6)}, ["'b'", "[5]", "[6]"]),
        ({**good, "a": good["a"].t()}, ["'a'", "[4, 3]"]),
        ({**good, "a": torch.randn(4, 3).t()}, ["'a'", "strides"]),
        ({**good, "b": good["b"].double()}, ["'b'", "float64"]),
        ({**good, "c": torch.ones(1)}, ["'c'"]),
        ({"a": good["a"]}, ["'b'", "missing"]),
        ({"b": good["b"], "a": good["a"]}, ["'a'", "'b'", "order"]),
        ({"a": good["a"], "x": good["b"]}, ["'b'", "'x'"]),
        ({"a": good["a"], "b": good["b"].to_sparse()}, ["'b'", "sparse"]),
        ({"a": good["a"], "b": torch.empty(5, device="meta")}, ["'b'", "meta"]),
        ({"a": good["a"], "b": None}, ["'b'", "NoneType"]),
        ([], ["'a'", "missing"]),
        ([good["a"]], ["named_parameters"]),
    ]
    for given, words in changes:
        with pytest.raises(WindlassInvalid) as e:
            quiet.offload(given, 2, 0, 1)
        assert all(word in str(e.value) for word in words), (words, str(e.value))
        assert quiet.version == 1
    fresh = {name: tensor + 1 for name, tensor in good.items()}
    assert quiet.offload(fresh, 2, 0, 1).new
    same(published(quiet), fresh)


def test_a_parameter_that_was_cast_or_moved_in_place_is_not_read_as_it_was(quiet: WeightManager) -> None:
    """The same objects with other memory: reading them by the old plan would read beyond their ends."""
    model = nn.Linear(64, 64)
    model.extra = nn.Parameter(torch.randn(9, 9))
    quiet.offload(model, 1, 0, 1)
    for change, back in [
        (lambda: model.half(), lambda: model.float()),
        (lambda: setattr(model.extra, "data", torch.randn(3, 3)), lambda: None),
        (lambda: setattr(model.extra, "data", torch.randn(9, 9).t()), lambda: None),
        (lambda: model.extra.untyped_storage().resize_(0), lambda: None),
        (lambda: model.to_empty(device="meta"), lambda: model.to_empty(device="cpu")),
    ]:
        change()
        with pytest.raises(WindlassInvalid, match=r"memory of|on the meta device"):
            quiet.offload(model, 2, 0, 1)
        back()
        model.extra.data = torch.randn(9, 9)
        assert quiet.version == 1
    quiet.offload(model, 2, 0, 1)
    same(published(quiet), dict(model.named_parameters()))


def test_a_cast_parameter_that_was_resized_in_place_is_noticed(home: str) -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    with WeightManager(model_id="cast", region_dir=home, agent=QUIET, generator_dtype="bfloat16") as wm:
        wm.offload({"w": weight}, 1, 0, 1)
        weight.data = torch.randn(8, 16)[:, ::2]
        with pytest.raises(WindlassInvalid, match="'w'"):
            wm.offload({"w": weight}, 2, 0, 1)


def test_weights_that_are_tied_at_first_and_not_later_are_noticed(quiet: WeightManager) -> None:
    x, y, z = torch.randn(3), torch.randn(3), torch.randn(3)
    quiet.offload({"a": x, "b": x}, 1, 0, 1)
    quiet.offload({"a": y, "b": y}, 2, 0, 1)
    same(published(quiet), {"a": y, "b": y})
    with pytest.raises(WindlassInvalid, match="'b' was the same tensor as 'a'"):
        quiet.offload({"a": y, "b": z}, 3, 0, 1)
    first, second = nn.Parameter(x), nn.Parameter(x)
    quiet.resume()
    quiet.offload({"a": first, "b": second}, 1, 0, 1)
    second.data = z
    with pytest.raises(WindlassInvalid, match="'b' was the same tensor as 'a'"):
        quiet.offload({"a": first, "b": second}, 2, 0, 1)


# Names.


@pytest.mark.parametrize(
    ("model_type", "tied"), [("qwen3", False), ("qwen3", True), ("qwen3_moe", False), ("deepseek_v3", False)]
)
def test_the_image_of_a_transformers_model_is_its_checkpoint(
    home: str, tmp_path: Path, model_type: str, tied: bool
) -> None:
    """Tied names are there once; DeepSeek's routers have buffers that belong to the checkpoint and are no parameters."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    config = transformers.AutoConfig.for_model(
        model_type,
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 4 if model_type == "deepseek_v3" else 2, "vocab_size": 64},
        **{"num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        **{
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
        },
        **{"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": tied},
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    wanted = {n: t for file in tmp_path.glob("*.safetensors") for n, t in load_file(file).items()}
    with WeightManager(model_id="hf", region_dir=home, agent=QUIET) as wm:
        wm.offload(model, 1, 0, 1)
        wm.offload(model, 2, 0, 1)
        assert wm._open is not None
        held = wm._open.publisher.hold(30.0)  # type: ignore[union-attr]
        found = load_file(held.path)
        held.finish()
        same(found, wanted)
        # A state dictionary has the tied name too; the checkpoint has not.
        wm.resume()
        names = SourceMap.from_model(model)
    with WeightManager(model_id="hf", region_dir=home, agent=QUIET, names=names) as wm:
        wm.offload(model.state_dict(), 1, 0, 1)
        same(published(wm), wanted)


def test_a_new_model_after_resume_gets_names_of_its_own(home: str) -> None:
    """Names that were derived from the first model used to stay for the second."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model("qwen3_moe", **small, num_experts=2, vocab_size=8, head_dim=8)
    with WeightManager(model_id="two", region_dir=home, agent=QUIET) as wm:
        wm.offload(transformers.AutoModelForCausalLM.from_config(config), 1, 0, 1)
        assert any("experts.1.down_proj" in name for name in published(wm))
        wm.resume()
        model = nn.Linear(2, 2)
        wm.offload(model, 1, 0, 1)
        same(published(wm), dict(model.named_parameters()))
