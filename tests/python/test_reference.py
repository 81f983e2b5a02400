"""The engine that figures on a GPU are measured with (``tests/gpu/reference.py``) computes what transformers does."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "gpu"))

import reference  # noqa: E402


def test_decoding_at_fixed_places_says_what_transformers_says_also_after_new_weights() -> None:
    model = reference.fuse(reference.plain("tiny", "cpu", 3)).float()
    graph = reference.Graph(model, 24)
    seen = []
    for seed in (3, 4):
        # In place, as weights are loaded.
        fresh = reference.fuse(reference.plain("tiny", "cpu", seed)).float()
        for mine, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
            mine.copy_(theirs)
        for prompt in reference.PROMPTS:
            told, said = list(graph.decode(prompt, 12)), list(reference.decode(model, prompt, 12))
            assert [token for token, _ in told] == [token for token, _ in said]
            # One sums in another order than the other.
            scores = torch.tensor([[a, b] for (_, a), (_, b) in zip(told, said, strict=True)])
            torch.testing.assert_close(scores[:, 0], scores[:, 1], rtol=1e-3, atol=1e-3)
            seen.append(tuple(token for token, _ in told))
    assert len(set(seen)) == len(seen), "the answers differ by prompt and weights"


def test_an_engine_with_a_graph_answers_in_its_thread() -> None:
    model = reference.fuse(reference.plain("tiny", "cpu", 5)).float()
    engine = reference.ReferenceEngine(model, length=4, graph=True)
    engine.start()
    try:
        with engine.pause():
            before = len(engine.tokens)
        with engine.pause():
            assert engine.error is None
    finally:
        engine.close()
    said = [token.token for token in engine.tokens if token.answer == 0]
    expected = [token for token, _ in reference.decode(model, reference.PROMPTS[0], 4)]
    assert said == expected[: len(said)] and len(engine.tokens) >= before
