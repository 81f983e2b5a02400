"""What the source documents say, typed as they say it."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import literal
import outside
import windlass
from children import environment
from literal import DictConfig, trainer_document
from windlass import WeightExtractor, WindlassInvalid, WindlassUnsupported, compat, strategy_from_config
from windlass.compat import (
    BroadcastTransferStrategy,
    CudaIpcTransferStrategy,
    CudaIpcWeightTransferReceiver,
    CudaIpcWeightTransferSender,
    FSDPWeightExtractor,
    InferenceEngineClient,
    MegatronWeightExtractor,
    PackedCudaIpcTransferStrategy,
    PackedCudaIpcWeightTransferReceiver,
    PackedCudaIpcWeightTransferSender,
    RaaSPool,
    ReceiverAgentConfig,
    SenderAgentConfig,
    TCPTransferEngine,
    TransferAgent,
    TransferBuffer,
    TransferEngineConfig,
    WeightChunk,
)
from windlass.transfer.base import WeightTransferStrategy
from windlass.transfer.client import InferenceEngine
from windlass.transfer.request import CudaIpcWeightUpdateRequest, PackedCudaIpcWeightUpdateRequest
from windlass.transfer.sync_info import EmptyWeightSyncInfo, EngineShape, TorchDistributedWeightSyncInfo

HERE = pathlib.Path(__file__).resolve().parent


@pytest.mark.parametrize(("document", "loads"), [("design", 4), ("plan", 3)])
def test_what_the_documents_type_moves_weights_between_two_processes(
    document: str, loads: int, tmp_path: pathlib.Path
) -> None:
    program = [sys.executable, str(HERE / "literal.py")]
    env = {**environment(), "GLOO_SOCKET_IFNAME": "lo"}
    with (tmp_path / "train").open("w+") as first, (tmp_path / "serve").open("w+") as second:
        trainer = subprocess.Popen(
            [*program, "train", document], stdout=subprocess.PIPE, stderr=first, env=env
        )
        engine = subprocess.Popen(
            [*program, "serve", document],
            stdin=trainer.stdout,
            stdout=subprocess.PIPE,
            stderr=second,
            env=env,
        )
        assert trainer.stdout is not None
        trainer.stdout.close()
        try:
            said, _ = engine.communicate(timeout=110)
            codes = (trainer.wait(timeout=10), engine.returncode)
        finally:
            for process in (trainer, engine):
                process.kill()
                process.wait()
    assert codes == (0, 0), "\n".join((tmp_path / name).read_text() for name in ("train", "serve"))
    sent = {name: p.detach().to(torch.bfloat16) for name, p in literal.model().named_parameters()}
    # The plan groups by module: the weight and the bias of the inner layer come together.
    assert json.loads(said) == {"loads": loads, "tensors": outside.digest(sent.items())}


def test_every_name_of_the_documents_is_there() -> None:
    for name in compat.__all__:
        if name not in ("VLLMWeightLoader", "SGLangWeightLoader"):
            assert getattr(compat, name) is not None
    assert compat.WeightManager is windlass.WeightManager
    assert issubclass(
        compat.BroadcastWeightTransferSender, windlass.transfer.broadcast.BroadcastTransferSender
    )
    with pytest.raises(AttributeError, match="NoSuchName"):
        compat.NoSuchName  # noqa: B018
    # Names that are only in the text of the documents, each where a reader looks for it.
    import re

    named = {
        "BroadcastWeightTransferSender",
        "CudaIpcWeightTransferSender",
        "PackedCudaIpcWeightTransferSender",
    }
    named |= {"BroadcastWeightTransferReceiver", "WeightSyncInitInfo", "TorchDistributedWeightSyncInitInfo"}
    named |= {
        "EmptyWeightSyncInitInfo",
        "TransferAgent",
        "TCPTransferEngine",
        "TransferBuffer",
        "ReceiverInfo",
    }
    named |= {"TransferEngineConfig", "SenderAgentConfig", "ReceiverAgentConfig", "TransferStatus"}
    assert named <= set(compat.__all__)
    assert all(re.fullmatch(r"[A-Za-z_]+", name) for name in compat.__all__)


IPC = {"device": "cpu"}


@pytest.mark.parametrize(
    ("sends", "receives", "request_type"),
    [
        (CudaIpcWeightTransferSender, CudaIpcWeightTransferReceiver, CudaIpcWeightUpdateRequest),
        (
            PackedCudaIpcWeightTransferSender,
            PackedCudaIpcWeightTransferReceiver,
            PackedCudaIpcWeightUpdateRequest,
        ),
    ],
)
def test_a_request_is_made_of_a_chunk_and_parsed_from_a_dictionary(
    sends: Any, receives: Any, request_type: Any
) -> None:
    chunk = WeightChunk.of([("a.b.weight", torch.arange(6.0)), ("a.b.bias", torch.ones(2))])
    loader = outside.Kept()
    with sends(IPC) as sender, receives(IPC) as receiver:
        request = sender.create_request(chunk)
        assert type(request) is request_type
        again = receiver.parse_request(json.loads(request.to_json()))
        assert again == request
        asyncio.run(receiver.receive_and_load_weights(again, loader))
        with pytest.raises(WindlassInvalid, match="same strategy"):
            receiver.parse_request({"names": ["a"], "dtypes": ["torch.bfloat16"], "shapes": [[1]]})
        # The plan's order cannot work, and says so.
        with pytest.raises(WindlassInvalid, match="needs the client") as e:
            asyncio.run(sender.send_chunks([chunk]))
        assert "send_chunks(chunks, inference_client)" in e.value.advice
        with pytest.raises(WindlassUnsupported, match="announced every chunk already"):
            sender.get_request()
    assert {name: tensor.tolist() for name, tensor in loader.tensors.items()} == {
        "a.b.weight": list(range(6)),
        "a.b.bias": [1.0, 1.0],
    }


def test_a_strategy_that_sends_versions_says_that_a_chunk_is_none(tmp_path: pathlib.Path) -> None:
    strategy = strategy_from_config({"strategy": "lora", "lora_sync_path": str(tmp_path)})
    with (
        strategy.create_sender(strategy.create_sync_info()) as sender,
        pytest.raises(WindlassUnsupported, match="announces whole versions"),
    ):
        sender.create_request(WeightChunk.of([("a", torch.zeros(1))]))


class Quiet(InferenceEngine):
    def __init__(self, **shape: int) -> None:
        self.shape = EngineShape(**shape)
        self.told: list[Any] = []

    async def init_weight_transfer(self, sync_info: Any, rank_offset: int) -> None:
        self.told.append((sync_info, rank_offset))

    async def update_weights(self, request: Any) -> None:
        self.told.append(request)


def test_a_trainers_whole_document_is_taken_as_it_is() -> None:
    cfg = trainer_document()
    made: Any = strategy_from_config(cfg)
    assert type(made) is windlass.transfer.BroadcastTransferStrategy
    assert made.settings.weight_sync_backend == "gloo"
    assert type(made).from_config(cfg) == made == WeightTransferStrategy.from_config(cfg)
    # The same as attributes, as dataclasses or argparse give them.
    spaces = SimpleNamespace(generator=SimpleNamespace(weight_sync_backend="gloo", master_addr="127.0.0.1"))
    assert strategy_from_config(spaces).config["master_addr"] == "127.0.0.1"
    with pytest.raises(WindlassInvalid, match="expected a mapping"):
        strategy_from_config("generator.yaml")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("weight_sync_backnd", "generator.weight_sync_backend"),
        ("weight_transfer_threshold_cuda_ipc_gb", "generator.weight_transfer_threshold_cuda_ipc_GB"),
        ("pack_weihgts", "generator.pack_weights"),
        ("use_cuda_icp", "generator.use_cuda_ipc"),
        ("stratgy", "generator.strategy"),
    ],
)
def test_a_misspelling_is_named_also_in_a_whole_document(
    key: str, meant: str, caplog: pytest.LogCaptureFixture
) -> None:
    document = trainer_document(**{key: "x"})
    document._values["generator"].pop(meant.split(".")[1], None)
    with pytest.raises(WindlassInvalid, match=f"generator.{key}.*did you mean '{meant}'") as e:
        strategy_from_config(document)
    assert e.value.name == "unknown_key"
    # Whoever says the right one too may mean something else by this one, and is told.
    strategy_from_config({"generator": {meant.split(".")[1]: None, "weight_sync_backend": "gloo", key: 1}})
    assert f"did you mean '{meant}'" in caplog.text


@pytest.mark.parametrize(
    "key",
    ["inference_engine_expert_parallel_size", "model_name", "enable_chunked_prefill", "engine", "linked"],
)
def test_a_key_that_is_not_ours_is_left_alone(key: str) -> None:
    strategy_from_config(trainer_document(**{key: "???"}))


def test_the_backend_cuda_ipc_is_ipc_between_those_who_share_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="windlass"):
        made = strategy_from_config({"generator": {"weight_sync_backend": "cuda_ipc"}})
    assert type(made) is windlass.transfer.PackedCudaIpcTransferStrategy
    assert "assumed: cuda_ipc means GPUs, and cuda_ipc shared ones" in caplog.text
    unpacked = {"generator": {"weight_sync_backend": "cuda_ipc", "pack_weights": False}}
    assert type(strategy_from_config(unpacked)) is windlass.transfer.CudaIpcTransferStrategy
    assert windlass.extract.settings(unpacked) == {"group_by_module": True, "threshold_gb": 1.0}
    for no in ({"generator.run_engines_locally": False}, {"trainer.placement.colocate_all": False}):
        with pytest.raises(WindlassUnsupported, match="cuda_ipc"):
            strategy_from_config({"generator.weight_sync_backend": "cuda_ipc", **no})
    with pytest.raises(WindlassInvalid, match="say one of them"):
        strategy_from_config({"generator": {"weight_sync_backend": "cuda_ipc", "use_cuda_ipc": False}})


@pytest.mark.parametrize("strategy", [CudaIpcTransferStrategy, PackedCudaIpcTransferStrategy])
def test_the_longer_calls_work_plain_and_awaited(strategy: Any) -> None:
    cfg = {"generator": {"use_cuda_ipc": True, "weight_transfer_threshold_cuda_ipc_GB": 0.25}}
    client = InferenceEngineClient([Quiet()])
    made = strategy()
    info = made.create_sync_info(cfg, client)
    assert info == EmptyWeightSyncInfo()
    assert made.config["weight_transfer_threshold_cuda_ipc_GB"] == 0.25
    assert pickle.loads(pickle.dumps(made)) == made == strategy.from_config(cfg)
    with made.create_sender(cfg, client, info) as sender, made.create_receiver(cfg, info, 1) as receiver:
        assert receiver.request_type is made.get_request_type()
        assert sender.create_request(WeightChunk.of([("a", torch.zeros(1))]))

    async def awaited() -> None:
        again = strategy()
        told = await again.create_sync_info(cfg=cfg, inference_client=client)
        assert await again.create_init_info() == told
        (await again.create_sender(cfg, client, told)).close()
        (await again.create_sender(sync_info=told)).close()
        (await again.create_receiver(told, 1)).close()
        (await again.create_receiver(sync_info=told, rank_offset=1)).close()

    asyncio.run(awaited())
    with pytest.raises(WindlassInvalid, match="differ in weight_transfer_threshold_cuda_ipc_GB"):
        made.create_sync_info({"generator": {"weight_transfer_threshold_cuda_ipc_GB": 2.0}}, client)
    with pytest.raises(TypeError, match=r"it takes \(sync_info: WeightSyncInfo\), or \(cfg"):
        made.create_sender(cfg, client, info, 7)


def test_engines_that_the_document_does_not_name_are_those_of_the_client() -> None:
    cfg = {"generator": {"weight_sync_backend": "gloo", "master_addr": "127.0.0.1"}}
    made = BroadcastTransferStrategy()
    info: Any = made.create_sync_info(cfg, InferenceEngineClient([Quiet(tp=2), Quiet(dp=3)]))
    assert info.world_size == 6
    with pytest.raises(WindlassInvalid, match="broadcast needs TorchDistributedWeightSyncInfo"):
        made.create_sender(cfg, None, EmptyWeightSyncInfo())


def test_the_client_joins_a_group_in_the_words_of_trainers() -> None:
    engines = [Quiet(tp=2), Quiet()]
    client = InferenceEngineClient.from_config(
        DictConfig({"generator": {"timeout": 7, "engines": [{"tp": 2}, {}]}}), engines
    )
    assert client._timeout == 7.0
    asyncio.run(
        client.init_weight_update_communicator(
            master_addr="10.0.0.7",
            master_port=29500,
            rank_offset=1,
            world_size=4,
            group_name="skyrl",
            backend="gloo",
            override_existing=False,
        )
    )
    info = TorchDistributedWeightSyncInfo("10.0.0.7", 29500, 4, "skyrl", "gloo")
    assert [engine.told for engine in engines] == [[(info, 1)], [(info, 3)]]
    asyncio.run(engines[1].init_weight_update_communicator("10.0.0.7", 29500, 3, 4, "skyrl", "gloo"))
    assert engines[1].told[1] == (info, 3)
    with pytest.raises(WindlassInvalid, match="world_size 4, not 1 and 5"):
        asyncio.run(client.init_weight_update_communicator("10.0.0.7", 29500, world_size=5))
    with pytest.raises(WindlassUnsupported, match="override_existing"):
        asyncio.run(client.init_weight_update_communicator("10.0.0.7", 29500, override_existing=True))
    with pytest.raises(WindlassInvalid, match="says that there are 1 engines"):
        InferenceEngineClient.from_config({"generator": {"num_inference_engines": 1}}, engines)


def names(chunks: Iterator[WeightChunk]) -> list[list[str]]:
    return [chunk.names for chunk in chunks]


LAYERS = {f"layers.{layer}.attn.{part}.weight": torch.ones(4) for layer in range(2) for part in "qkv"}


class Model:
    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from LAYERS.items()


class Plain(WeightExtractor):
    def _extract_raw_weights(self, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(model.named_parameters())


MODULES = [[f"layers.{layer}.attn.{part}.weight" for part in "qkv"] for layer in range(2)]
COLOCATED = DictConfig(
    {
        "generator": {"weight_sync_backend": "nccl", "weight_transfer_threshold_cuda_ipc_GB": 32 / 2**30},
        "trainer": {"placement": {"colocate_all": True}},
    }
)


def test_extractors_are_made_of_a_configuration() -> None:
    model = torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Sequential(torch.nn.Linear(2, 2))
    )
    grouped = [["0.0.weight", "0.0.bias"], ["1.0.weight", "1.0.bias"]]
    assert names(FSDPWeightExtractor(COLOCATED).extract_weights(model, torch.float32)) == grouped
    assert names(FSDPWeightExtractor(COLOCATED, model).extract_weights()) == grouped
    assert names(FSDPWeightExtractor.from_config(COLOCATED, model).extract_weights(model)) == grouped
    found = WeightExtractor.from_config(COLOCATED, model)
    assert type(found) is windlass.extract.ModuleWeightExtractor
    assert names(found.extract_weights()) == grouped
    # An option says otherwise.
    alone = FSDPWeightExtractor(COLOCATED, model, group_by_module=False, threshold_gb=16 / 2**30)
    assert len(names(alone.extract_weights())) == 4
    with pytest.raises(WindlassInvalid, match="there is no model"):
        next(FSDPWeightExtractor(COLOCATED).extract_weights())
    with pytest.raises(WindlassInvalid, match="depends on the model"):
        WeightExtractor.from_config(COLOCATED)


def test_flags_of_a_subclass_decide() -> None:
    class Flags(Plain):
        def __init__(self, cfg: Any, group: bool, batch: bool) -> None:
            super().__init__(cfg)
            self._group_by_module = group  # type: ignore[assignment,method-assign]
            self._batch_by_threshold = batch  # type: ignore[assignment,method-assign]

    def cut(cfg: Any, group: bool, batch: bool) -> list[int]:
        return [len(chunk) for chunk in Flags(cfg, group, batch).extract_weights(Model())]

    assert cut(None, True, False) == [3, 3]
    assert cut(None, False, False) == [1] * 6
    # Without a size of its own, the documented default.
    assert cut(None, False, True) == [6]
    # Over what the configuration says: 32 bytes are two tensors.
    assert cut(COLOCATED, False, True) == [2, 2, 2]
    assert cut(COLOCATED, False, False) == [1] * 6
    assert cut(COLOCATED, True, False) == [3, 3]

    class Asked(Plain):
        def _should_batch_by_threshold(self) -> bool:
            return True

    assert names(Asked().extract_weights(Model())) == [list(LAYERS)]


@pytest.mark.parametrize("announced", [False, True])
def test_helpers_of_a_subclass_are_used(announced: bool) -> None:
    class Own(Plain):
        """By kind of projection, whatever the layer; and two chunks at a time."""

        seen: list[list[str]] = []

        def _extract_metadata(self, model: Any) -> Any:
            return [(n, t.dtype, tuple(t.shape)) for n, t in model.named_parameters()] if announced else None

        def _group_by_module(self, params: Any) -> dict[str, list[str]]:
            self.seen.append(list(params))
            return {kind: [name for name in params if f".{kind}." in name] for kind in "qk"}

        def _batch_by_threshold(self, chunks: Any, threshold_gb: float) -> Iterator[list[WeightChunk]]:
            assert threshold_gb == 0.5
            held = list(chunks)
            yield held[:2]
            yield held[2:]

    q, k, v = ([name for name in LAYERS if f".{kind}." in name] for kind in "qkv")
    chunks = list(Own(group_by_module=True).extract_weights(Model()))
    assert [chunk.names for chunk in chunks] == [v[:1], q, k, v[1:]]
    assert [chunk.module_name for chunk in chunks] == [None, "q", "k", None]
    assert Own.seen == [list(LAYERS)]
    both = Own(group_by_module=True, threshold_gb=0.5).extract_weights(Model())
    assert names(both) == [[*v[:1], *q], [*k, *v[1:]]]
    # Who does not ask for groups gets none.
    assert len(list(Own().extract_weights(Model()))) == 6

    class Impl(Plain):
        """As the plan overrides it, with a flag of the helper's name beside."""

        def __init__(self) -> None:
            super().__init__()
            self._group_by_module = self._batch_by_threshold = True  # type: ignore[assignment,method-assign]

        def _group_by_module_impl(self, chunks: Any) -> Iterator[WeightChunk]:
            buffer: list[WeightChunk] = []
            for chunk in chunks:
                buffer.append(chunk)
                if len(buffer) == 2:
                    yield WeightChunk.joined(buffer)
                    buffer = []

        def _batch_by_threshold_impl(self, chunks: Any) -> Iterator[WeightChunk]:
            return (chunk for chunk in chunks if "layers.0.attn.v.weight" not in chunk.names)

    flat = list(LAYERS)
    assert names(Impl().extract_weights(Model())) == [flat[:2], flat[4:]]

    class Wrong(Plain):
        def _group_by_module(self, params: Any) -> dict[str, list[str]]:
            return {"m": ["layers.9.weight"]}

    with pytest.raises(WindlassInvalid, match="'layers.9.weight', which is no parameter"):
        list(Wrong(group_by_module=True).extract_weights(Model()))


def test_the_hook_may_be_written_as_the_documents_have_it() -> None:
    class Design(WeightExtractor):
        async def _extract_raw_weights(self, model: Any, generator_dtype: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {name: tensor.to(generator_dtype) for name, tensor in model.named_parameters()}

    chunks = list(Design(group_by_module=True).extract_weights(Model(), torch.bfloat16))
    assert [chunk.names for chunk in chunks] == MODULES
    assert {dtype for chunk in chunks for dtype in chunk.dtypes} == {"bfloat16"}

    class Waits(WeightExtractor):
        async def _extract_raw_weights(self, model: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
            await asyncio.sleep(0)
            return {}

    with pytest.raises(WindlassUnsupported, match="waits for something"):
        list(Waits().extract_weights(Model()))


def test_a_chunk_takes_its_size_and_checks_it() -> None:
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    how: dict[str, Any] = {"names": ["a"], "tensors": [tensor], "dtypes": [torch.bfloat16], "shapes": [(4,)]}
    assert WeightChunk(**how, total_size_bytes=8).total_size_bytes == WeightChunk(**how).total_size_bytes == 8
    joined = WeightChunk.joined([WeightChunk(**how), WeightChunk(**{**how, "names": ["b"]})])
    assert joined.total_size_bytes == 16
    with pytest.raises(WindlassInvalid, match="total_size_bytes is 9, and its tensors have 8 bytes"):
        WeightChunk(**how, total_size_bytes=9)
    with pytest.raises(WindlassInvalid, match="no tensors"):
        WeightChunk(names=["a"], dtypes=["bfloat16"], shapes=[[4]], tensors=None)  # type: ignore[arg-type]


class Bridge:
    """As the plan has it: all weights as one mapping."""

    def get_conversion_tasks(self, model: Any) -> list[Any]:
        mapping = SimpleNamespace(tp_size=1)
        return [SimpleNamespace(param_weight=t, mapping=mapping, name=n) for n, t in model.named_parameters()]

    def export_hf_weights(self, model: Any, **how: Any) -> dict[str, torch.Tensor]:
        tasks = how["conversion_tasks"] or self.get_conversion_tasks(model)
        return {task.name: task.param_weight for task in tasks}

    def export_adapter_weights(self, model: Any, **how: Any) -> dict[str, torch.Tensor]:
        return {"a.lora_A.weight": torch.ones(2)}


def test_a_megatron_bridge_may_return_a_mapping() -> None:
    bridge, model = Bridge(), Model()
    assert names(MegatronWeightExtractor(bridge, model).extract_weights()) == [[name] for name in LAYERS]
    by_cfg = MegatronWeightExtractor(COLOCATED, model, bridge=bridge)
    assert [len(chunk) for chunk in by_cfg.extract_weights(model)] == [2, 2, 2]
    from_config = MegatronWeightExtractor.from_config(COLOCATED, model, bridge=bridge)
    assert [len(chunk) for chunk in from_config.extract_weights(model)] == [2, 2, 2]
    adapters = MegatronWeightExtractor(bridge, model, lora=True)
    assert names(adapters.extract_weights(model)) == [["a.lora_A.weight"]]
    with pytest.raises(WindlassInvalid, match="needs the bridge") as e:
        MegatronWeightExtractor(COLOCATED, model)
    assert "bridge=bridge" in e.value.advice


def test_the_parts_of_the_weight_manager_take_its_configurations(tmp_path: pathlib.Path) -> None:
    engine = TransferEngineConfig(streams=3, mode="full", timeout=9.0)
    made: Any = TCPTransferEngine(engine)
    assert (made.settings.mode, made.settings.timeout) == ("full", 9.0)
    assert made.settings.config().engine == engine
    assert pickle.loads(pickle.dumps(made)) == made
    config = windlass.WeightManagerConfig(
        model_id="actor", region_dir=str(tmp_path), agent={"enabled": False}
    )  # type: ignore[arg-type]
    with windlass.WeightManager(config) as wm:
        wm.offload([("layers.0.attn.q.weight", torch.ones(8))], 1, 0, 1)
        with TransferAgent(wm.region, SenderAgentConfig(history=2), engine) as agent:
            endpoint = agent.endpoint()
            token = str(agent.status()["token_file"])
            receiver = ReceiverAgentConfig(
                endpoint=endpoint, token_file=token, image_dir=str(tmp_path / "image"), engine=engine
            )
            os.mkdir(tmp_path / "image")
            with TransferBuffer(receiver) as buffer:
                buffer.wait(1, 60)
                with buffer.hold() as image:
                    assert image.tensors["layers.0.attn.q.weight"].tolist() == [1.0] * 8
    with pytest.raises(WindlassInvalid, match="enabled is False"):
        TransferAgent(str(tmp_path), SenderAgentConfig(enabled=False))
    pool = RaaSPool("http://127.0.0.1:9")
    with pytest.raises(WindlassInvalid, match="lacks incarnation") as e:
        pool.notify_version("actor", 1, "http://127.0.0.1:8")
    assert "incarnation=wm.incarnation" in e.value.advice
