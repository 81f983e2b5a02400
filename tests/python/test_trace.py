"""The rehearsal of a loader, and the modules that qualify after it, without an engine: loaders of all kinds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from windlass.errors import WindlassInvalid
from windlass.load.qualify import Verdict, qualify, snapshot
from windlass.load.trace import Target, Trace, trace

Weights = Iterable[tuple[str, torch.Tensor]]


class Linear(torch.nn.Module):
    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full(shape, -1.0, dtype=dtype), requires_grad=False)


class Model(torch.nn.Module):
    """Fused rows, a slice for one of two ranks, padding, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = Linear(6, 4)
        self.piece = Linear(4, 3)
        self.padded = Linear(5, 2)
        self.norm = Linear(4)

    def load_weights(self, weights: Weights) -> set[str]:
        for name, tensor in weights:
            if name in ("q", "k"):
                at = 0 if name == "q" else 3
                self.qkv.weight.data.narrow(0, at, 3).copy_(tensor)
            elif name == "half":
                self.piece.weight.data.copy_(tensor.t()[:, 3:6])
            elif name == "padded":
                self.padded.weight[: tensor.shape[0]].data.copy_(tensor)
                self.padded.weight[tensor.shape[0] :].data.fill_(0)
            elif name == "norm":
                assert tensor.shape == self.norm.weight.shape, "the size is wrong"
                self.norm.weight.data.copy_(tensor)
            else:
                raise ValueError(f"There is no module or parameter named {name!r}")
        return set()


def sources() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"q": (3, 4), "k": (3, 4), "half": (6, 4), "padded": (3, 2), "norm": (4,)}
    return {name: torch.randn(*shape) for name, shape in shapes.items()}


def targets(model: torch.nn.Module) -> list[Target]:
    return [
        Target(prefix, name, parameter)
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def rehearsed(model: Any, given: dict[str, torch.Tensor]) -> Trace:
    return trace(model.load_weights, given, targets(model))


class Anything:
    """A judge that knows every class, and nothing of tensors beside parameters."""

    def refuses(self, name: str, module: torch.nn.Module) -> str | None:
        return None

    def independent(self, name: str, module: torch.nn.Module, attribute: str) -> bool:
        return attribute == "cos"

    def serving(self, attribute: str) -> bool:
        return False

    def looks_into(self, value: object) -> bool:
        return False


def judged(
    model: Any, given: dict[str, torch.Tensor], afterwards: Callable[[Any], None] = lambda model: None
) -> Verdict:
    found = rehearsed(model, given)
    names = {found.targets[copy.target].name for copy in found.copies}
    before = snapshot(model, Anything(), names)
    with torch.no_grad():
        model.load_weights(given.items())
        afterwards(model)
    return qualify(model, Anything(), found, before, given.__getitem__)


def test_a_rehearsal_changes_no_parameter() -> None:
    model, given = Model(), sources()
    before = {name: tensor.clone() for name, tensor in given.items()}
    rehearsed(model, given)
    assert all(bool((parameter == -1).all()) for parameter in model.parameters())
    assert all(torch.equal(before[name], given[name]) for name in given)


def test_every_copy_is_found_where_the_loader_would_put_it() -> None:
    model, given = Model(), sources()
    found = rehearsed(model, given)
    assert (found.refusal, found.reasons, len(found.copies)) == (None, {}, 5)
    with torch.no_grad():
        for copy in found.copies:
            into = found.targets[copy.target].tensor
            source = given[copy.source]
            torch.as_strided(into, copy.sizes, copy.target_strides, copy.target_offset).copy_(
                torch.as_strided(source, copy.sizes, copy.source_strides, copy.source_offset)
            )
        replayed = {name: tensor.clone() for name, tensor in model.named_parameters()}
        model.load_weights(given.items())
    replayed["padded.weight"][3:] = 0
    assert all(torch.equal(replayed[name], tensor) for name, tensor in model.named_parameters())


def test_padding_counts_as_written_and_everything_qualifies() -> None:
    verdict = judged(Model(), sources())
    assert (verdict.why, verdict.modules) == ({}, 4)
    assert verdict.replayed == {"q", "k", "half", "padded", "norm"}


def test_sources_in_one_flat_memory_are_told_apart() -> None:
    flat = torch.arange(100, dtype=torch.float32)
    given = {
        name: flat[at : at + t.numel()].view(t.shape)
        for (name, t), at in zip(sources().items(), (0, 12, 24, 48, 54))
    }
    found = rehearsed(Model(), given)
    assert {copy.source for copy in found.copies} == set(given)
    assert all(copy.source_offset in (0, 12) for copy in found.copies)


def test_a_name_that_the_engine_does_not_know_is_an_extra() -> None:
    given = {**sources(), "a_value_head": torch.zeros(3), "z_head": torch.zeros(1)}
    found = rehearsed(Model(), given)
    assert found.unexpected == ["a_value_head", "z_head"]
    assert len(found.copies) == 5


def test_a_wrong_shape_is_named_before_any_write() -> None:
    for name, wrong in {"norm": torch.zeros(5), "q": torch.zeros(3, 5), "half": torch.zeros(2, 4)}.items():
        model = Model()
        with pytest.raises(WindlassInvalid, match=f"'{name}'"):
            rehearsed(model, {**sources(), name: wrong})
        assert all(bool((parameter == -1).all()) for parameter in model.parameters())


def test_a_cast_is_not_replayed() -> None:
    given = sources()
    given["norm"] = given["norm"].bfloat16()
    verdict = judged(Model(), given)
    assert verdict.why == {"norm": "weight is cast from bfloat16 to float32"}
    assert verdict.session == {"norm"}


def test_a_sum_is_not_replayed() -> None:
    class Shifted(Model):
        def load_weights(self, weights: Weights) -> set[str]:
            return super().load_weights((n, t + 1 if n == "norm" else t) for n, t in weights)

    verdict = judged(Shifted(), sources())
    assert verdict.why == {"norm": "weight passes aten.add.Tensor"}


def test_a_duplicate_stays_on_the_path() -> None:
    class Moved(Model):
        def load_weights(self, weights: Weights) -> set[str]:
            return super().load_weights((n, t.clone().to("cpu")) for n, t in weights)

    assert judged(Moved(), sources()).why == {}


def test_a_loader_that_looks_at_values_gets_them_itself() -> None:
    class Curious(Model):
        def load_weights(self, weights: Weights) -> set[str]:
            pairs = list(weights)
            self.scale = max(float(t.max()) for _, t in pairs)
            return super().load_weights(pairs)

    verdict = judged(Curious(), sources())
    assert verdict.replayed == set()
    assert "looks at values" in verdict.why["norm"]


def test_a_loader_that_writes_to_its_input_is_given_copies() -> None:
    class Careless(Model):
        def load_weights(self, weights: Weights) -> set[str]:
            return super().load_weights((n, t.mul_(2) if n == "q" else t) for n, t in weights)

    model, given = Careless(), sources()
    before = given["q"].clone()
    found = rehearsed(model, given)
    assert found.written_sources == {"q"}
    assert found.refusal is not None
    assert torch.equal(given["q"], before)


def test_a_parameter_that_is_changed_afterwards_is_not_replayed() -> None:
    def shuffle(model: Model) -> None:
        model.qkv.weight.data.copy_(model.qkv.weight.flip(0))

    verdict = judged(Model(), sources(), shuffle)
    assert list(verdict.why) == ["qkv"]
    assert verdict.session == {"q", "k"}


def test_a_parameter_that_moves_is_not_replayed() -> None:
    def move(model: Model) -> None:
        model.piece.weight = torch.nn.Parameter(model.piece.weight.clone(), requires_grad=False)

    verdict = judged(Model(), sources(), move)
    assert verdict.why == {"piece": "weight moved during the reload"}


def test_a_tensor_of_unknown_origin_disqualifies_its_neighbours() -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.attend = Linear(2, 2), torch.nn.Module()

    class Latent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm = Attention(), Linear(2)

        def load_weights(self, weights: Weights) -> set[str]:
            for name, tensor in weights:
                self.get_parameter(name).data.copy_(tensor)
            return set()

    def derive(model: Latent) -> None:
        model.attention.attend.matrix = {"absorbed": [model.attention.up.weight @ torch.eye(2)]}

    given = {"attention.up.weight": torch.randn(2, 2), "norm.weight": torch.randn(2)}
    assert judged(Latent(), given).why == {}
    verdict = judged(Latent(), given, derive)
    assert set(verdict.why) == {"attention.up"}
    assert "unknown origin" in verdict.why["attention.up"]
    assert verdict.replayed == {"norm.weight"}


def test_a_packed_weight_in_a_closure_is_seen() -> None:
    def pack(model: Model) -> None:
        packed = model.norm.weight.clone()
        model.norm.multiply = lambda x: x * packed  # type: ignore[assignment]

    assert "unknown origin" in judged(Model(), sources(), pack).why["norm"]


def test_an_independent_tensor_that_changes_is_not_independent() -> None:
    def change(model: Model) -> None:
        model.norm.cos += 1  # type: ignore[operator, union-attr]

    model = Model()
    model.norm.register_buffer("cos", torch.zeros(3))
    assert judged(model, sources()).why == {}
    assert "changed during the reload" in judged(model, sources(), change).why["norm"]


def test_modules_that_share_a_source_qualify_together() -> None:
    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.third = Linear(4), Linear(4), Linear(4)

        def load_weights(self, weights: Weights) -> set[str]:
            for name, tensor in weights:
                if name == "both":
                    self.one.weight.data.copy_(tensor)
                    self.other.weight.data.copy_(tensor)
                else:
                    self.third.weight.data.copy_(tensor)
            return set()

    def negate(model: Shared) -> None:
        model.one.weight.data.neg_()

    verdict = judged(Shared(), {"both": torch.randn(4), "alone": torch.randn(4)}, negate)
    assert set(verdict.why) == {"one", "other"}
    assert (verdict.session, verdict.replayed) == ({"both"}, {"alone"})


def test_a_parameter_that_is_written_twice_is_not_replayed() -> None:
    class Twice(Model):
        def load_weights(self, weights: Weights) -> set[str]:
            for name, tensor in weights:
                super().load_weights([(name, tensor)])
                if name == "norm":
                    self.norm.weight.data[:2].copy_(tensor[:2])
            return set()

    assert "not written wholly" in judged(Twice(), sources()).why["norm"]


FIRST_REHEARSAL = """
import sys
import torch
from windlass.load.live import Live
from windlass.load.trace import Target, trace

weight = torch.zeros(4)
Live(None)
before = set(sys.modules)
found = trace(lambda weights: [weight.copy_(w) for _, w in weights], {"w": torch.ones(4)}, [Target("", "w", weight)])
assert len(found.copies) == 1 and not weight.any()
print(*sorted(set(sys.modules) - before))
"""


def test_the_first_rehearsal_imports_nothing_that_takes_time() -> None:
    # A process of its own: in this one torch has imported it all.
    done = subprocess.run(
        [sys.executable, "-c", FIRST_REHEARSAL], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) < 10, done.stdout
