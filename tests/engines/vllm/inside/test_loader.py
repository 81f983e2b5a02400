"""An engine that this process holds: an ``LLM`` whose worker has nothing but the extension."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from publishing import Publishing
from windlass.engines.vllm import VLLMWeightLoader
from windlass.errors import WindlassInvalid

KIND: tiny.Kind = "qwen3"


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[tiny.Kind], Path]) -> Iterator[Any]:
    from vllm import LLM

    with pytest.MonkeyPatch.context() as patch:
        # No plugin of ours: only what the flag brings.
        patch.setenv("VLLM_PLUGINS", "plain_weights")
        engine = LLM(
            model=str(checkpoint(KIND)),
            dtype="float32",
            max_model_len=512,
            max_num_seqs=4,
            enforce_eager=True,
            worker_extension_cls="windlass.vllm.WorkerExtension",
        )
        yield engine
        engine.llm_engine.engine_core.shutdown()


def answers(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    how = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in tiny.PROMPTS]
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, how, use_tqdm=False)]


@pytest.mark.timeout(300)
def test_an_engine_of_this_process_loads_an_image_and_tensors(llm: Any, home: Path) -> None:
    trainer, loader = tiny.model(KIND), VLLMWeightLoader(llm)
    with Publishing(home) as publishing:
        for version in (1, 2):
            tiny.stir(trainer, version)
            reports = asyncio.run(loader.load_image(publishing.publish(trainer, version)))
            assert [report.live is not None and report.live.version for report in reports] == [version]
            assert answers(llm) == tiny.answers(trainer)
        # By value, as a strategy would hand them over; the worker then has no version.
        tiny.stir(trainer, 3)
        asyncio.run(loader.load_weights(dict(trainer.named_parameters())))
        assert answers(llm) == tiny.answers(trainer)
        assert [report.live for report in asyncio.run(loader.reports())] == [None]
        # The same ones again, and then a part of them.
        for part in (list(dict(trainer.named_parameters())), ["model.norm.weight"]):
            changed = tiny.model(KIND)
            tiny.stir(changed, 5)
            with torch.no_grad():
                for name in part:
                    trainer.get_parameter(name).copy_(changed.get_parameter(name) * (1 + 1 / len(part)))
            asyncio.run(loader.load_weights({name: trainer.get_parameter(name) for name in part}))
            assert answers(llm) == tiny.answers(trainer)
        # And back to versions.
        tiny.stir(trainer, 4)
        asyncio.run(loader.load_image(publishing.publish(trainer, 4)))
        assert answers(llm) == tiny.answers(trainer)


@pytest.mark.timeout(300)
def test_tensors_that_do_not_fit_change_nothing(llm: Any) -> None:
    before, loader = answers(llm), VLLMWeightLoader(llm)
    wrong = {"model.norm.weight": tiny.model(KIND).model.norm.weight.repeat(2)}
    with pytest.raises(WindlassInvalid, match=r"model\.norm\.weight"):
        asyncio.run(loader.load_weights(wrong))
    assert answers(llm) == before
    assert [report.state for report in asyncio.run(loader.reports())] == ["clean"]
