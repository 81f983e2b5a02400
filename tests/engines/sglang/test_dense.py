"""One SGLang server with a dense model, brought from version to version by every way, and disturbed in between.

The server lives for the whole module; every test leaves it serving the newest version of the policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from policy import Policy, is_held_by
from safetensors.torch import load_file, save_file

import servers
import tiny
from flight import of_sglang
from sidecar import Proxy, Sidecar
from windlass.engines.sglang import SGLangWeightLoader, colocated
from windlass.engines.sglang.custom import PATH
from windlass.errors import (
    WindlassError,
    WindlassInvalid,
    WindlassPeerLost,
    WindlassStale,
    WindlassUnsupported,
)
from windlass.extract.chunk import WeightChunk
from windlass.transfer.broadcast import BroadcastTransferStrategy
from windlass.transfer.request import BroadcastWeightUpdateRequest

pytestmark = pytest.mark.timeout(900)

PROMPT = tiny.PROMPTS[0]
#: So many that a request is in flight for a while.
TOKENS = 900


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[tiny.Kind], Path]) -> Iterator[servers.Sglang]:
    with servers.Sglang(checkpoint("qwen3"), options=["--custom-weight-loader", PATH]) as server:
        yield server


@pytest.fixture(scope="module")
def policy(server: servers.Sglang, home: Path) -> Iterator[Policy]:
    policy = Policy("qwen3", home)
    load(server, policy.step())
    yield policy
    policy.close()


def loader(server: servers.Sglang, **options: Any) -> SGLangWeightLoader:
    return SGLangWeightLoader(server.url, **{"timeout": 120.0, **options})


def load(server: servers.Sglang, order: dict[str, Any] | str, **options: Any) -> Any:
    return asyncio.run(loader(server, **options).load_image(order))


def label_of(server: servers.Sglang) -> str:
    return str(server.get("/model_info")["weight_version"])


def tensors_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy.model.named_parameters()}


def right(server: servers.Sglang, policy: Policy) -> bool:
    """Whether the server answers by the policy's weights."""
    return server.answers(8) == tiny.answers(policy.model, 8)


@pytest.mark.parametrize("way", ["custom", "disk", "tensors"])
def test_versions_in_a_row_are_what_the_server_answers(
    way: str, server: servers.Sglang, policy: Policy
) -> None:
    mine = loader(server, way=way, bucket_bytes=200_000)
    for _ in range(5 if way == "custom" else 2):
        order = policy.step()
        loaded = asyncio.run(mine.load_image(order))
        assert loaded.way == way
        assert loaded.label == label_of(server) == f"windlass:{order['incarnation']:016x}:{policy.version}"
        assert right(server, policy)
    assert not mine.dirty


def test_the_server_loads_the_directories_of_the_disk_bridge(
    server: servers.Sglang, policy: Policy, home: Path, checkpoint: Callable[[tiny.Kind], Path]
) -> None:
    region, images, name = home / "bridge", home / "bridge-images", "weight_v%06d"
    follow = [f"--follow={home}/trainer/{name}", "--marker=STABLE", "--model=bridge", f"--region={region}"]
    receive = [f"--region={region}", f"--dir={images}", f"--as-dir={home}/engine/{name}"]
    with (
        Sidecar(*follow, service="publish") as publisher,
        Sidecar(*receive, f"--model-dir={checkpoint('qwen3')}") as receiver,
    ):
        for version in (1, 2, 3):
            policy.step(sparsely=True)
            written = home / "trainer" / f"weight_v{version:06d}"
            policy.model.save_pretrained(written)
            (written / "STABLE").touch()
            publisher.wait("published")
            assert receiver.wait("synced")["mode"] == ("full" if version == 1 else "delta")
            path = receiver.wait("placed")["path"]
            assert path == str(home / "engine" / written.name)
            shutil.rmtree(written)
            loaded = server.post("/update_weights_from_disk", {"model_path": path, "flush_cache": True})
            assert loaded["success"], loaded
            assert right(server, policy)
    load(server, policy.step())


def test_the_loader_of_the_workers_is_taken_when_the_server_has_it(
    server: servers.Sglang, policy: Policy
) -> None:
    order = policy.step()
    # By the directory alone: whatever version is there.
    loaded = load(server, order["image"])
    assert loaded.way == "custom"
    assert loaded.label == f"windlass:{order['incarnation']:016x}:{order['version']}"
    assert [report.rank for report in loaded.reports] == [0]
    assert loaded.reports[0].engine.startswith("sglang 0.")
    assert loaded.load_ms <= loaded.pause_ms


def test_weights_that_another_driver_loaded_are_not_patched(server: servers.Sglang, policy: Policy) -> None:
    mine, hows = loader(server), []
    for way in ("custom", "custom", "disk", "custom", "custom", "tensors", "custom", "custom"):
        loaded = asyncio.run(mine.load_image(policy.step(sparsely=True), way=way))
        hows += [report.last.how for report in loaded.reports if report.last is not None]
        assert right(server, policy), way
    # The first may be dense, or sparse, by what the tests before it did.
    assert hows[1:] == ["sparse", "dense", "sparse", "dense", "sparse"]
    workers = asyncio.run(mine.digests())
    assert workers[0]["unseen"] == [] and is_held_by(workers, policy.order()["image"])
    assert right(server, policy)


@pytest.mark.parametrize(
    ("pause", "cache", "way"),
    [
        ("retract", "reset", "custom"),
        ("retract", "reset", "disk"),
        ("abort", "reset", "custom"),
        ("in_place", "keep", "custom"),
        ("in_place", "keep", "disk"),
        ("wait", "reset", "disk"),
    ],
)
def test_requests_in_flight_end_as_the_pause_mode_says(
    pause: str, cache: str, way: str, server: servers.Sglang, policy: Policy
) -> None:
    old = label_of(server)
    order = policy.step()
    # What the server is asked first; requests begin just before.
    first = "/update_weights_from_disk" if pause == "wait" else "/pause_generation"
    with contextlib.closing(Proxy(server)) as proxy, ThreadPoolExecutor(1) as pool:
        mine = SGLangWeightLoader(proxy.url, timeout=120.0, pause=pause, cache=cache, way=way)  # type: ignore[arg-type]
        proxy.hold(first, "request")
        loading = pool.submit(lambda: asyncio.run(mine.load_image(order)))
        proxy.wait_held(first)
        flights = [of_sglang(server.url, prompt, TOKENS) for prompt in tiny.PROMPTS[:2]]
        proxy.release()
        new = loading.result(120).label
    for flight in flights:
        answer = flight.result()
        info = answer["meta_info"]
        versions = json.dumps(info["weight_versions"])
        if pause == "abort":
            assert info["finish_reason"]["type"] == "abort"
            assert len(answer["output_ids"]) < TOKENS
            continue
        assert info["finish_reason"]["type"] == "length"
        assert len(answer["output_ids"]) == TOKENS
        assert old in versions
        # One that was waited for has ended before; the others go on with the new weights.
        assert (new in versions) == (pause != "wait")
    if cache == "keep":
        # Prefixes of the old weights are still there; a flush is the caller's.
        server.flush()
    assert right(server, policy)


def refused(server: servers.Sglang, order: dict[str, Any], **options: Any) -> WindlassError:
    mine = loader(server, **options)
    with pytest.raises(WindlassError) as e:
        asyncio.run(mine.load_image(order))
    assert not mine.dirty
    return e.value


@pytest.mark.parametrize("way", ["custom", "disk", "tensors"])
def test_weights_that_do_not_fit_are_refused_before_the_server_is_touched(
    way: str, server: servers.Sglang, policy: Policy, home: Path, tmp_path: Path
) -> None:
    """A missing tensor, another shape, another dtype, a surplus one: told by a checkpoint that differs in just that."""
    before, label = server.answers(8), label_of(server)
    order = policy.step()
    real = Path(server.get("/server_info")["model_path"])
    weights = load_file(real / "model.safetensors")
    changes: dict[str, Any] = {
        "missing_tensor": {**weights, "model.layers.9.mlp.up_proj.weight": torch.zeros(4)},
        "shape_changed": {**weights, "model.norm.weight": torch.zeros(64)},
        "dtype_changed": {**weights, "model.norm.weight": torch.zeros(128, dtype=torch.bfloat16)},
        "extra_tensor": {n: t for n, t in weights.items() if n != "model.norm.weight"},
    }
    for name, tensors in changes.items():
        other = tmp_path / name
        other.mkdir()
        save_file(tensors, other / "model.safetensors")
        (other / "config.json").write_text((real / "config.json").read_text())
        error = refused(server, order, way=way, checkpoint=other, extras="error")
        assert error.name == name, error
        assert "model." in str(error)
        assert error.advice
    assert server.answers(8) == before
    assert label_of(server) == label
    assert not server.get("/server_info")["internal_states"][0].get("paused")
    load(server, order, way=way)
    assert right(server, policy)


def test_an_image_that_is_not_what_was_ordered_is_refused(server: servers.Sglang, policy: Policy) -> None:
    before = server.answers(8)
    order = policy.step()
    assert isinstance(refused(server, {**order, "version": 999}), WindlassStale)
    assert "digest" in str(refused(server, {**order, "digest": "00" * 32}))
    assert "policy" in str(refused(server, {**order, "model_id": "other"}))
    refused(server, {**order, "image": order["image"] + "-gone", "timeout": 1.0})
    assert server.answers(8) == before
    load(server, order)
    assert right(server, policy)


def test_a_worker_that_refuses_leaves_the_server_serving(
    server: servers.Sglang, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's own check is taken away: the worker's is there too."""
    before, label = server.answers(8), label_of(server)
    order = policy.step()
    mine = loader(server, way="custom")
    monkeypatch.setattr("windlass.engines.sglang.loader.check_identity", lambda *_: None)
    with pytest.raises(WindlassStale, match="rank 0"):
        asyncio.run(mine.load_image({**order, "version": 999}))
    assert not mine.dirty
    assert server.answers(8) == before
    assert label_of(server) == label
    assert asyncio.run(mine.load_image(order)).label == label_of(server)
    assert right(server, policy)


def test_surplus_tensors_are_listed_once_and_left_out(
    server: servers.Sglang, home: Path, policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "extra").mkdir()
    other = Policy("qwen3", home / "extra", {"value_head.weight": torch.ones(1, 128)})
    try:
        # Beside another version: a small step more, so that the answers are other ones.
        other.model.load_state_dict(policy.model.state_dict())
        order = other.step(seed=1000)
        assert refused(server, order, extras="error").name == "extra_tensor"
        # A file cannot leave anything out.
        assert refused(server, order, way="disk").name == "extra_tensor"
        mine = loader(server)
        with caplog.at_level(logging.WARNING, logger="windlass"):
            for way in ("custom", "tensors", "custom"):
                loaded = asyncio.run(mine.load_image(order, way=way))
                assert loaded.extras == ["value_head.weight"]
        assert sum("value_head.weight" in record.message for record in caplog.records) == 1
        assert right(server, other)
    finally:
        other.close()
    load(server, policy.order())
    assert right(server, policy)


def test_tensors_by_value_in_one_call_are_a_whole_version(server: servers.Sglang, policy: Policy) -> None:
    order = policy.step()
    mine = loader(server, bucket_bytes=100_000)

    async def pairs() -> AsyncIterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors_of(policy).items():
            yield name, tensor

    asyncio.run(mine.load_weights(pairs()))
    assert right(server, policy)
    before = server.answers(8)
    part = dict(list(tensors_of(policy).items())[:3])
    with pytest.raises(WindlassInvalid) as e:
        asyncio.run(mine.load_weights(part))
    assert e.value.name == "missing_tensor"
    assert server.answers(8) == before
    load(server, order)


def test_a_version_in_parts_is_loaded_under_one_pause(server: servers.Sglang, policy: Policy) -> None:
    policy.step()
    mine = loader(server)
    named = list(tensors_of(policy).items())

    async def run() -> None:
        async with mine.update(weight_version="parts-1"):
            await mine.load_weights(named[:5])
            await mine.load_weights(dict(named[5:]))

    asyncio.run(run())
    assert label_of(server) == "parts-1"
    assert right(server, policy)
    load(server, policy.order())


def test_an_update_broken_off_stays_paused_until_a_whole_version_is_loaded(
    server: servers.Sglang, policy: Policy
) -> None:
    before = server.answers(8)
    order = policy.step()
    mine = loader(server)
    named = list(tensors_of(policy).items())

    async def broken(parts: int) -> None:
        async with mine.update():
            if parts:
                await mine.load_weights(named[:parts])
            raise KeyError("the trainer went away")

    # Before the first part: as if nothing had been.
    with pytest.raises(KeyError):
        asyncio.run(broken(0))
    assert not mine.dirty
    assert server.answers(8) == before
    # After it: paused. A request waits, and is answered by the version that heals.
    with pytest.raises(KeyError):
        asyncio.run(broken(3))
    assert mine.dirty
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.generate, PROMPT, 8)
        with contextlib.suppress(WindlassError):
            asyncio.run(mine.load_image({**order, "version": 999}))
        assert mine.dirty
        assert not waiting.done()
        asyncio.run(mine.load_image(order))
        assert waiting.result(60) == tiny.greedy(policy.model, PROMPT, 8)
    assert not mine.dirty
    assert right(server, policy)


def test_a_version_with_a_part_missing_is_not_served(server: servers.Sglang, policy: Policy) -> None:
    order = policy.step()
    mine = loader(server)

    async def partly() -> None:
        async with mine.update():
            await mine.load_weights(list(tensors_of(policy).items())[:-1])

    with pytest.raises(WindlassInvalid, match="was not given") as e:
        asyncio.run(partly())
    assert e.value.name == "missing_tensor"
    assert mine.dirty
    asyncio.run(mine.load_image(order))
    assert right(server, policy)


def test_a_session_left_open_by_somebody_is_taken_over(server: servers.Sglang, policy: Policy) -> None:
    server.post("/begin_weight_update", {"selector": "target"})
    load(server, policy.step())
    assert right(server, policy)
    with pytest.raises(servers.HttpFailure, match="no weight-update session"):
        server.post("/end_weight_update", {})


class _Announce:
    """What a broadcast's sender needs of the engines: this one only."""

    def __init__(self, loader: SGLangWeightLoader) -> None:
        self._loader = loader

    async def init_weight_transfer(self, sync_info: Any) -> None:
        await self._loader.join_group(sync_info, rank_offset=1, override=True)

    async def update_weights(self, request: Any) -> None:
        await self._loader.receive_broadcast(request)


def test_a_broadcast_over_gloo_is_received_by_the_server_itself(
    server: servers.Sglang, policy: Policy
) -> None:
    policy.step()
    mine = loader(server)
    named = list(tensors_of(policy).items())
    strategy = BroadcastTransferStrategy(
        {
            "engines": [{"tp": 1}],
            "weight_sync_backend": "gloo",
            "master_addr": "127.0.0.1",
            "join_timeout": 60,
        }
    )

    async def run() -> None:
        info = strategy.create_sync_info()
        client = _Announce(mine)
        sender, _ = await asyncio.gather(
            asyncio.to_thread(strategy.create_sender, info), client.init_weight_transfer(info)
        )
        with sender:
            chunks = [WeightChunk.of(named[:7]), WeightChunk.of(named[7:])]
            async with mine.update(weight_version="broadcast-1"):
                await sender.send_chunks(chunks, client)
            # What does not fit is refused before the server listens.
            wrong = BroadcastWeightUpdateRequest(["model.norm.weight"], ["float32"], [[3]])
            with pytest.raises(WindlassInvalid, match=r"shape \[3\]"):
                async with mine.update(whole=False):
                    await mine.receive_broadcast(wrong)
            assert not mine.dirty
        await mine.leave_group(info.group_name)

    asyncio.run(run())
    assert label_of(server) == "broadcast-1"
    assert right(server, policy)
    load(server, policy.order())


def test_an_engine_sleeps_and_is_woken_with_new_weights(server: servers.Sglang, policy: Policy) -> None:
    """As far as a CPU goes: there is nothing to release, but every call and its order is real."""
    order = policy.step()
    mine = loader(server)
    told: list[str] = []

    async def loads(it: SGLangWeightLoader) -> Any:
        told.append("load")
        return await it.load_image(order)

    async def run() -> None:
        with pytest.raises(WindlassUnsupported, match="enable-memory-saver"):
            await colocated.sleep(mine)
        with pytest.raises(WindlassInvalid, match="does not sleep"):
            await colocated.wake(mine, loads)
        await colocated.sleep(mine, strict=False)
        assert mine.dirty
        waiting = asyncio.create_task(asyncio.to_thread(server.generate, PROMPT, 8))
        await colocated.wake(mine, loads, lambda: told.append("trainer released"))
        assert await waiting == tiny.greedy(policy.model, PROMPT, 8)

    asyncio.run(run())
    assert told == ["load", "trainer released"]
    assert not mine.dirty
    assert right(server, policy)


def test_the_snippet_of_the_guide_loads_what_was_published(
    server: servers.Sglang, policy: Policy, home: Path
) -> None:
    guide = (servers.ROOT / "docs" / "sglang.md").read_text()
    snippet = guide.split("## From Python")[1].split("```python")[1].split("```")[0]
    policy.step()
    changes = {
        "http://127.0.0.1:30000": server.url,
        "/dev/shm/images": str(home / "guide"),
        "http://trainer:18100": str(policy.manager.endpoint),
        "/run/trainer/token": str(policy.manager.token_file),
    }
    for old, new in changes.items():
        assert old in snippet
        snippet = snippet.replace(old, new)
    said = run_snippet(snippet)
    assert f":{policy.version} paused for" in said
    assert right(server, policy)


def run_snippet(snippet: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(snippet, "docs/sglang.md", "exec"), {})
    return out.getvalue()


HOLDER = """
    import asyncio, sys, time
    from windlass.engines.sglang import SGLangWeightLoader

    async def hold():
        loader = SGLangWeightLoader(sys.argv[1], checkpoint=sys.argv[2])
        async with loader.update():
            print("paused", flush=True)
            await asyncio.sleep(600)

    asyncio.run(hold())
"""


def test_a_loader_killed_before_the_first_write_leaves_the_server_serving(
    server: servers.Sglang, policy: Policy, checkpoint: Callable[[tiny.Kind], Path]
) -> None:
    asyncio.run(loader(server).load_image(policy.step()))
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), server.url, str(checkpoint("qwen3"))]
    env = {**os.environ, "PYTHONPATH": str(servers.PACKAGE)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "paused"
        holder.kill()
    # Would wait for ever on a server that stays paused.
    assert right(server, policy)
    asyncio.run(loader(server).load_image(policy.step()))
    assert right(server, policy)


def test_a_server_that_was_killed_and_restarted_is_loaded_like_any_other(
    server: servers.Sglang, policy: Policy
) -> None:
    """The last test of this module, because it takes a start."""
    mine = loader(server)
    asyncio.run(mine.load_image(policy.step()))
    server.kill()
    with pytest.raises(WindlassPeerLost, match=server.url):
        asyncio.run(mine.load_image(policy.order()))
    server.start()
    server.wait_ready()
    assert label_of(server) == "default"
    assert not right(server, policy)
    asyncio.run(mine.load_image(policy.order()))
    assert label_of(server).endswith(f":{policy.version}")
    assert right(server, policy)
