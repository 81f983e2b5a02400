"""Every worker of Ray is set up first, and what the program has set itself stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import windlass.openrlhf
from children import environment
from windlass import WindlassInvalid, WindlassUnsupported
from windlass.frameworks.after_import import after_import
from windlass.frameworks.ray_hook import HOOK, SETUP, hook, in_every_worker

#: Where `patient_ray` is.
ON_RAY = Path(__file__).resolve().parent.parent / "engines" / "on_ray"
PROGRAM = """
import os, sys
import patient_ray
import ray
from windlass.frameworks.ray_hook import in_every_worker

os.environ["PROBE_WORD"] = "passed on"
in_every_worker("ray_hook_probe:mark", "PROBE_WORD")
env = {"env_vars": {"THEIRS": "kept", "PYTHONPATH": os.environ["PYTHONPATH"]}}
patient_ray.start(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", runtime_env=env)

def seen():
    import ray_hook_probe
    return ray_hook_probe.MARKS, os.environ["PROBE_WORD"], os.environ["THEIRS"]

class Actor:
    def seen(self):
        return seen()

task = ray.get(ray.remote(seen).remote(), timeout=100)
actor = ray.get(ray.remote(Actor).remote().seen.remote(), timeout=100)
assert task == actor == (1, "passed on", "kept"), (task, actor)
"""


@pytest.mark.timeout(300)
def test_tasks_and_actors_are_set_up_first_with_the_programs_own_environment(tmp_path: Path) -> None:
    (tmp_path / "ray_hook_probe.py").write_text(
        "MARKS = 0\n\ndef mark():\n    global MARKS\n    MARKS += 1\n"
    )
    known = environment(ON_RAY)
    env = {**known, "PYTHONPATH": f"{known['PYTHONPATH']}:{tmp_path}", "RAY_worker_niceness": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_hook_of_the_program_is_called_and_a_setup_of_its_own_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (HOOK, SETUP, "WINDLASS_RAY_HOOK_BEFORE", "WINDLASS_RAY_PASSED"):
        monkeypatch.delenv(name, raising=False)
    # Restored at the end, whatever is set meanwhile.
    monkeypatch.setenv(HOOK, "test_ray_hook.theirs")
    monkeypatch.setenv(SETUP, "")
    monkeypatch.setenv("WINDLASS_RAY_HOOK_BEFORE", "")
    monkeypatch.setenv("WINDLASS_RAY_PASSED", "")
    in_every_worker("one:setup")
    in_every_worker("two:setup")
    in_every_worker("one:setup")
    env = hook({"env_vars": {"A": "1"}})
    assert env["working_dir"] == "theirs"
    assert env["env_vars"] == {SETUP: "one:setup,two:setup", "A": "1"}
    assert hook(env) == env
    with pytest.raises(WindlassUnsupported, match="worker_process_setup_hook of its own"):
        hook({"worker_process_setup_hook": "mine.setup"})


def theirs(env: dict[str, object]) -> dict[str, object]:
    return {**env, "working_dir": "theirs"}


def test_settings_that_the_hook_of_openrlhf_does_not_know_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for text, said in (
        ("{'timeout': 1}", "not JSON"),
        ('{"images": "/dev/shm"}', "expected an object with some of"),
    ):
        monkeypatch.setenv(windlass.openrlhf.VARIABLE, text)
        with pytest.raises(WindlassInvalid, match=said):
            windlass.openrlhf.hook(None)


def test_something_is_done_after_an_import_once_and_its_failure_stays_out_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "awaited_module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[int] = []

    def fails(module: object) -> None:
        raise RuntimeError("on purpose")

    after_import("awaited_module", lambda module: seen.append(module.VALUE))
    after_import("awaited_module", fails)
    assert "awaited_module" not in sys.modules
    import awaited_module  # type: ignore[import-not-found]

    assert seen == [1] and "could not be set up in awaited_module" in caplog.text
    after_import("awaited_module", lambda module: setattr(module, "VALUE", 2))
    assert awaited_module.VALUE == 2
    del sys.modules["awaited_module"]
