"""The transaction of the endpoint plugin against engines that fail: what is retried, fenced, resumed and left alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from windlass.engines.vllm.endpoint import WindlassEndpoint
from windlass.errors import WindlassError, WindlassInvalid, WindlassStale, WindlassTimeout

ORDER = {"image": "/dev/shm/nowhere", "model_id": "policy", "incarnation": 1, "version": 2}
NEW = {"model_id": "policy", "incarnation": 1, "version": 2}
OLD = {"model_id": "policy", "incarnation": 1, "version": 1}
GOOD = {"rank": 0, "state": "clean", "live": NEW, "error": None}
FAILURE = {"kind": "exhausted", "text": "no memory", "advice": ""}
DIRTY = {"rank": 0, "state": "dirty", "live": None, "error": FAILURE}
REFUSED = {"rank": 0, "state": "clean", "live": OLD, "error": {**FAILURE, "kind": "invalid"}}


class Scripted:
    """An engine whose workers answer as the script says."""

    def __init__(self, *loads: Any, cache: bool = True, paused: bool = False, core: bool = False) -> None:
        self.loads = list(loads)
        self.core = core
        self.cache = cache
        self.is_paused = paused
        self.calls: list[str] = []
        self.pausing = asyncio.Event()
        self.pausing.set()

    async def workers(self, method: str, *args: Any) -> list[dict[str, Any]]:
        if method != "windlass_load":
            told = {"rank": 0, "state": "clean", "live": OLD, "error": None}
            return [{**told, "staging": False, "unknown_layout": False}]
        self.calls.append(f"load {args[0]['how']}")
        given = self.loads.pop(0)
        if isinstance(given, Exception):
            raise given
        return [dict(report) for report in given]

    async def can_load_between_steps(self) -> bool:
        return self.core

    async def load_between_steps(
        self, order: dict[str, Any], reset: bool, label: str, lift: bool
    ) -> dict[str, Any]:
        self.calls.append(f"{order['how']} {label} reset {reset} lift {lift}")
        given = self.loads.pop(0)
        if isinstance(given, Exception):
            raise given
        return dict(given)

    async def pause(self, mode: str) -> None:
        await self.pausing.wait()
        self.is_paused = True
        self.calls.append(f"pause {mode}")

    async def resume(self) -> None:
        self.is_paused = False
        self.calls.append("resume")

    def dtype(self) -> str:
        return "bfloat16"

    async def paused(self) -> bool:
        return self.is_paused

    async def reset_cache(self, mode: str) -> bool:
        self.calls.append("reset")
        return self.cache

    async def label(self, text: str) -> None:
        self.calls.append(text)

    async def labelled(self) -> str | None:
        return None


def endpoint(engine: Scripted) -> WindlassEndpoint:
    made = WindlassEndpoint()
    made._engine = engine  # type: ignore[assignment]
    return made


def load(made: WindlassEndpoint, **pause: Any) -> Any:
    return made._load({"order": ORDER, "pause": pause})


LABEL = "windlass:0000000000000001:2"


def test_a_load_is_pause_load_cache_label_and_resume_in_this_order() -> None:
    async def scene() -> None:
        engine = Scripted([GOOD])
        await load(endpoint(engine), mode="wait")
        assert engine.calls == ["pause wait", "load auto", "reset", LABEL, "resume"]

    asyncio.run(scene())


def test_a_worker_that_fails_halfway_is_given_the_order_once_more() -> None:
    async def scene() -> None:
        engine = Scripted([DIRTY, GOOD], [GOOD, GOOD])
        await load(endpoint(engine))
        assert engine.calls == ["pause keep", "load auto", "load dense", "reset", LABEL, "resume"]

    asyncio.run(scene())


def test_an_engine_that_fails_twice_stays_fenced_until_a_load_succeeds() -> None:
    async def scene() -> None:
        engine = Scripted([DIRTY], [DIRTY], [REFUSED], [REFUSED], [GOOD])
        made = endpoint(engine)
        for _ in range(2):
            with pytest.raises(WindlassStale, match="generation stays paused: no memory") as caught:
                await load(made)
            assert caught.value.name == "fenced"
            assert engine.is_paused
        # Refused by an engine that is fenced: it stays so.
        assert "resume" not in engine.calls
        engine.loads = [[GOOD]]
        await load(made)
        assert not engine.is_paused

    asyncio.run(scene())


def test_an_order_that_all_workers_refuse_leaves_the_engine_serving() -> None:
    async def scene() -> None:
        engine = Scripted([REFUSED, REFUSED])
        with pytest.raises(WindlassInvalid, match="no memory"):
            await load(endpoint(engine))
        assert engine.calls == ["pause keep", "load auto", "resume"]

    asyncio.run(scene())


def test_workers_of_two_minds_are_brought_together() -> None:
    async def scene() -> None:
        engine = Scripted([GOOD, REFUSED], [GOOD, GOOD])
        await load(endpoint(engine))
        assert engine.calls[:3] == ["pause keep", "load auto", "load dense"]

    asyncio.run(scene())


def test_an_answer_that_does_not_come_is_not_taken_for_untouched_weights() -> None:
    async def scene() -> None:
        engine = Scripted(RuntimeError("a worker died"), RuntimeError("a worker died"))
        with pytest.raises(WindlassError, match="a worker died"):
            await load(endpoint(engine))
        assert "resume" not in engine.calls

    asyncio.run(scene())


def test_a_cache_that_is_not_reset_fences_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    import windlass.engines.vllm.endpoint as module

    monkeypatch.setattr(module, "CACHE_S", 0.1)

    async def scene() -> None:
        engine = Scripted([GOOD], [GOOD], cache=False)
        made = endpoint(engine)
        with pytest.raises(WindlassStale, match="prefix cache"):
            await load(made)
        assert "resume" not in engine.calls
        await load(made, cache="keep")
        assert engine.calls[-1] == "resume"

    asyncio.run(scene())


def test_a_pause_of_somebody_else_outlives_a_load() -> None:
    async def scene() -> None:
        engine = Scripted([GOOD], paused=True)
        await load(endpoint(engine))
        assert "resume" not in engine.calls

    asyncio.run(scene())


def test_a_lease_that_ends_before_the_pause_resumes_the_old_version() -> None:
    async def scene() -> None:
        engine = Scripted([GOOD])
        engine.pausing.clear()
        made = endpoint(engine)
        with pytest.raises(WindlassTimeout, match="lease"):
            await load(made, lease=0.05)
        assert engine.calls == ["resume"]
        assert made._transaction is None

    asyncio.run(scene())


def test_the_same_order_joins_and_another_one_is_refused() -> None:
    async def scene() -> None:
        engine = Scripted([GOOD])
        engine.pausing.clear()
        made = endpoint(engine)
        first, second = asyncio.create_task(load(made)), asyncio.create_task(load(made))
        await asyncio.sleep(0)
        with pytest.raises(WindlassStale, match="version 2 is being loaded"):
            await made._load({"order": {**ORDER, "version": 3}})
        # A client that goes away takes nothing with it.
        first.cancel()
        engine.pausing.set()
        assert (await second)["weight_version"] == LABEL
        assert engine.calls.count("load auto") == 1

    asyncio.run(scene())


# By one call of the engine core.


def answer(*reports: dict[str, Any], paused: bool = False, error: str | None = None) -> dict[str, Any]:
    times = {"pause_ms": 5.0, "drain_ms": 1.0, "load_ms": 4.0}
    return {"reports": [dict(r) for r in reports], "paused": paused, "error": error, **times}


def called(how: str, lift: bool = False) -> str:
    return f"{how} {LABEL} reset True lift {lift}"


def test_the_core_is_asked_again_until_workers_have_staged() -> None:
    async def scene() -> None:
        engine = Scripted({"staging": True}, {"staging": True}, answer(GOOD), core=True)
        told = await load(endpoint(engine))
        assert engine.calls == [called("auto")] * 3, "nothing is paused or resumed by calls of their own"
        assert (told["weight_version"], told["pause_ms"], told["drain_ms"]) == (LABEL, 5.0, 1.0)

    asyncio.run(scene())


def test_an_order_that_the_core_did_not_begin_leaves_the_engine_serving() -> None:
    async def scene() -> None:
        engine = Scripted(answer(REFUSED), answer(GOOD), core=True)
        made = endpoint(engine)
        with pytest.raises(WindlassInvalid, match="no memory"):
            await load(made)
        assert not (await made._status({}))["fenced"]
        await load(made)
        assert engine.calls == [called("auto")] * 2

    asyncio.run(scene())


def test_a_core_whose_workers_are_not_whole_is_told_once_more_and_then_fenced() -> None:
    async def scene() -> None:
        dirty = answer(DIRTY, paused=True)
        engine = Scripted(dirty, dirty, RuntimeError("the core died"), RuntimeError("it did"), core=True)
        made = endpoint(engine)
        for text in ("no memory", "it did"):
            with pytest.raises(WindlassStale, match=f"generation stays paused: .*{text}") as caught:
                await load(made)
            assert caught.value.name == "fenced"
        engine.loads = [answer(GOOD)]
        await load(made)
        hows = [called("auto"), called("dense")]
        assert engine.calls == [*hows, *(called(how, lift=True) for how in ("auto", "dense", "auto"))]
        assert not (await made._status({}))["fenced"]

    asyncio.run(scene())


def test_a_delta_that_failed_halfway_is_not_repeated_from_an_image_that_lacks_it() -> None:
    async def scene() -> None:
        engine = Scripted(answer(DIRTY, paused=True), core=True)
        delta = {"base": 1, "files": [["/dev/shm/1.delta", 64]]}
        with pytest.raises(WindlassStale, match="generation stays paused: no memory"):
            await endpoint(engine)._load({"order": {**ORDER, "delta": delta}, "pause": {}})
        assert engine.calls == [called("auto")]

    asyncio.run(scene())
