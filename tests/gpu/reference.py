"""A reference engine: a real language model that answers without a break while its weights are replaced.

It is no serving engine: one sequence at a time, by the layers of transformers, without batching. What it has in common with
one is what matters here: parameters that are held fused (one ``qkv_proj`` and one ``gate_up_proj`` in each layer) and are
loaded by a loader that slices, as vLLM's are; decoding that goes on throughout, by a CUDA graph if that is asked for; and a
pause between two steps. It is the engine of ``tests/gpu/end_to_end.py`` and ``bench/gpu_sync.py``, and figures from it are
labelled so.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

from windlass.load import ModelSession

#: How long anything of a test may take, in seconds.
PATIENCE = 240.0
#: Hidden size, intermediate size, layers, heads, key-value heads, head size, vocabulary, whether the ends are tied.
SIZES: dict[str, tuple[int, int, int, int, int, int, int, bool]] = {
    "tiny": (128, 256, 2, 4, 2, 32, 512, True),
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151_936, True),
    "1.7B": (2048, 6144, 28, 16, 8, 128, 151_936, True),
    "8B": (4096, 12288, 36, 32, 8, 128, 151_936, False),
}
#: What the engine is asked.
PROMPTS: tuple[tuple[int, ...], ...] = ((5, 77, 130, 9), (300, 301, 302, 44, 7, 19), (42,))
#: Fused parameters and the parts of which they are made.
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def config(size: str) -> Any:
    """The shapes of a Qwen3 model."""
    from transformers import Qwen3Config

    hidden, inner, layers, heads, kv, head, vocabulary, tied = SIZES[size]
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=head,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        # Tiny models need larger weights for their answers to differ from version to version.
        initializer_range=0.2 if size == "tiny" else 0.02,
    )


def plain(size: str, device: str, seed: int = 0) -> Any:
    """A model as transformers has it, with random weights."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            made = Qwen3ForCausalLM(config(size))
    finally:
        torch.set_default_dtype(before)
    return made.eval().requires_grad_(False)


class Fused(nn.Module):
    """The weights of several linear layers, one below the other."""

    def __init__(self, parts: Sequence[tuple[str, nn.Linear]]) -> None:
        super().__init__()
        self.rows: dict[str, tuple[int, int]] = {}
        at = 0
        for name, part in parts:
            self.rows[name] = (at, part.out_features)
            at += part.out_features
        self.weight = nn.Parameter(
            torch.cat([part.weight.detach() for _, part in parts]), requires_grad=False
        )

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """One of the parts."""
        at, rows = self.rows[name]
        self.weight.narrow(0, at, rows).copy_(tensor)


class Part(nn.Module):
    """One of the layers of a fused one. It has no weights of its own."""

    def __init__(self, whole: Fused, name: str) -> None:
        super().__init__()
        self._whole, self._rows = (whole,), whole.rows[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at, rows = self._rows
        return nn.functional.linear(x, self._whole[0].weight.narrow(0, at, rows))


def fuse(model: Any) -> Any:
    """Puts the layers of a plain model together."""
    for layer in model.model.layers:
        for home in (layer.self_attn, layer.mlp):
            for fused, names in STACKED.items():
                if not hasattr(home, names[0]):
                    continue
                whole = Fused([(name, getattr(home, name)) for name in names])
                setattr(home, fused, whole)
                for name in names:
                    setattr(home, name, Part(whole, name))
    return model


class ReferenceSession(ModelSession):
    """The engine's own way to load, for both forms. Nothing is post-processed."""

    def refuses(self, name: str, module: nn.Module) -> str | None:
        known = (
            isinstance(module, (nn.Linear, nn.Embedding, Fused)) or type(module).__name__ == "Qwen3RMSNorm"
        )
        return None if known else f"{type(module).__name__} is not on the list"

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As the loaders of vLLM's models do it: names of parts lead to the fused parameter and the rows of the part."""
        modules, loaded = dict(self.model.named_modules()), set()
        tied = self.model.config.tie_word_embeddings  # type: ignore[union-attr]
        for name, tensor in weights:
            if tied and name.startswith("lm_head."):
                continue
            module, _, attribute = name.rpartition(".")
            home, _, leaf = module.rpartition(".")
            stacked = next((f for f, parts in STACKED.items() if leaf in parts), None)
            whole = modules.get(f"{home}.{stacked}") if stacked is not None else None
            if isinstance(whole, Fused):
                whole.load(leaf, tensor)
                loaded.add(f"{home}.{stacked}.{attribute}")
            else:
                modules[module]._parameters[attribute].copy_(tensor)  # type: ignore[union-attr]
                loaded.add(name)
        return loaded


@dataclass(frozen=True)
class Token:
    """One step of decoding: in which answer, with which version, what came out, and with which score."""

    answer: int
    version: int
    token: int
    score: float


def decode(model: Any, prompt: Sequence[int], length: int) -> Iterator[tuple[int, float]]:
    """Greedy decoding, a step at a time. Who stops in between sees a whole step or none."""
    device = model.get_input_embeddings().weight.device
    ids, cache = torch.tensor([list(prompt)], device=device), None
    for _ in range(length):
        with torch.no_grad():
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            score, best = out.logits[0, -1].float().max(dim=-1)
        cache, ids = out.past_key_values, best.view(1, 1)
        # Also waits for the GPU: no step is under way between two of them.
        yield int(best.item()), float(score.item())


def answers(model: Any, length: int = 12) -> list[list[tuple[int, float]]]:
    """What a model answers to all prompts."""
    return [list(decode(model, prompt, length)) for prompt in PROMPTS]


class Graph:
    """The same decoding with keys and values at fixed places, so that a step is the same work at the same addresses: on a
    GPU one launch of a captured graph, as serving engines have it. The layers are the model's own and are not copied, so that
    weights that are replaced in place count from the next step on.
    """

    def __init__(self, model: Any, room: int) -> None:
        inner, config = model.model, model.config
        weight = model.get_input_embeddings().weight
        self._model, self._room, self._head = model, room, config.head_dim
        shape = (config.num_hidden_layers, 1, config.num_key_value_heads, room, config.head_dim)
        self._keys, self._values = (
            torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in "kv"
        )
        self._places = torch.arange(room, device=weight.device)
        self._turns = tuple(t[0] for t in inner.rotary_emb(self._values, self._places.view(1, -1)))
        self._token = torch.zeros(1, dtype=torch.long, device=weight.device)
        self._at = torch.zeros(1, dtype=torch.long, device=weight.device)
        self._said = torch.zeros(2, dtype=torch.double, device=weight.device)
        self._graph: Any = None
        if weight.device.type == "cuda":
            self._capture()

    def _capture(self) -> None:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._step()
        torch.cuda.synchronize()

    @torch.no_grad()
    def _step(self) -> None:
        """From the token at its place to the next one at the next."""
        model, (cos, sin) = self._model.model, (t.index_select(0, self._at) for t in self._turns)
        seen = (self._places <= self._at).view(1, 1, 1, -1)

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(1, 1, -1, self._head)

        def turn(x: torch.Tensor) -> torch.Tensor:
            low, high = x.chunk(2, dim=-1)
            return x * cos + torch.cat((-high, low), dim=-1) * sin

        x = model.embed_tokens(self._token).view(1, 1, -1)
        for layer, keys, values in zip(model.layers, self._keys, self._values, strict=True):
            attention, h = layer.self_attn, layer.input_layernorm(x)
            query = turn(attention.q_norm(heads(attention.q_proj(h))).transpose(1, 2))
            keys.index_copy_(2, self._at, turn(attention.k_norm(heads(attention.k_proj(h))).transpose(1, 2)))
            values.index_copy_(2, self._at, heads(attention.v_proj(h)).transpose(1, 2))
            found = nn.functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=seen, enable_gqa=True
            )
            x = x + attention.o_proj(found.transpose(1, 2).reshape(1, 1, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        score, best = self._model.lm_head(model.norm(x))[0, -1].float().max(dim=-1)
        self._said.copy_(torch.stack((best.double(), score.double())))
        self._token.copy_(best.view(1))
        self._at.add_(1)

    def decode(self, prompt: Sequence[int], length: int) -> Iterator[tuple[int, float]]:
        """As :func:`decode`."""
        assert len(prompt) + length <= self._room, (
            f"{len(prompt)} + {length} tokens, and room for {self._room}"
        )
        run = self._step if self._graph is None else self._graph.replay
        self._at.zero_()
        for token in prompt[:-1]:
            self._token.fill_(token)
            run()
        self._token.fill_(prompt[-1])
        for _ in range(length):
            run()
            best, score = self._said.tolist()
            yield int(best), score


class ReferenceEngine:
    """Decodes in a thread of its own until it is closed, by transformers or, with ``graph``, by :class:`Graph`.

    A pause begins when no step is under way and ends when the next one may begin. What ends in an error leaves the engine
    paused, as a fenced one is, until the next pause ends well.
    """

    def __init__(self, model: Any, length: int = 12, graph: bool = False) -> None:
        self.model, self.length = model, length
        room = max(map(len, PROMPTS)) + length
        self._decode = Graph(model, room).decode if graph else partial(decode, model)
        #: The version that steps are made with. Written in pauses only.
        self.version = 0
        self.tokens: list[Token] = []
        #: Milliseconds, and how long the step that was under way took to end.
        self.pauses: list[float] = []
        self.waits: list[float] = []
        self.error: BaseException | None = None
        self._turn = threading.Condition()
        self._paused, self._stepping, self._closed = False, False, False
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    def start(self) -> None:
        """Begins to answer, if it has not yet."""
        if self._thread.ident is None:
            self._thread.start()

    def _run(self) -> None:
        try:
            for answer in range(1 << 62):
                steps = self._decode(PROMPTS[answer % len(PROMPTS)], self.length)
                for _ in range(self.length):
                    if not self._enter():
                        return
                    try:
                        token, score = next(steps)
                        self.tokens.append(Token(answer, self.version, token, score))
                    finally:
                        self._leave()
        except BaseException as e:
            self.error = e
            raise

    def _enter(self) -> bool:
        with self._turn:
            self._turn.wait_for(lambda: self._closed or not self._paused)
            self._stepping = not self._closed
            return self._stepping

    def _leave(self) -> None:
        with self._turn:
            self._stepping = False
            self._turn.notify_all()

    @contextlib.contextmanager
    def pause(self, record: bool = True) -> Iterator[None]:
        """No step is under way inside."""
        asked = time.perf_counter()
        with self._turn:
            self._paused = True
            if not self._turn.wait_for(lambda: not self._stepping, timeout=120):
                raise TimeoutError("a step of decoding did not end within 120 s")
        began = time.perf_counter()
        yield
        with self._turn:
            self._paused = False
            self._turn.notify_all()
        if record:
            self.pauses.append((time.perf_counter() - began) * 1e3)
            self.waits.append((began - asked) * 1e3)

    def close(self) -> None:
        """Ends decoding, after the step that is under way."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        if self._thread.ident is not None:
            self._thread.join(120)


def replay(tokens: Sequence[Token], models: dict[int, Any], near: float = 0.0) -> tuple[int, int]:
    """Makes the same steps again, each with the version that it says it was made with: how many, and how many answers were
    made with several versions.

    An error for a token, or a score that is not as ``near``, that no step of whole versions gives. ``models`` are whole
    models by version.
    """
    by_answer: dict[int, list[Token]] = {}
    for token in tokens:
        by_answer.setdefault(token.answer, []).append(token)
    mixed = steps = 0
    for answer, said in by_answer.items():
        prompt = PROMPTS[answer % len(PROMPTS)]
        switch = _Switch(models)
        again = decode(switch, prompt, len(said))
        for position, token in enumerate(said):
            switch.version = token.version
            found = next(again)
            if found[0] != token.token or abs(found[1] - token.score) > near * abs(found[1]):
                raise AssertionError(
                    f"token {position} of answer {answer} is {token.token} ({token.score}); version {token.version} "
                    f"gives {found[0]} ({found[1]})"
                )
            steps += 1
        mixed += len({token.version for token in said}) > 1
    return steps, mixed


class _Switch:
    """Several versions of a model, one of which computes."""

    def __init__(self, models: dict[int, Any]) -> None:
        self._models = models
        self.version = next(iter(models))

    def __call__(self, **inputs: Any) -> Any:
        return self._models[self.version](**inputs)

    def get_input_embeddings(self) -> Any:
        return self._models[self.version].get_input_embeddings()


# Engines in processes of their own.


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def answer(serving: Any) -> None:
    """The engine's process: a line of JSON that names a method comes in, and what that says goes out."""
    say(json.dumps({"ok": "ready"}))
    try:
        for line in sys.stdin:
            words = json.loads(line)
            try:
                said = getattr(serving, words.pop("op"))(**words)
            except Exception as e:
                say(json.dumps({"error": f"{type(e).__name__}: {e}"}))
            else:
                say(json.dumps({"ok": said}))
    finally:
        serving.close()


class Child:
    """The other side: ``script --serve`` with what is given, as a child of this process."""

    def __init__(self, script: str, **given: Any) -> None:
        command = [sys.executable, script, "--serve", json.dumps(given)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.hear()
        except BaseException:
            self.kill()
            raise

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def tell(self, op: str, **words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **words}) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        line = self._lines.get(timeout=PATIENCE)
        if not line:
            raise ConnectionError("the engine is gone")
        said = json.loads(line)
        if "error" in said:
            raise RuntimeError(said["error"])
        return said["ok"]

    def ask(self, op: str, **words: Any) -> Any:
        self.tell(op, **words)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=30)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
