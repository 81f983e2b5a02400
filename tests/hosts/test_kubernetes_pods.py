"""The commands and probes of the manifests in examples/kubernetes, on hosts that stand for pods: names, the mounted secret and ports as
there. Without vLLM: its container has no place on a CPU, so the sidecar here has no engine."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hosts import PATIENCE, ROOT, Host, bench, missing, run, until
from safetensors.torch import load_file

#: The user and the group of the pods, as their manifests say. The user may read the Python of these tests, wherever it is installed.
USER = 1000
READS = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *READS, "--"]
LACKS = missing()
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(LACKS is not None, reason=f"NO BENCH OF HOSTS: {LACKS}"),
]
STEPS = 2


def containers(name: str) -> dict[str, Any]:
    """The containers of a workload, by name."""
    documents = yaml.safe_load_all((ROOT / f"examples/kubernetes/{name}.yaml").read_text())
    (template,) = (found["spec"]["template"] for found in documents if "template" in found["spec"])
    user = template["spec"]["securityContext"]
    assert user == {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
    return {container["name"]: container for container in template["spec"]["containers"]}


class Pods:
    """A controller, two trainers and two engines."""

    def __init__(self, home: Path, hosts: dict[str, Host]) -> None:
        self.home, self.hosts = home, hosts
        home.chmod(0o755)
        (home / "out").mkdir()
        os.chown(home / "out", USER, USER)
        names = {
            "controller": "controller",
            "trainer-0": "trainer-0.trainer",
            "trainer-1": "trainer-1.trainer",
        }
        lines = ["127.0.0.1 localhost"]
        lines += [f"{host.address} {names.get(name, name)} {name}" for name, host in hosts.items()]
        (home / "hosts").write_text("\n".join(lines) + "\n")
        (home / "bin").mkdir()
        command = home / "bin/windlass"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m windlass "$@"\n')
        command.chmod(0o755)
        token = secrets.token_hex(32)
        for host in hosts.values():
            run(*host.inside("mount", "--bind", str(home / "hosts"), "/etc/hosts"))
            # As the kubelet mounts it: files of root that the group may read, behind links.
            run(*host.inside("mount", "-t", "tmpfs", "tmpfs", "/run"))
            data = host.path("/run/windlass/..data")
            data.mkdir(parents=True)
            (data / "token").touch(0o440)
            (data / "token").write_text(token)
            os.chown(data / "token", 0, USER)
            host.path("/run/windlass/token").symlink_to("..data/token")

    def start(self, host: Host, words: list[str], **env: str) -> tuple[subprocess.Popen[str], Path]:
        log = self.home / f"{host.name}.log"
        path = f"{self.home}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
        with log.open("w") as out:
            return host.start(
                *AS_USER,
                *words,
                env={"PATH": path, "HOME": "/tmp", "OMP_NUM_THREADS": "1", **env},
                out=out,
                err=out,
            ), log

    def ready(
        self, name: str, container: dict[str, Any], words: list[str], **env: str
    ) -> tuple[subprocess.Popen[str], Path]:
        """Starts a container, and waits until its readiness probe passes."""
        process, log = self.start(self.hosts[name], words, **env)

        def look() -> bool:
            assert process.poll() is None, log.read_text()[-3000:]
            return self.passes(self.hosts[name], container["readinessProbe"])

        until(f"{name} is ready", look, 2 * PATIENCE)
        return process, log

    def passes(self, host: Host, probe: dict[str, Any]) -> bool:
        """What the kubelet would find."""
        if "exec" in probe:
            words = [*AS_USER, *probe["exec"]["command"]]
        else:
            get = probe["httpGet"]
            url = f"http://{host.address}:{get['port']}{get['path']}"
            words = [sys.executable, "-c", f"import urllib.request as r; r.urlopen({url!r}, timeout=60)"]
        env = {
            **os.environ,
            "PATH": f"{self.home}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "python"),
        }
        done = subprocess.run(
            host.inside(*words), env=env, capture_output=True, timeout=PATIENCE, check=False
        )
        return done.returncode == 0


@pytest.fixture
def pods() -> Iterator[Pods]:
    names = ["controller", "trainer-0", "trainer-1", "engine-0", "engine-1"]
    # Hosts have a /tmp and a /dev/shm of their own.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="windlass-pods-") as home, bench() as hosts:
        yield Pods(Path(home), {name: hosts.host(name) for name in names})


def test_the_commands_of_the_manifests_serve_what_is_trained_and_their_probes_pass(pods: Pods) -> None:
    control = containers("controller")["controller"]
    assert not pods.passes(pods.hosts["controller"], control["readinessProbe"])
    # Nothing is served before both engines are there, so the trainers wait for them.
    pods.ready("controller", control, [*control["command"], "--floor=2"])

    trainer = containers("trainer")["trainer"]
    checkpoint = pods.home / "out/checkpoint.pt"
    replaced = {
        "--nproc-per-node=8": "--nproc-per-node=1",
        "/app/train.py": str(ROOT / "examples/slurm/train.py"),
    }
    assert set(replaced) <= set(trainer["command"])
    words = [replaced.get(word, word) for word in trainer["command"]]
    names = ["trainer-0", "trainer-1"]
    variables = [
        {v["name"]: v.get("value", name).replace("$(POD_NAME)", name) for v in trainer["env"]}
        for name in names
    ]
    more = {"STEPS": str(STEPS), "CHECKPOINT": str(checkpoint)}
    second = pods.start(pods.hosts[names[1]], words, **variables[1], **more)
    ranks = [pods.ready(names[0], trainer, words, **variables[0], **more), second]

    sidecar = containers("engine")["windlass"]
    words = [word for word in sidecar["command"] if not word.startswith(("--engine=", "--model-dir="))]
    engines = [pods.hosts[name] for name in ("engine-0", "engine-1")]
    assert not any(pods.passes(engine, sidecar["readinessProbe"]) for engine in engines)
    for engine in engines:
        pods.start(engine, words)
    for process, log in ranks:
        assert process.wait(5 * PATIENCE) == 0, log.read_text()[-3000:]
    assert f"version {STEPS} is served" in "".join(log.read_text() for _, log in ranks)
    wanted = torch.load(checkpoint)
    for engine in engines:
        assert pods.passes(engine, sidecar["readinessProbe"])
        found = load_file(engine.path("/dev/shm/windlass/policy/a.safetensors"))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value.to(torch.bfloat16)) for name, value in wanted.items())
