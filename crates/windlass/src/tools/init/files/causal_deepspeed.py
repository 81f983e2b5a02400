"""Trains a small language model under ZeRO-3: torchrun --nproc-per-node 1 train.py [STEPS]"""

import os
import sys
import time

import deepspeed
import torch
import transformers

from windlass import WeightManager

# A Qwen3 with random weights. For a model of yours: AutoModelForCausalLM.from_pretrained(MODEL), and ./serve.sh MODEL.
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 600
settings = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
config = transformers.Qwen3Config(**SIZES, **HEADS)
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
if os.environ.get("RANK", "0") == "0":
    model.save_pretrained("policy")  # the checkpoint that the engine starts from
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

# The model_id names the region, /dev/shm/windlass-policy. generator_dtype is the dtype that the engine serves.
with WeightManager(model_id="policy", generator_dtype="bfloat16") as wm:
    for version in range(1, steps + 1):
        tokens = torch.randint(0, 512, (4, 32), device=engine.device)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        wm.offload(engine, version)  # every rank makes this call, and writes its own partitions
        print(f"version {version} is {wm.wait_delta_ready()}", flush=True)
        time.sleep(1)  # generate rollouts here
torch.distributed.destroy_process_group()
