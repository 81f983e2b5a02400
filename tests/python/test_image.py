"""The image of a receiver as a worker of an engine opens it: by its directory alone."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from children import environment
from windlass import (
    Receiver,
    WeightManager,
    WindlassInvalid,
    WindlassNotFound,
    WindlassStale,
    _windlass,
)
from windlass.receive.receiver import Tensors

WORKER = """
    import json, sys
    from windlass import _windlass
    from windlass.receive.receiver import Tensors

    held = _windlass.open_image(sys.argv[1], 30.0, 5.0)
    values = Tensors(held)["w"].tolist()
    held.finish()
    print(json.dumps([held.model_id, held.version, int(held.incarnation, 16), held.digest, values]))
"""


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="image-") as folder:
        yield Path(folder)


def test_an_image_is_read_by_another_process_without_its_receiver_and_its_publisher(home: Path) -> None:
    with WeightManager(model_id="actor", region_dir=str(home)) as wm:
        wm.offload({"w": torch.arange(5.0)}, 7, 0, 1)
        with Receiver(home / "image", region=wm.region) as receiver:
            receiver.wait(7, 30)
            with receiver.hold() as image:
                known = [image.version, image.incarnation, image.digest]
    command = [sys.executable, "-c", textwrap.dedent(WORKER), str(home / "image" / "actor")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["actor", *known, [0.0, 1.0, 2.0, 3.0, 4.0]]


def test_what_is_no_image_is_refused_by_name(home: Path) -> None:
    with pytest.raises(WindlassNotFound, match="there is no region"):
        _windlass.open_image(home / "nowhere", 30.0, 0.2)
    with pytest.raises(WindlassInvalid, match="a hold of -1 s"):
        _windlass.open_image(home / "nowhere", -1.0, 0.2)
    quiet = WeightManager(model_id="actor", region_dir=str(home), agent={"enabled": False}, timeout=20.0)
    with quiet as wm:
        wm.offload({"w": torch.zeros(3)}, 1, 0, 1)
        assert wm.region is not None
        with pytest.raises(WindlassInvalid, match="the region of a publisher of actor"):
            _windlass.open_image(wm.region, 30.0, 0.2)


def test_an_image_without_a_whole_version_is_waited_for_and_then_named(home: Path) -> None:
    where = home / "image" / "actor"
    with WeightManager(model_id="actor", region_dir=str(home)) as wm:
        wm.offload({"w": torch.zeros(3)}, 1, 0, 1)
        with Receiver(home / "image", region=wm.region) as receiver:
            receiver.wait(1, 30)
            # What a receiver leaves that dies before a version is proved.
            (where / "state.json").rename(where / "hidden")
            with pytest.raises(WindlassNotFound, match="image of actor at .* holds no whole version"):
                _windlass.open_image(where, 30.0, 0.2)
            taken: list[_windlass.Held] = []
            worker = threading.Thread(target=lambda: taken.append(_windlass.open_image(where, 30.0, 30.0)))
            worker.start()
            wm.offload({"w": torch.ones(3)}, 2, 0, 1)
            receiver.wait(2, 30)
            worker.join(30)
            assert [h.version for h in taken] == [2]
            assert Tensors(taken[0])["w"].tolist() == [1.0, 1.0, 1.0]
            taken[0].finish()
            with pytest.raises(WindlassStale, match="version 2 is no longer held"):
                taken[0].memory()
