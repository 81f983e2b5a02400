"""Trainers that use TRL's VLLMClient, in server mode, synced by Windlass: a program that test_trl.py starts in vLLM's environment.

by_client.py MODEL URL TOKEN_FILE IMAGES RESULT grpo|rloo-peft|online-dpo

GRPO sends all weights, RLOO those with a LoRA adapter merged, and online DPO one parameter after the other.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import tiny


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(c) % 7) for c in completions]


def main(model: str, url: str, token_file: str, images: str, result: str, how: str) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer

    import windlass.trl

    windlass.trl.use(token_file=token_file, image_dir=images, model_id=how, timeout=120)
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "output_dir": folder,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "max_steps": 2,
            "per_device_train_batch_size": 4,
            "report_to": "none",
            "learning_rate": 1e-1,
            "save_strategy": "no",
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": url,
        }
        make, sync, client = {"grpo": grpo, "rloo-peft": rloo, "online-dpo": online_dpo}[how](common)
        trainer = make(
            model=model,
            reward_funcs=reward,
            train_dataset=Dataset.from_list([{"prompt": f"hello world {i}"} for i in range(32)]),
            processing_class=AutoTokenizer.from_pretrained(model),
        )
        trainer.train()
        sync(trainer)
        trained = trainer.accelerator.unwrap_model(trainer.model).eval()
        if how == "rloo-peft":
            trained = trained.merge_and_unload()
        metrics = client(trainer)._transfer.metrics
        Path(result).write_text(json.dumps({"answers": tiny.answers(trained), "metrics": metrics}))


#: What makes a trainer, what has it sync once more, and where its client is. Trainers are imported after `use()` was called.
Parts = tuple[Callable[..., Any], Callable[[Any], None], Callable[[Any], Any]]


def by_generation(make: Callable[..., Any]) -> Parts:
    return (
        make,
        lambda trainer: trainer.vllm_generation.sync_weights(),
        lambda t: t.vllm_generation.vllm_client,
    )


def grpo(common: dict[str, Any]) -> Parts:
    from trl import GRPOConfig, GRPOTrainer

    # The correction asks the server for its configuration, which a server on a CPU cannot tell.
    more = {"model_init_kwargs": {"dtype": "float32"}, "vllm_importance_sampling_correction": False}
    args = GRPOConfig(num_generations=4, max_completion_length=8, **more, **common)
    return by_generation(partial(GRPOTrainer, args=args))


def rloo(common: dict[str, Any]) -> Parts:
    from peft import LoraConfig

    from trl import RLOOConfig, RLOOTrainer

    more = {"model_init_kwargs": {"dtype": "float32"}}
    args = RLOOConfig(num_generations=4, max_completion_length=8, **more, **common)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    return by_generation(partial(RLOOTrainer, args=args, peft_config=adapter))


def online_dpo(common: dict[str, Any]) -> Parts:
    import torch
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    import windlass

    colocated = OnlineDPOConfig(max_new_tokens=8, max_length=64, **{**common, "vllm_mode": "colocate"})
    try:
        OnlineDPOTrainer(model="none", reward_funcs=reward, args=colocated)
    except windlass.WindlassUnsupported as e:
        assert "vllm_mode is 'colocate'" in str(e)
    else:
        raise AssertionError("a colocated engine was not refused")
    args = OnlineDPOConfig(max_new_tokens=8, max_length=64, **common)

    def make(**given: Any) -> Any:
        # It asks for the device of an accelerator, which our client does not use.
        with mock.patch.object(
            torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cpu")
        ):
            return OnlineDPOTrainer(args=args, **given)

    return make, lambda trainer: trainer._move_model_to_vllm(), lambda trainer: trainer.vllm_client


if __name__ == "__main__":
    main(*sys.argv[1:])
