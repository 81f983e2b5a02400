"""What the libraries that write quantised checkpoints make of a weight: the reference of `test_quantised.py` and its ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace

import torch
from torch import Tensor, nn

PRESETS = {"fp8_channel": "FP8_DYNAMIC", "int8_channel": "W8A8"}
SUFFIX = {"fp8_block128": "_scale_inv", "fp8_channel": "_scale", "int8_channel": "_scale"}


def by_transformers(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Fine-grained fp8. It leaves weights alone that are no whole blocks; those are filled up with zeros here, as DeepSeek's
    and vLLM's quantisers do."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    rows, columns = weight.shape
    settings = SimpleNamespace(weight_block_size=[128, 128], scale_fmt="float")
    quantiser = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    room = torch.zeros(math.ceil(rows / 128) * 128, math.ceil(columns / 128) * 128, dtype=weight.dtype)
    room[:rows, :columns] = weight
    made = quantiser.convert({"a.weight": room})
    return made["a.weight"][:rows, :columns].contiguous(), made["a.weight_scale_inv"]


def by_compressed_tensors(preset: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As llm-compressor calls it: scales from the least and the greatest of each row, then the compressor."""
    from compressed_tensors.compressors import compress_module
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False).to(weight.dtype))
    model[0].weight.data.copy_(weight)
    apply_quantization_config(model, QuantizationConfig(config_groups={preset: ["Linear"]}))
    layer = model[0]
    scheme = layer.quantization_scheme.weights
    scale, zero = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), scheme)
    layer.weight_scale.data.copy_(scale)
    layer.weight_zero_point.data.copy_(zero)
    compress_module(layer)
    return layer.weight.data, layer.weight_scale.data


def by_library(scheme: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weight and its scales."""
    weight = weight.detach().contiguous()
    return by_compressed_tensors(PRESETS[scheme], weight) if scheme in PRESETS else by_transformers(weight)


def checkpoint(
    scheme: str, tensors: Mapping[str, Tensor], *, skip: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """All tensors as a quantised checkpoint has them: 2-D weights by the library, the others as they are."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name.endswith(".weight") and not any(part in name for part in skip):
            out[name], out[name + SUFFIX[scheme]] = by_library(scheme, tensor)
        else:
            out[name] = tensor
    return out
