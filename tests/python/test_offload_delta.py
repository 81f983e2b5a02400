"""offload_mode="delta" on a CPU: what is handed out, when calls return, and what they raise."""

from __future__ import annotations

import json
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from controlled import until
from windlass import Receiver, WeightManager, WindlassError, WindlassInvalid, WindlassStale

QUIET = {"enabled": False}


@pytest.fixture
def home() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="delta-") as folder:
        yield folder


def weights() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return {
        "embed": torch.randn(300, 301, generator=made).to(torch.bfloat16),
        "norm": torch.randn(70_000, generator=made),
        "one": torch.randn((), generator=made),
    }


def step(tensors: dict[str, torch.Tensor], version: int) -> None:
    tensors["embed"][version % 300, ::7] *= 1.01
    tensors["norm"][version::997] += 1e-3


def told(wm: WeightManager) -> dict[str, Any]:
    """The agent's own account."""
    assert wm.token_file is not None
    request = urllib.request.Request(
        f"{wm.endpoint}/status",
        headers={"Authorization": f"Bearer {Path(wm.token_file).read_text().strip()}"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        status: dict[str, Any] = json.loads(answer.read())
    return status


def test_receivers_follow_versions_that_are_handed_out_by_delta(home: str) -> None:
    tensors = weights()
    with WeightManager(model_id="p", region_dir=home, offload_mode="delta", timeout=60.0) as wm:
        first = wm.offload(tensors, 1, 0, 1)
        assert (first.mode, wm.status()["deltas"]) == ("copy", True)
        wm.wait_delta_ready(1)
        with Receiver(f"{home}/image", region=wm.region) as receiver:
            for version in range(2, 7):
                step(tensors, version)
                result = wm.offload(tensors, version, 0, 1)
                assert (result.mode, result.version, wm.version) == ("delta", version, version)
                wanted = {name: t.clone() for name, t in tensors.items()}
                # From here on the trainer may change its weights.
                receiver.wait(version, 60.0)
                with receiver.hold() as image:
                    assert image.version == version
                    for name, tensor in wanted.items():
                        assert torch.equal(image.tensors[name], tensor), name
                    assert image.digest == wm.wait_delta_ready(version)
        status = told(wm)
        assert status["counters"]["joined"] == 5
        assert status["counters"]["sealed_by_delta"] == 5
        assert status["contradiction"] is None


def test_a_delta_that_fails_in_the_background_is_raised_by_the_next_call_and_then_copied(home: str) -> None:
    tensors = weights()
    config: dict[str, Any] = {"model_id": "p", "region_dir": home, "offload_mode": "delta", "agent": QUIET}
    with WeightManager(timeout=1.0, **config) as wm:
        for version in (1, 2, 3):
            step(tensors, version)
            wm.offload(tensors, version, 0, 1, timeout=30.0)
        assert wm._open is not None
        assert wm._open.publisher is not None
        wm._open.publisher.settle(30.0)
        # Two readers, one on each slot, so that the next version finds none to write.
        held = [wm._open.publisher.hold(60.0)]
        wm.offload(tensors, 4, 0, 1, timeout=30.0)
        wm._open.publisher.settle(30.0)
        step(tensors, 5)
        assert wm.offload(tensors, 5, 0, 1, timeout=30.0).mode == "delta"
        with pytest.raises(WindlassError, match="version 5 was not committed"):
            wm.offload(tensors, 6, 0, 1, timeout=30.0)
        for h in held:
            h.finish()
        # The number was handed out: the same bytes or none.
        other = {name: t + 1 for name, t in tensors.items()}
        with pytest.raises(WindlassStale, match="handed out"):
            wm.offload(other, 5, 0, 1, timeout=30.0)
        assert wm.offload(tensors, 5, 0, 1, timeout=30.0).mode == "copy"
        step(tensors, 6)
        assert wm.offload(tensors, 6, 0, 1, timeout=30.0).mode == "delta"
        wm._open.publisher.settle(30.0)
        assert wm.version == 6


def test_waiting_for_a_delta_raises_what_became_of_it(home: str) -> None:
    tensors = weights()
    config: dict[str, Any] = {"model_id": "p", "region_dir": home, "offload_mode": "delta", "agent": QUIET}
    with WeightManager(timeout=0.5, **config) as wm:
        for version in (1, 2):
            wm.offload(tensors, version, 0, 1, timeout=30.0)
        assert wm._open is not None
        assert wm._open.publisher is not None
        wm._open.publisher.settle(30.0)
        held = wm._open.publisher.hold(60.0)
        wm.offload(tensors, 3, 0, 1, timeout=30.0)
        wm._open.publisher.settle(30.0)
        wm.offload(tensors, 4, 0, 1, timeout=30.0)
        with pytest.raises(WindlassError, match="version 4 was not committed"):
            wm.wait_delta_ready(4, timeout=30.0)
        held.finish()


def test_auto_copies_where_no_gpu_tells_what_changed(home: str) -> None:
    with WeightManager(model_id="p", region_dir=home, agent=QUIET, timeout=30.0) as wm:
        assert wm.config.offload_mode == "auto"
        modes = [wm.offload(weights(), version, 0, 1).mode for version in (1, 2)]
        assert (modes, wm.status()["deltas"]) == (["copy", "copy"], False)
    with pytest.raises(WindlassInvalid, match="offload_mode"):
        WeightManager(model_id="p", region_dir=home, offload_mode="fast")


def test_the_same_version_again_waits_for_the_first_and_is_not_new(home: str) -> None:
    tensors = weights()
    config: dict[str, Any] = {"model_id": "p", "region_dir": home, "offload_mode": "delta", "agent": QUIET}
    with WeightManager(timeout=30.0, **config) as wm:
        wm.offload(tensors, 1, 0, 1)
        step(tensors, 2)
        assert wm.offload(tensors, 2, 0, 1).mode == "delta"
        assert not wm.offload(tensors, 2, 0, 1).new
        step(tensors, 3)
        with pytest.raises(WindlassStale):
            wm.offload(tensors, 2, 0, 1)
        assert wm.offload(tensors, 3, 0, 1).mode == "delta"


def test_a_manager_that_is_closed_or_resumed_leaves_no_thread_and_no_file(home: str) -> None:
    tensors = weights()
    config: dict[str, Any] = {"model_id": "p", "region_dir": home, "offload_mode": "delta"}
    with WeightManager(timeout=30.0, **config) as wm:
        for version in (1, 2):
            step(tensors, version)
            wm.offload(tensors, version, 0, 1)
        wm.resume()
        step(tensors, 1)
        assert wm.offload(tensors, 1, 0, 1).mode == "copy"
        assert wm.offload(tensors, 2, 0, 1).mode == "delta"
    tasks = [Path(f"/proc/self/task/{t.name}/comm") for t in Path("/proc/self/task").iterdir()]
    until("threads end", lambda: not any(c.exists() and "windlass-rank" in c.read_text() for c in tasks))
    until("the region goes", lambda: not list(Path(home).iterdir()))
