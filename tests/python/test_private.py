"""Whose directories and secrets are taken, from Python: those of another user, or that others can read, are refused."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch

from windlass import Controller, Receiver, WeightManager, open_image
from windlass.errors import WindlassDenied
from windlass.publish.announce import AgentClient

#: A user that this process is not.
OTHER = 65_534

TOKEN = "0123456789abcdef0123456789abcdef"


def give_away(path: pathlib.Path) -> None:
    """Gives a path to another user; a test that cannot says so."""
    if os.geteuid() != 0:
        pytest.skip("SKIPPED what belongs to another user: only root can give files away")
    os.chown(path, OTHER, OTHER)


def publish(home: pathlib.Path) -> None:
    agent = {"enabled": False}
    with WeightManager(model_id="policy", region_dir=str(home), timeout=10.0, agent=agent) as wm:
        wm.offload({"a": torch.ones(2)}, 1, 0, 1)


def taken_by(file: pathlib.Path, home: pathlib.Path) -> list[str]:
    """What everything says that takes a token file, none of which may read it."""
    said = []
    for take in (
        lambda: Receiver(home / "image", endpoint="http://127.0.0.1:9", token_file=file, timeout=0.1),
        lambda: Controller("http://127.0.0.1:9", token_file=file),
        lambda: AgentClient("http://127.0.0.1:9", str(file), None).wait_served(1, 0.0),
    ):
        with pytest.raises(WindlassDenied) as refused:
            take()
        said.append(str(refused.value))
    return said


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_token_file_that_others_can_read_is_refused(tmp_path: pathlib.Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(mode)
    for said in taken_by(file, tmp_path):
        assert str(file) in said and "chmod 600" in said
    file.chmod(0o600)
    assert Controller("http://127.0.0.1:9", token_file=file).url


def test_a_token_file_of_another_user_is_refused(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    give_away(file)
    for said in taken_by(file, tmp_path):
        assert str(file) in said and str(OTHER) in said


def test_a_region_that_another_user_made_first_is_refused(tmp_path: pathlib.Path) -> None:
    region = tmp_path / "windlass-policy"
    region.mkdir()
    # With a token of its own: by it, the weights could be pulled.
    (region / "token").write_text(TOKEN)
    (region / "token").chmod(0o600)
    give_away(region)
    give_away(region / "token")
    before = region.stat()
    with pytest.raises(WindlassDenied, match=f"{OTHER}.*choose another"):
        publish(tmp_path)
    assert (region.stat().st_mode, region.stat().st_uid) == (before.st_mode, OTHER)
    assert sorted(p.name for p in region.iterdir()) == ["token"]
    with pytest.raises(WindlassDenied, match=str(OTHER)), open_image(region, timeout=0.1):
        pass


def test_a_place_that_everybody_can_write_to_must_be_sticky(tmp_path: pathlib.Path) -> None:
    place = tmp_path / "open"
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(WindlassDenied, match=r"chmod \+t"):
        publish(place)
    place.chmod(0o1777)
    publish(place)


BEYOND = """
import resource, sys, torch, windlass
from windlass.errors import WindlassExhausted
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
with windlass.WeightManager(region_dir=sys.argv[1], agent={"enabled": False}) as wm:
    try:
        wm.offload({"a": torch.ones(1 << 20)}, 1, 0, 1)
    except WindlassExhausted as e:
        print(e)
"""


def test_a_file_beyond_the_limit_on_sizes_is_an_error_and_not_the_end(tmp_path: pathlib.Path) -> None:
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN, "Python ignores it by itself"
    done = subprocess.run(
        [sys.executable, "-c", BEYOND, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "ulimit -f" in done.stdout
