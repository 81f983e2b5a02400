"""The policy and its task: a Qwen3 with random weights, a tokenizer trained on the spot, and digits to reverse.

Nothing is downloaded. The tokenizer is a byte-level BPE trained on the sources of Python's standard library, which
every interpreter has; the warm-up learns from the same text and from solved tasks.
"""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import Any

import torch
from settings import SIZES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

END = "<|end|>"
#: Length of the text for the tokenizer and the warm-up.
TEXT_CHARS = 2_000_000


def text(chars: int = TEXT_CHARS) -> str:
    """Text that exists on every machine: the sources of the standard library."""
    parts: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(path.read_text("utf-8", errors="ignore"))
        if sum(map(len, parts)) >= chars:
            break
    return "".join(parts)[:chars]


def make_tokenizer(vocab: int, corpus: str) -> Tokenizer:
    """A byte-level BPE in which every digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    pieces = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((corpus[i : i + 4096] for i in range(0, len(corpus), 4096)), trainer)
    return tokenizer


def make_model(size: str, vocab: int, end: int) -> nn.Module:
    """Random weights in float32, which stay the master weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = SIZES[size]
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=end,
        pad_token_id=end,
        bos_token_id=None,
    )
    model: nn.Module = Qwen3ForCausalLM(config).float()
    return model


class Task:
    """Reverse the digits. A rule checks the answer and gives partial credit."""

    def __init__(self, tokenizer: Tokenizer, digits: int, seed: int) -> None:
        self.tokenizer = tokenizer
        self.digits = digits
        self.end = tokenizer.encode(END).ids[0]
        self._random = random.Random(seed)

    def draw(self) -> tuple[str, str]:
        """A question and its answer."""
        digits = "".join(self._random.choices("0123456789", k=self.digits))
        return f"reverse {digits} =", digits[::-1]

    def ids(self, words: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(words).ids
        return ids

    def solved(self, count: int) -> Tensor:
        """Questions with their answers, for supervised training."""
        return torch.tensor([[*self.ids("".join(self.draw())), self.end] for _ in range(count)])

    def reward(self, completion: list[int], answer: str) -> float:
        """The share of correct digits, plus a small term for the length, so that rewards differ within a group."""
        ended = completion.index(self.end) if self.end in completion else len(completion)
        said: str = self.tokenizer.decode(completion[:ended])
        right = sum(a == b for a, b in zip(said, answer, strict=False)) / max(len(said), len(answer))
        return 0.9 * right + 0.1 / (1 + abs(len(said) - len(answer)))


def windows(ids: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Random windows of the text."""
    starts = torch.randint(0, len(ids) - length, (count,), generator=generator)
    return torch.stack([ids[s : s + length] for s in starts.tolist()])


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids[:, :-1]).logits.float()
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def sample(model: Any, task: Task, prompts: int, group: int) -> tuple[Tensor, int, Tensor]:
    """Samples groups of completions: (tokens, start of the completions, rewards by group)."""
    drawn = [task.draw() for _ in range(prompts)]
    asked = torch.tensor([task.ids(question) for question, _ in drawn]).repeat_interleave(group, 0)
    tokens: Tensor = model.generate(
        input_ids=asked,
        attention_mask=torch.ones_like(asked),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=task.digits + 1,
    )
    start = asked.shape[1]
    answers = [answer for _, answer in drawn for _ in range(group)]
    said = tokens[:, start:].tolist()
    rewards = [task.reward(ids, answer) for ids, answer in zip(said, answers, strict=True)]
    return tokens, start, torch.tensor(rewards).view(prompts, group)


def grpo_loss(model: nn.Module, tokens: Tensor, start: int, rewards: Tensor, end: int) -> Tensor:
    """The clipped policy-gradient loss of one on-policy step, with advantages normalised within each group."""
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    logits = model(input_ids=tokens[:, :-1]).logits[:, start - 1 :].float()
    said = tokens[:, start:]
    logp = torch.log_softmax(logits, -1).gather(-1, said.unsqueeze(-1)).squeeze(-1)
    # The loss includes the end token and excludes the tokens after it.
    ended = (said == end).long().cumsum(1)
    counts = (ended - (said == end).long() == 0).float()
    ratio = torch.exp(logp - logp.detach())
    clipped = ratio.clamp(0.8, 1.2)
    gain = torch.minimum(ratio * advantages.view(-1, 1), clipped * advantages.view(-1, 1))
    return -(gain * counts).sum() / counts.sum()
