"""The schemes in which weights can be published quantised: names, shapes and configuration, without a tensor.

Owns: :data:`SCHEMES`, which tensors a scheme applies to, what its scales are called, and the ``quantization_config`` that a
served checkpoint needs (:func:`quantization_config`). Called by :class:`windlass.names.DtypeRules` and
:mod:`windlass.publish.derived`. Must not: import torch; the arithmetic is :mod:`windlass.publish.quantise`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from windlass.errors import WindlassInvalid

__all__ = ["SCHEMES", "Scheme", "is_glob", "quantization_config", "scales_among"]

#: What a scheme can quantise. float64 would give channel scales that no engine reads.
_SOURCES = frozenset({"float16", "bfloat16", "float32"})
#: Modules by the last part of their name that are no Linear layer, or that every published checkpoint keeps whole.
_KEPT = frozenset(
    {
        *("lm_head", "embed_out", "output_layer"),
        *("embed_tokens", "embed_in", "wte", "wpe", "word_embeddings", "position_embeddings"),
        *("embeddings", "embedding", "embed_positions", "tok_embeddings", "token_embedding"),
        *("gate", "router", "shared_expert_gate"),
    }
)


@dataclass(frozen=True)
class Scheme:
    """How a weight of shape [out, in] becomes 8 bits per element and scales.

    >>> scheme = SCHEMES["fp8_block128"]
    >>> scheme.scale_name("layers.0.q_proj.weight"), scheme.scale_shape((576, 7168))
    ('layers.0.q_proj.weight_scale_inv', (5, 56))
    """

    name: str
    #: Of the quantised weight.
    dtype: str
    #: Rows and columns that share a scale; without columns, a whole row does.
    rows: int
    columns: int | None
    #: What is added to the weight's name.
    suffix: str
    #: Of the scales; without one, the dtype of the weight that was quantised.
    scale_dtype: str | None

    def scale_name(self, weight: str) -> str:
        """What the scale of a weight is called."""
        return weight + self.suffix

    def group(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of a tensor that share a scale."""
        return self.rows, self.columns or max(shape[1], 1)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """How many scales a weight has."""
        rows, columns = self.group(shape)
        return -(-shape[0] // rows), max(-(-shape[1] // columns), 1)

    def why_not(self, name: str, dtype: str, shape: Sequence[int]) -> str | None:
        """Why this scheme cannot be applied to a tensor at all."""
        if len(shape) != 2:
            return f"it has {len(shape)} dimensions, and only weights of 2 are quantised"
        if 0 in shape:
            return "it has no elements"
        if dtype not in _SOURCES:
            return f"it is {dtype}; float32, bfloat16 and float16 can be quantised"
        return None

    def why_kept(self, name: str) -> str | None:
        """Why a pattern that matches this tensor leaves it as it is."""
        module, _, leaf = name.rpartition(".")
        if leaf != "weight":
            return "it is not the weight of a Linear layer"
        last = module.rpartition(".")[2]
        if last in _KEPT:
            return f"checkpoints keep {last} as it is"
        return None


SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        scheme.name: scheme
        for scheme in (
            Scheme("fp8_block128", "float8_e4m3fn", 128, 128, "_scale_inv", "float32"),
            Scheme("fp8_channel", "float8_e4m3fn", 1, None, "_scale", None),
            Scheme("int8_channel", "int8", 1, None, "_scale", None),
        )
    }
)


def is_glob(pattern: str) -> bool:
    """Whether a pattern may match more than the name that it spells.

    >>> is_glob("*.weight"), is_glob("lm_head.weight")
    (True, False)
    """
    return any(c in pattern for c in "*?[")


def scales_among(names: Collection[str]) -> frozenset[str]:
    """Those of a checkpoint's names that are scales of its weights.

    >>> sorted(scales_among({"a.weight", "a.weight_scale_inv", "logit_scale"}))
    ['a.weight_scale_inv']
    """
    suffixes = {scheme.suffix for scheme in SCHEMES.values()}
    return frozenset(
        name
        for name in names
        for suffix in suffixes
        if name.endswith(suffix) and name.removesuffix(suffix) in names
    )


def _groups(kind: str, strategy: str, *, dynamic: bool) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic}


def _channel(form: str, kind: str) -> dict[str, Any]:
    """As compressed-tensors writes its presets FP8_DYNAMIC and W8A8."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _groups(kind, "channel", dynamic=False),
                "input_activations": _groups(kind, "token", dynamic=True),
                "output_activations": None,
            }
        },
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


_CONFIGS: Mapping[str, tuple[dict[str, Any], str]] = MappingProxyType(
    {
        "fp8_block128": (
            {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            },
            "modules_to_not_convert",
        ),
        "fp8_channel": (_channel("float-quantized", "float"), "ignore"),
        "int8_channel": (_channel("int-quantized", "int"), "ignore"),
    }
)


def quantization_config(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, Any] | None:
    """The ``quantization_config`` of a ``config.json`` for these tensors, given as {name: (dtype, shape)} as
    :func:`windlass.names.checkpoint_layout` reads them from an image or a checkpoint; ``None`` if none is quantised.

    >>> quantization_config({
    ...     "q.weight": ("float8_e4m3fn", (256, 128)),
    ...     "q.weight_scale_inv": ("float32", (2, 1)),
    ...     "mlp.gate.weight": ("bfloat16", (8, 128)),
    ... })["modules_to_not_convert"]
    ['lm_head', 'mlp.gate']
    """
    found: dict[str, str] = {}
    whole: set[str] = {"lm_head"}
    scales = scales_among(tensors.keys())
    for name, (dtype, shape) in tensors.items():
        if name in scales:
            continue
        scheme = next(
            (s for s in SCHEMES.values() if s.dtype == dtype and s.scale_name(name) in tensors), None
        )
        if scheme is not None:
            found.setdefault(scheme.name, name)
        elif len(shape) >= 2 and "." in name:
            whole.add(name.rpartition(".")[0])
    if not found:
        return None
    if len(found) > 1:
        (first, a), (second, b) = list(found.items())[:2]
        raise WindlassInvalid(
            f"{a!r} is {first} and {b!r} is {second}: one quantization_config describes one scheme",
            "give all weights of a model the same scheme",
        )
    document, key = _CONFIGS[next(iter(found))]
    return {**copy.deepcopy(document), key: sorted(whole)}
