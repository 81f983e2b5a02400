"""Tensors that come in requests: learnt from once, then written to an engine's parameters directly."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from windlass.errors import WindlassInvalid
from windlass.load import Live, ModelSession
from windlass.load import series as series_module
from windlass.load.series import fingerprint

ROWS = {"q": 6, "k": 2, "v": 2}


class Fused(nn.Module):
    """A fused parameter, a turned one, one with padding, and one that comes as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.turned = nn.Linear(4, 10, bias=False), nn.Linear(3, 5, bias=False)
        self.padded, self.norm = nn.Embedding(8, 4), nn.LayerNorm(4)


class Engine(ModelSession):
    """A loader like those of engines, which counts what it is given, and may treat a weight after it was loaded."""

    def __init__(self, model: Fused, scale: float | None = None) -> None:
        super().__init__(model, self._load)
        self.loads: list[list[str]] = []
        self.open = 0
        self._scale = scale

    def _load(self, weights: Any) -> set[str]:
        model, loaded = self.model, set()
        for name, tensor in weights:
            if not tensor.is_meta and self.open:
                self.loads[-1].append(name)
            if name in ROWS:
                start = {"q": 0, "k": 6, "v": 8}[name]
                model.qkv.weight.data[start : start + ROWS[name]].copy_(tensor)  # type: ignore[union-attr, index]
            elif name == "turned":
                model.turned.weight.data.copy_(tensor.t())  # type: ignore[union-attr, operator]
            elif name == "padded":
                model.padded.weight.data[:5].copy_(tensor)  # type: ignore[union-attr, index]
                model.padded.weight.data[5:].fill_(0)  # type: ignore[union-attr, index]
            elif name.startswith("norm."):
                getattr(model.norm, name[5:]).data.copy_(tensor)
            elif name == "tied":
                continue
            else:
                raise KeyError(name)
            loaded.add(name)
        return loaded

    def begin(self) -> None:
        self.open += 1
        self.loads.append([])

    def finish(self) -> None:
        self.open -= 1
        if self._scale is not None:
            with torch.no_grad():
                self.model.turned.weight.mul_(self._scale)  # type: ignore[union-attr, operator]

    def abandon(self) -> None:
        self.open -= 1


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        **{name: torch.randn(rows, 4) for name, rows in ROWS.items()},
        "turned": torch.randn(3, 5),
        "padded": torch.randn(5, 4),
        "norm.weight": torch.randn(4),
        "norm.bias": torch.randn(4),
        "tied": torch.randn(5, 4),
    }


def requests(tensors: dict[str, torch.Tensor], size: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    pairs = list(tensors.items())
    for at in range(0, len(pairs), size):
        yield pairs[at : at + size]


def update(live: Live, tensors: dict[str, torch.Tensor], size: int = 2) -> None:
    for request in requests(tensors, size):
        # In memory that the next request gets: nothing may be kept.
        held = [(name, tensor.clone()) for name, tensor in request]
        live.series.feed(held)
        for _, tensor in held:
            tensor.fill_(float("nan"))
    live.series.finish()


def expect(model: Fused, tensors: dict[str, torch.Tensor], scale: float = 1.0) -> None:
    assert torch.equal(model.qkv.weight, torch.cat([tensors[name] for name in ROWS]))
    assert torch.equal(model.turned.weight, tensors["turned"].t() * scale)
    assert torch.equal(model.padded.weight, torch.cat([tensors["padded"], torch.zeros(3, 4)]))
    assert torch.equal(model.norm.weight, tensors["norm.weight"])
    assert torch.equal(model.norm.bias, tensors["norm.bias"])


@pytest.mark.parametrize("together", [1, 1 << 28])
def test_after_the_first_series_tensors_are_written_directly(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series_module, "TOGETHER", together)
    model = Fused()
    engine = Engine(model)
    live = Live(engine)
    hows = []
    for version in range(1, 5):
        # However they are divided into requests.
        update(live, weights(version), size=version)
        expect(model, weights(version))
        report = live.report()
        assert (report.state, report.error) == ("clean", None)
        assert report.last is not None
        hows.append(report.last.how)
    assert hows == ["session", "dense", "dense", "dense"]
    assert len(engine.loads) == 1 and set(engine.loads[0]) == set(weights(1))
    assert report.plan is not None
    assert (report.plan.replayed, report.plan.session) == (4, 0)
    assert report.last is not None
    assert report.last.bytes == sum(t.nbytes for t in weights(1).values())


def test_tensors_at_hand_are_written_directly_from_where_they_are() -> None:
    model = Fused()
    engine = Engine(model)
    live = Live(engine)
    for version in (1, 2, 3):
        live.load_tensors(weights(version))
        expect(model, weights(version))
    assert len(engine.loads) == 1
    # Another set of them is the engine's own again, and one that does not fit touches nothing.
    part = {name: tensor for name, tensor in weights(4).items() if name.startswith("norm.")}
    live.load_tensors(part)
    expect(model, {**weights(3), **part})
    assert engine.loads[1] == ["norm.bias", "norm.weight"]
    with pytest.raises(WindlassInvalid, match="turned"):
        live.load_tensors({**weights(5), "turned": torch.randn(3, 6)})
    expect(model, {**weights(3), **part})
    assert (live.report().state, len(engine.loads)) == ("clean", 2)
    live.load_tensors(weights(6))
    live.load_tensors(weights(7))
    expect(model, weights(7))
    assert len(engine.loads) == 3


def test_what_the_engine_changes_afterwards_is_never_replayed(caplog: pytest.LogCaptureFixture) -> None:
    model = Fused()
    engine = Engine(model, scale=2.0)
    live = Live(engine)
    with caplog.at_level(logging.WARNING, "windlass"):
        for version in (1, 2, 3):
            update(live, weights(version))
            expect(model, weights(version), scale=2.0)
    assert engine.loads[1:] == [["turned"], ["turned"]]
    report = live.report()
    assert report.plan is not None and report.last is not None
    assert report.plan.why == {
        "turned": "weight is not turned as it was loaded: the engine changes it afterwards"
    }
    assert report.last.how == "dense"
    assert (
        "3 modules are written directly, 1 by the engine's own loader; turned: weight is not" in caplog.text
    )


@pytest.mark.parametrize("change", ["dtype", "shape", "more"])
def test_another_layout_is_learnt_anew(change: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Fused()
    engine = Engine(model)
    live = Live(engine)
    for version in (1, 2):
        update(live, weights(version))
    given = weights(3)
    if change == "dtype":
        given = {name: t.double() for name, t in given.items()}
    elif change == "shape":
        given["tied"] = torch.randn(5, 1, 4)
        given = {"tied": given.pop("tied"), **given}
    else:
        given = {"new": torch.ones(3), **given}
    with caplog.at_level(logging.WARNING, "windlass"):
        update(live, given)
    assert "the next update is loaded by the engine" in caplog.text
    assert len(engine.loads) == 2
    expect(model, {name: t.float() for name, t in given.items()})
    update(live, given)
    expect(model, {name: t.float() for name, t in given.items()})
    assert live.report().state == "clean"
    # Casts are the loader's; everything else is written directly again.
    assert len(engine.loads) == (3 if change == "dtype" else 2)


def test_a_layout_that_changes_in_the_middle_is_named_and_the_next_one_is_whole() -> None:
    model = Fused()
    live = Live(Engine(model))
    for version in (1, 2):
        update(live, weights(version))
    given = weights(3)
    live.series.feed([("q", given["q"])])
    with pytest.raises(WindlassInvalid, match=r"'k' came as float64 \[2, 4\], and was float32") as caught:
        live.series.feed([("k", given["k"].double())])
    assert caught.value.name == "layout_changed"
    live.series.abandon(caught.value)
    report = live.report()
    assert report.state == "dirty" and report.error is not None and "'k' came as" in report.error.text
    update(live, weights(4))
    expect(model, weights(4))
    assert live.report().state == "clean"


def test_a_series_without_a_tensor_is_named_and_stays_dirty() -> None:
    model = Fused()
    live = Live(Engine(model))
    for version in (1, 2):
        update(live, weights(version))
    fewer = {name: t for name, t in weights(3).items() if name not in ("turned", "tied")}
    with pytest.raises(WindlassInvalid, match="turned did not come") as caught:
        update(live, fewer)
    assert caught.value.name == "missing_tensor"
    assert live.report().state == "dirty"
    live.series.abandon(caught.value)
    assert live.report().state == "dirty"
    update(live, weights(4))
    expect(model, weights(4))
    assert live.report().state == "clean"


def test_a_series_that_breaks_off_leaves_the_worker_dirty() -> None:
    model = Fused()
    live = Live(Engine(model))
    for version in (1, 2):
        update(live, weights(version))
    live.series.feed([("q", weights(3)["q"])])
    assert live.report().state == "dirty"
    live.series.abandon(ConnectionError("the trainer is gone"))
    report = live.report()
    assert report.state == "dirty" and report.error is not None
    assert "the trainer is gone" in report.error.text
    # The copies still hold, and everything is written again.
    update(live, weights(4))
    expect(model, weights(4))
    report = live.report()
    assert report.last is not None and (report.state, report.last.how) == ("clean", "dense")


def test_what_came_before_a_restart_does_not_count() -> None:
    model = Fused()
    live = Live(Engine(model))
    for version in (1, 2):
        update(live, weights(version))
    # An update that was never finished, and another one that begins with the same tensors and lacks one.
    live.series.feed([(name, t) for name, t in weights(3).items() if name in ("turned", "q")])
    with pytest.raises(WindlassInvalid, match="turned did not come"):
        update(live, {name: t for name, t in weights(4).items() if name != "turned"})


@pytest.mark.parametrize("why", ["moved", "forgotten"])
def test_weights_that_moved_or_were_discarded_are_loaded_by_the_engine(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Fused()
    engine = Engine(model)
    live = Live(engine)
    for version in (1, 2):
        update(live, weights(version))
    assert len(engine.loads) == 1
    if why == "moved":
        model.norm.weight.data = model.norm.weight.data.clone()
    else:
        # As after sleeping at level 2: also what no tensor of the update writes is gone.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        live.forget("sleep was called")
    with caplog.at_level(logging.WARNING, "windlass"):
        update(live, weights(3))
    expect(model, weights(3))
    assert len(engine.loads) == 2
    if why == "moved":
        assert "parameters are not where they were" in caplog.text
    update(live, weights(4))
    expect(model, weights(4))
    assert len(engine.loads) == 2


def test_a_session_that_refuses_is_used_every_time(caplog: pytest.LogCaptureFixture) -> None:
    model = Fused()
    engine = Engine(model)
    engine.refuses_plan = lambda: "experts move"  # type: ignore[method-assign]
    live = Live(engine)
    with caplog.at_level(logging.WARNING, "windlass"):
        for version in (1, 2):
            update(live, weights(version))
            expect(model, weights(version))
    assert len(engine.loads) == 2
    assert "the update is loaded by the engine: experts move" in caplog.text


def test_a_loader_that_cannot_be_rehearsed_is_used_every_time(caplog: pytest.LogCaptureFixture) -> None:
    model = Fused()
    engine = Engine(model)
    load = engine._load

    def looks(given: Any) -> Any:
        pairs = list(given)
        if any(tensor.is_meta or not engine.open for _, tensor in pairs):
            raise RuntimeError("no memory, no rehearsal")
        return load(pairs)

    engine._loader = looks
    live = Live(engine)
    with caplog.at_level(logging.WARNING, "windlass"):
        for version in (1, 2):
            update(live, weights(version))
            expect(model, weights(version))
    assert len(engine.loads) == 2
    assert "no plan could be made" in caplog.text


def test_a_fingerprint_sees_every_element_and_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(7, 11, dtype=torch.float32)
    whole = int(fingerprint(tensor))
    for piece in (1, 5, 11, 12, 1000):
        monkeypatch.setattr(series_module, "PIECE", piece)
        assert int(fingerprint(tensor)) == whole
        assert int(fingerprint(tensor.t().contiguous().t())) == whole
    seen = {whole}
    for i in range(tensor.numel()):
        other = tensor.clone()
        bits = other.view(torch.int32).view(-1)
        bits[i] ^= 1
        seen.add(int(fingerprint(other)))
    swapped = tensor.clone()
    swapped.view(-1)[[0, 1]] = tensor.view(-1)[[1, 0]]
    seen |= {int(fingerprint(swapped)), int(fingerprint(tensor.t()))}
    assert len(seen) == tensor.numel() + 3
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64):
        assert int(fingerprint(torch.ones(3).to(dtype))) == int(fingerprint(torch.ones(3).to(dtype)))
    assert int(fingerprint(torch.empty(0, 3))) == 0
    assert int(fingerprint(torch.tensor(3.0))) != int(fingerprint(torch.tensor(4.0)))
