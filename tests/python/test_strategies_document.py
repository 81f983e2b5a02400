"""Which strategy a trainer's own document means."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from children import environment
from windlass import WindlassInvalid, WindlassUnsupported, strategy_from_config
from windlass.document import KEYS
from windlass.transfer import OWN
from windlass.transfer.base import strategy_class, strategy_names
from windlass.transfer.sync_info import EngineShape

ROOT = Path(__file__).resolve().parent.parent.parent


def nested(dotted: dict[str, Any]) -> dict[str, Any]:
    """The same document, as a trainer's file has it."""
    out: dict[str, Any] = {}
    for key, value in dotted.items():
        *folders, last = key.split(".")
        place = out
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return out


COLOCATED = {"generator.weight_sync_backend": "nccl", "trainer.placement.colocate_all": True}


@pytest.mark.parametrize(
    ("document", "strategy"),
    [
        (COLOCATED, "PackedCudaIpcTransferStrategy"),
        ({**COLOCATED, "generator.pack_weights": False}, "CudaIpcTransferStrategy"),
        ({**COLOCATED, "generator.use_cuda_ipc": False}, "TcpTransferStrategy"),
        ({**COLOCATED, "generator.weight_sync_backend": "gloo"}, "BroadcastTransferStrategy"),
        ({**COLOCATED, "generator.run_engines_locally": False}, "BroadcastTransferStrategy"),
        ({**COLOCATED, "generator.backend": "sglang"}, "TcpTransferStrategy"),
        (
            {**COLOCATED, "generator.backend": "sglang", "generator.use_cuda_ipc": True},
            "PackedCudaIpcTransferStrategy",
        ),
        (
            {**COLOCATED, "generator.backend": "sglang", "generator.weight_sync_backend": "gloo"},
            "BroadcastTransferStrategy",
        ),
        ({"generator.weight_sync_backend": "nccl"}, "BroadcastTransferStrategy"),
        ({"generator.weight_sync_backend": "gloo"}, "BroadcastTransferStrategy"),
        (
            {"generator.weight_sync_backend": "nccl", "generator.run_engines_locally": False},
            "BroadcastTransferStrategy",
        ),
        ({"generator.weight_sync_backend": "nccl", "generator.strategy": "tcp"}, "TcpTransferStrategy"),
        (
            {
                **COLOCATED,
                "trainer.policy.model.lora.rank": 8,
                "trainer.policy.model.lora.alpha": 16,
                "trainer.policy.model.lora.dropout": 0.0,
                "trainer.policy.model.lora.lora_sync_path": "/mnt/lora",
            },
            "LoraTransferStrategy",
        ),
        ({**COLOCATED, "trainer.policy.model.lora.rank": 0}, "PackedCudaIpcTransferStrategy"),
    ],
)
def test_a_document_means_the_same_nested_and_dotted(
    document: dict[str, Any], strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="windlass"):
        dotted = strategy_from_config(document)
    assert type(dotted).__name__ == strategy
    assert strategy_from_config(nested(document)) == dotted
    # What was chosen, and why, is in the log.
    assert "strategy " in caplog.text
    assert ": " in caplog.text


def test_the_settings_of_the_chosen_strategy_come_from_the_document() -> None:
    made: Any = strategy_from_config(
        {
            "generator": {
                "weight_sync_backend": "gloo",
                "num_inference_engines": 2,
                "inference_engine_tensor_parallel_size": 2,
                "inference_engine_data_parallel_size": 3,
                "override_existing_update_group": "enable",
            }
        }
    )
    assert made.settings.engines == (EngineShape(tp=2, dp=3),) * 2
    assert made.settings.override_existing_update_group is True
    ipc: Any = strategy_from_config({**COLOCATED, "generator.weight_transfer_threshold_cuda_ipc_GB": 0.25})
    assert ipc.settings.weight_transfer_threshold_cuda_ipc_GB == 0.25
    lora: Any = strategy_from_config(
        {"trainer.policy.model.lora.rank": 4, "trainer.policy.model.lora.lora_sync_path": "/mnt/lora"}
    )
    assert lora.settings.lora_sync_path == "/mnt/lora"
    auto: Any = strategy_from_config(
        {
            "generator.weight_sync_backend": "gloo",
            "generator.override_existing_update_group": "auto",
            "generator.run_engines_locally": False,
        }
    )
    assert auto.settings.override_existing_update_group is True


def test_facts_that_were_gathered_come_before_what_is_assumed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="windlass"):
        strategy_from_config(COLOCATED)
    assert "assumed: nccl means GPUs, and colocate_all shared ones" in caplog.text
    caplog.clear()
    gpus = {"trainer_gpus": ["GPU-1"], "engine_gpus": ["GPU-2"]}
    with caplog.at_level("INFO", logger="windlass"):
        made = strategy_from_config(COLOCATED, gpus)
    # No trainer is on the engine's GPU, whatever the document says.
    assert type(made).__name__ == "BroadcastTransferStrategy"
    assert "assumed" not in caplog.text
    with pytest.raises(WindlassUnsupported, match="GPU-2"):
        strategy_from_config({**COLOCATED, "generator.strict": True}, gpus)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"generator.weight_sync_backnd": "nccl"}, "did you mean 'generator.weight_sync_backend'"),
        (
            {"generator": {"weight_transfer_threshold_cuda_ipc_gb": 1}},
            "weight_transfer_threshold_cuda_ipc_GB",
        ),
        ({"trainer": {"placement": {"colocate_al": True}}}, "did you mean 'trainer.placement.colocate_all'"),
        ({"trainer": {"policy": {"model": {"lora": {"rnk": 1}}}}}, "lora.rank"),
        ({"generator.weight_sync_backend": "mpi"}, "mpi"),
        ({"trainer.policy.model.lora.rank": -1}, "expected 0 for no adapter"),
        ({"generator.num_inference_engines": 0, "generator.weight_sync_backend": "gloo"}, "1 or more"),
        (
            {"generator.weight_sync_backend": "gloo", "generator.override_existing_update_group": "yes"},
            "'enable', 'disable' or 'auto'",
        ),
        ({"generator.strategy": "tcp", "generator": {"strategy": "tcp"}}, "twice"),
    ],
)
def test_a_key_or_value_that_is_not_known_is_refused_with_what_was_meant(
    document: dict[str, Any], words: str
) -> None:
    with pytest.raises(WindlassInvalid, match=words):
        strategy_from_config(document)


def test_our_strategies_are_in_the_registry_and_in_the_package_s_entry_points() -> None:
    assert set(OWN) <= set(strategy_names())
    tomllib = pytest.importorskip("tomllib")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points["windlass.strategies"] == {name: ":".join(place) for name, place in OWN.items()}
    for name in OWN:
        assert strategy_class(name).__name__.endswith("TransferStrategy")


def test_every_key_of_the_source_documents_is_known() -> None:
    assert {
        "generator.weight_sync_backend",
        "generator.weight_transfer_threshold_cuda_ipc_GB",
        "generator.override_existing_update_group",
        "generator.pack_weights",
        "generator.use_cuda_ipc",
        "generator.model_dtype",
        "generator.use_flashrl",
        "trainer.placement.colocate_all",
        "trainer.policy.model.lora.rank",
        "trainer.policy.model.lora.alpha",
        "trainer.policy.model.lora.dropout",
        "trainer.policy.model.lora.lora_sync_path",
    } <= set(KEYS)


def test_the_client_and_the_strategies_table_need_no_torch() -> None:
    program = (
        "import json, sys, windlass, windlass.transfer.client, windlass.engines.remote, windlass.transfer, windlass.document;"
        "print(json.dumps('torch' in sys.modules))"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout) is False


@pytest.mark.parametrize(
    ("strategy", "settings", "words"),
    [
        ("broadcast", {"codec": "delta_plain"}, "codec is 'delta_plain': broadcast is 'full'"),
        ("broadcast", {"link": "tcp"}, "link is 'tcp': broadcast is 'collective'"),
        ("packed_cuda_ipc", {"codec": "delta_plain"}, "codec is 'delta_plain': IPC is 'full'"),
        ("tcp", {"codec": "zstd"}, "codec is 'zstd': it is 'auto' or 'plain' or 'context' or 'full'"),
        ("tcp", {"codec": "context", "mode": "full"}, "codec is 'context'"),
        ("tcp", {"codec": "full", "mode": "delta"}, "codec is 'full'"),
        ("tcp", {"link": "nixl"}, "link is 'nixl'"),
        ("lora", {"lora_sync_path": "/mnt/lora", "codec": "delta_plain"}, "travels whole"),
    ],
)
def test_a_link_or_codec_that_a_strategy_has_not_is_refused(
    strategy: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(WindlassInvalid) as error:
        strategy_class(strategy)(settings)
    assert words in f"{error.value} {error.value.advice}"


def test_a_codec_is_what_receivers_ask_for() -> None:
    def asks(**settings: Any) -> str:
        made: Any = strategy_from_config({"strategy": "tcp", **settings})
        return str(made.settings.asks)

    assert [asks(), asks(codec="full"), asks(codec="delta_plain")] == ["auto", "full", "auto"]
    assert asks(codec="delta_plain", mode="delta") == "delta"
    document = {"generator.strategy": "tcp", "generator.codec": "full"}
    made: Any = strategy_from_config(document)
    assert made.settings.asks == "full"


def test_a_codec_is_the_form_of_deltas_that_receivers_ask_for() -> None:
    def records(config: dict[str, Any]) -> str:
        made: Any = strategy_from_config(config)
        return str(made.settings.records)

    named = {None: "auto", "auto": "auto", "plain": "plain", "delta_plain": "plain"}
    named |= {"context": "context", "delta_context": "context", "full": "auto"}
    for codec, expected in named.items():
        assert records({"strategy": "tcp", "codec": codec}) == expected
    for codec, expected in {"auto": "auto", "plain": "plain", "context": "context"}.items():
        assert records({"generator.strategy": "tcp", "generator.codec": codec}) == expected
    assert records({"generator.strategy": "tcp"}) == "auto"


def test_the_model_dtype_of_a_document_is_published() -> None:
    document = {"generator.strategy": "tcp", "generator.model_dtype": "bfloat16"}
    made: Any = strategy_from_config(document)
    assert made.settings.config().generator_dtype == "bfloat16"
