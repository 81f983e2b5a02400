"""Engines by HTTP: which calls are made, with what, and what becomes of failures."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_engines import OK, SGLANG, VLLM, VLLM_LEGACY, Fake, serving, slowly
from windlass import (
    WindlassDenied,
    WindlassInvalid,
    WindlassPeerLost,
    WindlassStale,
    WindlassTimeout,
    WindlassUnsupported,
)
from windlass.engines.remote import RemoteWeightLoader, SglangEngine, VllmEngine, remote_engine
from windlass.http import Answer
from windlass.identity import Identity
from windlass.transfer.client import EnginesFailed, InferenceEngineClient
from windlass.transfer.request import (
    BroadcastWeightUpdateRequest,
    LoraDiskWeightUpdateRequest,
    PullWeightUpdateRequest,
)
from windlass.transfer.sync_info import EmptyWeightSyncInfo, EngineShape, TorchDistributedWeightSyncInfo

INFO = TorchDistributedWeightSyncInfo("10.0.0.1", 29500, 4, backend="gloo")
REQUEST = BroadcastWeightUpdateRequest(["a", "b"], ["bfloat16", "float32"], [[2, 3], [4]])
GROUP = {
    "master_address": "10.0.0.1",
    "master_port": 29500,
    "rank_offset": 3,
    "world_size": 4,
    "group_name": "weight_update_group",
    "backend": "gloo",
}


async def whole(client: InferenceEngineClient, info: Any, request: Any) -> None:
    await client.init_weight_transfer(info)
    await client.begin_sync()
    await client.update_weights(request)
    await client.finish_sync("7")
    await client.aclose()


def one(engine: Any, **how: Any) -> InferenceEngineClient:
    # A first engine of two ranks that is not told anything, so that the offset is 3.
    class Before(VllmEngine):
        async def _post(self, path: str, body: Any = None, **how: Any) -> Answer:
            return Answer(200, b"{}")

        async def pause(self) -> None: ...

        resume = reset_prefix_cache = pause

    return InferenceEngineClient([Before("http://h", shape=EngineShape(tp=2)), engine], **how)


def test_a_native_vllm_is_told_by_its_own_routes(tmp_path: Path) -> None:
    with serving(VLLM) as fake:
        engine = VllmEngine(fake.url, strategy={"strategy": "broadcast"}, token="secret", dir=tmp_path)
        asyncio.run(whole(one(engine, pause=True), INFO, REQUEST))
    assert fake.paths[0] == "/init_weight_transfer_engine"
    assert fake.asked[0][1] == {
        "init_info": {"sync_info": INFO.to_dict(), "strategy": {"strategy": "broadcast"}, "rank_offset": 3}
    }
    # The reset begins before the others, and ends when it ends.
    assert sorted(fake.paths[1:3]) == ["/pause", "/reset_prefix_cache"]
    assert fake.paths[3:] == [
        "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume",
        "/shutdown_weight_transfer_engine",
    ]  # fmt: skip
    assert dict(fake.asked)["/update_weights"] == {"update_info": {"request": REQUEST.to_dict()}}
    assert dict(fake.asked)["/finish_weight_update"] == {"weight_version": "7"}
    assert "mode=keep&clear_cache=true" in fake.queries
    assert all(headers["authorization"] == "Bearer secret" for headers in fake.headers)


def test_a_legacy_vllm_gets_a_dictionary_for_each_parameter() -> None:
    with serving(VLLM_LEGACY) as fake:
        engine = VllmEngine(fake.url, override_existing_update_group=True)
        asyncio.run(whole(one(engine, prefix_cache="keep"), INFO, REQUEST))
    assert fake.paths == [
        "/init_weight_transfer_engine",
        "/init_weight_update_communicator",
        "/update_weights",
        "/update_weights",
        "/destroy_weights_update_group",
    ]
    assert fake.asked[1][1] == {**GROUP, "override_existing": True}
    assert [body for path, body in fake.asked if path == "/update_weights"] == REQUEST.to_legacy_dicts()


def test_sglang_is_told_by_its_own_routes_inside_a_session(tmp_path: Path) -> None:
    with serving(SGLANG) as fake:
        asyncio.run(whole(one(SglangEngine(fake.url, dir=tmp_path), pause=True), INFO, REQUEST))
    assert fake.asked[0] == ("/init_weights_update_group", GROUP)
    # The cache is reset while the update begins.
    paths = [path for path in fake.paths[1:] if path != "/flush_cache"]
    assert fake.paths.count("/flush_cache") == 1
    assert paths == [
        "/pause_generation", "/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update", "/update_weight_version",
        "/continue_generation", "/destroy_weights_update_group",
    ]  # fmt: skip
    assert dict(fake.asked)["/update_weights_from_distributed"] == {
        "names": ["a", "b"],
        "dtypes": ["bfloat16", "float32"],
        "shapes": [[2, 3], [4]],
        "group_name": "weight_update_group",
        "flush_cache": False,
    }


def test_an_older_sglang_has_no_session_and_an_override_leaves_the_old_group_first() -> None:
    routes = {path: answer for path, answer in SGLANG.items() if "_weight_update" not in path}
    routes["POST /destroy_weights_update_group"] = (400, {"success": False, "message": "does not exist"})
    with serving(routes) as fake:
        engine = SglangEngine(fake.url, override_existing_update_group=True)
        client = InferenceEngineClient([engine], prefix_cache="keep")

        async def run() -> None:
            await client.init_weight_transfer(INFO)
            for _ in range(2):
                await client.begin_sync()
                await client.update_weights(REQUEST)
                await client.finish_sync()

        asyncio.run(run())
    assert fake.paths == [
        "/destroy_weights_update_group", "/init_weights_update_group",
        "/begin_weight_update", "/update_weights_from_distributed", "/update_weights_from_distributed",
    ]  # fmt: skip


def test_a_session_that_a_failed_sync_left_open_is_used_by_the_next(tmp_path: Path) -> None:
    answers = iter([(500, {"message": "lost"}), OK])
    with serving({**SGLANG, "POST /update_weights_from_distributed": lambda body: next(answers)}) as fake:
        engine = SglangEngine(fake.url, dir=tmp_path)
        client = InferenceEngineClient([engine], prefix_cache="keep", pause=True)

        async def run() -> None:
            await client.init_weight_transfer(INFO)
            await client.begin_sync()
            with pytest.raises(EnginesFailed, match="lost"):
                await client.update_weights(REQUEST)
            assert "paused" in await client.abort_sync()
            # Nor by hand, nor by another program that has written nothing.
            with pytest.raises(WindlassStale, match="stays paused"):
                await engine.resume()
            with pytest.raises(WindlassStale, match="stays paused"):
                await SglangEngine(fake.url, dir=tmp_path).resume()
            assert "/continue_generation" not in fake.paths
            await client.begin_sync()
            await client.update_weights(REQUEST)
            await client.finish_sync()

        asyncio.run(run())
    assert fake.paths.count("/begin_weight_update") == fake.paths.count("/end_weight_update") == 1
    assert fake.paths[-1] == "/continue_generation"


def test_adapters_are_loaded_by_the_servers_own_routes() -> None:
    with serving(VLLM) as vllm, serving(SGLANG) as sglang:
        client = InferenceEngineClient(
            [
                VllmEngine(
                    vllm.url, strategy={"strategy": "lora", "lora_sync_path": "/mnt"}, lora_name="actor"
                ),
                SglangEngine(sglang.url, lora_name="actor"),
            ],
            prefix_cache="keep",
        )

        async def run() -> None:
            await client.init_weight_transfer(EmptyWeightSyncInfo())
            for version in (1, 2):
                await client.begin_sync()
                await client.update_weights(LoraDiskWeightUpdateRequest(f"/mnt/actor-{version}"))
                await client.finish_sync()
            await client.aclose()

        asyncio.run(run())
    # No transfer backend is needed for adapters.
    assert vllm.paths == ["/v1/load_lora_adapter"] * 2
    loads = [body for _, body in vllm.asked]
    assert loads[-1] == {"lora_name": "actor", "lora_path": "/mnt/actor-2", "load_inplace": True}
    assert sglang.paths == ["/load_lora_adapter", "/unload_lora_adapter", "/load_lora_adapter"]


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ((400, {"success": False, "message": "no such group"}), WindlassInvalid, "400: .*no such group"),
        ((401, {"error": "Unauthorized"}), WindlassDenied, "401: .*Unauthorized"),
        ((500, {"error": {"message": "boom"}}), WindlassPeerLost, "500: .*boom"),
    ],
)
def test_an_answer_other_than_yes_is_an_error_of_its_kind(answer: Any, kind: Any, words: str) -> None:
    with serving({**SGLANG, "POST /update_weights_from_distributed": answer}) as fake:
        engine = SglangEngine(fake.url)
        with pytest.raises(kind, match=words) as refused:
            asyncio.run(engine.update_weights(REQUEST))
    assert fake.url in str(refused.value)


def test_a_call_that_may_be_repeated_is_and_one_that_may_not_is_not(tmp_path: Path) -> None:
    answers = iter([(503, {}), None, OK])
    with serving({"POST /resume": lambda body: next(answers)}) as fake:
        asyncio.run(VllmEngine(fake.url, dir=tmp_path).resume())
        assert len(fake.asked) == 3
    with serving({"POST /update_weights": lambda body: None}) as fake:
        with pytest.raises(WindlassPeerLost, match="update_weights"):
            asyncio.run(VllmEngine(fake.url).update_weights(REQUEST))
        assert len(fake.asked) == 1
    with serving({"POST /shutdown_weight_transfer_engine": lambda body: None}) as fake:
        with pytest.raises(WindlassPeerLost):
            asyncio.run(VllmEngine(fake.url, attempts=2).close())
        assert len(fake.asked) == 2


def test_a_server_that_is_slow_or_gone_is_an_error_within_the_deadline(tmp_path: Path) -> None:
    with serving({"POST /update_weights": slowly(5, OK)}) as fake:
        begun = time.monotonic()
        with pytest.raises(WindlassTimeout, match=r"no answer within 0.3 s"):
            asyncio.run(VllmEngine(fake.url, timeout=0.3).update_weights(REQUEST))
        assert time.monotonic() - begun < 3
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(WindlassPeerLost, match=url):
            asyncio.run(VllmEngine(url, dir=tmp_path).resume())


def test_one_dead_server_of_three_is_named() -> None:
    with serving(SGLANG) as one_, serving(SGLANG) as two:
        dead = Fake(SGLANG)
        engines = [SglangEngine(fake.url) for fake in (one_, dead, two)]
        client = InferenceEngineClient(engines, prefix_cache="keep")
        asyncio.run(client.init_weight_transfer(INFO))
        dead.close()
        with pytest.raises(EnginesFailed, match="1 of 3 engines failed") as failed:
            asyncio.run(client.update_weights(REQUEST))
    assert list(failed.value.failures) == [dead.url]


def test_a_cache_that_was_not_reset_is_an_error(tmp_path: Path) -> None:
    refused = {
        "POST /reset_prefix_cache": (200, {"success": False}),
        "POST /flush_cache": (400, "requests are running"),
    }
    with serving(refused) as fake:
        with pytest.raises(WindlassStale, match="was not flushed"):
            asyncio.run(VllmEngine(fake.url, dir=tmp_path).reset_prefix_cache())
        with pytest.raises(WindlassStale, match="requests are running"):
            asyncio.run(SglangEngine(fake.url, dir=tmp_path).reset_prefix_cache())
        assert fake.paths.count("/flush_cache") > 1


def test_what_a_server_cannot_do_is_refused_with_what_can() -> None:
    pull = PullWeightUpdateRequest(Identity("m", 1, 1), "http://127.0.0.1:1")
    with pytest.raises(WindlassUnsupported, match="takes no PullWeightUpdateRequest"):
        asyncio.run(SglangEngine("http://h").update_weights(pull))
    from windlass.transfer.sync_info import AgentWeightSyncInfo

    agent = AgentWeightSyncInfo(["http://127.0.0.1:1"], "t" * 64, "m")
    with pytest.raises(WindlassUnsupported, match="joins process groups"):
        asyncio.run(SglangEngine("http://h").init_weight_transfer(agent, 1))
    with serving(VLLM_LEGACY) as fake, pytest.raises(WindlassUnsupported, match="the older interface only"):
        asyncio.run(VllmEngine(fake.url).init_weight_transfer(agent, 1))
    for url in ("ftp://x", "localhost:1", "http://user:word@host"):
        with pytest.raises(WindlassInvalid):
            VllmEngine(url)
    with pytest.raises(WindlassInvalid, match="expected vllm or sglang"):
        remote_engine("trtllm", "http://h")
    with pytest.raises(WindlassInvalid, match="dialect"):
        VllmEngine("http://h", dialect="old")  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "routes"), [("sglang", SGLANG), ("vllm", VLLM)])
def test_a_remote_loader_makes_a_directory_that_the_server_can_read(
    tmp_path: Path, kind: Any, routes: dict[str, Any]
) -> None:
    from safetensors.torch import load_file

    model, scratch = tmp_path / "model", tmp_path / "scratch"
    model.mkdir()
    scratch.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"):
        (model / name).write_text("{}")
    seen: list[Any] = []

    def read(body: Any) -> Any:
        folder = Path(body["model_path"] if kind == "sglang" else body["kwargs"]["weights_path"])
        seen.append((sorted(file.name for file in folder.iterdir()), load_file(folder / "model.safetensors")))
        return OK

    path = "POST /update_weights_from_disk" if kind == "sglang" else "POST /collective_rpc"
    with serving({**routes, path: read}) as fake:
        loader = RemoteWeightLoader(kind, fake.url, model, scratch=scratch, dir=tmp_path / "engines")
        asyncio.run(loader.load_weights({"w": torch.arange(3.0)}))
    (files, tensors) = seen[0]
    assert files == ["config.json", "model.safetensors", "tokenizer.json"]
    assert tensors["w"].tolist() == [0.0, 1.0, 2.0]
    assert list(scratch.iterdir()) == []


def test_an_sglang_server_beside_its_trainer_reads_what_was_pulled(tmp_path: Path) -> None:
    """The strategy that a colocated SGLang gets is one that its adapter takes."""
    from safetensors.torch import load_file

    from windlass import WeightSyncManager, strategy_from_config
    from windlass.extract import ModuleWeightExtractor
    from windlass.transfer.sync_info import AgentWeightSyncInfo
    from windlass.transfer.tcp import TcpTransferStrategy

    document = {
        "generator": {"backend": "sglang", "weight_sync_backend": "nccl", "model_id": "actor", "timeout": 60},
        "trainer": {"placement": {"colocate_all": True}},
    }
    strategy = strategy_from_config(document)
    assert isinstance(strategy, TcpTransferStrategy)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    seen: list[Any] = []
    info = {"model_path": str(model)}

    def read(body: Any) -> Any:
        seen.append(load_file(Path(body["model_path"]) / "model.safetensors")["weight"].tolist())
        info["weight_version"] = body["weight_version"]
        return OK

    routes = {
        **SGLANG,
        "POST /update_weights_from_disk": read,
        "GET /model_info": (200, info),
    }
    layer = torch.nn.Linear(2, 1, bias=False)

    async def run(url: str) -> None:
        engine = SglangEngine(url, dir=tmp_path / "engines")
        client = InferenceEngineClient([engine], prefix_cache="keep", pause=True)
        manager = WeightSyncManager(strategy, ModuleWeightExtractor(), client)
        await manager.initialize()
        for value in (1.0, 2.0):
            with torch.no_grad():
                layer.weight.fill_(value)
            await manager.sync_weights(layer)
        await client.aclose()
        manager.close()

    with serving(routes) as fake:
        asyncio.run(run(fake.url))
    assert seen == [[[1.0, 1.0]], [[2.0, 2.0]]]
    with serving({**routes, "GET /model_info": (200, {"model_path": "Qwen/Qwen3-8B"})}) as fake:
        agent = AgentWeightSyncInfo(["http://127.0.0.1:1"], "t" * 64, "m")
        with pytest.raises(WindlassInvalid, match="no directory of this host"):
            asyncio.run(SglangEngine(fake.url).init_weight_transfer(agent, 1))
