"""A trainer on a GPU: what `WeightManager` publishes of CUDA tensors, by copy and by delta, from one rank and from several.

    PYTHONPATH=python python tests/gpu/manager.py [NAME...]

Needs torch, a CUDA device and the built extension. A receiver takes every version over, and what it has is compared with
the tensors bit by bit. With `--rank R --ranks N --home DIR` it is one rank of such a trainer.
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

import needs

needs.need("torch", "windlass")

import torch  # noqa: E402

from windlass import Receiver, WeightManager, WindlassUnsupported  # noqa: E402

PATIENCE = 120.0
LATEST = 6


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def weights() -> dict[str, torch.Tensor]:
    """Every way that a tensor can lie, and fp32 ones of which the image has bf16."""
    made = torch.Generator(device="cuda").manual_seed(3)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=made, device="cuda").to(dtype)

    return {
        "embed": draw(3000, 1024),
        "master": draw(700, 512, dtype=torch.float32),
        "norm": draw(70_001),
        "odd": draw(4099)[1:],
        "one": draw(1),
        "router": draw(64, 128, dtype=torch.float32),
        "columns": draw(300, 800)[:, 200:600],
    }


DTYPES = {"*": "bfloat16"}


def step(tensors: dict[str, torch.Tensor], version: int) -> None:
    for i, tensor in enumerate(tensors.values()):
        mask = torch.rand(tensor.shape, device=tensor.device) < 0.01
        tensor.add_(mask.to(tensor.dtype) * (0.01 * (version + i)))


@contextlib.contextmanager
def home() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="windlass-gpu-") as folder:
        yield folder


def same(receiver: Receiver, version: int, tensors: dict[str, torch.Tensor]) -> None:
    receiver.wait(version, PATIENCE)
    with receiver.hold() as image:
        assert image.version == version, (image.version, version)
        assert set(image.tensors) == set(tensors)
        for name, tensor in tensors.items():
            found = image.tensors[name]
            want = tensor.detach().to(found.dtype).cpu().contiguous()
            equal = torch.equal(found.contiguous().view(torch.uint8), want.view(torch.uint8))
            assert equal, f"{name} of version {version}"


def follow(mode: str, tensors: dict[str, torch.Tensor], expected: str, baseline: str | int = "auto") -> str:
    with (
        home() as folder,
        torch.cuda.stream(torch.cuda.Stream()),
        WeightManager(
            model_id="p",
            region_dir=folder,
            offload_mode=mode,
            baseline=baseline,
            dtypes=DTYPES,
            timeout=PATIENCE,
        ) as wm,
    ):
        wm.offload(tensors, 1, 0, 1)
        place = wm.status()["baseline"]
        with Receiver(f"{folder}/image", region=wm.region) as receiver:
            same(receiver, 1, tensors)
            blocked = []
            for version in range(2, LATEST + 1):
                # The GPU is busy when offload() is called: it must wait for this stream.
                torch.cuda._sleep(20_000_000)
                step(tensors, version)
                began = time.monotonic()
                result = wm.offload(tensors, version, 0, 1)
                blocked.append((time.monotonic() - began) * 1e3)
                assert result.mode == expected, result
                same(receiver, version, tensors)
                with receiver.hold() as image:
                    assert image.digest == wm.wait_delta_ready(version, PATIENCE)
    where = (
        f", {place['device_bytes']} bytes on the GPU and {place['host_bytes']} on the host" if place else ""
    )
    if place and baseline != "auto":
        assert (place["device_bytes"] > 0, place["host_bytes"] > 0) == {
            "device": (True, False),
            "host": (False, True),
        }.get(str(baseline), (True, True)), place
    return f"{LATEST} versions, offload() took {min(blocked):.1f} ms{where}"


def test_cuda_tensors_of_every_form_are_published_by_copy() -> str:
    return follow("copy", weights(), "copy")


def test_versions_are_handed_out_by_what_changed() -> str:
    tensors = weights()
    # Rows that are not whole are found by copies only.
    del tensors["columns"]
    return follow("delta", tensors, "delta")


def test_nothing_said_means_by_delta_on_a_gpu_of_one_s_own() -> str:
    tensors = weights()
    del tensors["columns"]
    return follow("auto", tensors, "delta")


def test_a_tensor_that_cannot_be_compared_is_said_and_copied() -> str:
    tensors = {**weights(), "host": torch.randn(100).to(torch.bfloat16)}
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("windlass").addHandler(handler)
    try:
        note = follow("delta", tensors, "copy")
    finally:
        logging.getLogger("windlass").removeHandler(handler)
    assert any("publishes by copies: 1 of its pieces" in line for line in said), said
    with home() as folder:
        wm = WeightManager(region_dir=folder, offload_mode="delta", strict=True)
        try:
            wm.offload(tensors, 1, 0, 1)
        except WindlassUnsupported as e:
            assert "this rank has to copy" in str(e), e
        else:
            raise AssertionError("strict did not refuse")
        wm.close()
    return note


def comparable() -> dict[str, torch.Tensor]:
    tensors = weights()
    del tensors["columns"]
    return tensors


def test_a_baseline_on_the_host_publishes_the_same_versions() -> str:
    return follow("delta", comparable(), "delta", "host")


def test_a_split_baseline_publishes_the_same_versions() -> str:
    # A little more than half of the weights: records are taken from it first.
    return follow("delta", comparable(), "delta", 4 << 20)


def test_a_gpu_without_room_has_the_baseline_on_the_host_and_says_so() -> str:
    tensors = {"w": torch.randn(1 << 20, device="cuda").to(torch.bfloat16)}
    tensors["big"] = torch.zeros(1 << 30, dtype=torch.bfloat16, device="cuda")
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    fill = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda")
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logging.getLogger("windlass").addHandler(handler)
    told = []
    try:
        for place, strict, mode in (("auto", True, "delta"), ("device", False, "copy")):
            with (
                home() as folder,
                WeightManager(
                    region_dir=folder, offload_mode="delta", baseline=place, strict=strict, timeout=PATIENCE
                ) as wm,
            ):
                assert wm.offload(tensors, 1, 0, 1).mode == "copy"
                tensors["w"].add_(1)
                result = wm.offload(tensors, 2, 0, 1)
                assert result.mode == mode, result
                assert (wm.status()["baseline"] is None) == (mode == "copy")
                told.append(f"{mode} took {result.copy_ms:.0f} ms")
                wm.wait_delta_ready(2, PATIENCE)
        with home() as folder:
            wm = WeightManager(region_dir=folder, offload_mode="delta", baseline="device", strict=True)
            try:
                wm.offload(tensors, 1, 0, 1)
            except WindlassUnsupported as e:
                assert "this rank has to copy" in str(e) and "GiB are free" in str(e), e
            else:
                raise AssertionError("strict did not refuse")
            wm.close()
    finally:
        logging.getLogger("windlass").removeHandler(handler)
        del fill, tensors
        torch.cuda.empty_cache()
    lines = [r.getMessage() for r in said if r.levelno >= logging.WARNING]
    assert any("in page-locked host memory" in line and "a copy would take" in line for line in lines), lines
    copied = next(line for line in lines if "publishes by copies" in line)
    assert "GiB of GPU memory" in copied and "are free" in copied, copied
    return ", ".join(told)


def model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(301, 257, bias=True), torch.nn.Linear(257, 1021, bias=False), torch.nn.LayerNorm(1021)
    )


def drawn(version: int) -> dict[str, torch.Tensor]:
    """What the model holds as a version, the same on every rank."""
    whole = {name: p.detach().cuda() for name, p in model().named_parameters()}
    torch.manual_seed(version)
    for _ in range(2, version + 1):
        for name, tensor in whole.items():
            made = torch.Generator(device="cuda").manual_seed(version * 1000 + len(name))
            tensor.add_((torch.rand(tensor.shape, generator=made, device="cuda") < 0.01) * 0.01)
    return whole


def one_rank(rank: int, ranks: int, folder: str) -> None:
    """A rank whose shards are FSDP2's, of fp32 masters; all ranks share the one GPU."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    sharded = model().cuda()
    fully_shard(sharded, mesh=init_device_mesh("cuda", (ranks,)))
    wm = WeightManager(model_id="p", region_dir=folder, offload_mode="delta", dtypes=DTYPES, timeout=PATIENCE)
    modes = []
    for version in range(1, LATEST + 1):
        whole = drawn(version)
        for name, parameter in sharded.named_parameters():
            local = parameter.to_local()  # type: ignore[attr-defined]
            rows = whole[name].shape[0]
            each = -(-rows // ranks)
            first = min(rank * each, rows)
            with torch.no_grad():
                local.copy_(whole[name][first : first + local.shape[0]])
        modes.append(wm.offload(sharded.named_parameters(), version).mode)
        if rank == 0:
            with Receiver(f"{folder}/image", region=wm.region) as receiver:
                same(receiver, version, whole)
                with receiver.hold() as image:
                    assert image.digest == wm.wait_delta_ready(version, PATIENCE)
        dist.barrier()
    assert modes == ["copy"] + ["delta"] * (LATEST - 1), modes
    dist.barrier()
    wm.close()
    dist.destroy_process_group()


def test_fsdp2_shards_of_several_ranks_are_one_version_by_delta() -> str:
    ranks = 3
    with home() as folder:
        command = [sys.executable, __file__, "--ranks", str(ranks), "--home", folder]
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


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("names", nargs="*", help="parts of the names of tests")
    arguments.add_argument("--rank", type=int)
    arguments.add_argument("--ranks", type=int, default=1)
    arguments.add_argument("--home")
    given = arguments.parse_args()
    faulthandler.dump_traceback_later(600, exit=True)
    logging.basicConfig(level=os.environ.get("WINDLASS_LOG_LEVEL", "WARNING"))
    if given.rank is not None:
        one_rank(given.rank, given.ranks, given.home)
        return
    needs.need_device("a trainer on a GPU")
    sys.exit(needs.run_tests(globals(), given.names, patience=600))


if __name__ == "__main__":
    main()
