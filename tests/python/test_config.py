"""Configuration: round trips, defaults, and refusals that name the field."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from typing import Any

import pytest

from children import environment
from windlass import SenderAgentConfig, WeightManagerConfig, WindlassInvalid
from windlass.config import Config, ReceiverAgentConfig, ReceiverInfo, TransferEngineConfig, TransferStatus

EVERY: list[Config] = [
    WeightManagerConfig(
        model_id="actor",
        generator_dtype="torch.bfloat16",
        dtypes={"*.gate.weight": "F32"},
        include=["model.*"],
        exclude=("*.value_head.*",),
        controller="http://10.0.0.1:9100",
        agent=SenderAgentConfig(
            ports="18100-18110", threads=2, nixl="auto", nixl_params={"engine_config": "TLS=rc"}
        ),
        engine=TransferEngineConfig(streams=8, mode="delta"),
    ),
    WeightManagerConfig(),
    SenderAgentConfig(),
    TransferEngineConfig(timeout=1),
    ReceiverAgentConfig(endpoint="http://10.0.0.7:9000", name="engine-0"),
    TransferStatus(),
    ReceiverInfo(instance_id="i-1", version=3),
]


@pytest.mark.parametrize("config", EVERY, ids=lambda c: type(c).__name__)
def test_a_configuration_survives_json_and_pickle(config: Config) -> None:
    text = json.dumps(config.to_dict())
    assert type(config).from_dict(json.loads(text)) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_dtypes_in_a_configuration_become_canonical() -> None:
    config = EVERY[0]
    assert isinstance(config, WeightManagerConfig)
    assert config.generator_dtype == "bfloat16"
    assert config.dtypes == {"*.gate.weight": "float32"}


@pytest.mark.parametrize(
    ("kind", "field", "value", "expected"),
    [
        (WeightManagerConfig, "model_id", "a/b", "model id"),
        (WeightManagerConfig, "model_id", "", "not empty"),
        (WeightManagerConfig, "generator_dtype", "bf17", "bf17"),
        (WeightManagerConfig, "dtypes", {"*": "bf17"}, "bf17"),
        (WeightManagerConfig, "dtypes", ["x"], "dictionary"),
        (WeightManagerConfig, "include", "model.*", "list of texts"),
        (WeightManagerConfig, "exclude", [1], "list of texts"),
        (WeightManagerConfig, "extras", "warn", "'error', 'ignore'"),
        (WeightManagerConfig, "buffers", "yes", "True or False"),
        (WeightManagerConfig, "timeout", 0, "more than 0"),
        (WeightManagerConfig, "timeout", float("nan"), "more than 0"),
        (WeightManagerConfig, "timeout", True, "more than 0"),
        (WeightManagerConfig, "controller", "10.0.0.1", "endpoint"),
        (WeightManagerConfig, "memfd", "maybe", "'always'"),
        (WeightManagerConfig, "agent", "0.0.0.0", "SenderAgentConfig"),
        (SenderAgentConfig, "ports", "18110-18100", "18100-18110"),
        (SenderAgentConfig, "ports", 18100, "18100-18110"),
        (SenderAgentConfig, "nixl", "yes", "'off', 'auto'"),
        (SenderAgentConfig, "nixl_params", {"engine_config": "TLS=tcp"}, "none while nixl is 'off'"),
        (SenderAgentConfig, "nixl_params", {"engine_config=TLS": "tcp"}, "texts by their names"),
        (SenderAgentConfig, "nixl_params", "engine_config=TLS=tcp", "texts by their names"),
        (SenderAgentConfig, "data_ports", "70000", "18100-18110"),
        (SenderAgentConfig, "ports", "0-5", "18100-18110"),
        (SenderAgentConfig, "advertise_host", "0.0.0.0", "advertise_host"),
        (SenderAgentConfig, "history", -1, "integer"),
        (SenderAgentConfig, "threads", 0, "integer"),
        (TransferEngineConfig, "streams", 0, "from 1 to 64"),
        (TransferEngineConfig, "streams", 2.5, "from 1 to 64"),
        (TransferEngineConfig, "mode", "both", "'delta'"),
        (ReceiverAgentConfig, "endpoint", "nowhere", "endpoint"),
    ],
)
def test_a_bad_value_is_refused_with_its_field_and_what_was_expected(
    kind: type[Config], field: str, value: Any, expected: str
) -> None:
    with pytest.raises(WindlassInvalid) as refused:
        kind(**{field: value})
    assert f"{kind.__name__}.{field}" in str(refused.value)
    assert expected in str(refused.value)


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(WindlassInvalid, match="no field 'stream'; did you mean 'streams'"):
        TransferEngineConfig.from_dict({"stream": 4})
    with pytest.raises(WindlassInvalid, match="no field 'port'; did you mean 'ports'"):
        WeightManagerConfig.from_dict({"agent": {"port": "1"}})
    with pytest.raises(WindlassInvalid, match="no field 'zzz'; known: streams"):
        TransferEngineConfig.from_dict({"zzz": 1})
    with pytest.raises(WindlassInvalid, match="endpoint"):
        ReceiverAgentConfig.from_dict({})
    with pytest.raises(WindlassInvalid, match="dictionary"):
        WeightManagerConfig.from_dict({"engine": 6})


def test_the_status_of_a_receiver_is_read_as_rust_writes_it() -> None:
    identity = {"model_id": "actor", "incarnation": 5, "version": 7}
    written = {
        "stage": "pulling",
        "publisher": "the agent at http://10.0.0.5:7000",
        "target": identity,
        "image": {"identity": {**identity, "version": 6}, "digest": "00" * 16},
        "mode": "delta",
        "bytes": 10,
        "bytes_done": 4,
        "brought": [{"by": "engine-2", "bytes": 3, "rate": 1.5}, {"bytes": 1, "rate": 2.0}],
        "synced": 2,
        "error": None,
    }
    status = TransferStatus.from_dict(written)
    assert status.target is not None
    assert status.target.version == 7
    assert status.image is not None
    assert status.image.identity.version == 6
    assert status.to_dict() == written


def test_the_defaults_of_an_agent_are_those_of_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "windlass", "agent", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment(),
    )
    agent, engine = SenderAgentConfig(), TransferEngineConfig()
    options = done.stdout.split("\n      --")
    defaults = {
        text.split()[0]: text.split("[default: ")[1].split("]")[0] for text in options if "[default: " in text
    }
    assert defaults["bind"] == agent.bind
    assert defaults["ports"] == agent.ports
    assert int(defaults["history"]) == agent.history
    assert defaults["history-bytes"] == "4Gi"
    assert agent.history_bytes == 4 << 30
    assert int(defaults["streams"]) == engine.streams
    assert float(defaults["timeout"]) == engine.timeout


def test_a_dtype_may_be_spelt_as_torch_safetensors_or_configurations_do() -> None:
    import torch

    for spelling in (torch.bfloat16, "torch.bfloat16", "bfloat16", "BF16", "bf16"):
        config = WeightManagerConfig(generator_dtype=spelling, dtypes={"*.A_log": spelling})  # type: ignore[arg-type,dict-item]
        assert (config.generator_dtype, config.dtypes) == ("bfloat16", {"*.A_log": "bfloat16"})
    from windlass.dtypes import torch_dtype
    from windlass.names.dtypes import canonical_dtype

    short = {
        "fp16": "float16",
        "f16": "float16",
        "fp32": "float32",
        "fp8_e4m3": "float8_e4m3fn",
        "i8": "int8",
    }
    assert {name: canonical_dtype(name) for name in short} == short
    assert torch_dtype("bf16") is torch.bfloat16
    for wrong in ("bfloat61", 16):
        with pytest.raises(WindlassInvalid, match="generator_dtype"):
            WeightManagerConfig(generator_dtype=wrong)  # type: ignore[arg-type]


def test_a_model_id_that_cannot_be_says_which_one_can() -> None:
    with pytest.raises(WindlassInvalid, match="use 'Qwen--Qwen3-8B'") as e:
        WeightManagerConfig(model_id="Qwen/Qwen3-8B")
    assert e.value.advice == "set model_id to 'Qwen--Qwen3-8B'"
    assert WeightManagerConfig(model_id="Qwen--Qwen3-8B").model_id == "Qwen--Qwen3-8B"
    with pytest.raises(WindlassInvalid, match="use 'a-b--c'"):
        WeightManagerConfig(model_id="../a-b c")
    with pytest.raises(WindlassInvalid, match="not usable"):
        WeightManagerConfig(model_id="/")
