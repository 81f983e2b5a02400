"""LoRA in one process (C21, C52): what is found, and what a saved adapter is. Ranks: test_extract_ranks.py."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models import differences, lora_policy, policy
from windlass.errors import WindlassInvalid
from windlass.extract import ModuleWeightExtractor
from windlass.extract.lora import LoraState, collect_lora, is_lora, save_lora


def collected(model: Any, dtype: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    chunks = ModuleWeightExtractor(**options).extract_weights(model, dtype)
    return {name: tensor for chunk in chunks for name, tensor in chunk}


def test_an_adapter_is_found_under_wrappers_and_only_where_there_is_one() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = lora_policy()

    assert is_lora(Wrapper()) and is_lora(torch.compile(lora_policy(), backend="eager"))
    assert not is_lora(policy())
    assert differences(collect_lora(Wrapper()).tensors, collect_lora(lora_policy()).tensors) == []


def test_a_model_with_another_kind_of_adapter_is_no_lora() -> None:
    from peft import IA3Config, get_peft_model

    model = get_peft_model(policy(), IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    assert not is_lora(model)


def test_an_extractor_sends_adapters_only_and_in_the_generator_dtype() -> None:
    got = collected(lora_policy(), "bfloat16")
    assert all(name.startswith("base_model.model.") for name in got)
    assert {tensor.dtype for tensor in got.values()} == {torch.bfloat16}
    assert got.keys() == collect_lora(lora_policy()).tensors.keys()


def test_the_base_of_a_lora_model_is_sent_when_adapters_are_declined() -> None:
    assert collected(lora_policy(), lora=False).keys() == dict(policy(width=16).named_parameters()).keys()


def test_asking_for_adapters_of_a_model_without_any_is_an_error() -> None:
    with pytest.raises(WindlassInvalid, match="Policy has no LoRA adapters"):
        collected(policy(), lora=True)
    with pytest.raises(WindlassInvalid, match="Policy has no LoRA adapters"):
        collect_lora(policy())


def test_one_of_several_adapters_is_collected_by_name() -> None:
    from peft import LoraConfig

    model = lora_policy()
    model.add_adapter("second", LoraConfig(r=5, target_modules=["k_proj"]))
    assert {
        tensor.shape[0] for name, tensor in collect_lora(model, "second").tensors.items() if "lora_A" in name
    } == {5}
    assert differences(collect_lora(model).tensors, collect_lora(lora_policy()).tensors) == []
    with pytest.raises(WindlassInvalid, match="no adapter 'third'"):
        collect_lora(model, "third")


def test_an_adapter_of_transformers_own_has_the_names_of_its_file(tmp_path: pathlib.Path) -> None:
    import transformers
    from peft import LoraConfig

    config = transformers.AutoConfig.for_model(
        "qwen3",
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        vocab_size=32,
        head_dim=8,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path)
    assert differences(collect_lora(model).tensors, load_file(tmp_path / "adapter_model.safetensors")) == []


def test_a_collected_adapter_does_not_change_with_the_model() -> None:
    model = lora_policy()
    state = collect_lora(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(tensor.any() for tensor in state.tensors.values())


def test_a_saved_adapter_appears_whole_and_once(tmp_path: pathlib.Path) -> None:
    state = collect_lora(lora_policy())
    path = save_lora(state, tmp_path / "new" / "folder", 3)
    assert path.name == "adapter-3"
    assert differences(load_file(path / "adapter_model.safetensors"), state.tensors) == []
    assert json.loads((path / "adapter_config.json").read_text())["r"] == 3
    with pytest.raises(WindlassInvalid, match="adapter-3 is there already"):
        save_lora(state, tmp_path / "new" / "folder", 3)
    assert [file.name for file in path.parent.iterdir()] == ["adapter-3"]


def test_an_adapter_that_cannot_be_written_leaves_nothing(tmp_path: pathlib.Path) -> None:
    broken = LoraState({"a": torch.zeros(2)}, {"callable": print})
    with pytest.raises(TypeError):
        save_lora(broken, tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_share_memory_or_have_strides_are_saved_as_they_look(tmp_path: pathlib.Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = LoraState({"one": base, "other": base[:2], "turned": base.T}, {"peft_type": "LORA"})
    path = save_lora(state, tmp_path, 0)
    assert differences(load_file(path / "adapter_model.safetensors"), state.tensors) == []
