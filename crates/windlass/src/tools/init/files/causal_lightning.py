"""Trains a small language model with Lightning and publishes each step: python train.py [STEPS]"""

import sys
import time

import torch
import transformers
from lightning.pytorch import LightningModule, Trainer

from windlass.callbacks import LightningCallback

# A Qwen3 with random weights. For a model of yours: AutoModelForCausalLM.from_pretrained(MODEL), and ./serve.sh MODEL.
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


class Policy(LightningModule):
    def __init__(self):
        super().__init__()
        config = transformers.Qwen3Config(**SIZES, **HEADS)
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.model.save_pretrained("policy")  # the checkpoint that the engine starts from

    def training_step(self, tokens, _):
        time.sleep(1)  # generate rollouts here
        return self.model(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 600
data = torch.utils.data.DataLoader(torch.randint(0, 512, (4 * steps, 32)), batch_size=4)
# The model_id names the region, /dev/shm/windlass-policy. generator_dtype is the dtype that the engine serves.
callback = LightningCallback(model_id="policy", module="model", generator_dtype="bfloat16", every=1)
trainer = Trainer(max_steps=steps, devices=1, callbacks=[callback], logger=False, enable_checkpointing=False)
trainer.fit(Policy(), data)
