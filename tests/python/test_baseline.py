"""Where a trainer's baseline is kept: what is decided, what is taken of a driver, and that all of it is given back.

The driver is ``host_driver.c``, whose device memory is this machine's, so that this needs no GPU; records byte by byte are in
``tests/gpu/device.py``.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from test_facts import ROOT, functions
from windlass._windlass import place_baseline
from windlass.config import WeightManagerConfig
from windlass.errors import WindlassExhausted, WindlassInvalid
from windlass.publish import gpu as on_gpu

G = 1 << 30
SOURCE = Path(__file__).with_name("host_driver.c")

RANK = Path(__file__).with_name("programs") / "baseline_rank.py"
WEIGHTS = (1 << 20) + 1008 + (1 << 19)
BLOCKS = 13

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a rank that keeps its baseline by ``how``, on a device with ``free`` of ``total`` bytes."""
    source = SOURCE.read_text()
    rest = [name for name in functions() if f"int {name}(" not in source]
    (tmp_path / "rest.c").write_text("".join(f"int {name}(void) {{ return 999; }}\n" for name in rest))
    command = ["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", tmp_path / "libcuda.so.1"]
    subprocess.run([*command, SOURCE, tmp_path / "rest.c"], check=True, timeout=60)

    def rank(free: int = 8 * G, total: int = 16 * G, fail: str = "", **how: Any) -> dict[str, Any]:
        env = {
            **os.environ,
            "LD_LIBRARY_PATH": str(tmp_path),
            "PYTHONPATH": str(ROOT / "python"),
            "FREE_BYTES": str(free),
            "TOTAL_BYTES": str(total),
            "FAIL": fail,
        }
        command = [sys.executable, str(RANK), json.dumps(how)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        # Whatever came of it, nothing is left.
        assert told["before"] == told["after"], told
        return told

    return rank


def test_a_baseline_is_on_the_device_on_the_host_or_in_both(run: Run) -> None:
    room = -(-WEIGHTS // 16 // 4) * 4
    for free, how, device in [
        (8 * G, {}, WEIGHTS),
        (8 * G, {"keep": "auto"}, WEIGHTS),
        # Above the reserve there are half a MiB and the records: four blocks of 128 KiB, then the tail.
        (G + (1 << 19) + room, {"keep": "auto"}, 4 << 17),
        (8 * G, {"keep": "auto", "most": 300_000 + room}, 2 << 17),
        (8 * G, {"keep": "host"}, 0),
        (G, {"keep": "auto"}, 0),
    ]:
        told = run(free, **how)
        on_device, on_host, records, compare, copy = told["place"]
        assert (on_device, on_device + on_host) == (device, WEIGHTS), (free, how, told)
        assert records == (room if free > G else -(-WEIGHTS // 64 // 4) * 4)
        # Tables, the tally and two buffers for records are all else that is taken.
        assert 0 <= told["kept"][0] - on_device - records < 8192, told
        assert 0 <= told["kept"][1] - on_host < WEIGHTS // 16, told
        assert (told["lost 2"], told["lost 3"]) == (BLOCKS, BLOCKS)
        assert copy > 0 and (on_host == 0 or compare > copy * on_host / WEIGHTS)


def test_what_was_taken_is_given_back_where_something_is_refused(run: Run) -> None:
    split = {"keep": "auto", "most": 1 << 19}
    told = run(**split)
    assert min(told["place"][:2]) > 0, told
    asked = dict(zip(("device", "host"), told["asked"]))
    # Weights, records, three tables and a tally; weights and two buffers for records.
    assert asked == {"device": 6, "host": 3}
    for kind, count in asked.items():
        for n in range(1, count + 1):
            told = run(fail=f"{kind}:{n}", **split)
            assert "error" in told, (kind, n, told)
            name, text = told["error"]
            assert name == "WindlassExhausted", told
            assert ("ulimit -l" in text) if kind == "host" else ("are free" in text), text


def test_a_device_that_lost_its_room_meanwhile_leaves_all_to_the_host(run: Run) -> None:
    # The second allocation on the device is that of the weights.
    told = run(fail="device:2", keep="auto")
    assert told["place"][:2] == [0, WEIGHTS], told
    for how in ({}, {"keep": "auto", "most": 1 << 20}):
        name, text = run(fail="device:2", **how)["error"]
        assert name == "WindlassExhausted" and 'baseline="host"' in text, text


def test_a_device_that_is_full_is_said_in_numbers(run: Run) -> None:
    name, text = run(free=1 << 20)["error"]
    assert name == "WindlassExhausted"
    assert "0.0 GiB are free" in text and 'baseline="auto"' in text and "gpu_memory_utilization" in text


def test_the_decision_is_that_of_the_core() -> None:
    # 8B on an H200 where an engine left 11.6 GiB: a sixth is on the GPU.
    device, host, records, compare, copy = place_baseline(int(15.3 * G), int(11.6 * G), 141 * G, 64 * G)
    assert device + host == int(15.3 * G) and device + records <= int(11.6 * G) - 141 * G // 20
    assert 200 < compare < copy < 320
    assert place_baseline(16 * G, 100 * G, 141 * G)[1] == 0
    assert place_baseline(16 * G, 20 * G, 24 * G, demanded=False)[:2] == (9 * G, 7 * G)
    assert place_baseline(16 * G, 20 * G, 24 * G, keep="host")[0] == 0
    assert place_baseline(16 * G, 20 * G, 24 * G, most=0)[0] == 0
    with pytest.raises(WindlassExhausted, match=r"16\.0 GiB of page-locked host memory.*may take 3\.6 GiB"):
        place_baseline(16 * G, 100 * G, 141 * G, 4 * G, keep="host")
    with pytest.raises(WindlassInvalid, match='"gpu" is no place'):
        place_baseline(1, 1, 1, keep="gpu")


class Pretended:
    """What :func:`windlass.publish.gpu.can_compare` asks a GPU and a tensor."""

    name, ordinal = "H200", 0
    is_meta, dtype = False, torch.bfloat16

    def __init__(self, free: int = 0, elements: int = 0, device: int = 0) -> None:
        self.free, self.elements, self.device = free, elements, device

    def memory(self) -> tuple[int, int]:
        return self.free, 141 * G

    def numel(self) -> int:
        return self.elements

    def get_device(self) -> int:
        return self.device


def compares(
    monkeypatch: pytest.MonkeyPatch, free: int, host: int | None, *, where: str | int = "auto", on: int = 0
) -> bool:
    """Whether "auto" is by delta for 16 GiB in bf16."""
    tensor = Pretended(elements=8 * G, device=on)
    share = SimpleNamespace(gathered=False, fetch=lambda given: given)
    sources = [SimpleNamespace(name="w", shares=[share], given=tensor, derived=None, spent=False)]
    monkeypatch.setattr(on_gpu, "host_memory", lambda: host)
    gpu = cast(Any, Pretended(free=free))
    return on_gpu.can_compare(cast(Any, sources), gpu, lambda name, dtype: dtype, where)


def test_auto_takes_deltas_where_comparing_is_cheaper_than_copying(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "windlass"):
        assert compares(monkeypatch, 100 * G, 0)
        # With an engine on the GPU: half of what is free or what the reserve leaves.
        assert compares(monkeypatch, 30 * G, 128 * G)
        assert compares(monkeypatch, 12 * G, 128 * G)
        assert compares(monkeypatch, 12 * G, None)
        assert not caplog.messages
        # All of it over the bus.
        assert not compares(monkeypatch, 7 * G, 128 * G)
        assert (
            "17.2 GB of the baseline in host memory" in caplog.text and "comparing would take" in caplog.text
        )
        caplog.clear()
        assert not compares(monkeypatch, 100 * G, 128 * G, where="host")
        assert compares(monkeypatch, 100 * G, 128 * G, where=8 * G)
        caplog.clear()
        # The slots come first: 16 GiB of 40 are left, and a tenth of that stays free.
        assert compares(monkeypatch, 12 * G, 50 * G)
        assert not compares(monkeypatch, 12 * G, 40 * G)
        assert "page-locked host memory" in caplog.text and "docker --memory" in caplog.text
        assert [r.levelname for r in caplog.records] == ["WARNING"]
        # What is on another GPU is not compared, which the plan says.
        assert not compares(monkeypatch, 100 * G, 128 * G, on=1)


@pytest.mark.parametrize("value", ["auto", "device", "host", 0, 5 * G])
def test_the_place_of_a_baseline_is_configured(value: str | int) -> None:
    config = WeightManagerConfig.from_dict({"baseline": value})
    assert WeightManagerConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("value", ["gpu", "", True, -1, 1.5, None])
def test_other_places_are_refused(value: Any) -> None:
    with pytest.raises(WindlassInvalid, match="baseline is .*'auto', 'device', 'host'"):
        WeightManagerConfig.from_dict({"baseline": value})
