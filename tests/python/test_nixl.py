"""Images read by NIXL, through Python: the manager, receivers, and the tcp strategy, over UCX's TCP."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from children import environment
from test_strategies_tcp import Engine, Kept
from windlass import Receiver, WeightManager, WeightSyncManager, WindlassInvalid, strategy_from_config
from windlass.extract import ModuleWeightExtractor
from windlass.receive.receiver import Synced
from windlass.transfer.client import InferenceEngineClient

ROOT = Path(__file__).parent.parent.parent
PARAMS = {"engine_config": "TLS=tcp"}


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="nixl-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def library() -> str:
    found = [os.environ.get("WINDLASS_NIXL_LIBRARY"), *ROOT.glob(".venv-nixl/lib/*/site-packages")]
    named = next((str(path) for path in found if path), None)
    if named is None:
        pytest.skip("NOT TESTED: NIXL, because there is none: run `make .venv-nixl/ready`")
    return named


def test_a_receiver_reads_the_image_of_a_manager_with_the_parameters_that_are_given(
    home: Path, library: str
) -> None:
    nixl: dict[str, Any] = {"nixl": "on", "nixl_library": library, "nixl_params": PARAMS}
    weights = {"a": torch.randn(300_000)}
    with WeightManager(model_id="read", region_dir=str(home), timeout=120.0, agent=nixl) as wm:
        wm.offload(weights, 1, 0, 1)
        assert wm.endpoint is not None and wm.token_file is not None
        source: dict[str, Any] = {"endpoint": wm.endpoint, "token_file": wm.token_file, "relay": False}
        with Receiver(home / "read", **source, **nixl) as receiver:
            told = receiver.wait(1, 120.0)
            assert told.read_bytes >= 1_200_000 and told.unread is None, told
            with receiver.hold() as image:
                assert torch.equal(image.tensors["a"], weights["a"])
        # What "auto" does without is no error.
        absent = str(home / "absent")
        with Receiver(
            home / "not", **source, nixl="auto", nixl_library=absent, nixl_params=PARAMS
        ) as receiver:
            told = receiver.wait(1, 120.0)
            assert told.read_bytes == 0, told
            with receiver.hold() as image:
                assert torch.equal(image.tensors["a"], weights["a"])


def test_both_ends_of_the_tcp_strategy_use_the_nixl_of_their_agents_configuration(
    home: Path, library: str, caplog: pytest.LogCaptureFixture
) -> None:
    agent = {"nixl": "on", "nixl_library": library, "nixl_params": PARAMS}
    settings = {
        "strategy": "tcp",
        "link": "shm",
        "image_dir": str(home / "images"),
        "timeout": 120.0,
        "manager": {"region_dir": str(home), "agent": agent},
    }
    model = torch.nn.Linear(400, 300)

    async def run() -> None:
        engine = Engine(settings, Kept())
        client = InferenceEngineClient([engine], prefix_cache="keep")
        manager = WeightSyncManager(strategy_from_config(settings), ModuleWeightExtractor(), client)
        await manager.initialize()
        await manager.sync_weights(model)
        assert torch.equal(engine.loader.tensors["weight"], model.weight)
        await client.aclose()
        manager.close()

    with caplog.at_level(logging.INFO, logger="windlass"):
        asyncio.run(run())
    told = [arg for record in caplog.records for arg in record.args or () if isinstance(arg, Synced)]
    assert [synced.read_bytes >= 480_000 for synced in told] == [True], told


def test_an_agent_gets_every_parameter(home: Path) -> None:
    agent = {"nixl": "auto", "nixl_params": {"engine_config": "TLS=tcp,rc", "num_workers": "2"}}
    with WeightManager(model_id="any", region_dir=str(home), timeout=120.0, agent=agent) as wm:
        wm.listen()
        words = Path(f"/proc/{wm.status()['agent']['pid']}/cmdline").read_text().split("\0")
    assert [word for word in words if "nixl-param" in word] == [
        "--nixl-param=engine_config=TLS=tcp,rc",
        "--nixl-param=num_workers=2",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nixl_params": PARAMS}, "expected none while nixl is 'off'; set it to 'auto' or 'on'"),
        ({"nixl": True, "nixl_params": {"TLS": 5}}, "{'TLS': 5}: expected texts by their names"),
        ({"nixl": True, "nixl_params": ["TLS=tcp"]}, r"\['TLS=tcp'\]: expected texts by their names"),
        ({"nixl": "sometimes"}, 'nixl "sometimes" is not one of "off", "auto" and "on"'),
    ],
)
def test_a_receiver_says_what_is_wrong_with_its_nixl(home: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(WindlassInvalid, match=said):
        Receiver(home, endpoint="http://127.0.0.1:1", token="t" * 32, **options)


def test_a_parameter_without_nixl_is_refused_by_the_command(home: Path) -> None:
    words = ["agent", f"--region={home}", "--nixl-param=engine_config=TLS=tcp"]
    command = [sys.executable, "-m", "windlass", *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "without --nixl auto or on" in done.stderr, done.stderr
