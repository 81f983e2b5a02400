"""Streams that pass by once: what is learned from the first, what is checked of the others, and what is always drained."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from windlass import Receiver, WindlassCorrupt, WindlassInvalid, WindlassNotFound
from windlass.frameworks.sender import Sender
from windlass.publish.stream import WeightStream


class Passing:
    """A generator that can be asked how far it came. Every tensor is in the same memory, as exporters have it."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors, self.passed = tensors, 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        room = torch.empty(max(t.numel() for t in self.tensors.values()))
        for name, tensor in self.tensors.items():
            self.passed += 1
            if tensor.dtype == room.dtype:
                shared = room[: tensor.numel()].view(tensor.shape)
                yield name, shared.copy_(tensor)
            else:
                yield name, tensor
        room.fill_(float("nan"))


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    shapes = {"embed": (64, 16), "norm": (16,), "up": (32, 16), "head": (64, 16), "empty": (0, 4)}
    return {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="stream-") as folder:
        yield Path(folder)


@pytest.fixture
def sender(home: Path) -> Iterator[Sender]:
    made = Sender({"model_id": "streamed", "region_dir": str(home), "timeout": 30.0})
    yield made
    made.close()


def test_ranks_share_a_stream_by_its_bytes_without_a_word() -> None:
    weights = tensors()
    held = []
    for rank in range(3):
        with WeightStream(rank, 3).version(Passing(weights)) as source:
            assert [name for name, _, _ in source.metadata()] == list(weights)
            held.append({name: tensor for name, tensor in source if tensor is not None})
            assert sorted(held[-1]) == sorted(source.held_names())
    assert sorted(name for part in held for name in part) == sorted(weights)
    sizes = [sum(t.nbytes for t in part.values()) for part in held]
    assert max(sizes) <= 64 * 16 * 4 + 16 * 4
    for part in held:
        for name, tensor in part.items():
            assert torch.equal(tensor, weights[name])


def test_versions_follow_the_stream_and_the_second_is_a_delta(home: Path, sender: Sender) -> None:
    weights = tensors()
    first = sender.publish(Passing(weights))
    assert (first.identity.model_id, first.identity.version) == ("streamed", 1)
    source = sender.source()
    assert source.token
    with Receiver(home / "images", endpoint=source.endpoint, token=source.token) as receiver:
        whole = receiver.wait(1, 30.0)
        with receiver.hold() as image:
            assert all(torch.equal(image.tensors[name], tensor) for name, tensor in weights.items())
        weights["norm"] = weights["norm"] + 1
        assert sender.publish(Passing(weights)).metrics()["windlass/version"] == 2
        told = receiver.wait(2, 30.0)
        assert told.mode == "delta"
        assert told.wire_bytes < whole.wire_bytes / 10
        with receiver.hold() as image:
            assert image.digest == sender.sealed(30.0)
            assert all(torch.equal(image.tensors[name], tensor) for name, tensor in weights.items())


def test_what_changed_is_named_and_the_stream_is_drained_all_the_same(sender: Sender) -> None:
    good = tensors()
    sender.publish(Passing(good))
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {**good, "norm": torch.randn(17)},
            "'norm' was float32 [16] in the first version and is now float32 [17]",
        ),
        ({**good, "norm": good["norm"].double()}, "'norm' was float32 [16]"),
        ({"extra": torch.ones(2), **good}, "'extra' was not sent with the first version"),
        ({name: t for name, t in good.items() if name != "up"}, "first 'up'"),
        ({**good, "norm": [1.0]}, "'norm' came as a list"),
    ]
    for weights, text in cases:
        stream = iter(weights.items())
        with pytest.raises(WindlassInvalid) as e:
            sender.publish(stream)
        assert text in str(e.value)
        assert next(stream, None) is None, "others would wait for this rank"
    again = Passing(good)
    with pytest.raises(WindlassInvalid, match="twice"):
        sender.publish([*again, ("norm", good["norm"])])
    assert sender.publish(Passing({n: t + 1 for n, t in good.items()})).identity.version == 2


def test_a_stream_that_fails_in_its_first_pass_may_come_again(sender: Sender) -> None:
    good = tensors()
    for bad, text in [([("a", torch.ones(1)), ("a", torch.ones(1))], "twice"), ([torch.ones(1)], "pairs")]:
        with pytest.raises(WindlassInvalid, match=text):
            sender.publish(bad)  # type: ignore[arg-type]
    assert sender.publish(Passing(good)).identity.version == 1


def checkpoint(folder: Path, weights: dict[str, torch.Tensor], **config: Any) -> str:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_what_is_never_sent_comes_from_the_checkpoint_and_is_said(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = tensors()
    path = checkpoint(tmp_path / "model", weights)
    trained = {name: weights[name] + 1 for name in ("up", "head")}
    sender = Sender({"model_id": "partial", "region_dir": str(home), "checkpoint": path})
    try:
        with caplog.at_level(logging.WARNING, logger="windlass"):
            sender.publish(Passing(trained))
        assert "3 tensors (4160 bytes) of the checkpoint" in caplog.text
        source = sender.source()
        with Receiver(home / "images", endpoint=source.endpoint, token=source.token) as receiver:
            for version in (1, 2, 3):
                receiver.wait(version, 30.0)
                with receiver.hold() as image:
                    assert image.digest == sender.sealed(30.0)
                    for name, tensor in {**weights, **trained}.items():
                        assert torch.equal(image.tensors[name], tensor), name
                trained = {name: tensor + 1 for name, tensor in trained.items()}
                sender.publish(Passing(trained))
        (tmp_path / "model" / "model.safetensors").write_bytes(b"")
        with pytest.raises(WindlassCorrupt, match="ended early"):
            sender.publish(Passing(trained))
    finally:
        sender.close()


def test_a_tied_head_is_not_completed_and_another_checkpoint_is_refused(tmp_path: Path) -> None:
    weights = {"model.embed_tokens.weight": torch.randn(4, 2), "lm_head.weight": torch.randn(4, 2)}
    tied = checkpoint(tmp_path / "tied", weights, tie_word_embeddings=True)
    sent = {"model.embed_tokens.weight": torch.ones(4, 2)}
    with WeightStream(checkpoint=tied).version(Passing(sent)) as source:
        assert [name for name, _, _ in source.metadata()] == list(sent)
    with (
        WeightStream(checkpoint=tied).version(Passing(tensors())) as source,
        pytest.raises(
            WindlassInvalid, match="5 tensors that were sent are not in the checkpoint .*, first 'embed'"
        ),
    ):
        source.metadata()
    with (
        WeightStream(checkpoint=str(tmp_path / "none")).version(Passing(sent)) as source,
        pytest.raises(WindlassNotFound, match="no checkpoint"),
    ):
        source.metadata()


def test_a_trained_tensor_that_a_checkpoint_calls_otherwise_is_an_error_and_not_left_out(
    tmp_path: Path,
) -> None:
    """As models with a vision tower have it: in memory one prefix more than on disk."""
    stored = {"model.layers.0.weight": torch.zeros(2), "lm_head.weight": torch.zeros(2)}
    path = checkpoint(tmp_path / "model", stored)
    sent = {"model.language_model.layers.0.weight": torch.ones(2), "lm_head.weight": torch.ones(2)}
    with (
        WeightStream(checkpoint=path).version(Passing(sent)) as source,
        pytest.raises(WindlassInvalid, match="first 'model.language_model.layers.0.weight'") as e,
    ):
        source.metadata()
    assert "give none" in e.value.advice
    # A head that no checkpoint has is left out as ever.
    with WeightStream(checkpoint=path).version([*stored.items(), ("v_head.weight", torch.ones(2))]) as source:
        assert len(source.metadata()) == 3


def test_experts_that_a_model_fuses_in_memory_are_published_as_its_checkpoint_has_them(
    home: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        decoder_sparse_step=1,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "moe")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    sender = Sender({"model_id": "moe", "region_dir": str(home), "checkpoint": str(tmp_path / "moe")})
    try:
        sender.publish((name, parameter.detach()) for name, parameter in model.named_parameters())
        source = sender.source()
        with Receiver(home / "images", endpoint=source.endpoint, token=source.token) as receiver:
            receiver.wait(1, 30.0)
            model.save_pretrained(tmp_path / "trained")
            wanted = load_file(tmp_path / "trained" / "model.safetensors")
            with receiver.hold() as image:
                assert sorted(image.tensors) == sorted(wanted)
                assert all(torch.equal(image.tensors[name], tensor) for name, tensor in wanted.items())
    finally:
        sender.close()
