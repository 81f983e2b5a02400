"""The model that every peer carries: Qwen3's names and shapes in bf16, made from a seed, and its steps.

Owns: sizes, names, shapes, the first weights, what a step changes, and the digest. Trainer and engine make the same weights from
the same seed, as both would load the same checkpoint. Weights of a GPU are made, changed and hashed there (``device``). Must not: know
a peer.

A step changes about one element in a hundred. As in RL post-training, most changes are one place of the bf16 grid, and an element of
small magnitude changes more often than one of large magnitude (probability ~ 1 / |w|).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from peers import device as on_device

#: The spread of matrices when they are made. Weights of norms lie around one.
SPREAD = 0.02
#: An element is drawn, and then changed with the probability min(1, SMALL / |w|). Of a normal distribution a quarter is.
SMALL, DRAWN = 0.09 * SPREAD, 4
#: Random values that tensors are filled with, over and over from different places: drawing billions takes minutes.
POOL = 1 << 22


@dataclass(frozen=True)
class Shape:
    """A Qwen3, without tied embeddings unless it says so."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool = False

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names as in a checkpoint, and shapes."""
        q, kv = self.heads * self.head, self.kv_heads * self.head
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for n in range(self.layers):
            layer = f"model.layers.{n}."
            found |= {
                layer + "input_layernorm.weight": (self.hidden,),
                layer + "self_attn.q_proj.weight": (q, self.hidden),
                layer + "self_attn.k_proj.weight": (kv, self.hidden),
                layer + "self_attn.v_proj.weight": (kv, self.hidden),
                layer + "self_attn.o_proj.weight": (self.hidden, q),
                layer + "self_attn.q_norm.weight": (self.head,),
                layer + "self_attn.k_norm.weight": (self.head,),
                layer + "post_attention_layernorm.weight": (self.hidden,),
                layer + "mlp.gate_proj.weight": (self.inner, self.hidden),
                layer + "mlp.up_proj.weight": (self.inner, self.hidden),
                layer + "mlp.down_proj.weight": (self.hidden, self.inner),
            }
        found["model.norm.weight"] = (self.hidden,)
        return found if self.tied else {**found, "lm_head.weight": (self.vocabulary, self.hidden)}

    def elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.tensors().values())

    def config(self) -> dict[str, Any]:
        """What stands in the config.json of a checkpoint."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "torch_dtype": "bfloat16",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


SIZES = {
    "tiny": Shape(128, 256, 5, 4, 2, 32, 512),
    "0.1B": Shape(512, 1536, 21, 8, 4, 64, 32_768),
    "0.5B": Shape(1024, 3072, 29, 16, 8, 64, 65_536),
    "1B": Shape(1536, 4608, 29, 24, 8, 64, 65_536),
    "2B": Shape(2048, 6144, 36, 32, 8, 64, 65_536),
    # As published.
    "0.6B": Shape(1024, 3072, 28, 16, 8, 128, 151_936, tied=True),
    "1.7B": Shape(2048, 6144, 28, 16, 8, 128, 151_936, tied=True),
    "8B": Shape(4096, 12_288, 36, 32, 8, 128, 151_936),
}


class Weights:
    """The parameters of one process, each in memory of its own. On ``cpu`` steps are numpy's, elsewhere the device's own."""

    def __init__(self, shape: Shape, seed: int = 1, share: float = 0.01, device: str = "cpu") -> None:
        self.shape, self.share = shape, share
        bits = torch.Generator().manual_seed(seed)
        pool = (torch.randn(POOL, generator=bits) * SPREAD).bfloat16().repeat(2).to(device)
        self.tensors: dict[str, torch.Tensor] = {}
        for name, size in shape.tensors().items():
            tensor = torch.empty(size, dtype=torch.bfloat16, device=device)
            flat, at = tensor.view(-1), int(torch.randint(POOL, (), generator=bits))
            for start in range(0, flat.numel(), POOL):
                part = flat[start : start + POOL]
                part.copy_(pool[at : at + part.numel()])
            self.tensors[name] = tensor.add_(1.0) if len(size) == 1 else tensor
        self._random = np.random.Generator(np.random.SFC64(seed))
        self._drift = None if device == "cpu" else torch.Generator(device).manual_seed(seed)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def step(self) -> int:
        """The next version, in place, and how many elements are other ones than before."""
        changed, apart = 0, max(1, round(1 / (self.share * DRAWN)))
        if self._drift is not None:
            return on_device.drift(self.tensors.values(), apart, SMALL, self._drift)
        for tensor in self.tensors.values():
            bits = tensor.view(-1).view(torch.int16).numpy()
            # One of each few neighbours is drawn, and then changed or not.
            where = np.arange(0, bits.size - apart + 1, apart)
            where += self._random.integers(apart, size=where.size, dtype=np.uint8)
            size = ((bits[where] & 0x7FFF).astype(np.uint32) << 16).view(np.float32)
            where = where[self._random.random(where.size, np.float32) * size < SMALL]
            # One place for most, a few for some, many for the rest.
            kind = self._random.random(where.size, np.float32)
            places = np.where(kind < 0.88, 1, np.where(kind < 0.98, 4, 40)).astype(np.int16)
            down = self._random.integers(2, size=where.size, dtype=np.uint8).astype(bool)
            old = bits[where]
            # Not beyond zero.
            down &= (old & 0x7FFF) > 64
            bits[where] = old + np.where(down, -places, places)
            changed += where.size
        return changed

    def digest(self, fused: bool = False) -> str:
        """Over names and bytes. ``fused``: as vLLM keeps them."""
        return digest(self.tensors, fused)


#: What vLLM keeps in one tensor, and the tensors of a checkpoint that it consists of.
FUSED = {
    "self_attn.qkv_proj.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
}  # fmt: skip


def digest(tensors: Mapping[str, torch.Tensor], fused: bool = False) -> str:
    """SHA-256 over names and bytes, in the order of the names. Of a GPU's tensors, see ``device.digest``."""
    pieces: dict[str, Iterable[torch.Tensor]] = {}
    parts = {part: (whole, some) for whole, some in FUSED.items() for part in some}
    for name, tensor in tensors.items():
        kind = next((part for part in parts if name.endswith("." + part)), None) if fused else None
        if kind is None:
            pieces[name] = [tensor]
        else:
            whole, some = parts[kind]
            front = name.removesuffix(kind)
            pieces[front + whole] = [tensors[front + part] for part in some]
    if any(tensor.is_cuda for tensor in tensors.values()):
        return on_device.digest(pieces)
    found = hashlib.sha256()
    for name in sorted(pieces):
        found.update(name.encode())
        for tensor in pieces[name]:
            found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()
