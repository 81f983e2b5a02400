"""Counts how bf16 weights change from one version to the next.

Each rank compares its shards with those of the version before; an all-reduce sums the counts. Blocks of 4 KiB are
counted within shards, which are contiguous in the image.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

KINDS = ("embedding", "attention", "mlp", "norm")
#: Bins of the distance in steps between neighbouring bf16 values, with the lower bound of each.
ULPS = {"1": 1, "2-3": 2, "4-7": 4, ">7": 8}
BLOCK = 2048
EXPONENTS = 256


def kind_of(name: str) -> str:
    if "norm" in name:
        return "norm"
    if "embed" in name or "lm_head" in name:
        return "embedding"
    return "attention" if "self_attn" in name else "mlp"


def local_shards(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The shards of this rank, flattened; a tied parameter appears once."""
    for name, p in model.named_parameters():
        given: Any = p.detach()
        yield name, (given.to_local() if hasattr(given, "to_local") else given).flatten()


def bits(values: Tensor) -> Tensor:
    return values.bfloat16().view(torch.int16)


def ordered(raw: Tensor) -> Tensor:
    """Maps bit patterns to integers in the order of the values: neighbours differ by one."""
    wide = raw.int()
    return torch.where(wide < 0, -(wide & 0x7FFF), wide)


class Changes:
    """Counts changes between steps. All ranks call :meth:`step` after each version."""

    def __init__(self, model: nn.Module, thorough: bool, learning_rate: float) -> None:
        self._model = model
        self._thorough = thorough
        self._rate = learning_rate
        self._before = {name: bits(p) for name, p in local_shards(model)}
        self._base: dict[str, Tensor] = {}
        self._master = {name: p.clone() for name, p in local_shards(model)} if thorough else {}

    def set_base(self) -> None:
        """Makes this version the base: :meth:`step` then also reports the net change since it."""
        self._base = dict(self._before)

    def step(self) -> dict[str, Any]:
        """Counts the changes since the last call."""
        names = list(self._before)
        counts = {name: torch.zeros(2, dtype=torch.int64) for name in names}
        steps = torch.zeros(len(ULPS), dtype=torch.int64)
        octaves = torch.zeros(2, EXPONENTS, dtype=torch.int64)
        blocks = torch.zeros(2, dtype=torch.int64)
        moved = torch.zeros(2, dtype=torch.float64)
        for name, p in local_shards(self._model):
            new, old = bits(p), self._before[name]
            changed = new != old
            counts[name] += torch.tensor([changed.numel(), int(changed.sum())])
            if self._thorough:
                _count(old, new, changed, steps, octaves, blocks)
                moved[0] += (p - self._master[name]).abs().sum(dtype=torch.float64) / self._rate
                if name in self._base:
                    moved[1] += int((new != self._base[name]).sum())
                self._master[name].copy_(p)
            self._before[name] = new
        tensors = torch.stack([counts[name] for name in names])
        for total in (tensors, steps, octaves, blocks, moved):
            dist.all_reduce(total)
        told: dict[str, Any] = {"elements": int(tensors[:, 0].sum()), "changed": int(tensors[:, 1].sum())}
        told["share"] = told["changed"] / told["elements"]
        if self._thorough:
            told |= _shares(names, tensors)
            told |= {
                "ulps": dict(zip(ULPS, steps.tolist(), strict=True)),
                "octaves": _octaves(octaves),
                "blocks": int(blocks[0]),
                "blocks_untouched": int(blocks[1]),
                "mean_step": float(moved[0]) / told["elements"],
            }
            if self._base:
                told["share_since_base"] = float(moved[1]) / told["elements"]
        return told


def _count(old: Tensor, new: Tensor, changed: Tensor, steps: Tensor, octaves: Tensor, blocks: Tensor) -> None:
    """Adds the counts of one tensor to ``steps``, ``octaves`` and ``blocks``."""
    was, now = old[changed], new[changed]
    far = (ordered(now) - ordered(was)).abs()
    at_least = torch.tensor([int((far >= least).sum()) for least in (*ULPS.values(), 1 << 17)])
    steps += at_least[:-1] - at_least[1:]
    octaves[0] += torch.bincount((old.int() >> 7) & 0xFF, minlength=EXPONENTS)
    octaves[1] += torch.bincount((was.int() >> 7) & 0xFF, minlength=EXPONENTS)
    whole = changed[: changed.numel() // BLOCK * BLOCK].view(-1, BLOCK)
    blocks += torch.tensor([len(whole), int((~whole.any(1)).sum())])


def _shares(names: list[str], tensors: Tensor) -> dict[str, Any]:
    kinds: dict[str, Any] = {}
    for kind in KINDS:
        rows = tensors[[kind_of(name) == kind for name in names]]
        elements, changed = rows.sum(0).tolist()
        kinds[kind] = {"elements": elements, "changed": changed, "share": changed / max(elements, 1)}
    matrices = tensors[[kind_of(name) in ("attention", "mlp") for name in names]].tolist()
    shares = sorted(changed / elements for elements, changed in matrices)
    return {
        "kinds": kinds,
        "tensors": len(names),
        "tensors_untouched": int((tensors[:, 1] == 0).sum()),
        "matrices": {"least": shares[0], "median": shares[len(shares) // 2], "most": shares[-1]},
    }


def _octaves(counts: Tensor) -> dict[str, list[int]]:
    """Weights and changed weights by the power of two of the old weight; zeros are a bin of their own."""
    every, changed = counts.tolist()
    return {
        "zero" if exponent == 0 else str(exponent - 127): [every[exponent], changed[exponent]]
        for exponent in range(EXPONENTS)
        if every[exponent]
    }
