"""Quantised weights on a GPU: the bits of the CPU's, published by copy and by delta, and beside vLLM's own quantisers.

    PYTHONPATH=python python tests/gpu/quantised.py [--device cpu] [NAME...]

Needs torch, a CUDA device and the built extension. The CPU's results are those of transformers and compressed-tensors, which
`tests/python/test_quantised.py` shows. With vLLM importable, its block quantiser is run, too, and how far it differs is
printed: it computes the same scales in another order of roundings. With `--device cpu` it tests itself only.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import needs

needs.need("torch", "windlass")

import torch  # noqa: E402

from windlass import Receiver, WeightManager  # noqa: E402
from windlass.names import SCHEMES  # noqa: E402
from windlass.publish import quantise  # noqa: E402

PATIENCE = 100.0
LATEST = 4
DEVICE = "cuda"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def home() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="windlass-gpu-") as folder:
        yield folder


def hard(rows: int, columns: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """On the CPU: every magnitude, a row of zeros, signed zeros, values in the middle between two others."""
    made = torch.Generator().manual_seed(seed)
    value = torch.randn(rows, columns, generator=made) * torch.logspace(-4, 2, columns)
    value[rows // 2] = 0
    value[-1, ::3] = -0.0
    value[-1, 1::3] = torch.arange(len(value[-1, 1::3])) * 0.5
    return value.to(dtype)


def made(scheme: str, weight: torch.Tensor, base: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A whole weight, quantised where it is, and its scales."""
    how, shape = SCHEMES[scheme], tuple(weight.shape)
    box = ((0, shape[0]), (0, shape[1]))
    amax = quantise.largest(how, shape, box, weight, base)
    out = torch.empty(shape, dtype=getattr(torch, how.dtype), device=weight.device)
    quantise.quantised(how, shape, box, weight, base, amax, out)
    return out, quantise.scales(how, amax, base)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8)


def same(receiver: Receiver, version: int, scheme: str, weights: dict[str, torch.Tensor]) -> None:
    """The image holds what the CPU makes of the weights."""
    receiver.wait(version, PATIENCE)
    with receiver.hold() as image:
        assert image.version == version, (image.version, version)
        count = 0
        for name, weight in weights.items():
            if weight.dim() == 2:
                wanted = made(scheme, weight.cpu(), torch.bfloat16)
                for key, tensor in zip((name, SCHEMES[scheme].scale_name(name)), wanted, strict=True):
                    found = image.tensors[key]
                    assert found.dtype == tensor.dtype and found.shape == tensor.shape, key
                    assert torch.equal(bits(found), bits(tensor)), f"{key} of version {version}"
                    count += 1
            else:
                assert torch.equal(bits(image.tensors[name]), bits(weight.bfloat16())), name
                count += 1
        assert len(image.tensors) == count


def weights() -> dict[str, torch.Tensor]:
    """bf16 ones, fp32 masters, ragged blocks, and a view of every second column."""
    return {
        "a.weight": hard(3000, 1024, torch.bfloat16).to(DEVICE),
        "b.weight": hard(700, 530, torch.float32, 2).to(DEVICE),
        "c.weight": hard(300, 800, torch.bfloat16, 3).to(DEVICE)[:, ::2],
        "norm.weight": torch.randn(4096, device=DEVICE),
    }


def step(tensors: dict[str, torch.Tensor], version: int) -> None:
    for i, tensor in enumerate(tensors.values()):
        mask = torch.rand(tensor.shape, device=tensor.device) < 0.01
        tensor.add_(mask.to(tensor.dtype) * (0.01 * (version + i)))


def follow(scheme: str, mode: str) -> str:
    tensors = weights()
    options: dict[str, Any] = {
        "generator_dtype": "bfloat16",
        "dtypes": {"*.weight": scheme},
        "timeout": PATIENCE,
    }
    took = []
    with home() as folder, WeightManager(region_dir=folder, offload_mode=mode, **options) as wm:
        receiver = None
        for version in range(1, LATEST + 1):
            if DEVICE == "cuda":
                # The GPU is busy when offload() is called: it must wait for this stream.
                torch.cuda._sleep(20_000_000)
            step(tensors, version)
            began = time.monotonic()
            result = wm.offload(tensors, version, 0, 1)
            took.append((time.monotonic() - began) * 1e3)
            assert result.mode == ("copy" if version == 1 else mode), result
            receiver = receiver or Receiver(f"{folder}/image", region=wm.region)
            same(receiver, version, scheme, tensors)
        assert not wm.offload(tensors, LATEST, 0, 1).new
        assert receiver is not None
        receiver.close()
    return f"{scheme} {min(took[1:]):.0f} ms"


def test_the_gpu_makes_the_bits_that_the_cpu_makes() -> str:
    count = 0
    for scheme in SCHEMES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for shape in ((1024, 2048), (577, 130), (1, 9), (4000, 129)):
                weight = hard(*shape, dtype)
                for a, b in zip(
                    made(scheme, weight.to(DEVICE), dtype), made(scheme, weight, dtype), strict=True
                ):
                    assert a.dtype == b.dtype
                    assert torch.equal(bits(a), bits(b)), (scheme, dtype, shape)
                    count += 1
    return f"{count} tensors"


def test_every_bf16_gives_the_same_scale_and_every_fp32_rounds_alike() -> str:
    every = torch.arange(0, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    some = torch.randint(0, 0x7F800000, (1 << 22,), dtype=torch.int32).view(torch.float32)
    for scheme in SCHEMES.values():
        for base, amax in ((torch.bfloat16, every.float()), (torch.float32, some)):
            there = quantise.scales(scheme, amax.to(DEVICE), base)
            assert torch.equal(bits(there), bits(quantise.scales(scheme, amax, base))), (scheme.name, base)
    return f"{every.numel()} and {some.numel()} magnitudes"


def test_versions_are_published_quantised_by_copy() -> str:
    return ", ".join(follow(scheme, "copy") for scheme in SCHEMES)


def test_versions_are_published_quantised_by_what_changed() -> str:
    return ", ".join(follow(scheme, "delta") for scheme in SCHEMES)


def one_rank(rank: int, ranks: int, folder: str) -> None:
    """A rank whose shards are FSDP2's; blocks of 128 rows are on two ranks. All ranks share the one GPU."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    backend = "gloo"
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
        backend = "cpu:gloo,cuda:gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    model = torch.nn.Sequential(torch.nn.Linear(300, 600), torch.nn.Linear(600, 200, bias=False)).to(DEVICE)
    fully_shard(model, mesh=init_device_mesh(DEVICE, (ranks,)))
    dtypes = {"*.weight": "fp8_block128"}
    wm = WeightManager(
        region_dir=folder, offload_mode="delta", generator_dtype="bfloat16", dtypes=dtypes, timeout=PATIENCE
    )
    for version in range(1, LATEST + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().mul_(1 + version / 64)  # type: ignore[attr-defined]
        result = wm.offload(model.named_parameters(), version)
        assert result.mode == ("copy" if version == 1 else "delta"), result
        # Not by full_tensor(): gloo gathers nothing that is on a GPU.
        parts: list[Any] = [None] * ranks
        mine = {name: p.to_local().detach().cpu() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
        dist.all_gather_object(parts, mine)
        whole = {name: torch.cat([part[name] for part in parts]) for name in mine}
        if rank == 0:
            with Receiver(f"{folder}/image", region=wm.region) as receiver:
                same(receiver, version, "fp8_block128", whole)
        dist.barrier()
    ways = wm.status()["ways"]
    assert any("across ranks" in way for way in ways), ways
    wm.close()
    dist.destroy_process_group()


def test_blocks_across_ranks_of_fsdp2_are_quantised_as_the_whole() -> str:
    ranks = 3
    with home() as folder:
        command = [sys.executable, __file__, "--device", DEVICE, "--ranks", str(ranks), "--home", folder]
        children = [subprocess.Popen([*command, "--rank", str(r)]) for r in range(ranks)]
        try:
            for child in children:
                code = child.wait(PATIENCE)
                assert code == 0, (code, child.args)
        finally:
            for child in children:
                child.kill()
                child.wait()
    return f"{ranks} ranks, {LATEST} versions"


def test_what_vllm_makes_of_the_same_weights() -> str:
    """vLLM's block quantiser rounds ``amax / 448`` and its reciprocal; transformers rounds ``448 / amax`` and its reciprocal. So
    scales differ in the last bit, and elements on a boundary by one step; anything more is a fault."""
    try:
        from vllm.utils.deep_gemm import per_block_cast_to_fp8
    except ImportError as e:
        return f"SKIPPED: vLLM cannot be imported ({e})"
    weight = (torch.randn(4096, 4096, device=DEVICE) * 0.02).bfloat16()
    theirs, their_scale = per_block_cast_to_fp8(weight, [128, 128])
    ours, our_scale = made("fp8_block128", weight, torch.bfloat16)
    torch.testing.assert_close(our_scale, their_scale, rtol=2**-22, atol=0)
    apart = (ours.view(torch.uint8).int() - theirs.view(torch.uint8).int()).abs()
    share = float((apart > 0).float().mean())
    assert int(apart.max()) <= 1 and share < 0.01, (int(apart.max()), share)
    differing = float((our_scale != their_scale).float().mean())
    return f"{share:.4%} of elements differ by one step, {differing:.0%} of scales by the last bit"


def test_what_it_costs() -> str:
    """Quantising a billion bf16 elements, in weights of the size of an 8B model's."""
    if DEVICE == "cpu":
        return "SKIPPED on a CPU"
    weight = torch.randn(14336, 4096, device=DEVICE).bfloat16()
    times = []
    for scheme in SCHEMES:
        made(scheme, weight, torch.bfloat16)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        began = time.monotonic()
        for _ in range(17):
            made(scheme, weight, torch.bfloat16)
        torch.cuda.synchronize()
        took = (time.monotonic() - began) * 1e3 / (17 * weight.numel() / 1e9)
        extra = (torch.cuda.max_memory_allocated() - before) / 1e6
        times.append(f"{scheme} {took:.1f} ms, {extra:.0f} MB at most")
    return "per 1e9 elements: " + "; ".join(times)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("names", nargs="*", help="parts of the names of tests")
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments.add_argument("--rank", type=int)
    arguments.add_argument("--ranks", type=int, default=1)
    arguments.add_argument("--home")
    given = arguments.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(300, exit=True)
    logging.basicConfig(level=os.environ.get("WINDLASS_LOG_LEVEL", "WARNING"))
    globals()["DEVICE"] = given.device
    if given.device == "cuda":
        needs.need_device("quantised weights on a GPU")
    if given.rank is not None:
        one_rank(given.rank, given.ranks, given.home)
        return
    sys.exit(needs.run_tests(globals(), given.names, patience=300))


if __name__ == "__main__":
    main()
