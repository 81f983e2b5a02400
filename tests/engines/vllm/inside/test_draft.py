"""An engine with a draft model: versions reach the model, its draft stays, and that is said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny
from publishing import Publishing

KIND: tiny.Kind = "qwen3"


@pytest.mark.timeout(300)
def test_versions_reach_the_model_and_its_draft_is_said_to_stay(
    checkpoint: Callable[[tiny.Kind], Path],
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from vllm import LLM, SamplingParams

    monkeypatch.setenv("VLLM_PLUGINS", "windlass,plain_weights")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    path = str(checkpoint(KIND))
    llm = LLM(
        model=path,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        enforce_eager=True,
        speculative_config={"model": path, "method": "draft_model", "num_speculative_tokens": 2},
    )
    how = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": list(prompt)} for prompt in tiny.PROMPTS]
    trainer = tiny.model(KIND)
    try:
        with Publishing(home) as publishing, caplog.at_level(logging.WARNING, "windlass"):
            for version in (1, 2, 3):
                tiny.stir_some(trainer, version)
                order = publishing.publish(trainer, version)
                report: Any = llm.collective_rpc("windlass_load", args=(order,))[0]
                assert (report["state"], report["error"]) == ("clean", None)
                assert llm.reset_prefix_cache()
                outs = llm.generate(prompts, how, use_tqdm=False)
                assert [list(out.outputs[0].token_ids) for out in outs] == tiny.answers(trainer, 16)
        told = [r.getMessage() for r in caplog.records if "draft model" in r.getMessage()]
        assert len(told) == 1 and "keeps the weights" in told[0], told
    finally:
        llm.llm_engine.engine_core.shutdown()
