"""Trains a small language model with Accelerate and publishes each step: python train.py [STEPS]"""

import sys
import time

import torch
import transformers
from accelerate import Accelerator

from windlass.callbacks import AcceleratePublisher

# A Qwen3 with random weights. For a model of yours: AutoModelForCausalLM.from_pretrained(MODEL), and ./serve.sh MODEL.
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 600
accelerator = Accelerator()
config = transformers.Qwen3Config(**SIZES, **HEADS)
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
if accelerator.is_main_process:
    model.save_pretrained("policy")  # the checkpoint that the engine starts from
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5))

# The model_id names the region, /dev/shm/windlass-policy. generator_dtype is the dtype that the engine serves.
with AcceleratePublisher(
    accelerator, model, model_id="policy", generator_dtype="bfloat16", every=1
) as publisher:
    for step in range(1, steps + 1):
        tokens = torch.randint(0, 512, (4, 32), device=accelerator.device)
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
        publisher.step()  # after each optimizer.step(), on every rank
        accelerator.print(f"step {step}", flush=True)
        time.sleep(1)  # generate rollouts here
