"""AsyncGRPOTrainer with real rollouts, synced by Windlass: a program that test_trl.py starts in vLLM's environment.

    async_grpo.py MODEL URL TOKEN_FILE IMAGES RESULT

Only the output layer is trained: TRL sends nothing else then, and the rest of each version comes from the checkpoint.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import tiny


class VarlenOnCpu:
    """The one kernel that the trainer takes from a hub, by plain attention: causal, segment by segment."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *_: Any, softmax_scale: Any = None, **__: Any
    ) -> Any:
        groups, out = q.shape[1] // k.shape[1], []
        for a, b, c, d in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), cu_k[:-1].tolist(), cu_k[1:].tolist()):
            queries = q[a:b].transpose(0, 1)
            keys, values = (x[c:d].transpose(0, 1).repeat_interleave(groups, 0) for x in (k, v))
            mask = torch.ones(b - a, d - c, dtype=torch.bool).tril((d - c) - (b - a))
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=softmax_scale
            )
            out.append(attended.transpose(0, 1))
        return torch.cat(out)


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(c[-1]["content"]) % 7) for c in completions]


def main(model: str, url: str, token_file: str, images: str, result: str) -> None:
    import trl.experimental.async_grpo.async_grpo_trainer as trainer_module
    import trl.experimental.async_grpo.packing as packing
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.chat_template_utils import qwen3_instruct_2507_chat_template
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from windlass.trl import WindlassTransfer

    packing._flash_attn = lambda: VarlenOnCpu
    trainer_module.get_peak_flops_per_device = lambda *_, **__: None

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = qwen3_instruct_2507_chat_template
    transfer = WindlassTransfer(
        url, token_file=token_file, image_dir=images, checkpoint=model, model_id="async", timeout=120
    )
    syncs: list[dict[str, float]] = []
    resume = transfer.resume

    def noted() -> None:
        resume()
        syncs.append(dict(transfer.metrics))

    transfer.resume = noted  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        args = AsyncGRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            dtype="float32",
            gradient_checkpointing=False,
            max_steps=3,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            token_budget=-1,
            report_to="none",
            weight_sync_steps=1,
            learning_rate=1e-1,
            save_strategy="no",
            logging_steps=1,
            vllm_server_base_url=url,
            max_inflight_tasks=4,
            max_staleness=50,
        )
        rows = [{"prompt": [{"role": "user", "content": f"hello world {i}"}]} for i in range(32)]
        trainer = AsyncGRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            weight_transfer=transfer,
        )
        transfer.log_to(trainer)
        for name, parameter in trainer.model.named_parameters():
            parameter.requires_grad_(name == "lm_head.weight")
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "windlass/pause_s" in entry]
        # Its own attention only takes packed rows.
        trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        trained.load_state_dict(trainer.accelerator.unwrap_model(trainer.model).state_dict())
        told = {"answers": tiny.answers(trained), "syncs": syncs, "logged": logged}
        Path(result).write_text(json.dumps(told))


# The rollout worker is a child process that imports this file.
if __name__ == "__main__":
    main(*sys.argv[1:])
