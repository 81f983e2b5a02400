"""Tensors as SGLang's routes take them: by value, without SGLang installed on this side.

Owns: the bytes of ``serialized_named_tensors``. SGLang reads a pickle there, through an unpickler that allows little
but tensors; that is its protocol and not ours. Tensors go by value: a descriptor of another process ends the engine.

A bucket is one tensor of bytes and a list of where each tensor lies in it. Every tensor is aligned to its elements:
SGLang looks at the bytes in place, and an odd offset would raise inside it.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["BUCKET", "ORDER", "bucket", "buckets", "named", "order"]

#: The load format of a bucket.
BUCKET = "flattened_bucket"
#: The name under which an order travels.
ORDER = "__windlass_order__"
ALIGN = 16


def buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], size: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Groups tensors by bytes: each group has ``size`` at most, or is one tensor."""
    group: list[tuple[str, torch.Tensor]] = []
    held = 0
    for name, tensor in tensors:
        bytes_ = tensor.numel() * tensor.element_size()
        if group and held + bytes_ > size:
            yield group
            group, held = [], 0
        group.append((name, tensor))
        held += bytes_
    if group:
        yield group


def bucket(tensors: Sequence[tuple[str, torch.Tensor]]) -> bytes:
    """One bucket of these tensors."""
    import torch

    records, at = [], 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        # The attributes of SGLang's own record, as which its reader takes them.
        records.append(
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=at, end_idx=at + size, numel=size
            )
        )
        at += -(-size // ALIGN) * ALIGN
    flat = torch.zeros(at, dtype=torch.uint8)
    for record, (_, tensor) in zip(records, tensors):
        if record.numel:
            source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            flat[record.start_idx : record.end_idx].copy_(source)
    return pickle.dumps({"flattened_tensor": flat, "metadata": records}, protocol=4)


def named(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Tensors by name, each by itself."""
    # A copy each: a view would be written with all of its storage.
    return pickle.dumps(
        {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, protocol=4
    )


def order(plain: Mapping[str, object]) -> bytes:
    """An order for :mod:`windlass.engines.sglang.custom`, as a tensor of its JSON."""
    import torch

    text = bytearray(json.dumps(plain).encode())
    return pickle.dumps([(ORDER, torch.frombuffer(text, dtype=torch.uint8).clone())], protocol=4)
