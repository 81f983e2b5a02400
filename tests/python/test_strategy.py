"""The strategy skeleton, with a strategy that comes from outside and moves real tensors."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from children import environment
from windlass import (
    WeightExtractor,
    WeightLoader,
    WeightSyncManager,
    WindlassInvalid,
    WindlassNotFound,
    WindlassUnsupported,
    choose,
    register_strategy,
    strategy_from_config,
)
from windlass.transfer import base as strategy
from windlass.transfer.base import (
    WeightTransferReceiver,
    WeightTransferSender,
    WeightTransferStrategy,
    each_tensor,
)
from windlass.transfer.request import LoraDiskWeightUpdateRequest, WeightUpdateRequest
from windlass.transfer.sync_info import EmptyWeightSyncInfo, WeightSyncInfo

HERE = pathlib.Path(__file__).resolve().parent


class Sender(WeightTransferSender):
    closed = 0

    async def send_chunks(self, chunks: Any, inference_client: Any) -> None:
        for chunk in chunks:
            await inference_client.update_weights(chunk)

    def close(self) -> None:
        self.closed += 1


class Receiver(WeightTransferReceiver):
    async def receive_weights(self, request: WeightUpdateRequest) -> AsyncIterator[tuple[str, Any]]:
        yield "a", 1
        yield "b", 2


class Loader(WeightLoader):
    def __init__(self) -> None:
        self.loaded: list[dict[str, Any]] = []

    async def load_weights(self, named_tensors: Any) -> None:
        self.loaded.append({name: tensor async for name, tensor in each_tensor(named_tensors)})


class Small(WeightTransferStrategy):
    """Keeps something that cannot be pickled, as a strategy with a bound port would."""

    def create_sync_info(self) -> WeightSyncInfo:
        self.bound = open(os.devnull)  # noqa: SIM115
        return EmptyWeightSyncInfo()

    def create_sender(self, sync_info: WeightSyncInfo) -> WeightTransferSender:
        return Sender()

    def create_receiver(self, sync_info: WeightSyncInfo, *, rank: int = 1) -> WeightTransferReceiver:
        return Receiver()

    def get_request_type(self) -> type[WeightUpdateRequest]:
        return LoraDiskWeightUpdateRequest


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has a registry of its own."""
    monkeypatch.setattr(strategy, "_registered", {})


@pytest.fixture
def installed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A package that names the outside strategy, as pip would leave it; gives the environment of children."""
    info = tmp_path / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[windlass.strategies]\noutside_gloo = outside:GlooStrategy\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return {**environment(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}


def test_a_strategy_from_outside_moves_tensors_between_two_processes(
    tmp_path: pathlib.Path, installed: dict[str, str]
) -> None:
    config = json.dumps({"strategy": "outside_gloo", "engine_ranks": 1})
    program = [sys.executable, str(HERE / "outside.py")]
    errors = [(tmp_path / "train").open("w+"), (tmp_path / "serve").open("w+")]
    trainer = subprocess.Popen(
        [*program, "train", config], stdout=subprocess.PIPE, stderr=errors[0], env=installed
    )
    engine = subprocess.Popen(
        [*program, "serve", config],
        stdin=trainer.stdout,
        stdout=subprocess.PIPE,
        stderr=errors[1],
        env=installed,
    )
    assert trainer.stdout is not None
    trainer.stdout.close()
    try:
        said, _ = engine.communicate(timeout=100)
        codes = (trainer.wait(timeout=10), engine.returncode)
    finally:
        for process in (trainer, engine):
            process.kill()
            process.wait()
    assert codes == (0, 0), "\n".join((tmp_path / name).read_text() for name in ("train", "serve"))
    for file in errors:
        file.close()

    import outside

    result = json.loads(said)
    # One load for each group: q, k and v of a layer together.
    assert result == {"loads": 3, "tensors": outside.digest(outside.weights())}
    assert len(result["tensors"]) == 9


@pytest.mark.usefixtures("installed")
def test_an_installed_package_makes_its_strategy_known_by_an_entry_point() -> None:
    assert "outside_gloo" in strategy.strategy_names()
    made = strategy_from_config({"strategy": "outside_gloo", "engine_ranks": 2})
    assert type(made).__name__ == "GlooStrategy"
    assert made.config == {"engine_ranks": 2}
    assert strategy.strategy_class("outside_gloo") is type(made)


def test_a_registered_strategy_is_found_and_a_taken_name_is_refused() -> None:
    class Other(Small): ...

    assert register_strategy("small", Small) is Small
    register_strategy("small", Small)
    assert strategy_from_config({"strategy": "small"}) == Small()
    with pytest.raises(WindlassInvalid, match=r"'small' is taken.*replace=True"):
        register_strategy("small", Other)
    register_strategy("small", Other, replace=True)
    assert type(strategy_from_config({"strategy": "small"})) is Other
    with pytest.raises(WindlassNotFound, match="'smal'; did you mean 'small'"):
        strategy_from_config({"strategy": "smal"})
    with pytest.raises(WindlassInvalid, match="not a class derived"):
        register_strategy("other", dict)  # type: ignore[arg-type]
    with pytest.raises(WindlassInvalid, match="not a name"):
        register_strategy("a b", Small)


def test_a_strategy_pickles_as_its_plain_configuration_and_nothing_else() -> None:
    made = Small({"engines": [{"tp": 2}]})
    made.create_sync_info()
    again = pickle.loads(pickle.dumps(made))
    made.bound.close()
    assert again == made
    assert hash(again) == hash(made)
    assert vars(again) == {"_config": {"engines": [{"tp": 2}]}}
    assert repr(again) == "Small({'engines': [{'tp': 2}]})"
    made.config["engines"].clear()
    assert made.config == {"engines": [{"tp": 2}]}


def test_a_strategy_refuses_configuration_that_is_not_plain_data() -> None:
    for value in (object(), {1, 2}, float("nan"), lambda: None):
        with pytest.raises(WindlassInvalid, match="configuration of Small is not plain data"):
            Small({"value": value})


def test_every_role_can_be_used_alone_and_the_alias_makes_the_same_info() -> None:
    made = Small()
    info = made.create_init_info()
    made.bound.close()
    assert info == EmptyWeightSyncInfo()
    announced: list[Any] = []

    class Client:
        async def update_weights(self, request: Any) -> object:
            announced.append(request)
            return None

    with made.create_sender(info) as sender:
        asyncio.run(sender.send_chunks([1, 2], Client()))  # type: ignore[list-item]
    assert announced == [1, 2]
    assert sender.closed == 1  # type: ignore[attr-defined]
    loader = Loader()
    with made.create_receiver(info) as receiver:
        asyncio.run(receiver.receive_and_load_weights(LoraDiskWeightUpdateRequest("/a"), loader))
    assert loader.loaded == [{"a": 1, "b": 2}]


def test_a_loader_takes_a_mapping_an_iterator_and_an_async_iterator() -> None:
    async def stream() -> AsyncIterator[tuple[str, int]]:
        for pair in pairs:
            yield pair

    pairs = [("a", 1), ("b", 2)]
    loader = Loader()
    for form in (dict(pairs), pairs, iter(pairs), stream()):
        asyncio.run(loader.load_weights(form))
    assert loader.loaded == [dict(pairs)] * 4


@pytest.mark.parametrize(
    "role", [WeightLoader, WeightTransferSender, WeightTransferReceiver, WeightTransferStrategy]
)
def test_a_role_without_its_methods_cannot_be_made(role: Any) -> None:
    with pytest.raises(TypeError, match="abstract"):
        role()


def test_facts_choose_the_strategy_where_the_configuration_names_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    register_strategy("broadcast", Small)
    facts = {"placement": "remote", "backend": "gloo"}
    with caplog.at_level("INFO", logger="windlass"):
        made = strategy_from_config({"world": 3}, facts)
    assert made.config == {"world": 3, "link": "collective", "codec": "full"}
    assert "strategy broadcast over collective" in caplog.text
    register_strategy("tcp", Small)
    overrides = {"generator.weight_sync_backend": "gloo", "strategy": "tcp"}
    assert strategy_from_config({"strategy": "auto", "overrides": overrides}, facts).config["link"] == "tcp"
    with pytest.raises(WindlassInvalid, match="set 'strategy' to one of .*broadcast"):
        strategy_from_config({})


def test_a_choice_says_why_and_an_impossible_one_what_stands_in_the_way() -> None:
    gpus = {"trainer_gpus": ["GPU-1"], "engine_gpus": ["GPU-1"]}
    choice = choose({"placement": "same_gpu", "backend": "nccl", **gpus})
    assert choice["strategy"] == "packed_cuda_ipc"
    assert choice["why"]
    assert {next(iter(c["option"].values())) for c in choice["considered"]} >= {"tcp", "broadcast"}
    with pytest.raises(WindlassUnsupported, match="cuda_ipc"):
        choose({"placement": "remote"}, {"strategy": "cuda_ipc"})
    with pytest.raises(WindlassInvalid, match=r"stratgy.*did you mean .strategy"):
        choose({}, {"stratgy": "tcp"})
    with pytest.raises(WindlassInvalid, match="plcement"):
        choose({"plcement": "remote"})
    with pytest.raises(WindlassInvalid, match="change_rate"):
        choose({"change_rate": 2.0})


class Engines:
    """Remembers what it was told, and may refuse."""

    def __init__(self, refuse: bool = False) -> None:
        self.told: list[Any] = []
        self.refuse = refuse

    async def init_weight_transfer(self, sync_info: WeightSyncInfo) -> object:
        if self.refuse:
            raise WindlassUnsupported("no such engine")
        self.told.append(sync_info)
        return None

    async def update_weights(self, request: Any) -> object:
        self.told.append(request)
        return None


class One(WeightExtractor):
    def _extract_raw_weights(self, model: Any) -> Iterator[tuple[str, Any]]:
        yield "a.b.weight", model


def test_the_facade_joins_once_in_order_and_leaves_nothing_half_joined() -> None:
    import torch

    async def run() -> None:
        engines = Engines()
        manager = WeightSyncManager(Small(), One(), engines)
        with pytest.raises(WindlassInvalid, match="initialize"):
            await manager.sync_weights(torch.ones(2))
        await manager.initialize()
        with pytest.raises(WindlassInvalid, match="joined already"):
            await manager.initialize()
        await manager.sync_weights(torch.ones(2), "bfloat16")
        assert engines.told[0] == EmptyWeightSyncInfo()
        assert [chunk.dtypes for chunk in engines.told[1:]] == [["bfloat16"]]
        sender = manager._sender
        manager.close()
        manager.close()
        assert isinstance(sender, Sender)
        assert sender.closed == 1
        refused = WeightSyncManager(Small(), One(), Engines(refuse=True))
        with pytest.raises(WindlassUnsupported, match="no such engine"):
            await refused.initialize()
        assert refused._sender is None

    asyncio.run(run())
