"""Load plans from Python: the image of a receiver into torch parameters, whole and only what changed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass import (
    Receiver,
    WeightManager,
    WindlassInvalid,
    WindlassStale,
    WindlassTimeout,
    WindlassUnsupported,
    _windlass,
)

HIDDEN, KV = 64, 16


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="load-") as folder:
        yield Path(folder)


def weights(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made).to(torch.bfloat16)

    return {
        "q": tensor(HIDDEN, HIDDEN),
        "k": tensor(KV, HIDDEN),
        "v": tensor(KV, HIDDEN),
        "o": tensor(HIDDEN, HIDDEN),
        "turned": tensor(HIDDEN, KV),
        "norm": torch.randn(HIDDEN, generator=made),
        "extra": tensor(3),
    }


class Worker:
    """Two shards of an engine in one process: fused rows, columns cut in halves, one matrix transposed."""

    def __init__(self, layout: _windlass.Layout) -> None:
        half = HIDDEN // 2
        self.parameters = {
            "qkv": torch.zeros(HIDDEN + 2 * KV, HIDDEN, dtype=torch.bfloat16),
            "o.0": torch.zeros(HIDDEN, half, dtype=torch.bfloat16),
            "o.1": torch.zeros(HIDDEN, half, dtype=torch.bfloat16),
            "turned": torch.zeros(KV, HIDDEN, dtype=torch.bfloat16),
            "norm": torch.zeros(HIDDEN),
        }
        index = {name: i for i, name in enumerate(self.parameters)}
        rows = {"q": (0, HIDDEN), "k": (HIDDEN, KV), "v": (HIDDEN + KV, KV)}
        copies: list[Any] = [
            (name, 0, index["qkv"], first * HIDDEN, [n, HIDDEN], [HIDDEN, 1], [HIDDEN, 1])
            for name, (first, n) in rows.items()
        ]
        copies += [
            ("o", part * half, index[f"o.{part}"], 0, [HIDDEN, half], [HIDDEN, 1], [half, 1])
            for part in (0, 1)
        ]
        copies.append(("turned", 0, index["turned"], 0, [HIDDEN, KV], [KV, 1], [1, HIDDEN]))
        copies.append(("norm", 0, index["norm"], 0, [HIDDEN], [1], [1]))
        targets = [
            (name, p.numel(), str(p.dtype).removeprefix("torch.")) for name, p in self.parameters.items()
        ]
        self.plan = _windlass.LoadPlan(layout, targets, copies)

    @property
    def addresses(self) -> list[int]:
        return [p.data_ptr() for p in self.parameters.values()]

    def holds(self, wanted: dict[str, torch.Tensor]) -> bool:
        half = HIDDEN // 2
        expected = {
            "qkv": torch.cat([wanted["q"], wanted["k"], wanted["v"]]),
            "o.0": wanted["o"][:, :half],
            "o.1": wanted["o"][:, half:],
            "turned": wanted["turned"].T,
            "norm": wanted["norm"],
        }
        return all(torch.equal(self.parameters[name], value) for name, value in expected.items())


def test_an_image_is_loaded_whole_and_then_by_what_changed(home: Path) -> None:
    model = weights(0)
    with WeightManager(model_id="actor", region_dir=str(home)) as wm:
        wm.offload(model, 1, 0, 1)
        where = home / "image" / "actor"
        with Receiver(home / "image", region=wm.region, keep_deltas=3) as receiver:
            receiver.wait(1, 30)
            held = _windlass.open_image(where, 30.0, 5.0)
            worker = Worker(held.layout())
            coverage = worker.plan.coverage()
            assert coverage["targets"]["qkv"] == ((HIDDEN + 2 * KV) * HIDDEN,) * 2
            assert coverage["sources"]["o"] == (HIDDEN * HIDDEN, HIDDEN * HIDDEN)
            assert coverage["sources"]["extra"] == (0, 3)
            done, copies = worker.plan.dense(held, worker.addresses, threads=2)
            assert copies == 7
            assert done == sum(p.numel() * p.element_size() for p in worker.parameters.values())
            assert worker.holds(model)
            incarnation = int(held.incarnation, 16)
            held.finish()
            for version in (2, 3, 4):
                # A few elements of every tensor.
                for tensor in model.values():
                    tensor.view(-1)[version::97] += 1.0
                wm.offload(model, version, 0, 1)
                wm.wait_delta_ready(timeout=30)
                assert receiver.wait(version, 30)["mode"] == "delta"
                held = _windlass.open_image(where, 30.0, 5.0)
                (elements,) = worker.plan.sparse(held, incarnation, version - 1, worker.addresses, 2)
                assert 0 < elements < 400
                assert worker.holds(model)
                assert worker.plan.sparse(held, incarnation, version, worker.addresses) == (0,)
                assert worker.plan.sampled_difference(held, worker.addresses, 1 << 40, 7) == []
                held.finish()
            held = _windlass.open_image(where, 30.0, 5.0)
            # Everybody's sums, and what nobody holds.
            told = json.loads(
                _windlass.combine_digests(held.layout(), [worker.plan.digest(worker.addresses)])
            )
            assert told["digest"] is None and told["disagree"] == [] and told["rest"] == [["extra", 0]]
            before = told["sums"]["k"]
            worker.parameters["qkv"][HIDDEN + 1, 3] += 1.0
            told = json.loads(
                _windlass.combine_digests(held.layout(), [worker.plan.digest(worker.addresses)])
            )
            assert told["sums"]["k"] != before
            assert worker.plan.sampled_difference(held, worker.addresses, 1 << 40, 7) == ["k"]
            assert worker.plan.dense(held, worker.addresses, only=["k"])[1] == 1
            assert worker.holds(model)
            held.finish()
            with pytest.raises(WindlassStale, match="no longer held"):
                worker.plan.dense(held, worker.addresses)


def test_a_base_without_deltas_is_stale_and_nothing_is_written(home: Path) -> None:
    model = weights(1)
    with WeightManager(model_id="actor", region_dir=str(home)) as wm:
        wm.offload(model, 5, 0, 1)
        with Receiver(home / "image", region=wm.region, keep_deltas=2) as receiver:
            receiver.wait(5, 30)
            held = _windlass.open_image(home / "image" / "actor", 30.0, 5.0)
            worker, incarnation = Worker(held.layout()), int(held.incarnation, 16)
            with pytest.raises(WindlassStale, match="the receiver kept none"):
                worker.plan.sparse(held, incarnation, 4, worker.addresses)
            with pytest.raises(WindlassStale, match="another life of the publisher"):
                worker.plan.sparse(held, incarnation + 1, 5, worker.addresses)
            with pytest.raises(WindlassStale, match="newer than the image"):
                worker.plan.sparse(held, incarnation, 6, worker.addresses)
            with pytest.raises(WindlassTimeout, match="hold a mixture"):
                worker.plan.dense(held, worker.addresses, timeout=0.0)
            assert not any(p.any() for p in worker.parameters.values())
            held.finish()


def test_memory_and_copies_that_do_not_fit_are_refused_by_name(home: Path) -> None:
    model = weights(2)
    with WeightManager(model_id="actor", region_dir=str(home)) as wm:
        wm.offload(model, 1, 0, 1)
        with Receiver(home / "image", region=wm.region) as receiver:
            receiver.wait(1, 30)
            held = _windlass.open_image(home / "image" / "actor", 30.0, 5.0)
            worker = Worker(held.layout())
            good = worker.addresses
            with pytest.raises(WindlassInvalid, match="5 addresses are needed and 4 were given"):
                worker.plan.dense(held, good[:4])
            with pytest.raises(WindlassInvalid, match="target 0 has no memory at 0x0"):
                worker.plan.dense(held, [0, *good[1:]])
            with pytest.raises(WindlassInvalid, match=r"target \d and target \d share memory"):
                worker.plan.dense(held, [good[0], good[1], good[1] + 64, *good[3:]])
            inside = held.memory().address + 8
            with pytest.raises(WindlassInvalid, match="share memory"):
                worker.plan.dense(held, [inside, *good[1:]])
            assert not any(p.any() for p in worker.parameters.values())
            held.finish()
            layout = held.layout()

    def plan(dtype: str, copy: tuple[Any, ...]) -> None:
        _windlass.LoadPlan(layout, [("p", 10, dtype)], [copy])  # type: ignore[list-item]

    plan("bfloat16", ("q", 0, 0, 0, [10], [1], [1]))
    with pytest.raises(WindlassUnsupported, match="does not cast"):
        plan("float32", ("q", 0, 0, 0, [10], [1], [1]))
    with pytest.raises(WindlassInvalid, match='copy 0 reads "nothing"'):
        plan("bfloat16", ("nothing", 0, 0, 0, [10], [1], [1]))
    with pytest.raises(WindlassInvalid, match="up to element 11, and it has 10"):
        plan("bfloat16", ("q", 0, 0, 1, [10], [1], [1]))
    with pytest.raises(WindlassInvalid, match="is written already"):
        plan("bfloat16", ("q", 0, 0, 0, [2], [1], [0]))
    with pytest.raises(WindlassInvalid, match="more than 64 bits"):
        plan("bfloat16", ("q", 0, 0, 0, [2, 2], [2**64 - 1, 2**64 - 1], [1, 2]))
    with pytest.raises(WindlassInvalid, match="not_a_dtype"):
        plan("not_a_dtype", ("q", 0, 0, 0, [10], [1], [1]))
