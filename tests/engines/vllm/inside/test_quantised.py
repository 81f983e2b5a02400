"""Quantised images into vLLM's own models, built from a checkpoint of the same format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tiny
from building import session
from windlass import Receiver, WeightManager
from windlass.errors import WindlassInvalid
from windlass.load import Live, LoadOrder


class Quantising:
    """A trainer that publishes ``int8_channel``, and checkpoints of its images."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.model = tiny.model("qwen3")
        options: dict[str, Any] = {"dtypes": {"*.weight": "int8_channel"}, "region_dir": str(home)}
        self.manager = WeightManager(model_id="policy", **options)
        self.receiver: Receiver | None = None

    def publish(self, version: int) -> LoadOrder:
        tiny.stir_some(self.model, version)
        self.manager.offload(self.model, version, 0, 1)
        if self.receiver is None:
            self.receiver = Receiver(self.home / "image", region=self.manager.region)
        self.receiver.wait(version, 60)
        with self.receiver.hold() as image:
            return LoadOrder.of(image)

    def checkpoint(self, name: str) -> Path:
        """What the image holds, in the files of a checkpoint."""
        folder = tiny.save(self.model, self.home / name)
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        assert self.receiver is not None
        with self.receiver.hold() as image:
            tensors = {key: tensor.clone() for key, tensor in image.tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = self.manager.quantization_config()
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.manager.close()


@pytest.fixture
def trainer(home: Path) -> Any:
    made = Quantising(home)
    yield made
    made.close()


def packed(model: torch.nn.Module) -> dict[str, bytes]:
    """Every parameter and buffer that has bytes of its own."""
    named = [*model.named_parameters(), *model.named_buffers()]
    kept = {name: t for name, t in named if t.numel() and not t.is_mkldnn and t.device.type == "cpu"}
    return {
        name: t.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for name, t in kept.items()
        if t.dim()
    }


def test_a_quantised_version_is_what_a_fresh_engine_of_its_checkpoint_has(trainer: Quantising) -> None:
    trainer.publish(1)
    worker = session(trainer.checkpoint("first"))
    live = Live(worker, engine="vllm")
    for version in (2, 3):
        report = live.load(trainer.publish(version))
        assert (report.state, report.error) == ("clean", None)
    fresh = session(trainer.checkpoint("fresh"))
    mine, theirs = packed(worker.model), packed(fresh.model)
    assert any("qkv_proj" in name for name in mine)
    assert mine == theirs


def test_scales_of_a_quantised_cache_that_were_made_up_are_not_kept(trainer: Quantising) -> None:
    """An engine that began with weights of no meaning has scales of no meaning, too."""
    order = trainer.publish(1)
    worker = session(trainer.checkpoint("first"))
    worker._vllm_config.load_config.load_format = "dummy"
    worker._vllm_config.cache_config.cache_dtype = "fp8"
    with pytest.raises(WindlassInvalid, match="lacks weights for .*k_scale"):
        Live(worker, engine="vllm").load(order)
