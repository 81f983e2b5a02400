"""SGLang's side of the package without SGLang: what is judged, linked and packed, and the loader in a worker."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from recorder import Recorder
from windlass import Receiver, WeightManager, _windlass
from windlass.engines.sglang import SGLangLora, SGLangWeightLoader, custom, payload
from windlass.engines.sglang.served import Rules, Served, Shape
from windlass.engines.sglang.session import SglangSession
from windlass.errors import (
    WindlassCorrupt,
    WindlassInvalid,
    WindlassNotFound,
    WindlassStale,
    WindlassUnsupported,
)
from windlass.load.order import Report
from windlass.load.trace import trace
from windlass.names.checkpoint import checkpoint_layout


def checkpoint(path: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


SERVED = Served(
    {"a": ("bfloat16", (2, 3)), "b": ("bfloat16", (4,)), "x.rotary_emb.inv_freq": ("float32", (8,))}
)
GOOD: dict[str, Shape] = {"a": ("bfloat16", (2, 3)), "b": ("bfloat16", (4,))}


@pytest.mark.parametrize(
    ("offered", "rules", "name", "says"),
    [
        ({"a": GOOD["a"]}, Rules(), "missing_tensor", "b is missing"),
        ({**GOOD, "a": ("bfloat16", (3, 2))}, Rules(), "shape_changed", r"a has shape \[3, 2\]"),
        ({**GOOD, "a": ("float32", (2, 3))}, Rules(), "dtype_changed", "a is float32"),
        ({**GOOD, "a": ("int8", (2, 3))}, Rules(cast=True), "dtype_changed", "a is int8"),
        ({**GOOD, "v": ("bfloat16", (1,))}, Rules("error"), "extra_tensor", "it has v"),
        ({}, Rules(optional=["*"]), "missing_tensor", "no tensor"),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_named(
    offered: dict[str, Shape], rules: Rules, name: str, says: str
) -> None:
    with pytest.raises(WindlassInvalid, match=says) as e:
        SERVED.check(offered, rules, what="version 3")
    assert e.value.name == name
    assert "version 3" in str(e.value)


def test_what_the_rules_allow_fits() -> None:
    assert SERVED.check(GOOD, Rules("error"), what="it").take == ["a", "b"]
    assert SERVED.check({"a": GOOD["a"]}, Rules(optional=["b*"]), what="it").take == ["a"]
    assert SERVED.check({"a": GOOD["a"]}, Rules(), what="it", whole=False).take == ["a"]
    assert SERVED.check({**GOOD, "a": ("float32", (2, 3))}, Rules(cast=True), what="it").take == ["a", "b"]
    assert SERVED.check({**GOOD, "v": ("float32", (1,))}, Rules(), what="it").extras == ["v"]


def test_many_problems_are_counted_and_some_listed() -> None:
    served = Served({f"w{i}": ("float32", (1,)) for i in range(9)})
    with pytest.raises(WindlassInvalid, match=r"w1 is missing.*and 3 more"):
        served.check({"w0": ("float32", (1,))}, Rules(), what="it")


def test_a_tied_output_embedding_need_not_be_there(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.zeros(4, 2), "lm_head.weight": torch.zeros(4, 2)}
    offered: dict[str, Shape] = {"model.embed_tokens.weight": ("float32", (4, 2))}
    tied = Served.from_checkpoint(checkpoint(tmp_path / "tied", tensors, tie_word_embeddings=True))
    assert tied.check(offered, Rules(), what="it").take == ["model.embed_tokens.weight"]
    untied = Served.from_checkpoint(checkpoint(tmp_path / "untied", tensors))
    with pytest.raises(WindlassInvalid, match="lm_head.weight is missing"):
        untied.check(offered, Rules(), what="it")


def test_a_checkpoint_in_shards_is_read_by_its_index(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"old": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    index = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert Served.from_checkpoint(tmp_path).tensors == {"a": ("float32", (2,)), "b": ("bfloat16", (3,))}


@pytest.mark.parametrize("file", ["../secret.safetensors", "/secret.safetensors", "..", "sub/a.safetensors"])
def test_an_index_that_leads_out_of_its_directory_is_refused_for_what_an_engine_serves(
    file: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    for place in (tmp_path / "secret.safetensors", model / "sub" / "a.safetensors", model / "b.safetensors"):
        save_file({"a": torch.zeros(2)}, place)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(WindlassCorrupt, match="no plain file name"):
        Served.from_checkpoint(model)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        b"\xff" * 8,
        b"\x10" + b"\0" * 7 + b"{}",
        b"\x02" + b"\0" * 7 + b"[]",
        b"\2" + b"\0" * 7 + b"x{",
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(WindlassCorrupt, match="model.safetensors"):
        checkpoint_layout(file)


def test_a_checkpoint_that_cannot_be_judged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WindlassNotFound, match="nowhere") as e:
        Served.from_checkpoint(tmp_path / "nowhere")
    assert "checkpoint=" in e.value.advice
    with pytest.raises(WindlassUnsupported, match="no safetensors files"):
        Served.from_checkpoint(tmp_path)


def test_a_bucket_is_read_as_sglang_reads_it() -> None:
    tensors = [
        ("odd", torch.arange(3, dtype=torch.uint8)),
        ("a", torch.randn(3, 5)),
        ("b", torch.randn(4, 4, dtype=torch.bfloat16).t()),
        ("none", torch.empty(0, 4)),
        ("one", torch.tensor(3.0)),
    ]
    told = pickle.loads(payload.bucket(tensors))
    for record, (name, tensor) in zip(told["metadata"], tensors, strict=True):
        part = told["flattened_tensor"][record.start_idx : record.end_idx]
        read = part.view(record.dtype).reshape(record.shape)
        assert record.name == name
        assert torch.equal(read, tensor)


class Watch(pickle.Unpickler):
    """Notes what a pickle asks for."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.names: list[str] = []

    def find_class(self, module: str, name: str) -> Any:
        self.names.append(f"{module}.{name}")
        return super().find_class(module, name)


def test_payloads_hold_tensors_by_value_only() -> None:
    """No descriptors, and not the storage around a view."""
    big = torch.randn(1000, 1000)
    for text in (
        payload.bucket([("v", big[:1, :2])]),
        payload.named({"v": big[:1, :2]}),
        payload.order({"order": {}}),
    ):
        assert len(text) < 5000
        seen = Watch(io.BytesIO(text))
        seen.load()
        assert not [name for name in seen.names if "multiprocessing" in name or "fd" in name.lower()]


def test_buckets_keep_order_and_size() -> None:
    tensors = [(str(i), torch.zeros(n, dtype=torch.uint8)) for i, n in enumerate([5, 5, 5, 30, 1])]
    groups = [[name for name, _ in group] for group in payload.buckets(tensors, 10)]
    assert groups == [["0", "1"], ["2"], ["3"], ["4"]]


class Model(torch.nn.Module):
    """Has what a model of SGLang has: a loader of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(2, 3))
        self.b = torch.nn.Parameter(torch.zeros(4))
        self.breaks = False

    def load_weights(self, weights: Any) -> None:
        for position, (name, tensor) in enumerate(weights):
            if self.breaks and position == 1:
                raise RuntimeError("out of luck")
            getattr(self, name).data.copy_(tensor)


class World:
    """A publisher, an image, a checkpoint and one worker."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.weights = {"a": torch.randn(2, 3), "b": torch.randn(4)}
        self.checkpoint = checkpoint(home / "model", self.weights)
        self.manager = WeightManager(model_id="policy", region_dir=str(home / "region"))
        self.receiver: Receiver | None = None
        self.model = Model()
        self.version = 0

    def publish(self, **more: torch.Tensor) -> dict[str, Any]:
        self.version += 1
        self.weights = {name: tensor + 1 for name, tensor in self.weights.items()}
        self.manager.offload(
            list({**self.weights, **more}.items()), version=self.version, rank=0, world_size=1
        )
        if self.receiver is None:
            self.receiver = Receiver(self.home / "image", region=self.manager.region)
        self.receiver.wait(self.version)
        with self.receiver.hold() as image:
            return {
                "image": str(image.path.parent),
                "model_id": "policy",
                "incarnation": image.incarnation,
                "version": image.version,
                "digest": image.digest,
                "reports": str(self.home / f"reports-{os.urandom(4).hex()}"),
                "timeout": 20.0,
            }

    def send(self, order: dict[str, Any], ends: bool = False, **served: Any) -> Report:
        plain = {"order": order, "served": {"checkpoint": str(self.checkpoint), **served}, "ends": ends}
        custom.load(self.model, pickle.loads(payload.order(plain)))
        report = Report.read(order["reports"], 0)
        assert report is not None
        return report

    def holds(self, weights: Mapping[str, torch.Tensor]) -> bool:
        return torch.equal(self.model.a, weights["a"]) and torch.equal(self.model.b, weights["b"])

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.manager.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def test_a_worker_loads_an_image_and_reports(world: World) -> None:
    order = world.publish()
    report = world.send(order)
    assert report.error is None
    assert world.holds(world.weights)
    assert report.live is not None
    assert report.live.version == 1
    assert report.state == "clean"
    assert report.last is not None
    assert report.last.bytes == 40
    assert len(report.worker) == 16


def test_an_image_that_does_not_fit_is_refused_by_the_worker(world: World) -> None:
    good = world.publish()
    assert world.send(good).error is None
    before = dict(world.weights)
    order = world.publish()
    for change, kind in [
        ({"version": 9}, "stale"),
        ({"model_id": "other"}, "stale"),
        ({"digest": "00" * 32}, "corrupt"),
        ({"image": str(world.home / "nowhere"), "timeout": 0.2}, None),
    ]:
        report = world.send({**order, **change, "reports": str(world.home / f"r{kind}{len(change)}")})
        assert report.error is not None
        assert kind is None or report.error.kind == kind
        assert report.state == "clean"
        assert report.live is not None
        assert report.live.version == 1
        assert world.holds(before)
    assert world.send(order).error is None
    assert world.holds(world.weights)


def test_a_worker_leaves_out_or_refuses_extra_tensors(world: World) -> None:
    order = world.publish(value_head=torch.ones(3))
    report = world.send(order, extras="error")
    assert report.error is not None
    assert "value_head" in report.error.text
    assert not world.holds(world.weights)
    report = world.send({**order, "reports": str(world.home / "again")})
    assert report.error is None
    assert list(report.extras) == ["value_head"]
    assert world.holds(world.weights)


def test_a_rank_that_refuses_holds_back_the_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom, "_all_ranks", lambda ready: False)
    report = world.send(world.publish())
    assert report.error is not None
    assert report.error.kind == "cancelled"
    assert report.state == "clean"
    assert not world.holds(world.weights)


def test_a_load_that_breaks_says_dirty_and_the_next_one_heals(world: World) -> None:
    order = world.publish()
    world.model.breaks = True
    report = world.send(order)
    assert report.state == "dirty"
    assert report.live is None
    assert report.error is not None
    assert "out of luck" in report.error.text
    # What is refused before it writes does not make it clean.
    refused = world.send({**order, "version": 9, "reports": str(world.home / "refused")})
    assert refused.state == "dirty"
    world.model.breaks = False
    healed = world.send({**order, "reports": str(world.home / "healed")})
    assert healed.state == "clean"
    assert healed.error is None
    assert world.holds(world.weights)


def test_a_module_that_is_not_on_the_list_goes_through_its_own_loader_each_time(world: World) -> None:
    for _ in range(2):
        report = world.send(world.publish())
        assert report.error is None
        assert world.holds(world.weights)
        assert report.last is not None
        assert report.plan is not None
        assert (report.last.how, report.plan.replayed) == ("session", 0)
        assert list(report.plan.why.values()) == [f"{__name__}.Model is not on the list"]


class Buffered(Model):
    """Takes one of its tensors into a buffer, and derives another as soon as it has loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("c", torch.zeros(4))

    def load_weights(self, weights: Any) -> None:
        super().load_weights(weights)
        self.derived = self.a.data * 2


def test_a_rehearsal_leaves_buffers_and_what_a_loader_derives_as_they_were() -> None:
    model = Buffered()
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(4)}
    session = SglangSession(model)
    before = dict(vars(model))
    with session.rehearsal() as targets:
        found = trace(session.load_weights, tensors, targets)
    assert [target.name for target in found.targets] == ["a", "b"]
    assert vars(model) == before
    assert not model.a.any()
    assert not model.c.any()


def test_a_model_that_takes_a_tensor_where_no_rehearsal_sees_it_is_loaded_whole(world: World) -> None:
    world.model = Buffered()
    world.weights["c"] = torch.randn(4)
    world.checkpoint = checkpoint(world.home / "buffered", world.weights)
    for _ in range(2):
        report = world.send(world.publish())
        assert (report.error, report.state) == (None, "clean")
        assert report.live is not None
        assert report.live.version == world.version
        assert world.holds(world.weights)
        assert torch.equal(world.model.c, world.weights["c"])  # type: ignore[arg-type]
        assert report.plan is not None
        assert report.plan.why == {"": "the rehearsal saw c reach no parameter"}


class Packs:
    """A method that packs weights in place, and cannot undo it."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.a.data.mul_(2)
        layer.use_intel_amx_backend = True


def test_the_end_of_an_update_does_not_pack_packed_weights(world: World) -> None:
    method = Packs()
    world.model.quant_method = method  # type: ignore[assignment]
    order = world.publish()
    assert world.send(order, ends=True).error is None
    packed = world.weights["a"] * 2
    assert torch.equal(world.model.a, packed)
    # As SGLang's /end_weight_update does after each of them.
    method.process_weights_after_loading(world.model)
    assert torch.equal(world.model.a, packed)
    refused = {**order, "version": 9, "reports": str(world.home / "refused")}
    assert world.send(refused, ends=True).error is not None
    method.process_weights_after_loading(world.model)
    assert torch.equal(world.model.a, packed)
    # That was for these ends alone: what loads by another way is processed.
    method.process_weights_after_loading(world.model)
    assert torch.equal(world.model.a, packed * 2)


def test_an_update_without_an_end_leaves_nothing_to_skip(world: World) -> None:
    method = Packs()
    world.model.quant_method = method  # type: ignore[assignment]
    assert world.send(world.publish()).error is None
    assert torch.equal(world.model.a, world.weights["a"] * 2)
    method.process_weights_after_loading(world.model)
    assert torch.equal(world.model.a, world.weights["a"] * 4)


def test_workers_write_sums_when_they_are_asked(world: World, tmp_path: Path) -> None:
    assert world.send(world.publish()).error is None
    custom.load(world.model, pickle.loads(payload.order({"prove": str(tmp_path)})))
    told = json.loads((tmp_path / "0.json").read_text())
    assert told["unseen"] == ["a", "b"]
    assert told["report"]["live"]["version"] == 1


class Taken:
    """A held image that was taken back in the middle of a load."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held, name)

    def renew(self, seconds: float) -> None:
        raise WindlassStale("it was taken back")


def test_an_image_taken_back_during_a_load_leaves_the_server_fenced(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = {**world.publish(), "reports": None}
    recorder = Recorder(world.checkpoint)
    try:
        loader = SGLangWeightLoader(
            recorder.url, way="tensors", bucket_bytes=8, dir=world.checkpoint.parent / "engines"
        )
        real = _windlass.open_image
        with monkeypatch.context() as patch:
            patch.setattr(_windlass, "open_image", lambda *how: Taken(real(*how)))
            with pytest.raises(WindlassStale, match="taken back while"):
                asyncio.run(loader.load_image(order))
        assert loader.dirty
        assert "continue_generation" not in recorder.routes
        assert asyncio.run(loader.load_image(order)).way == "tensors"
        assert recorder.routes[-1] == "continue_generation"
        assert not loader.dirty
    finally:
        recorder.close()


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"{}", b'{"order": {}}', b'{"order": {"image": 3}}', b"\xff\xfe"]
)
def test_no_order_makes_the_loader_raise(text: bytes, tmp_path: Path) -> None:
    model = Model()
    custom.load(model, [(payload.ORDER, torch.tensor(list(text), dtype=torch.uint8))])
    custom.load(model, [("a", torch.ones(2, 3))])
    custom.load(model, [])
    order = {"image": "/nowhere", "model_id": "m", "incarnation": 1, "version": 1, "timeout": 0.1}
    for reports in (None, "/proc/nowhere", str(tmp_path / "r")):
        custom.load(
            model, pickle.loads(payload.order({"order": {**order, "reports": reports}, "served": {"bad": 1}}))
        )
    assert not model.a.any()


@pytest.mark.parametrize(
    "options",
    [
        {"pause": "in_place"},
        {"pause": "wait", "way": "custom"},
        {"pause": "now"},
        {"way": "ftp"},
        {"cache": "maybe"},
        {"extras": "some"},
        {"timeout": 0},
    ],
)
def test_options_that_contradict_each_other_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(WindlassInvalid):
        SGLangWeightLoader("http://127.0.0.1:9", **options)


def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(WindlassInvalid, match="not an engine"):
        SGLangWeightLoader(SimpleNamespace())
    with pytest.raises(WindlassInvalid, match="not a name"):
        SGLangLora("http://127.0.0.1:9", adapter="a b")
