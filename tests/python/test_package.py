"""The package as a whole: what importing it does, and what its exceptions are."""

from __future__ import annotations

import builtins
import copy
import json
import pickle
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import windlass
from children import environment
from windlass import _moved, _windlass, errors

FRESH = """
import json, os, sys, threading, time
start = time.perf_counter()
import windlass
took = time.perf_counter() - start
heavy = [m for m in ("torch", "numpy", "transformers", "peft", "deepspeed", "megatron", "ray") if m in sys.modules]
threads = len(os.listdir("/proc/self/task"))
print(json.dumps({"heavy": heavy, "threads": threads, "took": took, "fds": len(os.listdir("/proc/self/fd"))}))
"""
BARE = """
import json, os
print(json.dumps(len(os.listdir("/proc/self/fd"))))
"""


def fresh(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment(),
    )
    assert not done.stderr
    return done.stdout


def test_importing_windlass_brings_no_torch_no_thread_and_no_output() -> None:
    seen = json.loads(fresh(FRESH))
    assert seen["heavy"] == []
    assert seen["threads"] == 1
    assert seen["fds"] == json.loads(fresh(BARE))


def test_every_name_that_the_package_exports_is_there_once() -> None:
    assert len(set(windlass.__all__)) == len(windlass.__all__)
    for name in windlass.__all__:
        assert getattr(windlass, name) is not None, name


def test_the_front_door_has_at_most_forty_names() -> None:
    assert len(windlass.__all__) <= 40
    assert set(windlass.__all__).isdisjoint(_moved.NAMES)


@pytest.mark.parametrize("name", sorted(_moved.NAMES))
def test_an_old_name_of_the_package_warns_and_names_the_new_place(name: str) -> None:
    with pytest.warns(
        DeprecationWarning, match=f"windlass.{name} is {_moved.NAMES[name]}.{name} now"
    ) as warned:
        found = getattr(windlass, name)
    assert found is getattr(import_module(_moved.NAMES[name]), name)
    assert warned[0].filename == __file__


OLD = """
import sys, warnings
from importlib import import_module
from pathlib import Path
from windlass import _moved
warnings.simplefilter("ignore", DeprecationWarning)
for old, new in _moved.MOVED.items():
    module = import_module(f"windlass.{old}")
    assert module is import_module(f"windlass.{new}") and module.__spec__.name == f"windlass.{new}", old
"""


def test_an_old_name_of_a_module_is_the_module() -> None:
    fresh(OLD)


def test_the_exceptions_are_those_of_the_table_of_kinds() -> None:
    kinds = _windlass.kinds()
    assert {row[1] for row in kinds} == set(errors.__all__) - {"WindlassError"}
    for kind, name, builtin, meaning in kinds:
        exception = getattr(errors, name)
        assert getattr(windlass, name) is exception
        assert issubclass(exception, windlass.WindlassError), kind
        assert issubclass(exception, getattr(builtins, builtin)), kind
        assert meaning


def test_the_http_statuses_are_those_of_the_core() -> None:
    source = (Path(__file__).parents[2] / "crates/windlass-core/src/error.rs").read_text()
    table = source[source.index("pub const fn row(") : source.index("pub const fn advice(")]
    rows = re.findall(r'row\(\s*"(Windlass\w+)",\s*"\w+",\s*(\d+),', table)
    kinds = {name: kind for kind, name, *_ in _windlass.kinds()}
    assert {kinds[name]: int(status) for name, status in rows} == errors.HTTP_STATUS


@pytest.mark.parametrize("name", errors.__all__)
def test_an_exception_keeps_what_it_says_through_pickle_and_copy(name: str) -> None:
    error = getattr(errors, name)("what happened", "what to do", "missing_field")
    for again in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert (str(again), again.advice, again.name) == ("what happened", "what to do", "missing_field")
    assert str(getattr(errors, name)()) == ""


def test_a_chunker_says_what_is_wrong_and_stays_usable() -> None:
    chunker = _windlass.Chunker(threshold_bytes=8)
    chunker.push("a", "bfloat16", (2,), "payload")
    for push, words in [
        (("a", "bfloat16", (1,), None), "twice"),
        (("b", "bf17", (1,), None), "bf17"),
        (("c", "float4_e2m1fn_x2", (3,), None), "whole bytes"),
        (("d", "bfloat16", (2**62, 2**62), None), "overflows"),
    ]:
        with pytest.raises(windlass.WindlassInvalid, match=words):
            chunker.push(*push)
    assert chunker.pending_bytes == 4
    assert chunker.finish() == [(None, [("a", "bfloat16", [2], "payload")])]
    assert chunker.finish() == []
    with pytest.raises(windlass.WindlassInvalid, match="make another"):
        chunker.push("e", "bfloat16", (1,), None)


def test_a_chunker_lets_go_of_what_it_gave_out() -> None:
    payload = object()
    before = sys.getrefcount(payload)
    chunker = _windlass.Chunker()
    done = chunker.push("a", "uint8", [1], payload)
    assert sys.getrefcount(payload) == before + 1
    del done
    assert sys.getrefcount(payload) == before
    chunker = _windlass.Chunker(threshold_bytes=8)
    assert chunker.push("a", "uint8", [1], payload) == []
    assert sys.getrefcount(payload) == before + 1
    del chunker
    assert sys.getrefcount(payload) == before


def test_every_dtype_of_torch_that_has_a_name_here_has_its_size() -> None:
    import torch

    seen = 0
    for name in _windlass.dtypes():
        for spelling in (name, f"torch.{name}", _windlass.dtype_safetensors(name)):
            assert _windlass.dtype_name(spelling) == name
        dtype = getattr(torch, name, None)
        if dtype is not None and _windlass.dtype_bits(name) >= 8:
            assert dtype.itemsize * 8 == _windlass.dtype_bits(name), name
            seen += 1
    assert seen >= 18


def test_a_threshold_and_a_module_are_those_of_the_trainers() -> None:
    assert _windlass.threshold_from_gb(1.0) == 1024**3
    assert _windlass.threshold_from_gb(0.5) == 512 * 1024**2
    with pytest.raises(windlass.WindlassInvalid, match="weight_transfer_threshold_cuda_ipc_GB"):
        _windlass.threshold_from_gb(0)
    assert _windlass.module_of("model.layers.0.self_attn.q_proj.weight") == "model.layers.0.self_attn"
    assert _windlass.module_of("lm_head.weight") is None
