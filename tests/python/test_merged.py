"""Models with LoRA adapters: what is published is what PEFT's `merge_and_unload()` leaves, bit by bit, version after version."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import differences
from ranks import Run
from windlass import Receiver, SourceMap, WeightManager, WindlassInvalid, WindlassUnsupported

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TINY: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    },
}


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="merged-") as folder:
        yield Path(folder)


def base(kind: str = "Qwen2", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**TINY, **options})
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


def train(model: nn.Module, seed: int = 0) -> None:
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=made).to(parameter.dtype) / 4)


def lora(model: Any, **options: Any) -> Any:
    chosen = {"r": 4, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"], **options}
    return peft.get_peft_model(model, peft.LoraConfig(**chosen))


def state(model: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def merged(model: Any) -> dict[str, Tensor]:
    return state(copy.deepcopy(model).merge_and_unload())


def published(
    home: Path,
    model: Any,
    expected: Callable[[Any], dict[str, Tensor]] = merged,
    versions: int = 2,
    **config: Any,
) -> dict[str, Tensor]:
    """Trains and publishes, and compares what a receiver has of each version; the model is not changed by it."""
    got: dict[str, Tensor] = {}
    with WeightManager(region_dir=str(home), timeout=120.0, **config) as wm:
        receiver = None
        for version in range(1, versions + 1):
            train(model, version)
            before = state(model)
            done = wm.offload(model, version)
            assert done.new and done.version == version
            assert differences(state(model), before) == []
            receiver = receiver or Receiver(str(home / "image"), region=wm.region)
            receiver.wait(version, 120.0)
            with receiver.hold() as image:
                got = {name: tensor.clone() for name, tensor in image.tensors.items()}
            assert differences(got, expected(model)) == [], f"version {version}"
        assert not wm.offload(model, versions).new
        if receiver is not None:
            receiver.close()
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]},
        {"use_rslora": True, "rank_pattern": {"down_proj": 2}, "alpha_pattern": {"q_proj": 3}},
        {"use_dora": True, "target_modules": ["q_proj", "down_proj", "embed_tokens"]},
        {"lora_bias": True, "bias": "lora_only", "target_modules": ["q_proj", "v_proj"]},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
    ],
    ids=["plain", "rslora", "dora", "bias", "modules_to_save"],
)
def test_what_is_published_is_what_merge_and_unload_leaves(
    home: Path, options: dict[str, Any], dtype: torch.dtype
) -> None:
    published(home, lora(base(dtype=dtype), **options))


@pytest.mark.parametrize("mode", ["copy", "delta"])
def test_an_image_of_merged_weights_answers_as_the_merged_model(home: Path, mode: str) -> None:
    model = lora(base(), modules_to_save=["lm_head"])
    image = published(home, model, versions=3, offload_mode=mode)
    loaded = transformers.AutoModelForCausalLM.from_config(model.config).to(torch.bfloat16)
    loaded.load_state_dict(image)
    tokens = torch.arange(24).reshape(2, 12) % 96
    with torch.no_grad():
        expected = copy.deepcopy(model).merge_and_unload().eval()(tokens).logits
        without = base().eval()(tokens).logits
        assert torch.equal(loaded.eval()(tokens).logits, expected)
    assert not torch.equal(expected, without)


def test_tied_weights_are_merged_once_for_both_names(home: Path) -> None:
    model = lora(base(tie_word_embeddings=True), target_modules=["embed_tokens", "lm_head"])

    def expected(model: Any) -> dict[str, Tensor]:
        left = merged(model)
        left.pop("lm_head.weight")
        return left

    published(home, model, expected)


def test_weights_that_are_stored_transposed_are_merged(home: Path) -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, tie_word_embeddings=False)
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(config)
    published(home, lora(model, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True))


def test_adapted_parameters_of_experts_are_merged_under_the_names_of_the_checkpoint(home: Path) -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    model = base("Qwen3Moe", **moe)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = lora(model, target_modules=["q_proj"], target_parameters=names)

    def expected(model: Any) -> dict[str, Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            from safetensors.torch import load_file

            copy.deepcopy(model).merge_and_unload().save_pretrained(folder)
            return dict(load_file(Path(folder) / "model.safetensors"))

    image = published(home, adapted, expected)
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in image


class Pictures(nn.Module):
    """A model that is not transformers', with convolutions of each kind that is merged."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Conv1d(3, 5, 3)
        self.plane = nn.Conv2d(3, 5, 3)
        self.point = nn.Conv2d(3, 5, 1, bias=False)
        self.space = nn.Conv3d(3, 5, 2)


@pytest.mark.parametrize("dora", [False, True])
def test_convolutions_are_merged(home: Path, dora: bool) -> None:
    torch.manual_seed(3)
    published(home, lora(Pictures(), target_modules=["line", "plane", "point", "space"], use_dora=dora))


def test_several_active_adapters_are_merged_in_their_order(home: Path) -> None:
    model = lora(base())
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    model.base_model.set_adapter(["other", "default"])
    published(home, model)


def test_an_adapter_that_is_not_active_is_no_part_of_it(home: Path) -> None:
    model = lora(base())
    model.add_adapter("reference", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    published(home, model)


def test_adapters_that_transformers_itself_added_are_merged(home: Path) -> None:
    model = base()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model.add_adapter(config)
    # The adapters are in bfloat16, too.
    twin = peft.get_peft_model(base(), config, autocast_adapter_dtype=False)

    def expected(model: Any) -> dict[str, Tensor]:
        values = {f"base_model.model.{name}": value for name, value in model.state_dict().items()}
        twin.load_state_dict(values)
        return merged(twin)

    published(home, model, expected)


def test_what_is_merged_in_the_model_is_not_merged_again(home: Path) -> None:
    model = lora(base())
    train(model)
    with WeightManager(region_dir=str(home), timeout=120.0) as wm:
        receiver = None
        for version, act in ((1, model.merge_adapter), (2, model.unmerge_adapter)):
            act()
            wm.offload(model, version)
            receiver = receiver or Receiver(str(home / "image"), region=wm.region)
            receiver.wait(version, 120.0)
            with receiver.hold() as image:
                assert differences(dict(image.tensors), merged(model)) == []
        receiver.close()


def test_merged_weights_are_cast_and_quantised_as_any_others(home: Path) -> None:
    model = lora(base(dtype=torch.float32))
    train(model)
    given = {name: value.to(torch.bfloat16) for name, value in merged(model).items()}
    dtypes = {"*.down_proj.weight": "fp8_block128", "*.q_proj.weight": "int8_channel"}

    def image_of(place: str, given: Any) -> dict[str, Tensor]:
        (home / place).mkdir()
        config = {"generator_dtype": "bfloat16", "dtypes": dtypes}
        with WeightManager(region_dir=str(home / place), timeout=120.0, **config) as wm:
            wm.offload(given, 1)
            with Receiver(str(home / place / "image"), region=wm.region) as receiver:
                receiver.wait(1, 120.0)
                with receiver.hold() as image:
                    return {name: tensor.clone() for name, tensor in image.tensors.items()}

    assert differences(image_of("merged", model), image_of("plain", given)) == []


def test_only_one_merged_weight_is_there_at_a_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    from windlass.publish.merged import Merged

    alive: list[weakref.ref[Tensor]] = []
    most = 0
    make = Merged._made

    def counted(self: Merged, into: Tensor | None = None) -> Tensor:
        nonlocal most
        made = make(self, into)
        alive.append(weakref.ref(made))
        most = max(most, sum(each() is not None for each in alive))
        return made

    monkeypatch.setattr(Merged, "_made", counted)
    model = lora(base())
    with WeightManager(region_dir=str(home), agent={"enabled": False}, timeout=120.0) as wm:
        wm.offload(model, 1)
    assert len(alive) == 4 and most == 1


# Several ranks.


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["copy", "delta"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp1"])
def test_shards_are_merged_where_they_are(ranks: Run, kind: str, mode: str) -> None:
    ways = ranks(2, "merged_ranks:merged", [kind, "bfloat16", mode, {}], 280)[0]
    assert any(way.startswith("LoRA merged into") for way in ways), ways


@pytest.mark.timeout(400)
def test_partitions_of_zero_3_are_merged_where_they_are(ranks: Run) -> None:
    env = {"DS_ACCELERATOR": "cpu"}
    ways = ranks(2, "merged_ranks:merged", ["zero3", "float32", "copy", {}], 380, env=env)[0]
    assert "LoRA merged into ZeRO-3 shards" in ways


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_sharded_dora_weights_are_gathered_one_at_a_time(ranks: Run, kind: str) -> None:
    ranks(2, "merged_ranks:merged", [kind, "bfloat16", "copy", {"use_dora": True}], 280)


@pytest.mark.timeout(300)
def test_hosts_that_each_have_a_part_merge_theirs(ranks: Run) -> None:
    more = {"node": "host", "whole": False}
    ranks(2, "merged_ranks:merged", ["fsdp2", "float32", "copy", {}, more], 280)


@pytest.mark.timeout(200)
def test_a_rank_whose_adapters_cannot_be_merged_is_an_error_on_all(ranks: Run) -> None:
    first, second = ranks(2, "merged_ranks:refused", ["one"], 180)
    assert "rank 1 could not merge adapters" in first and "IA3" in first
    assert "IA3" in second


# What cannot be merged, and what would be left out.


def refused(home: Path, given: Any, **config: Any) -> str:
    with (
        WeightManager(region_dir=str(home), agent={"enabled": False}, timeout=60.0, **config) as wm,
        pytest.raises((WindlassInvalid, WindlassUnsupported)) as error,
    ):
        wm.offload(given, 1)
    return f"{error.value} {error.value.advice}"


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("IA3Config", {"target_modules": ["q_proj"], "feedforward_modules": []}),
        ("LoHaConfig", {"target_modules": ["q_proj"]}),
        ("PromptTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}),
        ("AdaLoraConfig", {"target_modules": ["q_proj"], "total_step": 10}),
        ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    ],
)
def test_other_methods_of_peft_are_refused_by_their_names(
    home: Path, method: str, options: dict[str, Any]
) -> None:
    model = peft.get_peft_model(base(), getattr(peft, method)(**options))
    said = refused(home, model)
    assert str(next(iter(model.peft_config.values())).peft_type.value) in said
    assert "merge_and_unload()" in said


def test_kinds_of_lora_that_are_not_merged_are_refused_by_their_names(home: Path) -> None:
    tokens = lora(base(), trainable_token_indices=[3, 5])
    assert "TrainableTokensWrapper" in refused(home, tokens)
    invoked = lora(base(), target_modules=["q_proj"], alora_invocation_tokens=[3], task_type="CAUSAL_LM")
    assert "ALoraLinearVariant" in refused(home, invoked)
    attention = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2)})
    said = refused(home, lora(attention, target_modules=["attn"]))
    assert "MultiheadAttention" in said
    without_bias = lora(base(), lora_bias=True, target_modules=["down_proj"])
    assert "down_proj" in refused(home, without_bias)


def test_an_extractor_refuses_other_methods_of_peft_by_their_names() -> None:
    from windlass.extract import extractor_for

    config = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    model = peft.get_peft_model(base(), config)
    with pytest.raises(WindlassUnsupported, match="IA3"):
        list(extractor_for(model).extract_weights(model))
    assert list(extractor_for(model, lora=False).extract_weights(model))


def test_a_trained_copy_of_a_weight_that_is_tied_is_refused(home: Path) -> None:
    model = lora(base(tie_word_embeddings=True), modules_to_save=["embed_tokens"])
    said = refused(home, model)
    assert "'lm_head.weight'" in said.replace("base_model.model.", "") and "ensure_weight_tying" in said


def test_adapters_without_their_model_are_an_error(home: Path) -> None:
    model = lora(base(), modules_to_save=["lm_head"])
    for given in (model.named_parameters(), model.state_dict()):
        said = refused(home, given)
        assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight" in said
        assert "the model itself" in said


def test_trainable_parameters_that_the_checkpoint_lacks_are_an_error(home: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = base()
            self.v_head = nn.Linear(32, 1)
            self.gate = nn.Linear(32, 1)

    model = Wrapped()
    said = refused(home, model)
    assert "2 trainable parameters" in said and "gate.weight" in said and "v_head" not in said
    with WeightManager(region_dir=str(home), agent={"enabled": False}, exclude=["gate.*"]) as wm:
        wm.offload(model, 1)
    model.gate.requires_grad_(False)
    with WeightManager(region_dir=str(home), agent={"enabled": False}) as wm:
        wm.offload(model, 1)


def test_another_choice_of_adapters_is_an_error_until_resume(home: Path) -> None:
    model = lora(base())
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with WeightManager(region_dir=str(home), agent={"enabled": False}, timeout=60.0) as wm:
        wm.offload(model, 1)
        model.set_adapter("other")
        with pytest.raises(WindlassInvalid, match="active adapters .* resume"):
            wm.offload(model, 2)
        wm.resume()
        wm.offload(model, 2)


def test_another_object_for_the_same_model_is_followed(home: Path) -> None:
    model = lora(base())
    with WeightManager(region_dir=str(home), timeout=120.0) as wm:
        wm.offload(model, 1)
        again = copy.deepcopy(model)
        train(again)
        for layer in again.modules():
            if isinstance(layer, peft.tuners.lora.LoraLayer):
                layer.scaling["default"] = 0.3
        wm.offload(again, 2)
        with Receiver(str(home / "image"), region=wm.region) as receiver:
            receiver.wait(2, 120.0)
            with receiver.hold() as image:
                assert differences(dict(image.tensors), merged(again)) == []


# What else may be published of such a model.


def test_adapters_alone_are_published_as_peft_saves_them(home: Path) -> None:
    from safetensors.torch import load_file

    model = lora(base(), modules_to_save=["lm_head"])

    def expected(model: Any) -> dict[str, Tensor]:
        model.save_pretrained(home / "peft")
        return dict(load_file(home / "peft" / "adapter_model.safetensors"))

    published(home, model, expected, lora="adapter", model_id="policy.lora")
    assert "has no LoRA adapters" in refused(home, base(), lora="adapter")
    assert "the model itself" in refused(home, model.named_parameters(), lora="adapter")


def test_the_base_is_published_where_it_is_asked_for(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = lora(base(), modules_to_save=["lm_head"])

    def expected(_: Any) -> dict[str, Tensor]:
        return state(base())

    with caplog.at_level(logging.WARNING, "windlass"):
        published(home, model, expected, lora="base")
    names = SourceMap.from_model(model, saved_modules="default")
    with WeightManager(region_dir=str(home), agent={"enabled": False}, names=names) as wm:
        wm.offload(model, 1)


def test_what_is_published_of_adapters_is_one_of_three(home: Path) -> None:
    with pytest.raises(WindlassInvalid, match="'merged', 'adapter', 'base'"):
        WeightManager(region_dir=str(home), lora="both")
