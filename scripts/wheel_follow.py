"""Follows checkpoints without torch: `windlass publish` makes versions of them, and a receiver pulls each.

scripts/wheel_check.sh runs it where nothing but Python and the wheel is installed.
"""

import json
import pathlib
import struct
import subprocess
import tempfile

from windlass import Receiver


def write(home: pathlib.Path, version: int) -> None:
    """A checkpoint of one bf16 tensor, of which a few elements differ from version to version."""
    numbers = [i % 251 + (version if i % 500 == 0 else 0) for i in range(1 << 20)]
    data = struct.pack(f"<{len(numbers)}H", *numbers)
    tensor = {"dtype": "BF16", "shape": [1024, 1024], "data_offsets": [0, len(data)]}
    header = json.dumps({"w": tensor}).encode()
    path = home / f"step_{version}"
    path.mkdir()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    (path / ".windlass-ready").touch()


with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
    home = pathlib.Path(folder)
    write(home, 1)
    command = ["windlass", "publish", "--with-parent", "--follow", f"{home}/step_%d", "--model", "policy"]
    publisher = subprocess.Popen([*command, "--region", f"{home}/region"], stdin=subprocess.PIPE)
    with Receiver(f"{home}/images", region=f"{home}/region") as receiver:
        for version in (1, 2, 3):
            if version > 1:
                write(home, version)
            image = receiver.wait(version, timeout=60).image
            assert image is not None and image.identity.version == version, image
            print(f"version {version}: {image.digest}")
    publisher.stdin.close()
    publisher.wait(60)
