"""The calls that an SGLang server sees, by a server that only writes them down.

What a real server makes of them is tested in ``tests/engines/sglang``; here is what cannot be had from the one version
that runs there: older servers, refusals, and the exact order of calls that ``docs/sglang.md`` gives.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from recorder import Recorder
from windlass.engines.sglang import SGLangWeightLoader
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


def loader_of(recorder: Recorder, timeout: float = 20.0, **options: Any) -> SGLangWeightLoader:
    # A journal of its own: ports are used again.
    return SGLangWeightLoader(recorder.url, timeout=timeout, dir=recorder.home / "engines", **options)


def load(recorder: Recorder, **options: Any) -> SGLangWeightLoader:
    loader = loader_of(recorder, **options)
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
    loader = loader_of(recorder)
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
    loader = loader_of(recorder)
    with pytest.raises(WindlassCorrupt if answer else WindlassPeerLost):
        asyncio.run(loader.load_weights(WEIGHTS))
    # Not tried again by itself: it may have been done. It is paused once more, in case it was not.
    assert recorder.routes == ["pause_generation", *SESSION, "pause_generation"]
    assert loader.dirty
    recorder.calls.clear()
    asyncio.run(loader.load_weights(WEIGHTS))
    assert recorder.routes == ["pause_generation", *SESSION, "flush_cache", "continue_generation"]
    assert not loader.dirty


def test_a_flush_that_answers_no_is_an_error(recorder: Recorder) -> None:
    recorder.answers["flush_cache"] = [(400, "requests are running")]
    loader = loader_of(recorder)
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
    loader = loader_of(recorder)

    async def both() -> None:
        await asyncio.gather(loader.load_weights(WEIGHTS), loader.load_weights(WEIGHTS))

    asyncio.run(both())
    one = ["pause_generation", *SESSION, "flush_cache", "continue_generation"]
    assert recorder.routes == [*one, *one]


OWNER = """
    import sys, time
    from windlass.engines.driver import EngineDriver

    driver = EngineDriver("sglang", sys.argv[1], dir=sys.argv[2]).core
    for word in sys.argv[3].split():
        {"pause": lambda: driver.pause("step-7", float(sys.argv[4]), 20.0), "touch": lambda: driver.touch(True),
         "finish": lambda: driver.resume()}[word]()
    print("there", flush=True)
    sys.stdin.read()
    driver.touch(True)
"""


def journal_of(recorder: Recorder) -> Any:
    [found] = (recorder.home / "engines").glob("*/journal.json")
    return json.loads(found.read_text())


def wait_for(what: Any, message: str) -> None:
    until = time.monotonic() + 30
    while not what():
        assert time.monotonic() < until, message
        time.sleep(0.02)


def owner(recorder: Recorder, words: str, lease: float = 60.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(OWNER), recorder.url, str(recorder.home / "engines")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    started = subprocess.Popen(
        [*command, words, str(lease)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None and started.stdout.readline().strip() == "there"
    return started


def guards_of(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for found in lists for child in found.read_text().split()]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("pause", ["pause_generation", "continue_generation"]),
        ("pause finish pause", ["pause_generation", "continue_generation"] * 2),
        ("pause finish", ["pause_generation", "continue_generation"]),
        ("pause touch", ["pause_generation"]),
        ("", []),
    ],
)
def test_a_pause_ends_with_its_owner_only_before_the_first_write(
    recorder: Recorder, words: str, asked: list[str]
) -> None:
    with owner(recorder, words) as killed:
        guards = guards_of(killed.pid)
        killed.kill()
    for guard in guards:
        wait_for(lambda pid=guard: not Path(f"/proc/{pid}").exists(), "the guard ends with its owner")
    assert recorder.routes == asked
    if "touch" not in words:
        assert not (recorder.home / "engines").exists(), "nothing is left behind"
        return
    assert (journal_of(recorder)["phase"], journal_of(recorder)["version"]) == ("writing", "step-7")
    # The next loader knows: what fails before its first write does not let the server go on.
    recorder.calls.clear()
    recorder.answers["begin_weight_update"] = [(400, {"message": "not today"}), (200, {"success": True})]
    loader = loader_of(recorder)
    with pytest.raises(Exception, match="not today"):
        asyncio.run(loader.load_weights(WEIGHTS))
    assert loader.dirty and "continue_generation" not in recorder.routes
    asyncio.run(loader.load_weights(WEIGHTS))
    assert not loader.dirty and recorder.routes[-1] == "continue_generation"


def test_a_pause_ends_with_its_lease_and_its_late_owner_writes_nothing(recorder: Recorder) -> None:
    with owner(recorder, "pause", lease=0.5) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        wait_for(lambda: "continue_generation" in recorder.routes, "the lease resumes the server")
        stopped.send_signal(signal.SIGCONT)
        assert stopped.stdin is not None
        stopped.stdin.close()
        assert stopped.wait(30) != 0, "its touch is an error"


def test_a_guard_that_is_killed_leaves_a_server_that_its_owner_resumes(recorder: Recorder) -> None:
    loader, others = loader_of(recorder), set(guards_of(os.getpid()))

    async def broken() -> None:
        async with loader.update():
            [guard] = set(guards_of(os.getpid())) - others
            os.kill(guard, signal.SIGKILL)
            await loader.load_weights(WEIGHTS)

    with pytest.raises(WindlassPeerLost, match="guard"):
        asyncio.run(broken())
    assert recorder.routes[-1] == "continue_generation" and not loader.dirty
    assert "update_weights_from_tensor" not in recorder.routes
