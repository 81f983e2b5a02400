"""Trains a small language model and publishes its weights after every step: python train.py [STEPS]"""

import contextlib
import sys
import time

import torch
import transformers

from windlass import WeightManager

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 600
# A Qwen3 with random weights. For a model of yours: AutoModelForCausalLM.from_pretrained(MODEL), and ./serve.sh MODEL.
config = transformers.Qwen3Config(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
model.save_pretrained("policy")  # the checkpoint that the engine starts from
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

# The model_id names the region, /dev/shm/windlass-policy. generator_dtype is the dtype that the engine serves.
with (
    WeightManager(model_id="policy", generator_dtype="bfloat16") as wm,
    contextlib.suppress(KeyboardInterrupt),
):
    for version in range(1, steps + 1):
        tokens = torch.randint(0, 512, (4, 32))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wm.offload(model, version)  # every rank makes this call
        print(f"version {version} is {wm.wait_delta_ready()}", flush=True)
        time.sleep(1)  # generate rollouts here
