"""A rank of twelve blocks of 128 KiB and a short one. Prints what it saw as one object."""

import ctypes
import gc
import json
import os
import sys
import tempfile
from pathlib import Path

from windlass import _windlass as w
from windlass.errors import WindlassError

how = json.loads(sys.argv[1])
driver = ctypes.CDLL("libcuda.so.1")
driver.windlass_live.restype = ctypes.c_uint64


def live():
    return [driver.windlass_live(0), driver.windlass_live(1)]


sizes = [1 << 20, 1000, 1 << 19]
told = {}
with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
    layout = w.Layout([(f"t{i}", "BF16", [n // 2]) for i, n in enumerate(sizes)])
    at = [at for _, _, _, at, _ in layout.tensors()]
    publisher = w.Publisher.create(Path(folder) / "region", "model", layout)
    copies = publisher.plan([(a, n, []) for a, n in zip(at, sizes)])
    gpu = w.Gpu.open(0)
    memory = [ctypes.create_string_buffer(os.urandom(n), n) for n in sizes]
    addresses = [ctypes.addressof(m) for m in memory]
    told["before"] = live()
    try:
        baseline = gpu.baseline(copies, **how)
    except WindlassError as e:
        told["error"] = [type(e).__name__, str(e)]
    else:
        told["place"], told["kept"] = baseline.place, live()
        told["asked"] = [driver.windlass_asked(0), driver.windlass_asked(1)]
        baseline.reset(addresses, 1)
        for version in (2, 3):
            for m in memory:
                m.raw = os.urandom(len(m))
            records = baseline.encode(addresses, version - 1, version)
            found = records.container()
            told[f"lost {version}"] = records.lost
            for m in memory:
                for begin in range(0, len(m), 1 << 17):
                    assert m.raw[begin : begin + (1 << 17)] in found, (version, len(m), begin)
        del baseline, records
    gc.collect()
    told["after"] = live()
    publisher.close()
sys.stdout.write(json.dumps(told))
