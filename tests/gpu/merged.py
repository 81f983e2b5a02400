"""A LoRA model on a GPU: what is published is what PEFT's `merge_and_unload()` leaves on the same GPU, bit by bit.

    PYTHONPATH=python python tests/gpu/merged.py [NAME...]

Needs torch, transformers, PEFT, a CUDA device and the built extension. Every version goes to a receiver, by copy and by delta; the
live model must not change, and merging must not need memory for a second model unless merged weights are kept to be compared.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from typing import Any

import needs

needs.need("torch", "windlass", "transformers", "peft")

import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from windlass import Receiver, WeightManager  # noqa: E402

PATIENCE = 120.0
VERSIONS = 4
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
}


def adapted(**options: Any) -> Any:
    """A model of 30 million parameters with adapters, on the GPU."""
    torch.manual_seed(3)
    config = transformers.Qwen2Config(**SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).cuda()
    chosen = {"r": 8, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    return peft.get_peft_model(model, peft.LoraConfig(**chosen))


def train(model: Any, seed: int) -> None:
    made = torch.Generator(device="cuda").manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=made, device="cuda")
                parameter.add_(noise.to(parameter.dtype) / 8)


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names that only one has, or whose bits differ."""
    strange = set(found) ^ set(expected)

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().view(torch.uint8)

    unlike = {n for n in set(found) & set(expected) if not torch.equal(bits(found[n]), bits(expected[n]))}
    return sorted(strange | unlike)


def follow(mode: str, **options: Any) -> str:
    """Publishes some versions. Says how long offload() took, and what the GPU held above the model meanwhile."""
    model = adapted(**options)
    took, peaks = [], []
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="windlass-gpu-") as folder,
        WeightManager(model_id="p", region_dir=folder, offload_mode=mode, timeout=PATIENCE) as wm,
    ):
        receiver = None
        for version in range(1, VERSIONS + 1):
            train(model, version)
            before = state(model)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held, began = torch.cuda.memory_allocated(), time.monotonic()
            done = wm.offload(model, version)
            took.append((time.monotonic() - began) * 1e3)
            peaks.append(torch.cuda.max_memory_allocated() - held)
            assert done.mode == (mode if version > 1 else done.mode), done
            assert not differing(state(model), before), "the live model has changed"
            receiver = receiver or Receiver(f"{folder}/image", region=wm.region)
            receiver.wait(version, PATIENCE)
            with receiver.hold() as image:
                wrong = differing(dict(image.tensors), state(copy.deepcopy(model).merge_and_unload()))
                assert not wrong, f"version {version} differs in {wrong[:5]}"
                assert image.digest == wm.wait_delta_ready(version, PATIENCE)
        assert receiver is not None
        receiver.close()
    if mode == "copy":
        # A merged tensor, what it is made of, and the factors in a wider dtype: not a second model.
        largest = max(p.numel() * p.element_size() for p in model.parameters())
        assert max(peaks[1:]) <= 8 * largest, (peaks, largest)
    return f"{VERSIONS} versions, offload() {min(took[1:]):.1f} ms, at most {max(peaks[1:]) >> 10} KiB more"


def test_merged_weights_are_published_by_copy() -> str:
    return follow("copy")


def test_merged_weights_are_published_by_delta() -> str:
    return follow("delta")


def test_weights_with_rank_stabilised_scaling_are_merged() -> str:
    return follow("delta", use_rslora=True, rank_pattern={"down_proj": 4})


def test_weights_decomposed_by_magnitude_are_merged() -> str:
    return follow("delta", use_dora=True)


def test_modules_that_are_trained_whole_are_published_as_they_are() -> str:
    return follow("delta", modules_to_save=["lm_head"])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("names", nargs="*", help="parts of the names of tests")
    given = arguments.parse_args()
    needs.need_device("merged weights on a GPU")
    sys.exit(needs.run_tests(globals(), given.names, patience=300))


if __name__ == "__main__":
    main()
