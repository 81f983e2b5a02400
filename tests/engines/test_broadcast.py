"""Broadcast over gloo and handles to memory into real servers, by the facade, the client and the HTTP adapters as a trainer uses them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import servers
import tiny
from windlass import WeightSyncManager, strategy_from_config
from windlass.engines.remote import SglangEngine, VllmEngine
from windlass.engines.sglang.custom import PATH
from windlass.extract import ModuleWeightExtractor
from windlass.transfer.client import EnginesFailed, InferenceEngineClient
from windlass.transfer.sync_info import EngineShape

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
BACKEND = ("--weight-transfer-config", '{"backend": "windlass"}')


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def config(tp: int = 1, engines: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "strategy": "broadcast",
        "engines": [{"tp": tp}] * engines,
        "weight_sync_backend": "gloo",
        "master_addr": "127.0.0.1",
        "timeout": 60.0,
        "join_timeout": 120.0,
        **more,
    }


class Training:
    """A trainer of one rank with its facade."""

    def __init__(self, settings: dict[str, Any], engines: list[Any], **how: Any) -> None:
        self.client = InferenceEngineClient(engines, timeout=120.0, **how)
        # Modules travel whole, in chunks of about a hundred kilobytes.
        extractor = ModuleWeightExtractor(group_by_module=True, threshold_gb=1e-4)
        self.manager = WeightSyncManager(strategy_from_config(settings), extractor, self.client)
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.manager.initialize())

    def sync(self, model: Any) -> int:
        return self.loop.run_until_complete(self.manager.sync_weights(model, "float32"))

    def close(self) -> None:
        try:
            self.loop.run_until_complete(self.client.aclose())
        finally:
            self.manager.close()
            self.loop.close()


@contextmanager
def training(settings: dict[str, Any], engines: list[Any], **how: Any) -> Iterator[Training]:
    made = Training(settings, engines, **how)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def traffic(server: servers.Server) -> Iterator[list[Any]]:
    """Requests that never stop; each ends with an answer of the right length or an error that is kept."""
    stop, seen = threading.Event(), []

    def ask() -> None:
        while not stop.is_set():
            try:
                seen.append(len(server.generate(tiny.PROMPTS[0], 32)))
            except Exception as e:
                seen.append(e)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.timeout(600)
def test_sglang_answers_from_every_version_that_was_broadcast(
    checkpoint: Callable[[tiny.Kind], Path],
) -> None:
    trainer = tiny.model("qwen3")
    with servers.Sglang(checkpoint("qwen3"), env=LOOPBACK) as server:
        before = server.answers()
        with training(config(), [SglangEngine(server.url)], pause=True) as sync:
            for version in range(1, 6):
                tiny.stir(trainer, version)
                assert sync.sync(trainer) == version
                assert server.answers() == tiny.answers(trainer) != before
                assert server.get("/model_info")["weight_version"] == str(version)
            with traffic(server) as seen:
                wait_for(lambda: len(seen) > 1)
                tiny.stir(trainer, 6)
                sync.sync(trainer)
                count = len(seen)
                wait_for(lambda: len(seen) > count + 1)
            assert set(seen) == {32}
            assert server.answers() == tiny.answers(trainer)
        # A trainer that comes back finds the group of the one before gone, and one that crashed overrides it.
        engine = SglangEngine(server.url, override_existing_update_group=True)
        with training(config(), [engine], pause=True) as sync:
            tiny.stir(trainer, 7)
            sync.sync(trainer)
            assert server.answers() == tiny.answers(trainer)
            # A dead engine is named, within the deadline.
            server.kill()
            begun = time.monotonic()
            with pytest.raises(EnginesFailed, match=server.url):
                sync.sync(trainer)
            assert time.monotonic() - begun < 60
            with pytest.raises(EnginesFailed):
                sync.loop.run_until_complete(sync.client.aclose())
            sync.client.engines[0]._group = None  # type: ignore[attr-defined]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["qwen3moe"])
def test_two_ranks_of_sglang_each_take_their_part(
    checkpoint: Callable[[tiny.Kind], Path], kind: tiny.Kind
) -> None:
    trainer = tiny.model(kind)
    with servers.Sglang(checkpoint(kind), tp=2, env=LOOPBACK) as server:
        engine = SglangEngine(server.url, shape=EngineShape(tp=2))
        with training(config(tp=2), [engine], pause=True) as sync:
            for version in (1, 2):
                tiny.stir(trainer, version)
                sync.sync(trainer)
                assert server.answers() == tiny.answers(trainer)


@pytest.mark.timeout(600)
def test_vllm_answers_from_every_version_that_was_broadcast_or_shared(
    checkpoint: Callable[[tiny.Kind], Path],
) -> None:
    trainer = tiny.model("qwen3")
    settings = config()
    with servers.Vllm(checkpoint("qwen3"), options=BACKEND, env=LOOPBACK) as server:
        before = server.answers()
        with training(settings, [VllmEngine(server.url, strategy=settings)], pause=True) as sync:
            for version in range(1, 6):
                tiny.stir(trainer, version)
                assert sync.sync(trainer) == version
                assert server.answers() == tiny.answers(trainer) != before
                assert server.get("/weight_info") == {"weight_version": str(version)}
            with traffic(server) as seen:
                wait_for(lambda: len(seen) > 1)
                tiny.stir(trainer, 6)
                sync.sync(trainer)
                count = len(seen)
                wait_for(lambda: len(seen) > count + 1)
            assert set(seen) == {32}
            assert server.answers() == tiny.answers(trainer)
        # The same server takes weights from shared memory next, by whatever strategy comes.
        for number, name in enumerate(("packed_cuda_ipc", "cuda_ipc"), 7):
            by_memory = {"strategy": name, "weight_transfer_threshold_cuda_ipc_GB": 1e-4, "timeout": 60.0}
            with training(by_memory, [VllmEngine(server.url, strategy=by_memory)], pause=True) as sync:
                for version in (1, 2):
                    tiny.stir(trainer, 10 * number + version)
                    assert sync.sync(trainer) == version
                    assert server.answers() == tiny.answers(trainer)


@pytest.mark.timeout(600)
def test_two_ranks_of_vllm_each_take_their_part(checkpoint: Callable[[tiny.Kind], Path]) -> None:
    trainer = tiny.model("qwen3")
    settings = config(tp=2)
    with servers.Vllm(checkpoint("qwen3"), tp=2, options=BACKEND, env=LOOPBACK) as server:
        engine = VllmEngine(server.url, strategy=settings, shape=EngineShape(tp=2))
        with training(settings, [engine], pause=True) as sync:
            for version in (1, 2):
                tiny.stir(trainer, version)
                sync.sync(trainer)
                assert server.answers() == tiny.answers(trainer)


@pytest.mark.timeout(600)
def test_sglang_opens_the_trainers_memory_by_handles(checkpoint: Callable[[tiny.Kind], Path]) -> None:
    trainer = tiny.model("qwen3")
    options = ["--custom-weight-loader", PATH]
    with servers.Sglang(checkpoint("qwen3"), tp=2, options=options) as server:
        before = server.answers()
        for number, name in enumerate(("packed_cuda_ipc", "cuda_ipc"), 1):
            settings = {"strategy": name, "weight_transfer_threshold_cuda_ipc_GB": 1e-4, "timeout": 60.0}
            engine = SglangEngine(server.url, strategy=settings, shape=EngineShape(tp=2))
            with training(settings, [engine], pause=True) as sync:
                # The first is learnt from, and those after it are written directly.
                for version in (1, 2, 3):
                    tiny.stir(trainer, 10 * number + version)
                    assert sync.sync(trainer) == version
                    assert server.answers() == tiny.answers(trainer) != before
                    assert server.get("/model_info")["weight_version"] == str(version)
                assert mapped(server)
                # Both workers say how: nothing but copies.
                said = [report.last.how for report in engine._handles.reports]  # type: ignore[union-attr]
                assert said == ["dense", "dense"]
                with traffic(server) as seen:
                    wait_for(lambda: len(seen) > 1)
                    tiny.stir(trainer, 10 * number + 4)
                    sync.sync(trainer)
                    count = len(seen)
                    wait_for(lambda seen=seen, count=count: len(seen) > count + 1)
                assert set(seen) == {32}
                assert server.answers() == tiny.answers(trainer)
                # A sync without some of the weights is an error, and the next whole one heals.
                with pytest.raises(EnginesFailed, match="did not come"):
                    sync.sync(trainer.model.layers[0])
                sync.sync(trainer)
                assert server.answers() == tiny.answers(trainer)
            # Closed: nobody has the arena open any more.
            assert not mapped(server)
            assert server.answers() == tiny.answers(trainer)


@pytest.mark.timeout(900)
def test_of_two_servers_the_one_that_died_is_named_and_the_other_goes_on(
    checkpoint: Callable[[tiny.Kind], Path],
) -> None:
    trainer = tiny.model("qwen3")
    settings = {"strategy": "packed_cuda_ipc", "timeout": 60.0}
    doomed = servers.Vllm(checkpoint("qwen3"), options=BACKEND, deadline=500)
    other = servers.Sglang(checkpoint("qwen3"), options=["--custom-weight-loader", PATH], deadline=500)
    doomed.start()
    with other, doomed:
        engines = [
            VllmEngine(doomed.url, strategy=settings),
            SglangEngine(other.url, strategy=settings),
        ]
        with training(settings, engines, pause=True) as sync:
            tiny.stir(trainer, 1)
            assert sync.sync(trainer) == 1
            assert doomed.answers() == other.answers() == tiny.answers(trainer)
            doomed.kill()
            tiny.stir(trainer, 2)
            with pytest.raises(EnginesFailed, match="1 of 2 engines failed") as failed:
                sync.sync(trainer)
            assert list(failed.value.failures) == [doomed.url]
            # Nobody can leave at a server that is gone.
            sync.client.engines = sync.client.engines[1:]
            sync.client._names = sync.client._names[1:]
        # The next client has the one that is left.
        with training(settings, engines[1:], pause=True) as sync:
            sync.sync(trainer)
            assert other.answers() == tiny.answers(trainer)


def mapped(server: servers.Sglang) -> bool:
    """Whether a process of the server has memory of a trainer."""
    found = False
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(maps.parent.name)) == server.pid:
                found = found or "windlass-arena-" in maps.read_text()
    return found
