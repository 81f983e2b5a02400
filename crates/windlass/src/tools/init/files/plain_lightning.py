"""Trains a small module with Lightning and publishes its weights after every step: python train.py [STEPS]"""

import sys
import time

import torch
from lightning.pytorch import LightningModule, Trainer

from windlass.callbacks import LightningCallback


class Policy(LightningModule):
    """Put your module here."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1024, 1024)

    def training_step(self, batch, _):
        time.sleep(1)  # generate rollouts here
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 600
data = torch.utils.data.DataLoader(torch.randn(8 * steps, 1024), batch_size=8)
# The model_id names the region, /dev/shm/windlass-policy, in which receivers on this host find the versions.
callback = LightningCallback(model_id="policy", generator_dtype="bfloat16", every=1)
trainer = Trainer(max_steps=steps, devices=1, callbacks=[callback], logger=False, enable_checkpointing=False)
trainer.fit(Policy(), data)
