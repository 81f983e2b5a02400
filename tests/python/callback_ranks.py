"""What the ranks of `test_callbacks.py` do: train with Accelerate, and compare what a receiver got."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from windlass import Receiver
from windlass.callbacks import AcceleratePublisher


class Check:
    """Compares a receiver's image with the model, on the first rank."""

    def __init__(self) -> None:
        homes = [tempfile.mkdtemp(dir="/dev/shm") if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(homes)
        self.home: str = homes[0]
        self.versions: list[int] = []
        self._receiver: Receiver | None = None

    def see(self, model: nn.Module, version: int) -> None:
        whole = {
            name.removeprefix("module."): p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
            for name, p in model.named_parameters()
        }
        if dist.get_rank() == 0:
            if self._receiver is None:
                region = f"{self.home}/windlass-policy"
                self._receiver = Receiver(f"{self.home}/images", region=region, relay=False)
            self._receiver.wait(version, timeout=30)
            with self._receiver.hold() as image:
                assert image.version == version and set(image.tensors) >= set(whole)
                for name, tensor in whole.items():
                    assert torch.equal(image.tensors[name], tensor), name
            self.versions.append(version)
        dist.barrier()

    def close(self) -> None:
        """Nothing but the image is left."""
        if self._receiver is not None:
            self._receiver.close()
            assert os.listdir(self.home) == ["images"]
            shutil.rmtree(self.home)
        dist.barrier()


def trained(library: str) -> list[int]:
    """Three steps in the library's trainer under DDP: the versions that were compared here."""
    check = Check()
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    data = [{"values": torch.full((5,), float(row))} for row in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        (of_transformers if library == "transformers" else of_lightning)(check, net, data, folder)
    check.close()
    return check.versions


def of_transformers(check: Check, net: nn.Module, data: Any, folder: str) -> None:
    import transformers

    from windlass.callbacks import WindlassCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(values).square().mean()}

    class Seen(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            check.see(model, state.global_step)

    args = {"per_device_train_batch_size": 1, "max_steps": 3, "disable_tqdm": True, "report_to": []}
    trainer = transformers.Trainer(
        model=Model(),
        args=transformers.TrainingArguments(folder, use_cpu=True, save_strategy="no", **args),
        train_dataset=data,
    )
    trainer.add_callback(WindlassCallback(trainer, region_dir=check.home, timeout=30.0))
    trainer.add_callback(Seen())
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"


def of_lightning(check: Check, net: nn.Module, data: Any, folder: str) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from windlass.callbacks import LightningCallback

    class Model(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch["values"]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    class Seen(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            check.see(module, trainer.global_step)

    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=3,
        callbacks=[LightningCallback(region_dir=check.home, timeout=30.0), Seen()],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=1))


def accelerated(kind: str) -> tuple[list[int | None], list[int]]:
    """Six batches, of which two are a step: the versions after each, and what was logged here."""
    from accelerate import Accelerator, PartialState
    from accelerate.tracking import GeneralTracker, on_main_process

    logged: list[int] = []

    class Tracker(GeneralTracker):  # type: ignore[misc]
        name = "recorded"
        requires_logging_directory = False

        @on_main_process  # type: ignore[untyped-decorator]
        def __init__(self) -> None:
            super().__init__()

        @property
        def tracker(self) -> None:
            return None

        @on_main_process  # type: ignore[untyped-decorator]
        def store_init_configuration(self, values: Any) -> None:
            pass

        @on_main_process  # type: ignore[untyped-decorator]
        def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
            assert values["windlass/offload_version"] == step
            logged.append(int(step))

    # The tracker asks which process is the main one.
    PartialState(cpu=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=Tracker())
    accelerator.init_trackers("test")
    torch.manual_seed(5)
    model: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
    else:
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    check = Check()
    versions: list[int | None] = []
    with AcceleratePublisher(accelerator, model, region_dir=check.home, timeout=30.0) as publisher:
        for batch in range(6):
            with accelerator.accumulate(model):
                values = torch.full((2, 5), float(batch + dist.get_rank()))
                accelerator.backward(model(values).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            done = publisher.step()
            versions.append(None if done is None else done.version)
            if done is not None:
                check.see(model, done.version)
    check.close()
    return versions, logged
