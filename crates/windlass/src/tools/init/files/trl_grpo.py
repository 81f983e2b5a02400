"""TRL trains, vLLM generates, and Windlass carries the weights after each step: python train.py [MODEL] [STEPS]

Start ./serve.sh with the same MODEL first.
"""

import sys

from datasets import Dataset

import windlass.trl
from trl import GRPOConfig, GRPOTrainer

SERVER = "http://127.0.0.1:8000"


def reward(completions, **_):
    """Put your reward here."""
    return [float(len(completion)) for completion in completions]


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B"
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 10
    # The one call that selects Windlass, before the trainer is made. serve.sh wrote the secret of the server's plugin.
    windlass.trl.use(token_file="engine.token")
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(use_vllm=True, vllm_mode="server", vllm_server_base_url=SERVER, max_steps=steps),
        train_dataset=Dataset.from_dict({"prompt": ["one two three", "a windlass hauls"]}),
        reward_funcs=reward,
    )
    trainer.train()
