"""Context records beside plain ones on a GPU: the same change of bf16 weights, applied in place.

    PYTHONPATH=python python bench/context.py [--elements 8e9] [--rate 0.0036] [--repeats 12] [--windlass COMMAND]

Needs a CUDA device, torch and the command `windlass`, which makes the records; `--host` is a trial on the CPU. 64 blocks
are encoded, and weights of so many elements are copies of them, each a tensor of its own. Timed by events; medians
count. Beside both, reading all weights once is the least that context records can take.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "gpu"))

import needs  # noqa: E402

needs.need("torch", "numpy")

import codec  # noqa: E402
import context  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from drawing import Draw  # noqa: E402
from programs import PATCH, PIECE, PLACE, TALLY, Device, Host, Programs  # noqa: E402

BLOCKS = 64


class Weights:
    """Copies of a tensor in an engine's memory, and the records that lead it to its next state."""

    def __init__(self, device: Programs, tensor: codec.Tensor, copies: int, raw: bytes) -> None:
        self.device, size = device, len(tensor.old)
        self.states = [torch.from_numpy(s.copy()).to(device.device) for s in (tensor.old, tensor.new)]
        self.memory = device.zeros(copies * size)
        pieces, places, patches, sums = [], [], [], []
        records, _ = codec.parse(raw)
        blocks = codec.blocks_of([tensor])
        old_sums = [b.sum(tensor.old) for b in blocks]
        mantissa = codec.MANTISSA[tensor.dtype]
        for copy in range(copies):
            pieces.append((0, size, size, 1, self.memory.data_ptr() + copy * size, size))
            for b in blocks:
                place = len(places)
                places.append((b.start * b.tensor.unit, 0, b.run, 1, copy, 1, 1, mantissa))
                if r := records.get(b.number):
                    patches.append((r.offset, r.sum, len(r.payload), r.mode, place, 0))
            sums += old_sums
        self.pieces, self.places = (
            device.table(np.array(pieces, PIECE)),
            device.table(np.array(places, PLACE)),
        )
        self.old_sums = device.table(np.array(sums, np.uint64))
        self.sums = self.old_sums.clone()
        self.payload = device.table(np.frombuffer(raw + b"\0" * 16, np.uint8))
        rows = np.array(patches, PATCH)
        is_context = rows["mode"] == codec.CONTEXT
        self.patches = [
            (kernel, len(some), device.table(some), device.zeros(4 * len(some)))
            for kernel, some in (("apply", rows[~is_context]), ("context", rows[is_context]))
            if len(some)
        ]
        self.tally = device.zeros(1, TALLY)

    def reset(self) -> None:
        self.memory.view(-1, len(self.states[0])).copy_(self.states[0])
        self.sums.copy_(self.old_sums)
        self.tally.zero_()

    def apply(self) -> None:
        for kernel, count, table, outcomes in self.patches:
            self.device.start(
                f"{kernel}_2",
                f"windlass_{kernel}",
                places=self.places,
                pieces=self.pieces,
                patches=table,
                payload=self.payload,
                sums=self.sums,
                outcomes=outcomes,
                tally=self.tally,
                count=count,
                work=0,
            )

    def check(self) -> None:
        told = self.device.read(self.tally, TALLY)[0]["outcome"]
        assert int(told[1]) == sum(p[1] for p in self.patches), told
        assert (self.memory.view(-1, len(self.states[1])) == self.states[1]).all()


def timed(weights: Weights, repeats: int, on_device: bool) -> list[float]:
    took = []
    for _ in range(repeats):
        weights.reset()
        if on_device:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            weights.apply()
            end.record()
            torch.cuda.synchronize()
            took.append(float(begin.elapsed_time(end)))
        else:
            began = time.perf_counter()
            weights.apply()
            took.append(1e3 * (time.perf_counter() - began))
        weights.check()
    return sorted(took)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", action="store_true", help="a trial on the CPU; times mean nothing")
    parser.add_argument("--elements", type=lambda text: needs.whole(1)(str(int(float(text)))), default=8e9)
    parser.add_argument("--rate", type=needs.share, default=0.0036, help="of weights of median size")
    parser.add_argument("--repeats", type=needs.whole(1), default=12)
    parser.add_argument("--windlass", help="the command; python -m windlass unless told")
    args = parser.parse_args()
    if not args.host:
        needs.need_device(instead="--host needs none; its times mean nothing")
    if args.windlass is None:
        needs.need("windlass")
    windlass = [sys.executable, "-m", "windlass"] if args.windlass is None else args.windlass.split()
    device: Programs = Host() if args.host else Device()
    blocks = 1 if args.host else BLOCKS
    tensor = context.tensor(Draw(7), "BF16", blocks * codec.BLOCK_UNITS, args.rate)
    changed = (tensor.old.view(np.uint16) != tensor.new.view(np.uint16)).mean()
    copies = 2 if args.host else max(1, int(args.elements) // tensor.units)
    told: dict[str, object] = {"elements": copies * tensor.units, "changed": round(float(changed), 5)}
    for mode in ("plain", "context"):
        raw = codec.container(windlass, [tensor], mode)
        weights = Weights(device, tensor, copies, raw)
        took = timed(weights, args.repeats, not args.host)
        told[mode] = {
            "ms": [round(t, 3) for t in (took[0], statistics.median(took), took[-1])],
            "records": {kernel: count for kernel, count, _, _ in weights.patches},
            "bytes": len(raw) * copies,
        }
        del weights
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
