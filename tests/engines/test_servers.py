"""The engines themselves, before anything of ours: what they answer is what transformers answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import servers
import tiny


@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", [servers.Vllm, servers.Sglang])
def test_an_engine_answers_what_transformers_answers(
    engine: type[servers.Server], checkpoint: Callable[[tiny.Kind], Path]
) -> None:
    with engine(checkpoint("qwen3")) as server:  # type: ignore[call-arg, arg-type]
        assert server.answers() == tiny.answers(tiny.model("qwen3"))
