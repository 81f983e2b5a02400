"""TRL: one call before the trainer is made. docs/trl.md says how the server is started.

python trl_grpo.py MODEL SERVER TOKEN_FILE
"""

import sys

from datasets import Dataset

import windlass.trl
from trl import GRPOConfig, GRPOTrainer


def reward(completions, **_):
    return [float(len(completion)) for completion in completions]


if __name__ == "__main__":
    model, server, token_file = sys.argv[1:]
    windlass.trl.use(token_file=token_file)
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(use_vllm=True, vllm_mode="server", vllm_server_base_url=server, max_steps=10),
        train_dataset=Dataset.from_dict({"prompt": ["one two three", "a windlass hauls"]}),
        reward_funcs=reward,
    )
    trainer.train()
