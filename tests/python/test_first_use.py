"""What first users ran into: each test is named for what went wrong."""

from __future__ import annotations

import json
import logging
import pathlib
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from windlass import (
    Receiver,
    SenderAgentConfig,
    SourceMap,
    WeightManager,
    WeightManagerConfig,
    WindlassError,
    WindlassInvalid,
    WindlassNotFound,
    WindlassTimeout,
)
from windlass.config import TransferEngineConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def home() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield pathlib.Path(folder)


def silent(home: pathlib.Path, **fields: Any) -> WeightManager:
    """A manager without an agent."""
    return WeightManager(region_dir=str(home), agent={"enabled": False}, **fields)


def two_layers() -> dict[str, torch.Tensor]:
    return {f"layers.{i}.qkv.weight": torch.full((6, 4), float(i)) for i in range(2)}


@pytest.mark.parametrize(
    "names",
    [
        SourceMap().split_rows(r"(.*)\.qkv\.weight", {"q": 2, "k": 2, "v": 2}),
        SourceMap().rename(r"layers\.\d+\.", "layers."),
    ],
    ids=["split", "rename"],
)
def test_two_parameters_that_become_one_tensor_are_refused(home: pathlib.Path, names: SourceMap) -> None:
    refused = pytest.raises(WindlassInvalid, match=r"layers\.0\.qkv.*layers\.1\.qkv.*both become")
    with silent(home, names=names) as wm, refused:
        wm.offload(two_layers(), 1, 0, 1)


def test_rows_of_several_layers_are_split_under_their_own_names(home: pathlib.Path) -> None:
    rows = {rf"\1.{part}.weight": 2 for part in "qkv"}
    names = SourceMap().split_rows(r"(.*)\.qkv\.weight", rows)
    with WeightManager(region_dir=str(home), names=names) as wm:
        wm.offload(two_layers(), 1, 0, 1)
        with Receiver(home / "image", region=wm.region) as receiver:
            receiver.wait(1)
            with receiver.hold() as image:
                assert sorted(image.tensors) == sorted(
                    f"layers.{i}.{p}.weight" for i in (0, 1) for p in "qkv"
                )
                assert bool((image.tensors["layers.1.k.weight"] == 1).all())


def test_parts_of_a_configuration_are_taken_as_objects_and_as_dictionaries() -> None:
    agent, engine = SenderAgentConfig(ports="18100-18110"), TransferEngineConfig(streams=3)
    made = WeightManager(agent=agent, engine=engine).config
    assert made == WeightManager(agent=agent.to_dict(), engine={"streams": 3}).config
    assert made == WeightManagerConfig(agent={"ports": "18100-18110"}, engine=engine)  # type: ignore[arg-type]
    assert made == WeightManager(made.to_dict()).config  # type: ignore[arg-type]
    with pytest.raises(WindlassInvalid, match=r"agent.*dictionary of its fields"):
        WeightManager(agent="0.0.0.0")


@pytest.mark.parametrize(
    "arguments",
    [{"config": "policy"}, {"names": {"a": "b"}}, {"names": "qwen3"}, {"group": True}],
    ids=["config", "names", "name", "group"],
)
def test_arguments_of_the_wrong_kind_are_refused_when_they_are_given(arguments: dict[str, Any]) -> None:
    with pytest.raises(WindlassInvalid, match="expected"):
        WeightManager(**arguments)


def test_a_rank_that_is_no_number_is_named(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with silent(home) as wm, pytest.raises(WindlassInvalid, match="RANK='first'"):
        wm.offload({"a": torch.ones(2)}, 1)


def test_an_agent_that_cannot_start_is_told_once(
    home: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        return [r.getMessage() for r in caplog.records if "agent does not run" in r.getMessage()]

    with caplog.at_level(logging.WARNING, "windlass"), socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        wm = WeightManager(region_dir=str(home), agent={"ports": port})
        version, until = 0, time.monotonic() + 120
        # The agent may not have been started yet, or be on its way to its end, when a version is published.
        while not told():
            assert time.monotonic() < until, wm.status()
            version += 1
            wm.offload({"a": torch.ones(2)}, version, 0, 1)
        for later in range(version + 1, version + 4):
            wm.offload({"a": torch.ones(2)}, later, 0, 1)
        wm.close()
    assert len(told()) == 1, told()
    assert port in told()[0]


def test_a_version_that_does_not_come_is_said_to_be_missing(home: pathlib.Path) -> None:
    with WeightManager(region_dir=str(home)) as wm:
        wm.offload({"a": torch.ones(2)}, 1, 0, 1)
        assert wm.endpoint is not None
        assert wm.token_file is not None
        with Receiver(home / "image", endpoint=wm.endpoint, token_file=wm.token_file) as receiver:
            receiver.wait(1)
            with pytest.raises(WindlassTimeout, match="version 5 did not come.*the image has 1"):
                receiver.wait(5, timeout=0.5)
        with pytest.raises(WindlassNotFound, match="token file"):
            Receiver(home / "other", endpoint=wm.endpoint, token_file=home / "nothing")


def test_a_receiver_may_be_made_before_its_publisher(home: pathlib.Path) -> None:
    with WeightManager(region_dir=str(home / "other"), model_id="policy") as wm:
        wm.offload({"a": torch.ones(2)}, 1, 0, 1)
        assert wm.region is not None
        region = home / "region" / pathlib.Path(wm.region).relative_to(home / "other")
    begun = time.monotonic()
    with Receiver(home / "image", region=region) as receiver:
        assert time.monotonic() - begun < 30, "the constructor waits for nobody"
        assert receiver.version is None
        assert receiver.status().image is None
        with WeightManager(region_dir=str(home / "region"), model_id="policy") as wm:
            wm.offload({"a": torch.ones(2)}, 1, 0, 1)
            receiver.wait(1)
        assert receiver.version == 1


def test_a_wait_lasts_until_its_own_deadline_when_the_agent_is_killed(home: pathlib.Path) -> None:
    with WeightManager(region_dir=str(home)) as wm:
        wm.offload({"a": torch.ones(2)}, 1, 0, 1)
        with Receiver(home / "image", region=wm.region) as receiver:
            receiver.wait(1)
            assert wm._agent is not None
            wm._agent.stop(0)
            begun = time.monotonic()
            with pytest.raises(WindlassTimeout, match="version 2 did not come within 1.5 s.*the image has 1"):
                receiver.wait(2, timeout=1.5)
            assert time.monotonic() - begun >= 1.5


def test_a_region_that_is_not_there_is_the_reason_and_not_the_deadline(home: pathlib.Path) -> None:
    with pytest.raises(WindlassError) as told:
        Receiver(home / "image", region=home / "nobody", timeout=0.5)
    assert "nobody" in str(told.value)
    assert "the deadline passed" not in str(told.value)


def test_a_small_model_does_not_ask_for_room_for_a_large_history(home: pathlib.Path) -> None:
    with WeightManager(region_dir=str(home), memfd="never") as wm:
        wm.prepare({"a": torch.ones(1000)}, 0, 1)
        assert wm._room(wm._open.plan) == 4000  # type: ignore[union-attr]


class Fused(nn.Module):
    """The model of the guide's snippet about names."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Module()
        layer.qkv = nn.Linear(4, 6144, bias=False)
        layer.A_log = nn.Parameter(torch.ones(3))
        self.actor = nn.Module()
        self.actor.layers = nn.ModuleList([layer])
        self.v_head = nn.Linear(4, 1)


def test_the_snippets_of_the_guide_run(home: pathlib.Path) -> None:
    from safetensors.torch import save_file

    model = Fused()
    names = [f"layers.0.{p}_proj.weight" for p in "qkv"]
    save_file(
        {n: torch.zeros(1) for n in names} | {"layers.0.A_log": torch.zeros(1)}, home / "model.safetensors"
    )
    text = (ROOT / "docs" / "trainers.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(snippets) == 6
    for folder in ("base-model", "served"):
        (home / folder).mkdir()
    (home / "base-model" / "config.json").write_text('{"model_type": "qwen3"}')
    sent: list[str] = []
    for number, snippet in enumerate(snippets):
        if "peft" in snippet:
            # tests/python/test_merged.py does what this one says, and compares.
            continue
        # Nothing of a user's machine is touched: other names, other places, any port.
        code = (
            snippet.replace('model_id="policy"', f'model_id="policy-{number}", region_dir={str(home)!r}')
            .replace("path/to/checkpoint", str(home / "model.safetensors"))
            .replace('"0.0.0.0", advertise_host="trainer-0.cluster"', '"127.0.0.1"')
            .replace('ports="18100-18110", data_ports="18111-18121"', 'ports="0", data_ports="0"')
            .replace("FSDPWeightExtractor", "ModuleWeightExtractor")
            .replace("base-model/", f"{home}/base-model/")
            .replace("served/", f"{home}/served/")
        )
        scope: dict[str, Any] = {
            "steps": 2,
            "model": model,
            "optimizer": None,
            "train_one_step": lambda model, optimizer: None,
            "send": lambda names, tensors: sent.extend(names),
        }
        exec(compile(code, f"docs/trainers.md, snippet {number}", "exec"), scope)
        if "wm" in scope and number > 0:
            with scope["wm"] as wm:
                wm.offload(model, 1, 0, 1)
                if "names" in scope:
                    dtypes = {name: row[0] for name, row in wm._open.plan.table.items()}
                    assert dtypes == dict.fromkeys([*names, "layers.0.A_log"], "float32")
    assert "actor.layers.0.qkv.weight" in sent
    served = json.loads((home / "served" / "config.json").read_text())
    assert served["model_type"] == "qwen3"
    assert served["quantization_config"]["weight_block_size"] == [128, 128]
