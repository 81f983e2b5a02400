"""Adapters at run time: each version beside the one before, and the base weights untouched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from windlass.engines.vllm import VLLMWeightLoader
from windlass.errors import WindlassInvalid

KIND: tiny.Kind = "qwen3"
RANK, ALPHA = 4, 8.0


def make_adapter(path: Path, model: Any, seed: int) -> None:
    """Writes a random adapter, and adds it to ``model``, which is what the engine should answer like."""
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            a = torch.randn(RANK, module.in_features, generator=generator) * 0.2
            b = torch.randn(module.out_features, RANK, generator=generator) * 0.2
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            with torch.no_grad():
                module.weight += ALPHA / RANK * (b @ a)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    config |= {"target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "tiny", "lora_dropout": 0.0}
    (path / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.timeout(300)
def test_versions_of_an_adapter_follow_each_other(
    checkpoint: Callable[[tiny.Kind], Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import LLM, SamplingParams

    monkeypatch.setenv("VLLM_PLUGINS", "windlass,plain_weights")
    llm = LLM(
        model=str(checkpoint(KIND)),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        enforce_eager=True,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
    )
    how = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in tiny.PROMPTS]

    def answers(request: Any) -> list[list[int]]:
        outs = llm.generate(prompts, how, use_tqdm=False, lora_request=request)
        return [list(out.outputs[0].token_ids) for out in outs]

    try:
        loader = VLLMWeightLoader(llm)
        base = answers(None)
        for version in (1, 2, 3):
            model = tiny.model(KIND)
            make_adapter(home / str(version), model, version)
            asyncio.run(loader.load_lora(home / str(version)))
            assert loader.adapter is not None
            assert loader.adapter.lora_name == f"policy-{version}"
            assert answers(loader.adapter) == tiny.answers(model, 16)
        assert answers(None) == base == tiny.answers(tiny.model(KIND), 16)
        assert set(llm.llm_engine.list_loras()) == {3}
        with pytest.raises(WindlassInvalid, match="is no adapter"):
            asyncio.run(loader.load_lora(home))
    finally:
        llm.llm_engine.engine_core.shutdown()
