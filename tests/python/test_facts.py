"""What is known about GPUs: on this machine, between two sides, and under drivers that are broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from windlass import choose, strategy_from_config
from windlass.errors import WindlassInvalid
from windlass.transfer.facts import facts_between, gpu_facts

ROOT = Path(__file__).resolve().parents[2]

#: Keys of ``Cuda`` in the Rust core.
CUDA_KEYS = {
    "unusable",
    "driver",
    "capability",
    "free_bytes",
    "expandable_segments",
    "exports_handles",
    "exports_descriptors",
    "ipc_namespace",
    "pid_namespace",
}


def side(host: str = "a", gpus: tuple[str, ...] = ("GPU-1",), **cuda: Any) -> dict[str, Any]:
    """An answer of gpu_facts()."""
    full = {"driver": [12, 8], "capability": [9, 0], "free_bytes": 40 * 10**9, **cuda}
    return {"host": host, "gpus": list(gpus), "cuda": full, "reach": {}}


def test_the_facts_of_this_machine_are_plain_and_understood() -> None:
    facts = gpu_facts()
    assert json.loads(json.dumps(facts)) == facts
    assert set(facts["cuda"]) == CUDA_KEYS
    assert facts["host"] and facts["cuda"]["pid_namespace"].startswith("pid:[")
    choice = choose(facts_between(facts, facts))
    if facts["gpus"]:
        assert choice["strategy"] in ("packed_cuda_ipc", "cuda_ipc", "tcp")
    else:
        assert "libcuda.so.1" in facts["cuda"]["unusable"] or "device" in facts["cuda"]["unusable"]
        assert (choice["strategy"], choice["link"]) == ("tcp", "shm")
    with pytest.raises(WindlassInvalid, match="at least one process"):
        facts_between([], facts)


def test_where_engines_run_follows_from_hosts_and_uuids() -> None:
    two = side(gpus=("GPU-1", "GPU-2"))
    cases: list[tuple[Any, Any, str]] = [
        (two, side(gpus=("GPU-2",)), "same_gpu"),
        (two, side(gpus=("GPU-2", "GPU-3")), "same_host"),
        (two, side(gpus=("GPU-3",)), "same_host"),
        (two, side(gpus=()), "same_host"),
        (two, side(host="b"), "remote"),
        # A UUID that is the same on two hosts is a mistake, and no shared GPU.
        (side(), side(host="b"), "remote"),
        ([side(host="a"), side(host="b", gpus=("GPU-2",))], side(host="a"), "same_gpu"),
        ([side(host="a"), side(host="b", gpus=("GPU-2",))], side(host="a", gpus=("GPU-2",)), "remote"),
    ]
    for trainers, engines, placement in cases:
        assert facts_between(trainers, engines)["placement"] == placement
    # Colocated on two hosts.
    both = [side(host="a"), side(host="b", gpus=("GPU-2",))]
    facts = facts_between(both, both)
    assert (facts["placement"], facts["several_hosts"]) == ("same_gpu", True)
    assert choose(facts)["strategy"] == "packed_cuda_ipc"
    apart = {**side(gpus=("GPU-3",)), "reach": {"GPU-3": ["GPU-3", "GPU-1"], "GPU-1": []}}
    assert facts_between(side(), apart)["peer_access"] is True
    assert (
        facts_between(side(), {**apart, "reach": {"GPU-3": ["GPU-3"], "GPU-1": []}})["peer_access"] is False
    )
    assert facts_between(side(), side(gpus=("GPU-3",)))["peer_access"] is None


def test_an_arena_that_does_not_fit_is_not_taken() -> None:
    full = side(free_bytes=10**9, expandable_segments=False)
    assert choose(facts_between(full, full))["strategy"] == "cuda_ipc"
    assert choose(facts_between(full, full, arena_bytes=10**8))["strategy"] == "packed_cuda_ipc"


def test_engines_that_answered_decode_deltas() -> None:
    answer = gpu_facts()
    theirs = {**side(host="b", gpus=("GPU-9",)), "peer": answer["peer"]}
    assert choose(facts_between(side(), theirs, elastic=True))["codec"] == "delta_plain"
    # One that says nothing of it may be anything.
    silent = side(host="b", gpus=("GPU-8",))
    assert choose(facts_between(side(), [theirs, silent], elastic=True))["codec"] == "full"


@pytest.mark.parametrize("wrong", [3, "0", ["a"], [True], [-1]])
def test_numbers_of_gpus_are_checked(wrong: Any) -> None:
    with pytest.raises(WindlassInvalid, match="expected the numbers of GPUs"):
        gpu_facts(wrong)


def test_of_several_ranks_the_worst_counts() -> None:
    ranks = [
        side(gpus=("GPU-1",), free_bytes=30 * 10**9, exports_handles=True),
        side(gpus=("GPU-2",), free_bytes=10 * 10**9, exports_handles=False, expandable_segments=True),
    ]
    facts = facts_between(
        ranks, side(host="b", gpus=("GPU-9",)), elastic=True, baseline_bytes=16 * 10**9, peer={"delta": True}
    )
    cuda = facts["trainer_cuda"]
    assert (cuda["free_bytes"], cuda["exports_handles"], cuda["expandable_segments"]) == (
        10 * 10**9,
        False,
        True,
    )
    assert facts["trainer_gpus"] == ["GPU-1", "GPU-2"]
    choice = choose(facts)
    assert (choice["strategy"], choice["codec"], choice["offload"]) == ("tcp", "delta_plain", "delta")
    # Half of what is free on the fullest GPU, and the rest on the host.
    assert "5000 MB in 10.0 GB of free GPU memory and 12.0 GB on the host" in choice["why"], choice["why"]
    full = facts_between([ranks[0], side(gpus=("GPU-2",), free_bytes=10**8)], side(host="b"), elastic=True)
    choice = choose({**full, "baseline_bytes": 16 * 10**9, "peer": {"delta": True}})
    assert choice["offload"] == "copy" and "0.1 GiB are free" in choice["why"], choice["why"]
    roomy = facts_between(
        ranks[0],
        side(host="b", gpus=("GPU-9",)),
        elastic=True,
        baseline_bytes=14 * 10**9,
        peer={"delta": True},
    )
    assert choose(roomy)["offload"] == "delta"


def test_the_chosen_way_to_offload_becomes_a_setting_of_the_manager() -> None:
    facts = facts_between(
        side(), side(host="b", gpus=("GPU-9",)), elastic=True, baseline_bytes=10**9, peer={"delta": True}
    )
    made = strategy_from_config({"strategy": "auto"}, facts)
    assert made.config["manager"] == {"offload_mode": "delta"}
    # What the configuration says of the manager stays.
    own = {"manager": {"offload_mode": "copy", "region_dir": "/dev/shm"}}
    assert strategy_from_config({"strategy": "auto", **own}, facts).config["manager"] == own["manager"]
    demanded = strategy_from_config(
        {"strategy": "auto", "overrides": {"generator.offload_mode": "copy"}}, facts
    )
    assert demanded.config["manager"] == {"offload_mode": "copy"}
    # Nobody knows whether a baseline fits: the manager looks for itself.
    unknown = {**facts, "baseline_bytes": None}
    assert "manager" not in strategy_from_config({"strategy": "auto"}, unknown).config
    document = {"generator": {"strategy": "tcp", "offload_mode": "delta"}}
    assert strategy_from_config(document, facts).config["manager"] == {"offload_mode": "delta"}


def test_containers_apart_do_not_share_handles() -> None:
    ours, theirs = side(ipc_namespace="ipc:[1]"), side(ipc_namespace="ipc:[2]")
    choice = choose(facts_between(ours, theirs))
    assert (choice["strategy"], choice["link"]) == ("tcp", "shm")
    packed = next(c for c in choice["considered"] if c["option"] == {"strategy": "packed_cuda_ipc"})
    assert packed["blocked"] and "--ipc" in packed["why_not"]
    assert choose(facts_between(ours, ours))["strategy"] == "packed_cuda_ipc"


# Libraries that call themselves libcuda.so.1.

SOURCE = """
#include <string.h>
int cuInit(unsigned flags) { return INIT; }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuGetErrorString(int code, const char **text) {
    *text = code == 100 ? "no CUDA-capable device is detected" : code == 2 ? "out of memory" : "unknown error";
    return 0;
}
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetName(char *name, int bytes, int device) { strncpy(name, "Pretended GPU", bytes); return 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, 7, 16); return 0; }
int cuDeviceTotalMem_v2(unsigned long *bytes, int device) { *bytes = 1ul << 34; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? MAJOR : attribute == 76 ? 5 : 1;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { return RETAIN; }
"""

Driver = Callable[..., dict[str, str]]


def functions() -> list[str]:
    """All that the driver is asked for."""
    text = (ROOT / "crates/windlass-data/src/cuda/driver.rs").read_text()
    found = re.search(r"const FUNCTIONS: &\[&str\] = &\[(.*?)\];", text, re.DOTALL)
    assert found
    return re.findall(r'"(cu\w+)"', found[1])


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    """Makes a library, and the environment in which it is found."""

    def make(*, missing: tuple[str, ...] = (), source: str | None = None, **values: int) -> dict[str, str]:
        known = {"INIT": 0, "VERSION": 12080, "COUNT": 1, "MAJOR": 9, "RETAIN": 2, **values}
        if source is None:
            rest = [n for n in functions() if f"int {n}(" not in SOURCE and n not in missing]
            source = SOURCE + "".join(f"int {name}(void) {{ return 999; }}\n" for name in rest)
            for name in missing:
                source = source.replace(f"int {name}(", f"int not_{name}(")
        (tmp_path / "fake.c").write_text(source)
        flags = [f"-D{name}={value}" for name, value in known.items()]
        command = ["cc", "-shared", "-fPIC", "-w", *flags, "-Wl,-soname,libcuda.so.1", "-o"]
        subprocess.run([*command, tmp_path / "libcuda.so.1", tmp_path / "fake.c"], check=True, timeout=60)
        return {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT / "python")}

    return make


def ask(env: dict[str, str], code: str) -> str:
    """What a Python says under that driver. It must end well."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


OPEN = """
from windlass import _windlass
from windlass.errors import WindlassError
try:
    _windlass.Gpu.open(0)
except WindlassError as e:
    print(type(e).__name__, e)
"""

BROKEN: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "no device": ({"INIT": 100}, "WindlassUnsupported", ("no CUDA-capable device", "nvidia-smi")),
    "none visible": ({"COUNT": 0}, "WindlassUnsupported", ("none is visible", "CUDA_VISIBLE_DEVICES")),
    "forked": ({"INIT": 3}, "WindlassUnsupported", ("forked", "spawn")),
    "old driver": ({"VERSION": 11040}, "WindlassUnsupported", ("CUDA 11.4 and at least 12.0", "newer")),
    "old device": ({"MAJOR": 7}, "WindlassUnsupported", ("Pretended GPU", "7.5", "8.0 (Ampere)")),
    "full device": ({"RETAIN": 2}, "WindlassExhausted", ("opening a device", "out of memory", "who holds")),
    "one function less": (
        {"missing": ("cuMemExportToShareableHandle",)},
        "WindlassUnsupported",
        ("cuMemExportToShareableHandle", "stub"),
    ),
    "no function": ({"source": "int nothing;"}, "WindlassUnsupported", ("has no cu", "LD_LIBRARY_PATH")),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_cuda_driver_is_an_error_by_name(case: str, driver: Driver) -> None:
    how, kind, parts = BROKEN[case]
    told = ask(driver(**how), OPEN)
    assert told.startswith(kind + " "), told
    for part in parts:
        assert part in told


@pytest.mark.parametrize("case", ["no function", "old driver", "old device", "full device"])
def test_facts_and_doctor_say_what_is_wrong_with_a_driver(case: str, driver: Driver, tmp_path: Path) -> None:
    how, _, parts = BROKEN[case]
    env = driver(**how)
    facts = json.loads(
        ask(env, "import json; from windlass.transfer.facts import gpu_facts; print(json.dumps(gpu_facts()))")
    )
    # Of several parts of a message the doctor has some in the value.
    assert parts[-1] in facts["cuda"]["unusable"]
    choice = choose(
        facts_between(facts, facts, trainer_gpus=["GPU-1"], engine_gpus=["GPU-1"], placement="same_gpu")
    )
    packed = next(c for c in choice["considered"] if c["option"] == {"strategy": "packed_cuda_ipc"})
    assert packed["blocked"] and "at the trainers" in packed["why_not"]
    command = [sys.executable, "-m", "windlass", "doctor", "--json", f"--region-dir={tmp_path}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    object_ = json.loads(done.stdout.splitlines()[-1])
    advice = [
        c for c in object_["checks"] if c["name"].startswith(("cuda", "gpu 0")) and c["verdict"] == "advice"
    ]
    assert advice, object_["gpu"]
    assert all(c["verdict"] != "problem" for c in object_["checks"] if c["name"].startswith(("cuda", "gpu")))


def test_a_file_that_is_no_library_is_no_driver(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("not a library")
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT / "python")}
    # What the loader says of it is told.
    assert "libcuda.so.1: file too short" in ask(env, OPEN) or "invalid ELF header" in ask(env, OPEN)


def test_importing_touches_no_driver_and_the_host_needs_none(driver: Driver) -> None:
    # A library that ends whoever loads it. Builds of torch with CUDA do when they are imported, so it is left out.
    env = driver(source="#include <stdlib.h>\n__attribute__((constructor)) void end(void) { _Exit(9); }")

    def ends(*command: str) -> int:
        done = subprocess.run(
            [sys.executable, *command], env=env, capture_output=True, timeout=120, check=False
        )
        return done.returncode

    assert ends("-c", "import windlass; windlass.choose({'placement': 'same_host'})") == 0
    assert ends("-m", "windlass", "bench", "digest", "--elements=64Ki", "--repeats=3") == 0
    assert ends("-c", OPEN) == 9, "the library would have been noticed"


BENCH = [sys.executable, str(ROOT / "bench" / "gpu_vllm.py")]


def test_the_bench_of_vllm_says_loudly_what_is_missing(tmp_path: Path) -> None:
    def told(*options: str) -> str:
        env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
        command = [*BENCH, f"--home={tmp_path}", *options]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2, done.stderr
        assert list(tmp_path.iterdir()) == []
        return done.stderr

    cpu = ("--device=cpu", "--size=tiny")
    assert "CANNOT RUN: /nonexistent/python cannot be run" in told(*cpu, "--vllm-python=/nonexistent/python")
    without = tmp_path.parent / "python-without-vllm"
    without.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'vllm'\" >&2\nexit 1\n")
    without.chmod(0o700)
    message = told(*cpu, f"--vllm-python={without}")
    assert "no vLLM in" in message and "pip install vllm" in message and "nothing was measured" in message
    if not gpu_facts()["gpus"]:
        assert "no CUDA:" in told()
