"""What is known of an architecture by its `model_type` alone, without a model and without transformers.

transformers (5.x) holds the experts of a layer in two parameters, `…experts.gate_up_proj` [E, 2I, H] and
`…experts.down_proj` [E, H, I]. Whether a checkpoint does too depends on the architecture: most checkpoints
have one tensor for each expert and projection, some (gpt-oss, Llama 4) are fused. A name does not tell, so it
needs a model type.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from windlass.errors import WindlassInvalid
from windlass.names.view import Shape, View

__all__ = ["AS_IS", "FUSED_EXPERTS", "PER_EXPERT", "Experts"]

#: What a fused parameter of experts is called; three dimensions, or two for a bias.
FUSED_EXPERTS = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?P<part>gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class Experts:
    """Splits fused experts into one tensor for each expert and projection.

    >>> rule = Experts("gate_proj", "up_proj", "down_proj")
    >>> [view.name for view in rule("mlp.experts.gate_up_proj", (1, 8, 4)) or ()]
    ['mlp.experts.0.gate_proj.weight', 'mlp.experts.0.up_proj.weight']
    """

    gate: str
    up: str
    down: str
    #: The block that holds the experts and their router is called so in the model …
    block: str | None = None
    #: … and so in the checkpoint.
    checkpoint_block: str | None = None

    def __call__(self, name: str, shape: Shape) -> Sequence[View] | None:
        """The views of a fused parameter, a renamed one, or None."""
        match = FUSED_EXPERTS.fullmatch(name)
        target = self._rename(match["experts"] if match else name)
        box = tuple((0, size) for size in shape)
        if match is None:
            if target == name:
                return None
            return [View(box, target, shape, (0,) * len(shape), tuple(range(len(shape))))]
        if len(shape) != 3:
            raise WindlassInvalid(
                f"parameter {name!r} should have 3 dimensions (experts, rows, columns), not {shape}"
            )
        count, rows, columns = shape
        parts = [self.down] if match["part"] == "down_proj" else [self.gate, self.up]
        if rows % len(parts):
            raise WindlassInvalid(f"parameter {name!r} of shape {shape} does not divide into gate and up")
        height = rows // len(parts)
        return [
            View(
                ((expert, expert + 1), (index * height, (index + 1) * height), (0, columns)),
                f"{target}.{expert}.{part}.weight",
                (height, columns),
                (0, 0),
                (1, 2),
            )
            for expert in range(count)
            for index, part in enumerate(parts)
        ]

    def _rename(self, name: str) -> str:
        if self.block is None:
            return name
        return re.sub(rf"\.{self.block}(?=\.)", f".{self.checkpoint_block}", name, count=1) if name else name


_QWEN = Experts("gate_proj", "up_proj", "down_proj")
_MIXTRAL = Experts("w1", "w3", "w2", block="mlp", checkpoint_block="block_sparse_moe")

#: Architectures whose checkpoints have a tensor for each expert.
PER_EXPERT: dict[str, Experts] = {
    **dict.fromkeys(
        (
            *("deepseek_v2", "deepseek_v3", "dots1", "flex_olmo", "glm4_moe", "hunyuan_v1_moe", "olmoe"),
            *("qwen2_moe", "qwen3_moe", "qwen3_next"),
        ),
        _QWEN,
    ),
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), _MIXTRAL),
}

#: Architectures whose checkpoints have the model's own names and shapes, fused experts included.
AS_IS = frozenset(
    {
        *("cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_oss"),
        *(
            "granite",
            "llama",
            "llama4_text",
            "mistral",
            "olmo",
            "olmo2",
            "olmo3",
            "phi",
            "phi3",
            "qwen2",
            "qwen3",
        ),
        *("smollm3", "stablelm", "starcoder2"),
    }
)
