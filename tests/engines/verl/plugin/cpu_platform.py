"""A plugin of verl for these tests: a platform without a GPU. verl asks Ray for devices of the kind "GPU", of which the test makes up
as many as it needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """What verl asks of a platform."""

    device_name = "cpu"
    vendor_name = "cpu"

    @property
    def device_module(self) -> Any:
        return torch.cpu

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 16

    def set_device(self, index: int) -> None:
        pass

    def synchronize(self, index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, message: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, number: int) -> dict[str, Any]:
        return {"num_gpus": number}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _adapt_torch() -> None:
    """What verl calls of torch's module for its device, and of process groups, in the words of a CPU."""
    for name in ("empty_cache", "ipc_collect"):
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda *_, **__: None)
    init = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return init("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]


_adapt_torch()
