"""All engines behind one client."""

from __future__ import annotations

import asyncio
import pickle
import time
from typing import Any

import pytest

from windlass import WindlassError, WindlassInvalid, WindlassTimeout
from windlass.transfer.client import EnginesFailed, InferenceEngine, InferenceEngineClient
from windlass.transfer.request import BroadcastWeightUpdateRequest
from windlass.transfer.sync_info import EmptyWeightSyncInfo, EngineShape, WeightSyncInfo

REQUEST = BroadcastWeightUpdateRequest(["w"], ["float32"], [[1]])


class Noted(InferenceEngine):
    """Remembers what it was told, in one list for all; may fail or hang at a step."""

    def __init__(
        self, name: str, notes: list[str], fails: str = "", hangs: str = "", slow: float = 0.0
    ) -> None:
        self.name, self.notes, self.fails, self.hangs, self.slow = name, notes, fails, hangs, slow
        self.requests: list[Any] = []
        self.offset = 0

    async def _do(self, step: str) -> None:
        self.notes.append(f"{self.name} {step}")
        if step == self.hangs:
            await asyncio.sleep(600)
        if step == self.fails:
            raise RuntimeError(f"cannot {step}")
        await asyncio.sleep(self.slow)
        self.notes.append(f"{self.name} {step} done")

    async def init_weight_transfer(self, sync_info: WeightSyncInfo, rank_offset: int) -> None:
        self.offset = rank_offset
        await self._do("init")

    async def update_weights(self, request: Any) -> None:
        self.requests.append(request)
        await self._do("update")

    async def start_update(self) -> None:
        await self._do("start")

    async def finish_update(self, version: str | None = None) -> None:
        await self._do("finish")

    async def pause(self) -> None:
        await self._do("pause")

    async def resume(self) -> None:
        await self._do("resume")

    async def reset_prefix_cache(self) -> None:
        await self._do("reset")

    async def empty_cache(self) -> None:
        await self._do("empty")

    async def close(self) -> None:
        await self._do("close")


def test_all_engines_are_told_at_the_same_time_with_their_own_rank_offset() -> None:
    notes: list[str] = []
    engines = [Noted(f"e{i}", notes, slow=0.3) for i in range(20)]
    for engine in engines:
        engine.shape = EngineShape(tp=2)
    client = InferenceEngineClient(engines)
    begun = time.monotonic()
    asyncio.run(client.init_weight_transfer(EmptyWeightSyncInfo()))
    assert time.monotonic() - begun < 3
    assert [engine.offset for engine in engines] == list(range(1, 40, 2))
    # Every one of them began before the first ended.
    assert all(note.endswith("init") for note in notes[:20])


def test_one_error_lists_every_engine_that_failed() -> None:
    notes: list[str] = []
    client = InferenceEngineClient(
        [Noted("a", notes), Noted("b", notes, fails="update"), Noted("c", notes, fails="update")]
    )
    with pytest.raises(EnginesFailed, match="2 of 3 engines failed at update_weights: b: .*; c: ") as failed:
        asyncio.run(client.update_weights(REQUEST))
    assert sorted(failed.value.failures) == ["b", "c"]
    assert isinstance(failed.value.__cause__, RuntimeError)
    assert isinstance(failed.value, WindlassError)
    assert str(pickle.loads(pickle.dumps(failed.value))) == str(failed.value)
    assert "a update done" in notes


def test_an_error_that_begins_with_the_name_of_its_engine_is_not_given_it_twice() -> None:
    failures = {
        "engine 1": WindlassError("engine 1 died: killed"),
        "engine 10": WindlassError("engine 100 is no prefix"),
        "engine 2": WindlassError("engine 2: cannot load"),
        "engine 3": RuntimeError(),
    }
    assert str(EnginesFailed.at("load", failures, 4)).startswith(
        "4 of 4 engines failed at load: engine 1 died: killed; engine 10: engine 100 is no prefix; "
        "engine 2: cannot load; engine 3: RuntimeError"
    )


def test_an_engine_that_does_not_answer_is_listed_after_the_deadline() -> None:
    notes: list[str] = []
    client = InferenceEngineClient([Noted("a", notes), Noted("b", notes, hangs="update")], timeout=0.3)
    begun = time.monotonic()
    with pytest.raises(EnginesFailed, match=r"b: no answer to update_weights within 0.3 s") as failed:
        asyncio.run(client.update_weights(REQUEST))
    assert time.monotonic() - begun < 5
    assert isinstance(failed.value.failures["b"], WindlassTimeout)


def test_after_a_failure_the_others_are_not_waited_for_until_the_deadline() -> None:
    notes: list[str] = []
    client = InferenceEngineClient(
        [Noted("dead", notes, fails="update"), Noted("stuck", notes, hangs="update")], timeout=600
    )
    begun = time.monotonic()
    with pytest.raises(EnginesFailed, match="2 of 2 engines failed"):
        asyncio.run(client.update_weights(REQUEST))
    assert time.monotonic() - begun < 20


def test_the_reset_of_the_cache_starts_first_and_is_awaited_last() -> None:
    notes: list[str] = []
    client = InferenceEngineClient([Noted("e", notes)], pause=True, empty_cache=True)

    async def sync() -> None:
        engine = client.engines[0]
        reset = engine.reset_prefix_cache
        release = asyncio.Event()

        async def held() -> None:
            notes.append("e reset")
            await release.wait()
            notes.append("e reset done")

        engine.reset_prefix_cache = held  # type: ignore[method-assign]
        await client.begin_sync()
        await client.update_weights(REQUEST)
        asyncio.get_running_loop().call_later(0.1, release.set)
        await client.finish_sync("7")
        engine.reset_prefix_cache = reset  # type: ignore[method-assign]

    asyncio.run(sync())
    assert [note for note in notes if not note.endswith("done") or "reset" in note] == [
        "e reset", "e pause", "e empty", "e start", "e update", "e finish", "e reset done", "e empty", "e resume",
    ]  # fmt: skip


def test_without_a_pause_the_cache_is_reset_again_at_the_end() -> None:
    notes: list[str] = []
    client = InferenceEngineClient([Noted("e", notes)])

    async def sync() -> None:
        await client.begin_sync()
        await client.update_weights(REQUEST)
        await client.finish_sync()

    asyncio.run(sync())
    assert [note for note in notes if not note.endswith("done")] == [
        "e reset", "e start", "e update", "e finish", "e reset",
    ]  # fmt: skip


def test_a_reset_that_is_refused_at_the_end_is_an_error_and_keep_never_asks() -> None:
    async def sync(client: InferenceEngineClient) -> None:
        await client.begin_sync()
        await client.update_weights(REQUEST)
        await client.finish_sync()

    notes: list[str] = []
    client = InferenceEngineClient([Noted("e", notes, fails="reset")], pause=True)
    with pytest.raises(EnginesFailed, match="reset_prefix_cache: e: cannot reset"):
        asyncio.run(sync(client))
    # It stays paused: what it would answer now could come from the old weights.
    assert "prefixes of the old ones, and are paused" in asyncio.run(client.abort_sync())
    assert "e resume" not in notes
    notes.clear()
    asyncio.run(sync(InferenceEngineClient([Noted("e", notes, fails="reset")], prefix_cache="keep")))
    assert "e reset" not in notes


@pytest.mark.parametrize("step", ["pause", "start"])
def test_engines_that_nothing_was_written_to_are_resumed(step: str) -> None:
    notes: list[str] = []
    client = InferenceEngineClient([Noted("e", notes, fails=step)], pause=True, prefix_cache="keep")
    with pytest.raises(EnginesFailed, match=f"cannot {step}"):
        asyncio.run(client.begin_sync())
    assert notes[-1] == "e resume done"


def test_engines_that_were_written_to_stay_paused_until_a_sync_succeeds() -> None:
    notes: list[str] = []
    engine = Noted("e", notes, fails="update")
    client = InferenceEngineClient([engine], pause=True, prefix_cache="keep")

    async def failing() -> str:
        await client.begin_sync()
        with pytest.raises(EnginesFailed):
            await client.update_weights(REQUEST)
        return await client.abort_sync()

    assert "weights of two versions, or prefixes of the old ones, and are paused" in asyncio.run(failing())
    assert "e resume" not in notes
    engine.fails = ""

    async def healing() -> None:
        await client.begin_sync()
        await client.update_weights(REQUEST)
        await client.finish_sync()

    asyncio.run(healing())
    assert notes[-1] == "e resume done"


def test_dictionaries_without_a_type_are_taken_by_the_older_name() -> None:
    notes: list[str] = []
    engine = Noted("e", notes)
    client = InferenceEngineClient([engine])
    asyncio.run(client.update_named_weights({"names": ["w"], "dtypes": ["BF16"], "shapes": [[2]]}))
    assert engine.requests == [BroadcastWeightUpdateRequest(["w"], ["bfloat16"], [[2]])]


def test_engines_of_one_name_are_told_apart_and_none_is_an_error() -> None:
    notes: list[str] = []
    client = InferenceEngineClient([Noted("e", notes), Noted("e", notes, fails="close")])
    with pytest.raises(EnginesFailed, match=r"e\[1\]: cannot close"):
        asyncio.run(client.aclose())
    with pytest.raises(WindlassInvalid, match="at least one engine"):
        InferenceEngineClient([])
    with pytest.raises(WindlassInvalid, match="'reset' or 'keep'"):
        InferenceEngineClient([Noted("e", notes)], prefix_cache="drop")  # type: ignore[arg-type]


def test_a_document_without_prefix_caching_has_no_cache_to_reset() -> None:
    from windlass.transfer.client import settings

    assert settings({"generator.enable_prefix_caching": False}) == {"prefix_cache": "keep"}
    assert settings({"generator": {"enable_prefix_caching": True}}) == {"prefix_cache": "reset"}
    with pytest.raises(WindlassInvalid, match="enable_prefix_caching is 'no'"):
        settings({"generator": {"enable_prefix_caching": "no"}})
