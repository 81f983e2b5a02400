"""LoRA adapters in a running server: from a path and from memory, version by version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import servers
import tiny
from windlass.engines.sglang import SGLangLora
from windlass.errors import WindlassInvalid, WindlassNotFound
from windlass.extract.lora import LoraState, save_lora

pytestmark = pytest.mark.timeout(900)

RANK = 4


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[tiny.Kind], Path]) -> Iterator[servers.Sglang]:
    options = ["--enable-lora", "--max-lora-rank", str(RANK), "--lora-target-modules", "q_proj", "v_proj"]
    options += ["--lora-backend", "torch_native", "--max-loras-per-batch", "4"]
    with servers.Sglang(checkpoint("qwen3"), options=options) as server:
        yield server


def adapter(seed: int) -> LoraState:
    """An adapter as PEFT names it, strong enough to change answers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for target, out in (("q_proj", 128), ("v_proj", 64)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, 128, generator=generator) * 0.3
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * 0.3
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
    }
    return LoraState(tensors, config)


def merged(state: LoraState) -> Any:
    """The model with the adapter added to its weights."""
    model = tiny.model("qwen3")
    weights = dict(model.named_parameters())
    for name, a in state.tensors.items():
        if name.endswith("lora_A.weight"):
            target = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            b = state.tensors[name.replace("lora_A", "lora_B")]
            weights[target].data += state.config["lora_alpha"] / RANK * (b @ a)
    return model


def answers(server: servers.Sglang, name: str | None) -> list[list[int]]:
    more = {} if name is None else {"lora_path": name}
    return [server.generate(prompt, 8, **more) for prompt in tiny.PROMPTS]


def test_adapters_by_path_and_by_tensors_answer_as_merged_weights_do(
    server: servers.Sglang, tmp_path: Path
) -> None:
    mine = SGLangLora(server.url, adapter="policy")
    base = answers(server, None)
    assert base == tiny.answers(tiny.model("qwen3"), 8)
    for version in range(1, 5):
        state = adapter(version)
        if version % 2:
            name = asyncio.run(mine.load_path(save_lora(state, tmp_path, version), version))
        else:
            name = asyncio.run(mine.load_state(state, version))
        assert name == mine.current == f"policy-{version}"
        told = answers(server, name)
        assert told == tiny.answers(merged(state), 8)
        assert told != base
        # The version before is gone.
        assert [model["id"] for model in server.get("/v1/models")["data"][1:]] == [name]
    assert answers(server, None) == base
    # The same version once more, as after an answer that was lost.
    assert asyncio.run(mine.load_state(adapter(9), 4)) == "policy-4"
    assert answers(server, "policy-4") == tiny.answers(merged(adapter(9)), 8)
    asyncio.run(mine.unload())
    assert mine.current is None


def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_serves(
    server: servers.Sglang, tmp_path: Path
) -> None:
    mine = SGLangLora(server.url, adapter="other")
    name = asyncio.run(mine.load_state(adapter(1), 1))
    before = answers(server, name)

    def refused(state: LoraState, says: str) -> None:
        with pytest.raises(WindlassInvalid, match=says):
            asyncio.run(mine.load_state(state, 2))

    good = adapter(2)
    first = next(iter(good.tensors))
    refused(LoraState(good.tensors, {**good.config, "r": 64}), "rank 64")
    refused(LoraState(good.tensors, {**good.config, "r": 2}), "does not go with rank 2")
    refused(LoraState({**good.tensors, "modules_to_save.x": torch.zeros(1)}, good.config), "neither lora_A")
    refused(LoraState({n: t for n, t in good.tensors.items() if n != first}, good.config), "other half")
    refused(LoraState({**good.tensors, first: good.tensors[first].to(torch.int8)}, good.config), "int8")
    refused(LoraState(good.tensors, {**good.config, "target_modules": ["up_proj"]}), "up_proj")
    refused(LoraState({}, good.config), "no tensors")
    with pytest.raises(WindlassNotFound, match="adapter_config.json"):
        asyncio.run(mine.load_path(tmp_path, 2))
    assert mine.current == name
    assert answers(server, name) == before
    assert asyncio.run(mine.load_state(good, 2)) == "other-2"
    asyncio.run(mine.unload())
