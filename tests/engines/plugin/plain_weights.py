"""A vLLM plugin for these tests: lets the CPU build run here, and keep its weights as they were loaded.

vLLM on a CPU packs weights for its kernels and drops the originals; on a GPU it does not. With
``WINDLASS_TEST_PLAIN_WEIGHTS=1`` linear layers stay plain, so that what works on a GPU can be tested without one.
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    """Called by vLLM in each of its processes."""
    import torch

    # Attention on the CPU uses AMX tiles, for which the kernel must be asked first.
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    if os.environ.get("WINDLASS_TEST_PLAIN_WEIGHTS") == "1":
        keep_plain()


def keep_plain() -> None:
    """Linear layers and embeddings multiply by the weights that were loaded."""
    import torch
    import vllm.model_executor.layers.utils as layers
    import vllm.model_executor.layers.vocab_parallel_embedding as embedding

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = dispatch
    if hasattr(embedding, "dispatch_cpu_unquantized_gemm"):
        embedding.dispatch_cpu_unquantized_gemm = dispatch
