"""CUDA tensors, on a machine that has some. Skipped loudly everywhere else.

python -m pytest tests/python/test_gpu.py -rs
"""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from windlass import Receiver, WeightManager
from windlass.extract import ModuleWeightExtractor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE: the GPU paths were NOT tested"),
]


@pytest.fixture
def home() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield pathlib.Path(folder)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def test_cuda_tensors_of_every_kind_are_published_bit_by_bit(home: pathlib.Path) -> None:
    made = torch.Generator("cuda").manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made, device="cuda")

    weights = {
        "matrix": random(1031, 517),
        "half": random(333, 7).to(torch.float16),
        "bf16": random(1 << 20).to(torch.bfloat16),
        "fp8": random(77, 5).to(torch.float8_e4m3fn),
        "turned": random(65, 129).t(),
        "sliced": random(64, 64)[::2, 3:40],
        "scalar": random(),
        "empty": random(0, 4),
        "counts": torch.arange(1000, device="cuda"),
        "host": torch.randn(9, 9),
        "trained": nn.Parameter(random(8, 8)),
    }
    with WeightManager(model_id="gpu", region_dir=str(home), dtypes={"matrix": "bfloat16"}) as wm:
        receiver = None
        for version in (1, 2, 3):
            with torch.no_grad():
                for tensor in weights.values():
                    if tensor.dtype == torch.float32:
                        tensor.mul_(1.01)
            wm.offload(weights, version, 0, 1)
            receiver = receiver or Receiver(home / "image", region=wm.region)
            receiver.wait(version, 60.0)
            with receiver.hold() as image:
                for name, tensor in weights.items():
                    wanted = tensor.to(torch.bfloat16) if name == "matrix" else tensor
                    assert image.tensors[name].dtype == wanted.dtype, name
                    assert torch.equal(bits(image.tensors[name]), bits(wanted)), name
        assert receiver is not None
        receiver.close()


def test_an_optimizer_step_on_a_side_stream_is_seen_whole(home: pathlib.Path) -> None:
    """What the current stream has queued before the call is part of the version."""
    weight = torch.zeros(64 << 20, device="cuda", dtype=torch.bfloat16)
    with WeightManager(model_id="gpu-stream", region_dir=str(home)) as wm:
        for version in range(1, 6):
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    weight.add_(1.0)
                weight.fill_(float(version))
                wm.offload({"w": weight}, version, 0, 1)
                receiver = Receiver(home / "image", region=wm.region)
                receiver.wait(version, 60.0)
                with receiver.hold() as image:
                    assert bool((image.tensors["w"] == float(version)).all())
                receiver.close()


def test_fsdp2_on_a_cuda_mesh_is_published_shard_by_shard(home: pathlib.Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(37, 64), nn.Linear(64, 5)).cuda()
        fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with WeightManager(model_id="gpu-fsdp", region_dir=str(home), generator_dtype="bfloat16") as wm:
            receiver = None
            for version in (1, 2, 3):
                model(torch.randn(4, 37, device="cuda")).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                wm.offload(model, version)
                assert set(wm.status()["ways"]) == {"shards"}
                receiver = receiver or Receiver(home / "image", region=wm.region)
                receiver.wait(version, 60.0)
                with receiver.hold() as image:
                    for name, parameter in model.named_parameters():
                        wanted = parameter.full_tensor().to(torch.bfloat16)
                        assert torch.equal(bits(image.tensors[name]), bits(wanted)), name
            assert receiver is not None
            receiver.close()
    finally:
        dist.destroy_process_group()


def test_extractors_cast_on_the_device() -> None:
    model = nn.Linear(33, 17).cuda()
    chunks = list(ModuleWeightExtractor(threshold_gb=1.0).extract_weights(model, "bfloat16"))
    assert len(chunks) == 1
    for name, tensor in chunks[0]:
        assert tensor.device.type == "cuda"
        assert torch.equal(bits(tensor), bits(model.get_parameter(name).to(torch.bfloat16)))
