"""From the optimizer's step to an engine that answers with it: a trainer's process, TCP on loopback, an engine's process.

    PYTHONPATH=python python bench/gpu_sync.py [--size 8B] [--steps 12] [--region-dir DIR] [--image-dir DIR] [--json FILE]

Needs torch, transformers and the built extension (a release build), and a CUDA device unless ``--device cpu``. The engine
is the **reference engine** (``tests/gpu/reference.py``): a Qwen3 of transformers with fused parameters, which decodes one
sequence throughout, by a CUDA graph as serving engines do (``--eager``: without). Weights are random, in bf16; a step moves
about one in a hundred to its neighbour. A step begins when the version before is sealed and in the engine's image, as it would
be after seconds of training.

| figure | from | to |
|---|---|---|
| trainer blocked | the call of ``offload()`` | its return |
| announced | that return | the engine's receiver knows of the version |
| fetched | that | the delta is in its memory; ``ask`` and ``wire`` are parts of it |
| staged | that | the records are on the device |
| step ended | that | the step of decoding that was under way is over |
| **engine pause** | no step is under way | the next may begin |
| **step to visible** | the weights are changed | the end of the pause |
| image | the end of the pause | the receiver's image holds the version too; ``apply`` is a part of it |
| sealed | the call of ``offload()`` | the trainer's own slot holds the version and is sealed, if the trainer waits for it |

``sealed`` is measured with versions of its own, after the others: a trainer that waits has the slot written at once, and one that
computes lets engines fetch first.

``trainer blocked`` holds for a trainer that takes longer than ``sealed`` for a step: another ``offload()`` that comes
sooner waits first until the version before is in its slot. Parts are medians of their own and need not add up. ``fetched`` is
the receiver's whole call, ``ask`` and ``wire`` what it counts of it. Trainer and engine share one GPU here and disturb each
other, as they do not on two. The first versions take longer, because kernels are compiled and memory is registered:
``--warm`` of them do not count, and are in the JSON.

Bars for 8 B: engine pause <= 10 ms, step to visible <= 150 ms, trainer blocked <= 25 ms. ``--ipc`` adds the colocated way
beside one device copy (``bench/gpu_ipc.py``). Memory on the host: two slots of the trainer, an image of the receiver
and deltas: 3.3 times the weights (8 B: 54 GB); on the device, weights, baseline and the engine's: 3.1 times.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "bench")]

import needs  # noqa: E402

needs.need("torch", "transformers", "windlass")

import reference  # noqa: E402
import torch  # noqa: E402
from reference import PATIENCE, Child, ReferenceEngine, ReferenceSession, say  # noqa: E402

from windlass import Receiver, WeightManager  # noqa: E402
from windlass.load import Live, LoadOrder  # noqa: E402

#: Elements that are changed at a time.
CHUNK = 1 << 26
#: Versions that the trainer waits for.
SEALINGS = 5
FIGURES = (
    "engine pause", "step to visible", "trainer blocked", "announced", "fetched", "ask", "wire", "staged",
    "step ended", "load", "image", "apply", "sealed",
)  # fmt: skip
BARS = {"engine pause": 10.0, "step to visible": 150.0, "trainer blocked": 25.0}


class Serving:
    """The engine's process: takes one version after the other, and tells when what was done."""

    def __init__(
        self,
        size: str,
        device: str,
        threads: int,
        streams: int | None,
        image: str,
        endpoint: str,
        token_file: str,
        eager: bool,
    ) -> None:
        self.model = reference.fuse(reference.plain(size, device, 99))
        self.engine = ReferenceEngine(self.model, length=16, graph=not eager)
        self.live = Live(ReferenceSession(self.model), engine="reference", threads=threads)
        self.receiver = Receiver(
            image,
            endpoint=endpoint,
            token_file=token_file,
            keep_deltas=4,
            streams=streams,
            threads=threads,
            timeout=PATIENCE,
        )

    def take(self) -> dict[str, Any]:
        """The next version. Times are those of the system's monotonic clock."""
        at: dict[str, float] = {}
        newer = None
        if self.receiver.version is not None and (newer := self.receiver.wait_newer(PATIENCE)) is None:
            raise TimeoutError("no version came")
        at["announced"] = time.monotonic()
        fetched = None if newer is None else self.receiver.fetch(PATIENCE, newer)
        at["fetched"] = time.monotonic()
        staged = fetched is not None and self.live.stage_fetched(fetched, PATIENCE)
        at["staged"] = time.monotonic()
        synced: Any = {}
        if not staged:
            synced = self.receiver.sync(PATIENCE)
        if fetched is not None and staged:
            with self.engine.pause():
                at["paused"] = time.monotonic()
                report = self.live.load_fetched(fetched, PATIENCE)
                version = self.engine.version = fetched.version
            at["resumed"] = time.monotonic()
            synced = self.receiver.show(fetched, PATIENCE)
        else:
            # The first, and on a CPU all.
            with self.receiver.hold() as image, self.engine.pause():
                at["paused"] = time.monotonic()
                report = self.live.load(LoadOrder.of(image))
                version = self.engine.version = image.version
            at["resumed"] = time.monotonic()
        if report.state != "clean" or report.last is None:
            raise RuntimeError(f"version {version} was not loaded: {report.error}")
        at["image"] = time.monotonic()
        self.engine.start()
        if self.engine.error is not None:
            raise RuntimeError(f"the engine stopped: {self.engine.error}")
        return {
            "version": version,
            "at": at,
            "staged": staged,
            "how": report.last.how,
            "bytes": synced["wire_bytes"],
            "mode": synced["mode"],
            "ask": synced["ask_ms"],
            "wire": synced["wire_ms"],
            "apply": synced["apply_ms"],
            "load": report.last.ms,
            "pause": self.engine.pauses[-1],
            "tokens": len(self.engine.tokens),
        }

    def close(self) -> None:
        self.engine.close()
        self.receiver.close()


class Weights:
    """The trainer's."""

    def __init__(self, size: str, device: str) -> None:
        self.device = device
        self.tensors = {n: p.detach() for n, p in reference.plain(size, device, 1).named_parameters()}
        self.bytes = sum(t.nbytes for t in self.tensors.values())

    def step(self, rate: float) -> float:
        """Moves about so many elements to a neighbour, in place. When that was done."""
        for tensor in self.tensors.values():
            for bits in tensor.view(-1).view(torch.int16).split(CHUNK):
                draw = torch.rand(bits.shape, device=self.device)
                size = bits & 0x7FFF
                moves = (draw < rate) & (size > 0) & (size < 0x7F00)
                bits.add_(torch.where(draw < rate / 2, 1, -1).to(torch.int16).mul_(moves))
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.monotonic()


def check_room(size: int, region: Path, image: Path) -> None:
    """Ends the script if there is no room, before anything is written."""
    slots, copy = 2.2 * size, 1.1 * size
    for folder in (region, image):
        folder.mkdir(parents=True, exist_ok=True)
    advice = (
        "name other folders with --region-dir and --image-dir (a tmpfs is quickest), or take a smaller --size"
    )
    free = shutil.disk_usage(image).free
    if free < copy:
        needs.end(
            f"the image needs {copy / 1e9:.1f} GB in {image}, and {free / 1e9:.1f} GB are free: {advice}",
            2,
        )
    left = shutil.disk_usage(region).free - copy * (os.stat(region).st_dev == os.stat(image).st_dev)
    # Slots for which the folder is too small are anonymous memory.
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    memory = int(meminfo["MemAvailable"].split()[0]) * 1024
    if max(left, memory - copy) < slots:
        needs.end(
            f"the slots need {slots / 1e9:.1f} GB; {left / 1e9:.1f} GB are left in {region}, and {memory / 1e9:.1f} GB of "
            f"memory are available: {advice}",
            2,
        )


def one(
    child: Child, wm: WeightManager, weights: Weights, version: int, rate: float, waits: bool
) -> dict[str, Any]:
    """One version, all the way, and how long that took."""
    child.tell("take")
    changed = weights.step(rate)
    called = time.monotonic()
    offloaded = wm.offload(weights.tensors, version, 0, 1)
    returned = time.monotonic()
    if waits:
        wm.wait_delta_ready(version, timeout=PATIENCE)
    sealed = time.monotonic()
    row = child.hear()
    wm.wait_delta_ready(version, timeout=PATIENCE)
    if row["version"] != version:
        raise RuntimeError(f"the engine took version {row['version']} instead of {version}")
    at = row["at"]
    figures = {
        "engine pause": row["pause"],
        "step to visible": (at["resumed"] - changed) * 1e3,
        "trainer blocked": (returned - called) * 1e3,
        "announced": (at["announced"] - returned) * 1e3,
        "fetched": (at["fetched"] - at["announced"]) * 1e3,
        "staged": (at["staged"] - at["fetched"]) * 1e3,
        "step ended": (at["paused"] - at["staged"]) * 1e3,
        "image": (at["image"] - at["resumed"]) * 1e3,
        **{name: row[name] for name in ("ask", "wire", "apply", "load")},
        **({"sealed": (sealed - called) * 1e3} if waits else {}),
    }
    return {
        "version": version,
        "offload": offloaded.mode,
        **{name: row[name] for name in ("how", "staged", "mode", "bytes", "tokens")},
        "ms": figures,
    }


def measure(given: argparse.Namespace, home: Path, out: Any) -> dict[str, Any]:
    weights = Weights(given.size, given.device)
    region, image = Path(given.region_dir or home / "region"), Path(given.image_dir or home / "image")
    check_room(weights.bytes, region, image)
    say(f"{given.size}: {len(weights.tensors)} tensors, {weights.bytes / 1e9:.2f} GB, reference engine")
    told: dict[str, list[float]] = {name: [] for name in FIGURES}
    with WeightManager(
        model_id="policy", region_dir=str(region), offload_mode="delta", timeout=PATIENCE
    ) as wm:
        wm.offload(weights.tensors, 1, 0, 1)
        wm.wait_delta_ready(1, timeout=PATIENCE)
        child = Child(
            __file__,
            size=given.size,
            device=given.device,
            threads=given.threads,
            streams=given.streams,
            image=str(image),
            endpoint=wm.endpoint,
            token_file=wm.token_file,
            eager=given.eager,
        )
        try:
            child.ask("take")
            for version in range(2, 2 + given.warm + given.steps + SEALINGS):
                counts, waits = version >= 2 + given.warm, version >= 2 + given.warm + given.steps
                line = one(child, wm, weights, version, given.rate, waits)
                line |= {"size": given.size, "warm": counts, "waits": waits}
                out.write(json.dumps(line) + "\n")
                out.flush()
                names = ("sealed",) if waits else (n for n in FIGURES if n != "sealed")
                for name in names if counts else ():
                    told[name].append(line["ms"][name])
        finally:
            child.kill()
    return summary(given, weights.bytes, told, line)


def summary(
    given: argparse.Namespace, size: int, told: dict[str, list[float]], last: dict[str, Any]
) -> dict[str, Any]:
    say(f"  offload {last['offload']}, pulled {last['mode']}, loaded {last['how']}, staged {last['staged']}, "
        f"{last['bytes'] / 1e6:.1f} MB a version")  # fmt: skip
    for name, values in told.items():
        bar = f"   bar {BARS[name]:g}" if name in BARS and given.size == "8B" else ""
        say(f"  {name:16} {statistics.median(values):9.3f} ms [{min(values):.3f}..{max(values):.3f}]{bar}")
    medians = {name: statistics.median(values) for name, values in told.items()}
    return {"size": given.size, "summary": True, "engine": "reference", "bytes": size, "medians": medians}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", default="0.6B", type=needs.one_of(reference.SIZES), help=", ".join(reference.SIZES)
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=needs.whole(1), default=12, help="versions that count")
    parser.add_argument("--warm", type=needs.whole(0), default=3, help="versions that do not, before them")
    parser.add_argument("--rate", type=needs.share, default=0.01, help="of the elements that a step changes")
    parser.add_argument("--threads", type=needs.whole(1), default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--streams", type=needs.whole(1), help="of a transfer; six unless told")
    parser.add_argument("--eager", action="store_true", help="the engine decodes without a CUDA graph")
    parser.add_argument("--region-dir", help="where the trainer's slots are: 2.2 times the weights")
    parser.add_argument("--image-dir", help="where the receiver's image is: 1.1 times the weights")
    parser.add_argument("--ipc", action="store_true", help="also the colocated way")
    parser.add_argument("--json", help="a file for one line of JSON per version")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="  log: %(message)s")
    if given.serve:
        reference.answer(Serving(**json.loads(given.serve)))
        return
    if given.device == "cuda":
        needs.need_device(instead="--device cpu --size tiny needs none; its times mean nothing")
        say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    out = open(given.json, "a") if given.json else open(os.devnull, "w")  # noqa: SIM115
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sync-") as home, out:
        out.write(json.dumps(measure(given, Path(home), out)) + "\n")
        if given.ipc and given.device == "cuda" and given.size != "tiny":
            import gpu_ipc
            import torch.multiprocessing as mp

            torch.cuda.empty_cache()
            mp.set_start_method("spawn")
            found = gpu_ipc.measure(given.size, given.steps)
            out.write(json.dumps({"size": given.size, "ipc": True, **found}) + "\n")


if __name__ == "__main__":
    main()
