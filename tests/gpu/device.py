"""The device layer as the package calls it: offload into a slot, deltas from a baseline, loads into fused parameters.

    PYTHONPATH=python python tests/gpu/device.py [--seed N] [NAME...]

Needs torch, numpy, a CUDA device and the built extension. What is expected comes from torch, from the definition of
sums (`codec.py`), and from `windlass delta make` on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs

needs.need("torch", "numpy", "windlass")

import codec  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from windlass import _windlass as w  # noqa: E402
from windlass.errors import (  # noqa: E402
    WindlassCorrupt,
    WindlassError,
    WindlassExhausted,
    WindlassInvalid,
    WindlassNotFound,
    WindlassStale,
    WindlassUnsupported,
)

TORCH = {
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
PATIENCE = 240


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def raw(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return np.asarray(tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy())


class Source:
    """A tensor on the device, what the image holds of it, and the copy that brings it there."""

    def __init__(self, name: str, tensor: torch.Tensor, to: torch.dtype | None = None) -> None:
        self.name, self.tensor, self.to = name, tensor, to or tensor.dtype

    @property
    def is_cast(self) -> bool:
        return self.to != self.tensor.dtype

    def want(self) -> np.ndarray[Any, Any]:
        return raw(self.tensor.to(self.to))

    def copy(self, at: int) -> tuple[int, int, list[tuple[int, int, int]]]:
        """As the package would: a run of elements that are contiguous on both sides, and dimensions."""
        item = self.to.itemsize
        sizes, strides = list(self.tensor.shape), list(self.tensor.stride())
        wanted = [int(np.prod(sizes[i + 1 :])) for i in range(len(sizes))]
        run = 1
        while sizes and strides[-1] == run and wanted[-1] == run:
            run *= sizes.pop()
            strides.pop()
            wanted.pop()
        dims = [(n, t * item, f * self.tensor.itemsize) for n, t, f in zip(sizes, wanted, strides)]
        return at, run * item, dims


class Trainer:
    """A region and a rank that owns all of it."""

    def __init__(self, folder: str, sources: list[Source]) -> None:
        self.sources = sources
        # Flat, as the files are that `codec` writes: a layout has shapes, and a digest the layout.
        tensors = [(s.name, TORCH[s.to], [s.tensor.numel()]) for s in sources]
        self.layout = w.Layout(tensors)
        self.at = {name: at for name, _, _, at, _ in self.layout.tensors()}
        self.publisher = w.Publisher.create(Path(folder) / "region", "model", self.layout)
        self.copies = self.publisher.plan([s.copy(self.at[s.name]) for s in sources])
        self.casts = [s.is_cast for s in sources]

    @property
    def addresses(self) -> list[int]:
        return [s.tensor.data_ptr() for s in self.sources]

    def want(self) -> np.ndarray[Any, Any]:
        image = np.zeros(self.layout.data_bytes, np.uint8)
        for s in self.sources:
            data = s.want()
            image[self.at[s.name] : self.at[s.name] + len(data)] = data
        return image

    def publish(self, gpu: w.Gpu, version: int) -> bool:
        self.publisher.begin(version, 30.0)
        direct = self.publisher.copy_device(gpu, self.copies, self.addresses, stream(), self.casts)
        self.publisher.commit(30.0)
        return direct

    @contextlib.contextmanager
    def held(self) -> Iterator[w.Held]:
        held = self.publisher.hold(60.0)
        yield held
        held.finish()


def memory(of: w.Memory) -> np.ndarray[Any, Any]:
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * of.length).from_address(of.address))


@contextlib.contextmanager
def trainer(sources: list[Source]) -> Iterator[Trainer]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        made = Trainer(folder, sources)
        yield made
        made.publisher.close()


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    if dtype.is_floating_point:
        return (torch.randn(*shape, device="cuda") * 0.02).to(dtype)
    return torch.randint(0, 100, shape, device="cuda").to(dtype)


def sources() -> list[Source]:
    bf16 = torch.bfloat16
    wide = draw(300, 1000)
    return [
        Source("large", draw(3000, 2048)),
        Source("master", draw(2500, 1024, dtype=torch.float32), bf16),
        Source("master.rows", draw(400, 512, dtype=torch.float32)[:, 3:300], bf16),
        Source("turned", draw(700, 500).t()),
        Source("columns", wide[:, 100:612]),
        Source("repeated", draw(1, 640).expand(50, 640)),
        Source("planes", draw(12, 40, 33).permute(1, 0, 2)),
        Source("one", draw(1)),
        Source("odd", draw(4099)),
        Source("bytes", draw(777, dtype=torch.uint8)),
        Source("router", draw(64, 96, dtype=torch.float32)),
        Source("double", draw(33, 7, dtype=torch.float64)),
        Source("unaligned", draw(10_001)[1:]),
    ]


def test_a_device_says_what_it_is(gpu: w.Gpu) -> str:
    properties = torch.cuda.get_device_properties(0)
    assert gpu.name == properties.name and gpu.capability == (properties.major, properties.minor)
    assert str(properties.uuid) in gpu.uuid, (properties.uuid, gpu.uuid)
    free, total = gpu.memory()
    assert 0 < free < total
    assert w.Gpu.by_uuid(gpu.uuid).ordinal == gpu.ordinal == 0
    for wrong, kind in (
        (lambda: w.Gpu.open(99), WindlassNotFound),
        (lambda: w.Gpu.by_uuid("GPU-0"), WindlassNotFound),
    ):
        refuse(wrong, kind, "visible")
    return f"{gpu.name}, CUDA {gpu.cuda}"


def refuse(work: Any, kind: type[WindlassError], *parts: str) -> None:
    try:
        work()
    except kind as e:
        assert all(p in str(e) for p in parts), str(e)
    else:
        raise AssertionError(f"no {kind.__name__}")


def test_tensors_of_every_shape_reach_the_slot(gpu: w.Gpu) -> str:
    with trainer(sources()) as t:
        for version in (1, 2, 3, 4):
            if version == 3:  # They moved, and changed.
                for s in t.sources:
                    s.tensor = (
                        torch.empty_strided(
                            s.tensor.shape, s.tensor.stride(), dtype=s.tensor.dtype, device="cuda"
                        ).copy_(s.tensor * 3)
                        if s.name != "repeated"
                        else s.tensor
                    )
            assert t.publish(gpu, version), "straight into the slot"
            with t.held() as held:
                assert np.array_equal(memory(held.memory()), t.want()), f"version {version}"
    return f"{len(t.sources)} tensors, 4 versions"


def test_a_slot_that_cannot_be_registered_is_filled_through_a_buffer(gpu: w.Gpu) -> str:
    with trainer([*sources(), Source("long", draw(60 << 20))]) as t:
        t.publisher.begin(1, 30.0)
        before = gpu.register(t.publisher.slot())
        direct = t.publisher.copy_device(gpu, t.copies, t.addresses, stream(), t.casts)
        t.publisher.commit(30.0)
        assert not direct
        with t.held() as held:
            assert np.array_equal(memory(held.memory()), t.want())
        before.close()
    return "by a buffer"


def test_copies_wait_for_the_stream_of_the_trainer(gpu: w.Gpu) -> str:
    with trainer([Source("a", draw(1 << 20, dtype=torch.float32))]) as t:
        for version in range(1, 4):
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000_000)
                t.sources[0].tensor.fill_(version)
                t.publish(gpu, version)
            with t.held() as held:
                assert (memory(held.memory()).view(np.float32) == version).all()
        torch.cuda._sleep(8_000_000_000)
        t.publisher.begin(9, 30.0)
        began = time.monotonic()
        late = lambda: t.publisher.copy_device(gpu, t.copies, t.addresses, stream(), t.casts, 0.2)  # noqa: E731
        refuse(late, TimeoutError, "stream of the caller")  # type: ignore[arg-type]
        took = time.monotonic() - began
        t.publisher.abort()
        torch.cuda.synchronize()
        assert took < 1.5, took
    return f"given up after {took:.2f} s"


def changed(tensor: torch.Tensor, rate: float) -> None:
    """Some elements to their neighbours or anywhere."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    flat = tensor.view(bits)
    mask = torch.rand(flat.shape, device="cuda") < rate
    step = torch.where(torch.rand(flat.shape, device="cuda") < 0.95, 1, 37).to(bits)
    flat.copy_(torch.where(mask, flat + step, flat))


def ownable() -> list[Source]:
    bf16 = torch.bfloat16
    return [
        Source("a", draw(3000, 2048)),
        Source("b", draw(700, 700)),
        Source("m", draw(2500, 1024, dtype=torch.float32), bf16),
        Source("one", draw(1)),
        Source("odd", draw(4099)),
        Source("same", draw(70_000)),
        Source("bytes", draw(77_777, dtype=torch.uint8)),
        Source("router", draw(64, 2096, dtype=torch.float32)),
        Source("double", draw(333, 701, dtype=torch.float64)),
        Source("unaligned", draw(100_001)[1:]),
    ]


def cpu_container(
    t: Trainer, old: np.ndarray[Any, Any], new: np.ndarray[Any, Any], mode: str = "plain"
) -> bytes:
    made = []
    for name, dtype, _, at, size in t.layout.tensors():
        made.append(codec.Tensor(name, w.dtype_safetensors(dtype), old[at : at + size], new[at : at + size]))
    return codec.container([sys.executable, "-m", "windlass"], made, mode)


def head(container: bytes) -> tuple[int, bytes]:
    """Where records begin; the hashes of layout and cuts, and the digests."""
    return int.from_bytes(container[8:12], "little"), container[12:76]


def places(t: Trainer, room: int) -> dict[str, dict[str, Any]]:
    """Baselines with this room for records: on the device, half of the weights there, and on the host."""
    half = room + t.copies.bytes // 2
    return {"device": {}, "split": {"keep": "auto", "most": half}, "host": {"keep": "host"}}


def kept(gpu: w.Gpu, t: Trainer, name: str, room: int) -> w.Baseline:
    """One of them, where it was asked for."""
    baseline = gpu.baseline(t.copies, t.casts, room, **places(t, room)[name])
    device, host, records, _, _ = baseline.place
    assert (device > 0, host > 0) == (name != "host", name != "device"), (name, device, host)
    assert device + host >= t.copies.bytes and records >= room
    return baseline


def test_records_are_those_of_the_cpu_encoder(gpu: w.Gpu) -> str:
    told = []
    for place in ("device", "split", "host"):
        with trainer(ownable()) as t:
            # Room for every record: what finds none comes as a dense one, which is another test.
            baseline = kept(gpu, t, place, t.copies.bytes)
            refuse(lambda: baseline.encode(t.addresses, 1, 2, stream()), WindlassStale, "empty")  # noqa: B023
            baseline.reset(t.addresses, 1, stream())
            for version, rate in enumerate((0.01, 0.0001, 0.3, 0.0), 2):
                old = t.want()
                for s in t.sources:
                    if s.name != "same":
                        changed(s.tensor, rate * (40 if s.name == "m" else 1))
                new = t.want()
                records = baseline.encode(t.addresses, version - 1, version, stream())
                want, found = cpu_container(t, old, new), records.container()
                assert head(want)[1] == head(found)[1], "layout, cuts, digests"
                assert want[head(want)[0] :] == found[head(found)[0] :], f"version {version} with {place}"
                assert records.lost == 0 and baseline.version == version
                if place == "device":
                    told.append(f"{len(records)} records of {baseline.blocks}")
            late = lambda: baseline.encode(t.addresses, 3, 9, stream())  # noqa: B023, E731
            refuse(late, WindlassStale, "version 5", "version 3")
    return ", ".join(told) + "; the same with half of the baseline and all of it on the host"


def test_a_baseline_gives_back_what_it_took(gpu: w.Gpu) -> str:
    with trainer([Source("a", draw(1 << 28))]) as t:
        kept(gpu, t, "device", 1 << 20).reset(t.addresses, 1, stream())
        before = gpu.memory()[0]
        for place in ("split", "host", "device") * 2:
            baseline = kept(gpu, t, place, 1 << 20)
            baseline.reset(t.addresses, 1, stream())
            taken = before - gpu.memory()[0]
            device = baseline.place[0]
            assert device <= taken + (1 << 20) and taken < device + (64 << 20), (place, device, taken)
            del baseline
            assert abs(gpu.memory()[0] - before) < 8 << 20, (place, before, gpu.memory()[0])
    return "all of it"


def test_records_without_room_come_as_dense_ones(gpu: w.Gpu) -> str:
    told = []
    for place in ("device", "split", "host"):
        with trainer(ownable()) as t:
            baseline = kept(gpu, t, place, 100_000)
            baseline.reset(t.addresses, 1, stream())
            old = t.want()
            for s in t.sources:
                changed(s.tensor, 0.02)
            new = t.want()
            records = baseline.encode(t.addresses, 1, 2, stream())
            want, _ = codec.parse(cpu_container(t, old, new))
            found, _ = codec.parse(records.container())
            assert records.lost > 0 and found.keys() == want.keys()
            dense = 0
            for number, r in found.items():
                assert r.sum == want[number].sum
                if r.mode == codec.DENSE and want[number].mode != codec.DENSE:
                    dense += 1
                else:
                    assert r.payload == want[number].payload
            assert dense == records.lost
            # What follows is right again.
            changed(t.sources[0].tensor, 0.001)
            last = t.want()
            again = baseline.encode(t.addresses, 2, 3, stream()).container()
            want_again = cpu_container(t, new, last)
            assert head(again)[1] == head(want_again)[1]
            told.append(f"{records.lost} of {len(records)} lost ({place})")
    return ", ".join(told)


def test_memory_that_is_not_there_is_told_in_numbers(gpu: w.Gpu) -> str:
    with trainer([Source("a", draw(1 << 16))]) as t:
        refuse(lambda: gpu.baseline(t.copies, t.casts, 1 << 45), WindlassExhausted, "32768.0 GiB", "are free")
        host = torch.zeros(1 << 16, dtype=torch.bfloat16)
        baseline = gpu.baseline(t.copies, t.casts)
        refuse(lambda: baseline.reset([host.data_ptr()], 1, stream()), WindlassInvalid, "not memory of GPU 0")
        pinned = host.pin_memory()
        refuse(
            lambda: baseline.reset([pinned.data_ptr()], 1, stream()), WindlassInvalid, "pinned host memory"
        )
        assert baseline.version is None
        t.publisher.begin(1, 30.0)
        direct = lambda: t.publisher.copy_device(gpu, t.copies, [host.data_ptr()], stream(), t.casts)  # noqa: E731
        refuse(direct, WindlassInvalid, "not memory of GPU 0")
        t.publisher.abort()
    columns = Source("c", draw(1000, 3000)[:, :1000])
    with trainer([columns]) as t:
        refuse(
            lambda: gpu.baseline(t.copies, t.casts), WindlassUnsupported, "'c'".replace("'", '"'), "cut table"
        )
    return "told"


class Engine:
    """Fused, sliced and turned parameters, and their plan."""

    def __init__(self, gpu: w.Gpu, layout: w.Layout) -> None:
        self.layout = layout
        bf16, f32 = torch.bfloat16, torch.float32
        self.parameters = {
            "fused": torch.zeros(3000 + 700, 2048, dtype=bf16, device="cuda"),
            "turned": torch.zeros(700, 700, dtype=bf16, device="cuda"),
            "m.left": torch.zeros(2500, 500, dtype=bf16, device="cuda"),
            "m.right": torch.zeros(2500, 700, dtype=bf16, device="cuda"),
            "twice": torch.zeros(2, 70_000, dtype=bf16, device="cuda"),
            "small": torch.zeros(8000, dtype=bf16, device="cuda"),
            "bytes": torch.zeros(77_777, dtype=torch.uint8, device="cuda"),
            "router": torch.zeros(64, 2096, dtype=f32, device="cuda"),
            "double": torch.zeros(333, 701, dtype=torch.float64, device="cuda"),
            "unaligned": torch.zeros(100_000, dtype=bf16, device="cuda"),
        }
        names = list(self.parameters)
        n = names.index
        copies = [
            ("a", 0, n("fused"), 700 * 2048, [3000, 2048], [2048, 1], [2048, 1]),
            ("b", 0, n("turned"), 0, [700, 700], [700, 1], [1, 700]),
            ("m", 0, n("m.left"), 0, [2500, 500], [1024, 1], [500, 1]),
            ("m", 500, n("m.right"), 100, [2500, 524], [1024, 1], [700, 1]),
            ("same", 0, n("twice"), 0, [2, 70_000], [0, 1], [70_000, 1]),
            ("one", 0, n("small"), 5, [1], [1], [1]),
            ("odd", 0, n("small"), 8, [4099], [1], [1]),
            ("bytes", 0, n("bytes"), 0, [77_777], [1], [1]),
            ("router", 0, n("router"), 0, [64 * 2096], [1], [1]),
            ("double", 0, n("double"), 0, [333 * 701], [1], [1]),
            ("unaligned", 0, n("unaligned"), 0, [100_000], [1], [1]),
        ]
        targets = [(k, p.numel(), TORCH[p.dtype]) for k, p in self.parameters.items()]
        self.plan = w.LoadPlan(layout, targets, copies)
        self.device = gpu.load_plan(self.plan, [p.data_ptr() for p in self.parameters.values()])

    def want(self, image: np.ndarray[Any, Any]) -> dict[str, torch.Tensor]:
        """What the CPU's replay of the same plan leaves."""
        t = {}
        for name, dtype, _, at, size in self.layout.tensors():
            kind = next(k for k, v in TORCH.items() if v == w.dtype_safetensors(dtype))
            t[name] = torch.from_numpy(image[at : at + size].copy()).view(kind)
        t["a"], t["b"], t["m"] = t["a"].view(3000, 2048), t["b"].view(700, 700), t["m"].view(2500, 1024)
        out = {k: torch.zeros_like(p, device="cpu") for k, p in self.parameters.items()}
        out["fused"][700:] = t["a"]
        out["turned"][:] = t["b"].t()
        out["m.left"][:] = t["m"][:, :500]
        out["m.right"][:, 100:624] = t["m"][:, 500:]
        out["twice"][:] = t["same"]
        out["small"][5], out["small"][8 : 8 + 4099] = t["one"][0], t["odd"]
        for name in ("bytes", "router", "double", "unaligned"):
            out[name].view(-1)[:] = t[name].view(-1)
        return out

    def check(self, image: np.ndarray[Any, Any]) -> None:
        for name, want in self.want(image).items():
            assert np.array_equal(raw(self.parameters[name]), raw(want)), name

    def digest(self) -> str | None:
        combined = json.loads(w.combine_digests(self.layout, [self.device.digest(stream())]))
        assert not combined["disagree"] and not combined["rest"], combined
        return combined["digest"]  # type: ignore[no-any-return]


def sums(t: Trainer, image: np.ndarray[Any, Any]) -> bytes:
    """The sums of all blocks, by their definition."""
    made = []
    for name, dtype, _, at, size in t.layout.tensors():
        data = image[at : at + size]
        made.append(codec.Tensor(name, w.dtype_safetensors(dtype), data, data))
    told = [b.sum(b.tensor.new) for b in codec.blocks_of(made)]
    return b"".join(x.to_bytes(8, "little") + y.to_bytes(8, "little") for x, y in told)


def test_images_and_deltas_reach_fused_parameters(gpu: w.Gpu) -> str:
    with trainer(ownable()) as t:
        engine = Engine(gpu, t.layout)
        baseline = gpu.baseline(t.copies, t.casts)
        baseline.reset(t.addresses, 1, stream())
        t.publish(gpu, 1)
        first = t.want()
        # From the device, from the host, and from pinned memory of the host.
        image = torch.from_numpy(first).cuda()
        engine.device.dense(image.data_ptr(), stream())
        engine.check(first)
        with trainer(t.sources) as other:
            # Nobody has registered this one.
            other.publisher.begin(1, 30.0)
            memory(other.publisher.slot())[:] = first
            other.publisher.commit(30.0)
            for registered in (False, True):
                for p in engine.parameters.values():
                    p.zero_()
                with other.held() as held:
                    pin = gpu.register(held.memory()) if registered else None
                    engine.device.dense_held(held, stream(), 2)
                    if pin is not None:
                        pin.close()
                    # Compared wholly, and what differs is named.
                    assert engine.device.difference(held, stream(), 2) == []
                    engine.parameters["bytes"].add_(1)
                    assert engine.device.difference(held, stream(), 2) == ["bytes"]
                    engine.parameters["bytes"].sub_(1)
                engine.check(first)
        assert engine.digest() == baseline.digest()
        # Some of it only.
        engine.parameters["fused"].zero_()
        engine.parameters["bytes"].zero_()
        engine.device.dense(image.data_ptr(), stream(), ["a"])
        assert engine.parameters["fused"].any() and not engine.parameters["bytes"].any()
        engine.device.dense(image.data_ptr(), stream())
        # Deltas, with and without sums.
        last = first
        for version, rate in enumerate((0.01, 0.0003, 0.4), 2):
            for s in t.sources:
                changed(s.tensor, rate)
            delta = baseline.encode(t.addresses, version - 1, version, stream()).container()
            if version == 3:
                engine.device.set_sums(sums(t, last))
            if version == 4:
                # Those of the parameters themselves are the same.
                engine.device.set_sums(None)
                engine.device.sum_blocks(stream())
            staged = engine.device.stage(delta)
            engine.check(last)
            applied, skipped = engine.device.apply(staged, stream())
            assert (applied, skipped) == (len(staged), 0), (applied, skipped)
            last = t.want()
            engine.check(last)
            assert engine.digest() == baseline.digest(), f"version {version}"
            if version >= 3:
                # Twice is once, except in tensors that are not held once.
                engine.device.set_sums(sums(t, last))
                again = engine.device.apply(
                    engine.device.stage(delta, [s.name for s in t.sources if s.name != "same"]), stream()
                )
                assert again[0] == 0 and again[1] > 0, again
                engine.check(last)
        # Weights that are not those of the base are refused.
        changed(t.sources[0].tensor, 0.01)
        delta = baseline.encode(t.addresses, 4, 5, stream()).container()
        staged = engine.device.stage(delta)
        engine.parameters["fused"].add_(1)
        refuse(lambda: engine.device.apply(staged, stream()), WindlassCorrupt, "load the whole image")
        # Damage shows when the container is read.
        bad = bytearray(delta)
        bad[-100] ^= 1
        refuse(lambda: engine.device.stage(bytes(bad)), WindlassCorrupt, "damaged")
    return f"{len(engine.parameters)} parameters"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 32))
    parser.add_argument("names", nargs="*", help="parts of the names of tests")
    args = parser.parse_args()
    needs.need_device("the device layer")
    torch.manual_seed(args.seed)
    gpu = w.Gpu.open(0)
    say(f"seed {args.seed}, {gpu.name}, driver for CUDA {gpu.cuda[0]}.{gpu.cuda[1]}")
    return needs.run_tests(globals(), args.names, gpu, patience=PATIENCE)


if __name__ == "__main__":
    sys.exit(main())
