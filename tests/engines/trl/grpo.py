"""GRPOTrainer in server mode, synced by Windlass: a program that test_trl.py starts in vLLM's environment.

grpo.py MODEL URL TOKEN_FILE IMAGES RESULT full|peft
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import tiny


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(c) % 7) for c in completions]


def main(model: str, url: str, token_file: str, images: str, result: str, how: str) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer

    import windlass.trl

    windlass.trl.use(token_file=token_file, image_dir=images, model_id=how, timeout=120)
    # Trainers are imported afterwards here, and before in test_colocated_engines_are_refused.
    from trl import GRPOConfig, GRPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            model_init_kwargs={"dtype": "float32"},
            gradient_checkpointing=False,
            max_steps=2,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            report_to="none",
            learning_rate=1e-1,
            save_strategy="no",
            use_vllm=True,
            # It asks the server for its configuration, which a server on a CPU cannot tell.
            vllm_importance_sampling_correction=False,
            vllm_mode="server",
            vllm_server_base_url=url,
        )
        more: dict[str, Any] = {}
        if how == "peft":
            from peft import LoraConfig

            more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": f"hello world {i}"} for i in range(32)]),
            processing_class=AutoTokenizer.from_pretrained(model),
            **more,
        )
        trainer.train()
        trainer.vllm_generation.sync_weights()
        trained = trainer.accelerator.unwrap_model(trainer.model).eval()
        if how == "peft":
            trained = trained.merge_and_unload()
        metrics = trainer.vllm_generation.vllm_client._transfer.metrics
        Path(result).write_text(json.dumps({"answers": tiny.answers(trained), "metrics": metrics}))


if __name__ == "__main__":
    main(*sys.argv[1:])
