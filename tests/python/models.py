"""Small models for tests, the same on every rank and in the test itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from windlass.dtypes import Dtype

SEED = 20


class Block(nn.Module):
    """Matrices that no number of ranks divides, a bias, and a vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = nn.ModuleDict(
            {"q_proj": nn.Linear(width, width), "k_proj": nn.Linear(width, 3, bias=False)}
        )
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(width, 2 * width + 1)})
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn["q_proj"](self.norm(x)) * self.attn["k_proj"](x).mean(-1, keepdim=True)
        return x * self.mlp["up_proj"](x).mean(-1, keepdim=True)


class Policy(nn.Module):
    """Tied ends, one frozen parameter, and buffers of both kinds."""

    def __init__(self, width: int = 7, depth: int = 2, vocabulary: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.scale = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)
        self.register_buffer("steps", torch.tensor([3], dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def policy(**options: Any) -> Policy:
    """The same values on every rank, with odd ones among them: a negative zero, a subnormal, an infinity."""
    torch.manual_seed(SEED)
    model = Policy(**options)
    with torch.no_grad():
        model.embed.weight.view(-1)[:3] = torch.tensor([-0.0, 1e-40, float("inf")])
    return model


def lora_policy(width: int = 16) -> Any:
    """A PEFT model over :class:`Policy`, with adapters that are not zero and a module that is trained whole."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        policy(width=width), LoraConfig(r=3, target_modules=["q_proj", "up_proj"], modules_to_save=["head"])
    )
    torch.manual_seed(SEED + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_()
    return model


def reference(model: nn.Module, dtype: Dtype | None = None) -> dict[str, Tensor]:
    """What an extractor must give for the unwrapped model: its parameters, cast by torch."""
    from windlass.dtypes import torch_dtype

    to = None if dtype is None else torch_dtype(dtype)
    return {name: value.detach().to(to or value.dtype) for name, value in model.named_parameters()}


def same(one: Tensor, other: Tensor) -> bool:
    """Bit by bit: a negative zero is not a zero, and a NaN is itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def differences(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    """Names that are missing, too many, or differ in any bit."""
    return sorted(
        name
        for name in got.keys() | want.keys()
        if name not in got or name not in want or not same(got[name], want[name])
    )
