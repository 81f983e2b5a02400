"""The calls that an SGLang server sees, by a server that only writes them down.

What a real server makes of them is tested in ``tests/engines/sglang``; here is what cannot be had from the one version
that runs there: older servers, refusals, and the exact order of calls that ``docs/sglang.md`` gives.
"""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from recorder import Recorder
from windlass.engines.sglang import SGLangWeightLoader, gate, lease
from windlass.engines.sglang.engine import connect
from windlass.engines.sglang.gate import Gate
from windlass.errors import (
    WindlassCorrupt,
    WindlassDenied,
    WindlassPeerLost,
    WindlassStale,
    WindlassUnsupported,
)

WEIGHTS = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    recorder = Recorder(tmp_path)
    yield recorder
    recorder.close()


def load(recorder: Recorder, **options: Any) -> SGLangWeightLoader:
    loader = SGLangWeightLoader(recorder.url, timeout=20.0, **options)
    asyncio.run(loader.load_weights(WEIGHTS))
    return loader


SESSION = ["begin_weight_update", "update_weights_from_tensor", "end_weight_update"]


@pytest.mark.parametrize(
    ("pause", "cache", "flush"),
    [
        ("retract", "reset", ["flush_cache"]),
        ("abort", "reset", ["flush_cache"]),
        ("retract", "keep", []),
        ("in_place", "keep", []),
    ],
)
def test_the_calls_of_a_load_are_those_of_the_guide(
    pause: str, cache: str, flush: list[str], recorder: Recorder
) -> None:
    load(recorder, pause=pause, cache=cache, api_key="k")
    assert recorder.routes == ["pause_generation", *SESSION, *flush, "continue_generation"]
    assert recorder.body("pause_generation") == {"mode": pause}
    sent = recorder.body("update_weights_from_tensor")
    assert sent["flush_cache"] is False
    assert sent["load_format"] == "flattened_bucket"
    assert len(sent["serialized_named_tensors"]) == 2, "one for each rank"
    assert recorder.keys == {"Bearer k"}


def test_an_older_server_is_asked_for_a_session_once(recorder: Recorder) -> None:
    recorder.old = True
    recorder.answers["begin_weight_update"] = [(404, {"detail": "Not Found"})]
    loader = load(recorder)
    asyncio.run(loader.load_weights(WEIGHTS))
    assert recorder.routes.count("begin_weight_update") == 1
    assert "end_weight_update" not in recorder.routes
    assert recorder.routes.count("update_weights_from_tensor") == 2


def test_a_server_that_refuses_the_pause_is_not_touched(recorder: Recorder) -> None:
    recorder.answers["pause_generation"] = [(401, {"error": "Unauthorized"})]
    with pytest.raises(WindlassDenied, match=r"pause_generation \(pause\)") as e:
        load(recorder)
    assert "API key" in e.value.advice
    assert recorder.routes == ["pause_generation"]


def test_a_server_that_refuses_the_session_goes_on(recorder: Recorder) -> None:
    recorder.answers["begin_weight_update"] = [(400, {"success": False, "message": "not today"})]
    loader = SGLangWeightLoader(recorder.url, timeout=20.0)
    with pytest.raises(Exception, match="not today"):
        asyncio.run(loader.load_weights(WEIGHTS))
    assert recorder.routes == ["pause_generation", "begin_weight_update", "continue_generation"]
    assert not loader.dirty


@pytest.mark.parametrize(
    "answer", [(400, {"success": False, "message": "torn"}), None], ids=["no", "hangs up"]
)
def test_a_load_that_fails_leaves_the_server_paused_until_the_next_one(
    answer: tuple[int, Any] | None, recorder: Recorder
) -> None:
    recorder.answers["update_weights_from_tensor"] = [answer, (200, {"success": True})]
    loader = SGLangWeightLoader(recorder.url, timeout=20.0)
    with pytest.raises(WindlassCorrupt if answer else WindlassPeerLost):
        asyncio.run(loader.load_weights(WEIGHTS))
    # Not tried again by itself: it may have been done. It is paused once more, in case it was not.
    assert recorder.routes == ["pause_generation", *SESSION, "pause_generation"]
    assert loader.dirty
    recorder.calls.clear()
    asyncio.run(loader.load_weights(WEIGHTS))
    assert recorder.routes == ["pause_generation", *SESSION, "flush_cache", "continue_generation"]
    assert not loader.dirty


def test_a_server_that_was_only_waited_for_is_paused_after_a_failure(
    recorder: Recorder, tmp_path: Path
) -> None:
    gate = Gate(connect(recorder.url), "wait", "reset")
    with pytest.raises(KeyError), gate.stopped(time.monotonic() + 20) as passage:
        passage.touched = True
        raise KeyError("torn")
    assert gate.dirty
    assert recorder.calls == [("pause_generation", {"mode": "retract"})]
    with gate.stopped(time.monotonic() + 20):
        pass
    assert recorder.routes == ["pause_generation", "continue_generation"]
    assert not gate.dirty


def test_a_flush_that_answers_no_is_an_error(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "ENDING", 0.2)
    recorder.answers["flush_cache"] = [(400, "requests are running")]
    loader = SGLangWeightLoader(recorder.url, timeout=20.0)
    with pytest.raises(WindlassStale, match="not flushed"):
        asyncio.run(loader.load_weights(WEIGHTS))
    assert "continue_generation" not in recorder.routes
    assert loader.dirty


def test_a_flush_that_is_refused_for_a_moment_is_repeated(recorder: Recorder) -> None:
    recorder.answers["flush_cache"] = [(400, "ending"), (400, "ending"), (200, "flushed")]
    assert not load(recorder).dirty
    assert recorder.routes.count("flush_cache") == 3


def test_pausing_and_continuing_are_repeated_when_the_connection_breaks(recorder: Recorder) -> None:
    for route in ("pause_generation", "continue_generation"):
        recorder.answers[route] = [None, (200, {})]
    assert not load(recorder).dirty
    assert recorder.routes.count("pause_generation") == 2
    assert recorder.routes.count("continue_generation") == 2


def test_replicas_are_refused_where_sglang_would_end(recorder: Recorder) -> None:
    recorder.info["dp_size"] = 2
    with pytest.raises(WindlassUnsupported, match="2 data-parallel replicas"):
        load(recorder)
    assert recorder.routes == []


def test_a_load_waits_for_the_one_before_it(recorder: Recorder) -> None:
    loader = SGLangWeightLoader(recorder.url, timeout=20.0)

    async def both() -> None:
        await asyncio.gather(loader.load_weights(WEIGHTS), loader.load_weights(WEIGHTS))

    asyncio.run(both())
    one = ["pause_generation", *SESSION, "flush_cache", "continue_generation"]
    assert recorder.routes == [*one, *one]
    assert isinstance(loader._gate, Gate)


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["paused"], ["continue_generation"]),
        (["paused", "over", "paused"], ["continue_generation"]),
        (["paused", "over"], []),
        (["paused", "touched"], []),
        ([], []),
    ],
)
def test_a_pause_ends_with_its_owner_only_before_the_first_write(
    recorder: Recorder, words: list[str], asked: list[str]
) -> None:
    place = json.dumps({"url": recorder.url, "token": None})
    lease.main(io.StringIO("\n".join([place, *words, ""])))
    assert recorder.routes == asked
