"""The comparison with other systems (bench/peers) compares bytes: right ones count, and a wrong bit is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAMS = Path(__file__).resolve().parent / "programs"


@pytest.mark.timeout(400)
def test_peers_are_compared_bit_for_bit_and_a_wrong_one_is_reported(tmp_path: Path) -> None:
    words = ["--sizes=tiny", "--served=", "--turns=1", "--syncs=1", f"--out={tmp_path}"]
    words += ["--modules", "peers.listed", "corrupting_peer"]
    words += [f"--only={name}" for name in ("Windlass", "index", "safetensors", "corrupting", "torchstore")]
    env = {**os.environ, "PYTHONPATH": str(PROGRAMS)}
    command = [sys.executable, str(ROOT / "bench" / "peers"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=380, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads((tmp_path / "peers.json").read_text())
    assert found["errors"] == []
    rows = {row["name"].partition(" ")[0].rstrip(","): row for row in found["parameters"][0]["peers"]}
    assert {name: row["equal"] for name, row in rows.items()} == {
        "Windlass": True,
        "index": True,
        "safetensors": True,
        "corrupting": False,
    }
    for row in rows.values():
        assert row["compared"] == 3
        assert 0.005 < row["changed_share"] < 0.02
        assert 0 < row["pause_s"]["median"] <= row["visible_s"]["median"]
        assert row["cpu_s"]["median"] > 0 and row["memory_peak_bytes"] > row["bytes"]
    # Where no network could be made, other programs are counted, too.
    if found["own_network"]:
        assert 0 < rows["Windlass"]["wire_bytes"]["median"] < rows["index"]["wire_bytes"]["median"]
        assert rows["index"]["wire_bytes"]["median"] < 0.1 * rows["index"]["bytes"]
    assert [row["name"] for row in found["not_run"]] == ["torchstore"]
    assert "Error" in found["not_run"][0]["reason"]
    table = (tmp_path / "peers.md").read_text()
    assert table.count("**NO: wrong bytes**") == 1 and table.count("yes, 3 times") == 3
    ElementTree.parse(tmp_path / "parameters-tiny.svg")


def test_a_size_that_is_not_there_is_refused_by_name() -> None:
    command = [sys.executable, str(ROOT / "bench" / "peers"), "--sizes=9B"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "'9B': take some of tiny, 0.1B, 0.5B, 1B, 2B" in done.stderr
