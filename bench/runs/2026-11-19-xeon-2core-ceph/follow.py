"""A trainer uploads versions to a Ceph cluster and a receiver follows, while an OSD is killed and comes back. At the end a second trainer
takes the store over, and the first is told.

    AWS_ENDPOINT_URL=... AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... AWS_REGION=default \
        python follow.py s3://bucket/run DIR-OF-THE-CLUSTER [--versions 30]
"""
import argparse, subprocess, sys, tempfile, time
from pathlib import Path
import torch
from windlass import Receiver, WeightManager, WindlassError
from windlass.config import StoreConfig

arguments = argparse.ArgumentParser()
arguments.add_argument("url"); arguments.add_argument("cluster"); arguments.add_argument("--versions", type=int, default=30)
given = arguments.parse_args()
ceph = [str(Path(__file__).with_name("ceph.sh"))]
weights = {f"layer.{n}": torch.randn(1024, 1024).to(torch.bfloat16) for n in range(32)}   # 64 MiB
with tempfile.TemporaryDirectory(dir="/dev/shm") as home:
    store = StoreConfig(url=given.url, anchor_every=8, part_bytes=8 << 20)
    with WeightManager(model_id="policy", region_dir=f"{home}/region", timeout=300.0, store=store) as wm:
        wm.offload(weights, 1)
        wm.wait_stored(1)
        receiver = Receiver(f"{home}/image", store=f"{given.url}/policy", timeout=300.0)
        for version in range(2, given.versions + 1):
            if version == given.versions // 3:
                subprocess.run([*ceph, "kill", given.cluster, "1"], check=True); print("OSD 1 killed", flush=True)
            if version == 2 * given.versions // 3:
                subprocess.run([*ceph, "start", given.cluster, "1"], check=True); print("OSD 1 started", flush=True)
            for tensor in weights.values():
                tensor.view(-1)[torch.randint(tensor.numel(), (tensor.numel() // 100,))] += 0.5
            began = time.monotonic()
            wm.offload(weights, version)
            wm.wait_stored(version)
            stored = time.monotonic() - began
            receiver.wait(version, timeout=300.0)
            with receiver.hold() as held:
                assert all(torch.equal(held.tensors[name], weights[name]) for name in weights), version
            print(f"version {version}: stored after {stored:.2f} s, received and equal after {time.monotonic() - began:.2f} s", flush=True)
        with WeightManager(model_id="policy", region_dir=f"{home}/second", timeout=300.0, store=store) as second:
            second.offload(weights, 1)
            second.wait_stored(1)
            wm.offload(weights, given.versions + 1)
            try:
                wm.wait_stored(given.versions + 1)
            except WindlassError as e:
                print(f"the first trainer, after a second: {e}", flush=True)
            else:
                raise AssertionError("two trainers have published to one store")
    done = subprocess.run([sys.executable, "-m", "windlass", "store", "verify", given.url], capture_output=True, text=True)
    print(done.stdout[-1500:], done.stderr[-500:]); sys.exit(done.returncode)
