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


@pytest.mark.timeout(400)
def test_what_runs_on_a_gpu_runs_on_the_host_and_is_compared(tmp_path: Path) -> None:
    peers = {"Windlass", "CUDA IPC, handles once", "CUDA IPC, packed", "CUDA IPC, handles each version"}
    peers |= {"index + value (AstraFlow's method)", "XOR + zstd", "safetensors, shared directory"}
    words = ["--device=cpu:0", "--sizes=tiny", "--steps=1", f"--out={tmp_path}"]
    words += [f"--only={name}" for name in (*peers, "NCCL", "torchstore")]
    command = [sys.executable, str(ROOT / "bench" / "peers"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, cwd=tmp_path)
    found = json.loads((tmp_path / "peers.json").read_text())
    left_out = {row["name"] for row in found["not_run"]}
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in found["parameters"][0]["peers"]}
    # The packed IPC of Windlass needs a GPU; zstd is the system's.
    assert rows.keys() | left_out == peers | {"Windlass, packed CUDA IPC", "NCCL broadcast", "torchstore"}
    assert peers - rows.keys() <= {"XOR + zstd"}
    for row in rows.values():
        assert row["equal"] and row["compared"] == 3, row["name"]
        assert 0.005 < row["changed_share"] < 0.02
        assert row["device_bytes"]["median"] == 0 and row["memory_bytes"]["median"] > 0
    if found["own_network"]:
        # Parameters that are shared do not cross the network.
        assert rows["CUDA IPC, packed"]["wire_bytes"]["median"] < 1e5
    table = (tmp_path / "peers.md").read_text()
    assert "device memory beyond the weights" in table and "Compared by SHA-256" in table
    ElementTree.parse(tmp_path / "parameters-tiny.svg")


def test_a_run_without_time_says_what_it_left_out(tmp_path: Path) -> None:
    words = ["--device=cpu:0", "--sizes=tiny", "--deadline=0", f"--out={tmp_path}", "--only=index"]
    command = [sys.executable, str(ROOT / "bench" / "peers"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "peers.json").read_text())
    assert [row["reason"] for row in found["not_run"]] == ["no time was left (--deadline)"]


def test_sums_of_a_device_tell_every_bit_and_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from peers import device

    monkeypatch.setattr(device, "HASHED_AT_ONCE", 7)
    monkeypatch.setattr(device, "SHA_BYTES", 0)
    words = torch.arange(64, dtype=torch.int64) * 0x1234_5678_9ABC
    whole = device.fold([words])
    # However it is cut.
    assert torch.equal(whole, device.fold([words[:13], words[13:]]))
    for bit in (0, 31, 62, 63):
        other = words.clone()
        other[5] ^= (1 << bit) - (1 << 64 if bit == 63 else 0)
        assert not (whole == device.fold([other])).any()
    order = words.clone()
    order[[3, 40]] = order[[40, 3]]
    assert not (whole == device.fold([order])).any()
    pieces = {"one": [words[:8]], "other": [words[8:]]}
    assert device.digest(pieces) == device.digest({"other": [words[8:]], "one": [words[:3], words[3:8]]})
    assert device.digest(pieces) != device.digest({"one": [words[8:]], "other": [words[:8]]})


def test_steps_on_a_device_are_those_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from peers.model import SIZES, Weights

    one, other, still = (Weights(SIZES["tiny"], 7, 0.01, where) for where in ("cpu:0", "cpu:0", "cpu"))
    changed = [one.step(), one.step()]
    assert changed == [other.step(), other.step()] and one.digest() == other.digest()
    assert all(0.005 < count * 2 / one.nbytes < 0.02 for count in changed)
    differs = sum(int((a != b).sum()) for a, b in zip(one.tensors.values(), still.tensors.values()))
    assert max(changed) < differs <= sum(changed)
    assert all(torch.isfinite(tensor).all() for tensor in one.tensors.values())


def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    command = [sys.executable, str(ROOT / "bench" / "peers"), "--device=cuda:77"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and ("CUDA" in done.stderr or "cuda:77" in done.stderr)


def test_a_size_that_is_not_there_is_refused_by_name() -> None:
    command = [sys.executable, str(ROOT / "bench" / "peers"), "--sizes=9B"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "'9B': take some of tiny, 0.1B, 0.5B, 1B, 2B" in done.stderr
