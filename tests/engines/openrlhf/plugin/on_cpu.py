"""What OpenRLHF and DeepSpeed ask of CUDA, in the words of a CPU: called first by every worker of Ray."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from windlass.frameworks.after_import import after_import


class Cpu(str):
    """A device to copy to, and a number in the name of one."""

    def __format__(self, _: str) -> str:
        return "0"


def setup() -> None:
    after_import("openrlhf", _torch)
    after_import("openrlhf.utils.deepspeed.deepspeed", _deepspeed)


def _torch(_: ModuleType) -> None:
    import torch

    for name in ("set_device", "synchronize", "empty_cache", "manual_seed_all"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: Cpu("cpu")  # type: ignore[assignment, return-value]


def _deepspeed(module: Any) -> None:
    """Nothing is compiled."""
    import deepspeed

    mesh, config = module.init_device_mesh, module.get_train_ds_config

    def get_train_ds_config(*args: Any, **kwargs: Any) -> Any:
        made = config(*args, **kwargs)
        if "optimizer" in made:
            made["optimizer"]["params"]["torch_adam"] = True
        return made

    deepspeed.ops.__compatible_ops__ = {}
    module.init_device_mesh = lambda _, *args, **kwargs: mesh("cpu", *args, **kwargs)
    module.get_train_ds_config = get_train_ds_config
