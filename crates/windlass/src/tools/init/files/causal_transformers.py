"""Trains a small language model with transformers and publishes each step: python train.py [STEPS]"""

import sys
import time

import torch
import transformers

from windlass.callbacks import WindlassCallback

# A Qwen3 with random weights. For a model of yours: AutoModelForCausalLM.from_pretrained(MODEL), and ./serve.sh MODEL.
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


class Rollouts(transformers.TrainerCallback):
    def on_step_end(self, *_, **__):
        time.sleep(1)  # generate rollouts here


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 600
config = transformers.Qwen3Config(**SIZES, **HEADS)
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
model.save_pretrained("policy")  # the checkpoint that an engine starts from
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 512, (256, 32))]
args = transformers.TrainingArguments(
    "runs", max_steps=steps, logging_steps=1, save_strategy="no", report_to=[]
)
trainer = transformers.Trainer(model=model, args=args, train_dataset=data, callbacks=[Rollouts()])
# The model_id names the region, /dev/shm/windlass-policy. generator_dtype is the dtype that the engine serves.
callback = WindlassCallback(trainer, model_id="policy", generator_dtype="bfloat16", every=1)
trainer.add_callback(callback)
try:
    trainer.train()
finally:
    callback.close()  # after Ctrl-C too, which the trainer tells no callback
