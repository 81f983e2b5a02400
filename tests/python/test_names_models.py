"""Names of real models: what the source map places equals what `save_pretrained` writes, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

from windlass import WindlassInvalid, WindlassUnsupported  # noqa: E402
from windlass.names import DtypeRules, Selection, SourceMap, checkpoint_layout, persistent_buffers  # noqa: E402
from windlass.names.architectures import AS_IS, PER_EXPERT  # noqa: E402
from windlass.names.clean import ADAPTER_PREFIXES  # noqa: E402
from windlass.names.trace import Traced  # noqa: E402

DENSE: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
MOE: dict[str, Any] = {
    **DENSE,
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    **{"first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4},
    **{"qk_nope_head_dim": 4, "v_head_dim": 8},
}
MLA = {key: value for key, value in MOE.items() if key != "head_dim"} | {"num_key_value_heads": 4}
SHAPES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gemma3_text", "gpt2", "gpt_neox", "hrm_text", "llama", "phi3", "qwen3"), DENSE),
    **dict.fromkeys(("ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "gpt_oss", "granitemoe"), MOE),
    **dict.fromkeys(("deepseek_v2", "dots1", "hunyuan_v1_moe", "jamba", "llama4_text", "minimax"), MOE),
    **dict.fromkeys(
        ("deepseek_v4", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"), MOE
    ),
    **dict.fromkeys(("longcat_flash", "qwen3_next"), MOE),
    "deepseek_v3": MLA,
}


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def build(model_type: str, dtype: Any = torch.float32, **changes: Any) -> Any:
    config = transformers.AutoConfig.for_model(model_type, **{**SHAPES[model_type], **changes})
    return randomised(transformers.AutoModelForCausalLM.from_config(config, dtype=dtype))


def randomised(model: Any) -> Any:
    """Every floating element different, so that a swap of any two shows."""
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(buffer for _, buffer in persistent_buffers(model))):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape))
    return model


def saved(model: Any, path: Path) -> dict[str, Any]:
    model.save_pretrained(path)
    found: dict[str, Any] = {}
    for file in path.glob("*.safetensors"):
        found.update(load_file(file))
    return found


def everything(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from persistent_buffers(model)


def assembled(tensors: Iterable[tuple[str, Any]], names: SourceMap) -> dict[str, Any]:
    """The image that views make, each element written exactly once."""
    image: dict[str, Any] = {}
    count: dict[str, Any] = {}
    for name, tensor in tensors:
        tensor = tensor.detach()
        for view in names.views(name, tuple(tensor.shape)):
            if view.name not in image:
                image[view.name] = torch.empty(view.shape, dtype=tensor.dtype)
                count[view.name] = torch.zeros(view.shape, dtype=torch.int64)
            left_out = [dim for dim in range(tensor.dim()) if dim not in view.dims]
            piece = tensor[tuple(slice(*bounds) for bounds in view.box)].permute(*view.dims, *left_out)
            where = tuple(slice(*bounds) for bounds in view.image_box)
            image[view.name][where] = piece.reshape(view.extent)
            count[view.name][where] += 1
    for name, times in count.items():
        assert bool((times == 1).all()), f"{name} is not written exactly once"
    return image


def assert_same(image: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(image) == set(expected)
    for name, tensor in expected.items():
        assert image[name].dtype == tensor.dtype, name
        assert image[name].shape == tensor.shape, name
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (image[name], tensor)]
        assert torch.equal(*bits), name


@pytest.mark.parametrize("model_type", sorted(SHAPES))
def test_the_image_of_a_model_equals_what_save_pretrained_writes(model_type: str, tmp_path: Path) -> None:
    model = build(model_type)
    expected = saved(model, tmp_path)
    names = SourceMap.from_model(model)
    assert_same(assembled(everything(model), names), expected)
    layout = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    assert names.written() == layout
    assert {name: shape for name, (_, shape) in checkpoint_layout(tmp_path).items()} == layout


@pytest.mark.parametrize("model_type", sorted({*SHAPES} & {*PER_EXPERT, *AS_IS}))
def test_the_built_in_names_of_an_architecture_equal_the_model_s_own(model_type: str) -> None:
    model = build(model_type)
    derived, built_in = SourceMap.from_model(model), SourceMap.for_model_type(model_type)
    for name, tensor in everything(model):
        shape = tuple(tensor.shape)
        assert sorted(derived.views(name, shape), key=str) == sorted(built_in.views(name, shape), key=str), (
            name
        )


@pytest.mark.parametrize("model_type", sorted({*PER_EXPERT, *AS_IS}))
def test_the_built_in_names_hold_for_an_architecture_of_its_usual_shape(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type, **SHAPES.get(model_type, {"num_hidden_layers": 2}))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    built_in = SourceMap.for_model_type(model_type)
    found = {
        view.name: view.shape for n, t in everything(model) for view in built_in.views(n, tuple(t.shape))
    }
    assert found == SourceMap.from_model(model).written()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_keep_their_bits(dtype: Any, tmp_path: Path) -> None:
    model = build("qwen3_moe", dtype)
    assert_same(assembled(everything(model), SourceMap.from_model(model)), saved(model, tmp_path))


def test_a_tied_model_writes_its_embedding_once(tmp_path: Path) -> None:
    model = build("qwen3", tie_word_embeddings=True)
    expected = saved(model, tmp_path)
    assert "lm_head.weight" not in expected
    names = SourceMap.from_model(model)
    assert_same(assembled(everything(model), names), expected)
    # The alias keeps its name for those who publish it.
    assert [view.name for view in names.views("lm_head.weight", (64, 32))] == ["lm_head.weight"]


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3", "gpt_neox"])
def test_a_model_that_was_loaded_is_named_as_it_would_be_saved_again(model_type: str, tmp_path: Path) -> None:
    first = saved(build(model_type), tmp_path / "a")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    again = saved(loaded, tmp_path / "b")
    assert_same(again, first)
    assert_same(assembled(everything(loaded), SourceMap.from_model(loaded)), again)


def test_a_configuration_alone_gives_the_same_names(tmp_path: Path) -> None:
    model = build("mixtral")
    expected = {name: tuple(tensor.shape) for name, tensor in saved(model, tmp_path).items()}
    assert SourceMap.from_config(model.config).written() == expected
    assert SourceMap.from_config(str(tmp_path)).written() == expected


def test_what_named_parameters_lacks_are_persistent_buffers(tmp_path: Path) -> None:
    model = build("deepseek_v3")
    expected = saved(model, tmp_path)
    names = SourceMap.from_model(model)
    lacking = set(expected) - set(assembled(model.named_parameters(), names))
    assert lacking == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    rules = DtypeRules("bfloat16", checkpoint=tmp_path)
    assert rules.dtype_of(next(iter(lacking)), torch.float32) == "float32"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.nn.DataParallel(model),
        lambda model: torch.nn.DataParallel(torch.nn.DataParallel(model)),
        lambda model: torch.compile(model, backend="eager"),
        lambda model: torch.nn.DataParallel(torch.compile(model, backend="eager")),
    ],
    ids=["data parallel", "twice", "compiled", "both"],
)
@pytest.mark.parametrize("model_type", ["qwen3", "mixtral"])
def test_a_wrapped_model_has_the_names_of_the_model_inside(
    model_type: str, wrap: Callable[[Any], Any], tmp_path: Path
) -> None:
    model = build(model_type)
    expected = saved(model, tmp_path)
    wrapped = wrap(model)
    for names in (SourceMap.from_model(wrapped), SourceMap.from_model(model)):
        assert_same(assembled(everything(wrapped), names), expected)
        assert_same(assembled(everything(model), names), expected)


def test_compiled_and_checkpointed_layers_keep_their_names(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = build("mixtral")
    expected = saved(model, tmp_path)
    layers = model.model.layers
    layers[0] = torch.compile(layers[0], backend="eager")
    layers[1] = checkpoint_wrapper(layers[1])
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    assert_same(assembled(everything(model), SourceMap.from_model(model)), expected)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_ddp_and_fsdp2_models_have_the_names_of_the_model_inside(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = build("mixtral")
    expected = saved(model, tmp_path / "saved")
    wrapped = DistributedDataParallel(model)
    assert_same(assembled(everything(wrapped), SourceMap.from_model(wrapped)), expected)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    full = [(name, t.full_tensor() if hasattr(t, "full_tensor") else t) for name, t in everything(model)]
    assert_same(assembled(full, SourceMap.from_model(model)), expected)


def test_names_as_fsdp1_gives_them_are_those_of_the_model_inside(tmp_path: Path) -> None:
    model = build("mixtral")
    expected = saved(model, tmp_path)
    named = [
        ("_fsdp_wrapped_module." + name.replace("layers.0.", "layers.0._fsdp_wrapped_module."), tensor)
        for name, tensor in everything(model)
    ]
    for names in (SourceMap.from_model(model), SourceMap.for_model_type("mixtral")):
        assert_same(assembled(named, names), expected)


@pytest.mark.usefixtures("group")
def test_the_map_of_an_fsdp1_model_has_global_shapes(tmp_path: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = build("qwen3_moe")
    expected = {name: tuple(tensor.shape) for name, tensor in saved(model, tmp_path / "saved").items()}
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    for original in (True, False):
        wrapped = FullyShardedDataParallel(
            build("qwen3_moe"),
            auto_wrap_policy=policy,
            use_orig_params=original,
            device_id=torch.device("cpu"),
        )
        assert SourceMap.from_model(wrapped).written() == expected


def test_a_zero3_parameter_counts_with_its_whole_shape(tmp_path: Path) -> None:
    model = build("mixtral")
    expected = {name: tuple(tensor.shape) for name, tensor in saved(model, tmp_path).items()}
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert SourceMap.from_model(model).written() == expected


def test_a_value_head_beside_a_model_is_an_extra(tmp_path: Path) -> None:
    class WithValueHead(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.pretrained_model = model
            self.v_head = torch.nn.Linear(32, 1)

    model = build("mixtral")
    expected = saved(model, tmp_path)
    actor = WithValueHead(model)
    names = SourceMap.from_model(actor)
    image = assembled(everything(actor), names)
    chosen = Selection().choose(image, names.written())
    assert chosen.extras == ("v_head.weight", "v_head.bias")
    assert chosen.missing == ()
    assert_same({name: image[name] for name in chosen.kept}, expected)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("derived", [True, False])
def test_the_base_of_a_peft_model_has_the_base_model_s_names(
    model_type: str, derived: bool, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    model = build(model_type)
    expected = saved(model, tmp_path)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if model_type == "qwen3_moe" else None
    config = peft.LoraConfig(
        target_modules=["q_proj", "v_proj", "embed_tokens"],
        target_parameters=targets,
        use_dora=targets is None,
    )
    wrapped = torch.nn.DataParallel(peft.get_peft_model(model, config))
    assert any("lora_A" in name for name, _ in wrapped.named_parameters())
    names = SourceMap.from_model(wrapped) if derived else SourceMap.for_model_type(model_type)
    assert_same(assembled(everything(wrapped), names), expected)


def test_saved_modules_of_peft_are_the_original_or_the_copy(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = build("qwen3")
    expected = saved(model, tmp_path)
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    copy = wrapped.base_model.model.lm_head.modules_to_save["default"].weight
    with torch.no_grad():
        copy.add_(1)
    assert_same(assembled(everything(wrapped), SourceMap.from_model(wrapped)), expected)
    trained = SourceMap.from_model(wrapped, saved_modules="default")
    assert_same(assembled(everything(wrapped), trained), expected | {"lm_head.weight": copy.detach()})


@pytest.mark.parametrize(
    "method", ["PromptTuningConfig", "IA3Config", "LoHaConfig", "VeraConfig", "OFTConfig"]
)
def test_other_adapters_leave_the_base_names_alone(method: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = build("qwen3")
    expected = saved(model, tmp_path)
    options: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    if method == "PromptTuningConfig":
        options["num_virtual_tokens"] = 4
    else:
        options["target_modules"] = ["q_proj", "o_proj"]
    if method == "IA3Config":
        options["feedforward_modules"] = []
    if method == "OFTConfig":
        options |= {"r": 0, "oft_block_size": 8}
    wrapped = peft.get_peft_model(model, getattr(peft, method)(**options))
    # Adapters may keep buffers of their own; the base model here has none.
    assert_same(assembled(wrapped.named_parameters(), SourceMap.from_model(wrapped)), expected)


def test_every_adapter_that_peft_knows_is_told_by_its_prefix() -> None:
    pytest.importorskip("peft")
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    assert {
        prefix for prefix in PEFT_TYPE_TO_PREFIX_MAPPING.values() if not prefix.startswith(ADAPTER_PREFIXES)
    } == set()


def test_a_changed_shape_is_an_error_that_names_the_parameter() -> None:
    names = SourceMap.from_model(build("qwen3_moe"))
    with pytest.raises(WindlassInvalid, match=r"model\.layers\.0\.mlp\.experts\.down_proj"):
        names.views("model.layers.0.mlp.experts.down_proj", (2, 32, 16))


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(WindlassInvalid, match="Linear"):
        SourceMap.from_model(torch.nn.Linear(2, 2))
    with pytest.raises(WindlassInvalid, match="str"):
        SourceMap.from_model("qwen3")


def with_conversion(*operations: Any, target: str = "self_attn.o_proj.weight") -> Any:
    """A model whose checkpoint is converted by the given operations when it is loaded."""
    from transformers.core_model_loading import WeightConverter

    model = build("qwen3")
    model._weight_conversions = [WeightConverter("attn.out", target, operations=list(operations))]
    return model


def test_permutations_of_rows_become_views_of_rows(tmp_path: Path) -> None:
    from transformers.core_model_loading import Interleave, PermuteForRope, Transpose

    for operation in (Interleave(dim=0), Interleave(dim=1), PermuteForRope(), Transpose(0, 1)):
        model = with_conversion(operation)
        expected = saved(model, tmp_path / repr(operation))
        assert "model.layers.0.attn.out" in expected
        assert_same(assembled(everything(model), SourceMap.from_model(model)), expected)


def test_arithmetic_in_a_conversion_is_an_error_that_names_the_tensor() -> None:
    from transformers.core_model_loading import ConversionOps

    class Doubled(ConversionOps):
        def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
            return {target_patterns[0]: next(iter(input_dict.values()))[0] * 2}

        @property
        def reverse_op(self) -> Any:
            return Doubled()

    names = SourceMap.from_model(with_conversion(Doubled()))
    name = "model.layers.0.self_attn.o_proj.weight"
    with pytest.raises(WindlassUnsupported, match=r"o_proj\.weight.*layers\.0\.attn\.out.*mul.*gathering"):
        names.views(name, (32, 32))
    assert len(names.views("model.norm.weight", (32,))) == 1
    assert names.drop(r".*o_proj\.weight").views(name, (32, 32)) == ()


def random_operation(rng: random.Random, shape: tuple[int, ...]) -> Callable[[Any], Any]:
    """Something that rearranges a tensor of the given shape."""
    dim = rng.randrange(len(shape))
    other = rng.randrange(len(shape))
    size = shape[dim]
    choices: list[Callable[[Any], Any]] = [
        lambda t: t.transpose(dim, other).contiguous(),
        lambda t: t.unsqueeze(dim),
        lambda t: t.squeeze(),
        lambda t: torch.cat(list(torch.chunk(t, 3, dim=dim))[::-1], dim=dim),
        lambda t: torch.stack(torch.unbind(t, dim), dim=other),
        lambda t: t.narrow(dim, 0, max(1, size - 1)),
        lambda t: t.reshape(-1),
        lambda t: t.flatten(0, min(1, t.dim() - 1)),
        lambda t: t.clone().detach(),
    ]
    for divisor in (2, 3, 4):
        if size % divisor == 0:
            split = (*shape[:dim], divisor, size // divisor, *shape[dim + 1 :])
            choices.append(lambda t, split=split: t.reshape(split))  # type: ignore[misc]
            choices.append(
                lambda t, split=split: t.reshape(split).transpose(dim, dim + 1).reshape(shape)  # type: ignore[misc]
            )
    return rng.choice(choices)


@pytest.mark.parametrize("seed", range(60))
def test_traced_tensors_tell_where_every_element_comes_from(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 3)))
    real = torch.arange(torch.Size(shape).numel()).reshape(shape)
    traced: Any = Traced.source("p", shape, real.dtype)
    source = real
    for _ in range(rng.randint(1, 6)):
        if not real.dim():
            break
        operation = random_operation(rng, tuple(real.shape))
        real, traced = operation(real), operation(traced)
        assert tuple(traced.shape) == tuple(real.shape)
        assert not traced.reasons
    rebuilt = torch.full_like(real, -1)
    views = list(traced.views("image"))
    if traced.reasons:
        # Dimensions of size one that no dimension of the parameter can stand for.
        assert real.dim() > source.dim()
        return
    for _, view in views:
        left_out = [dim for dim in range(source.dim()) if dim not in view.dims]
        piece = source[tuple(slice(*bounds) for bounds in view.box)].permute(*view.dims, *left_out)
        where = tuple(slice(*bounds) for bounds in view.image_box)
        assert bool((rebuilt[where] == -1).all())
        rebuilt[where] = piece.reshape(view.extent)
    assert torch.equal(rebuilt, real)


def test_a_permutation_into_too_many_pieces_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.names.trace.BLOCK_LIMIT", 8)
    tensor: Any = Traced.source("p", (32, 4), torch.float32)
    assert tensor.reshape(2, 16, 4).transpose(0, 1).reshape(32, 4).reasons
    assert not tensor.reshape(4, 8, 4).reshape(32, 4).reasons
