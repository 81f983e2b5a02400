"""Tiny random language models with a tokenizer, made without a network, and what they should answer.

Owns: the models that the engines of these tests serve, and the reference: greedy decoding by transformers in float32,
which vLLM and SGLang repeat token by token.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Kind = Literal["qwen3", "llama", "qwen3tied", "qwen3moe"]
KINDS: tuple[Kind, ...] = ("qwen3", "llama", "qwen3tied", "qwen3moe")

#: What engines are asked. Token ids, so that no tokenizer stands between the answers.
PROMPTS: tuple[tuple[int, ...], ...] = ((5, 77, 130, 9), (300, 301, 302, 44, 7, 19), (42,))


def config(kind: Kind) -> Any:
    """The configuration of a model that any machine runs at once."""
    from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

    common: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": kind == "qwen3tied",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        # Large enough for greedy answers to differ from model to model.
        "initializer_range": 0.2,
    }
    if kind == "llama":
        return LlamaConfig(**common)
    if kind == "qwen3moe":
        experts = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "decoder_sparse_step": 1,
        }
        return Qwen3MoeConfig(**common, **experts)
    return Qwen3Config(**common)


def model(kind: Kind, seed: int = 0) -> Any:
    """A random model in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config(kind), dtype=torch.float32).eval()


def save(model: Any, path: Path) -> Path:
    """Writes a model and its tokenizer the way Hugging Face checkpoints are laid out."""
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return path


def make_model(kind: Kind, path: Path, seed: int = 0) -> Any:
    """A random model, saved below ``path``."""
    made = model(kind, seed)
    save(made, path)
    return made


def stir(model: Any, seed: int, scale: float = 0.05) -> None:
    """Changes every weight a little, as a training step would, only more: answers should change."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)


def stir_some(model: Any, seed: int, share: float = 0.02, scale: float = 0.5) -> None:
    """Changes a few weights, so that a delta is small."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            chosen = torch.rand(parameter.shape, generator=generator) < share
            parameter += scale * chosen * torch.randn(parameter.shape, generator=generator)


def greedy(model: Any, prompt: tuple[int, ...], tokens: int = 24) -> list[int]:
    """What the model answers, by transformers."""
    import torch

    with torch.no_grad():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=-1
        )
    return [int(t) for t in out[0, len(prompt) :]]


def answers(model: Any, tokens: int = 24) -> list[list[int]]:
    """What the model answers to all prompts."""
    return [greedy(model, prompt, tokens) for prompt in PROMPTS]


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = [
        "a windlass hauls the anchor",
        "weights travel from trainer to engine",
        "versions one two three 0123456789",
    ]
    tokenizer.train_from_iterator(lines * 20, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    return fast
