"""vLLM's model classes without a server: what a worker makes of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch


def keep_plain(patch: pytest.MonkeyPatch) -> None:
    """No packing of linear layers, embeddings and experts."""
    import vllm.model_executor.layers.fused_moe.experts.cpu_moe as experts
    import vllm.model_executor.layers.utils as layers

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    patch.setattr(layers, "dispatch_cpu_unquantized_gemm", dispatch)
    patch.setattr(experts, "cpu_prepack_moe_weight", lambda weight, isa: weight)


def join(rank: int = 0, world: int = 1, address: str | None = None) -> None:
    """The process groups that vLLM's layers ask for, by the model that is current."""
    import torch.distributed as dist
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.parallel_state import destroy_model_parallel

    if dist.is_initialized():
        # Experts have a group of their own, which a model without them does not make.
        destroy_model_parallel()
    else:
        where = address or f"file:///dev/shm/windlass-join-{os.getpid()}"
        init_distributed_environment(world, rank, where, rank, backend="gloo")
    ensure_model_parallel_initialized(world, 1)


def session(
    path: Path, *, rank: int = 0, world: int = 1, address: str | None = None, dtype: str = "float32"
) -> Any:
    """The session of a freshly loaded model."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    from windlass.engines.vllm.session import VllmSession

    config = EngineArgs(
        model=str(path),
        dtype=dtype,
        max_model_len=512,
        max_num_seqs=4,
        enforce_eager=True,
        tensor_parallel_size=world,
        distributed_executor_backend="external_launcher" if world > 1 else None,
    ).create_engine_config()
    with set_current_vllm_config(config):
        join(rank, world, address)
        model = get_model(vllm_config=config)
    return VllmSession(model, config)


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    """Every parameter and buffer, as bytes."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().contiguous().numpy().tobytes() for name, tensor in named}


def places(model: torch.nn.Module) -> dict[str, int]:
    """Where the parameters are."""
    return {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
