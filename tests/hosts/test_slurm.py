"""The job of examples/slurm on four hosts: its commands as they stand there, and the job itself where Slurm is installed."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hosts import PATIENCE, ROOT, Host, bench, missing, run, until
from safetensors.torch import load_file

LACKS = missing()
NO_SLURM = [tool for tool in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(LACKS is not None, reason=f"NO BENCH OF HOSTS: {LACKS}"),
]
TRAINERS, STEPS = 2, 3


class Cluster:
    """Four hosts that know each other by name and share a directory, with the example in it."""

    def __init__(self, home: Path, hosts: list[Host]) -> None:
        self.home, self.hosts = home, hosts
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts)]
        (home / "hosts").write_text("\n".join(lines) + "\n")
        for host in hosts:
            run(*host.inside("mount", "--bind", str(home / "hosts"), "/etc/hosts"))
        for name in ("job.sh", "node.sh", "train.py"):
            shutil.copy(ROOT / "examples/slurm" / name, home)
        # As it is where the package is installed.
        (home / "bin").mkdir()
        command = home / "bin/windlass"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m windlass "$@"\n')
        command.chmod(0o755)
        self.checkpoint = home / "checkpoint.pt"
        self.env = {
            "PATH": f"{home}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TRAINERS": str(TRAINERS),
            "STEPS": str(STEPS),
            "CHECKPOINT": str(self.checkpoint),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, host: Host, *words: str, **env: str) -> tuple[subprocess.Popen[str], Path]:
        """A command on a host, and the file with what it says."""
        log = self.home / f"{host.name}-{Path(words[0]).name}-{secrets.token_hex(2)}.log"
        with log.open("w") as out:
            return host.start(*words, env=self.env | env, out=out, err=subprocess.STDOUT), log

    def output(self, host: Host, *words: str, **env: str) -> str:
        """What a command prints there; nothing if it fails."""
        process = host.start(
            "env",
            "-C",
            str(self.home),
            *words,
            env=self.env | env,
            out=subprocess.PIPE,
            err=subprocess.DEVNULL,
        )
        said = process.communicate(timeout=PATIENCE)[0]
        return said if process.returncode == 0 else ""

    def has_what_was_trained(self, directory: str = "/dev/shm/windlass/policy") -> None:
        """Every engine host has the last version, as the trainer has saved it and rounded to bfloat16."""
        wanted = torch.load(self.checkpoint)
        for host in self.hosts[TRAINERS:]:
            found = load_file(host.path(f"{directory}/a.safetensors"))
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert torch.equal(found[name], value.to(torch.bfloat16)), (host.name, name)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    # Hosts have a /tmp and a /dev/shm of their own.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="windlass-slurm-") as home, bench() as hosts:
        yield Cluster(Path(home), [hosts.host(f"node-{n}") for n in range(4)])


def test_the_commands_of_the_slurm_job_bring_versions_from_two_hosts_to_two(cluster: Cluster) -> None:
    (cluster.home / "token").touch(0o600)
    (cluster.home / "token").write_text(secrets.token_hex(32))
    first, *_ = cluster.hosts
    env = {"SHARED": str(cluster.home), "CONTROLLER": first.name, "ENGINES": "2"}
    node = str(cluster.home / "node.sh")
    logs = [cluster.start(first, node, "controller", **env)[1]]
    logs += [cluster.start(host, node, "engine", **env)[1] for host in cluster.hosts[TRAINERS:]]
    trainers = [cluster.start(host, node, "trainer", **env) for host in cluster.hosts[:TRAINERS]]
    for process, log in trainers:
        process.wait(5 * PATIENCE)
        assert process.returncode == 0, "\n".join(path.read_text()[-2000:] for path in [log, *logs])
    said = "".join(log.read_text() for _, log in trainers)
    assert all(f"version {version} is served" in said for version in range(1, STEPS + 1))
    cluster.has_what_was_trained()


CONF = """ClusterName=bench
SlurmctldHost=node-0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/tmp/munge.socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1
StateSaveLocation=/tmp/slurmctld
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
SlurmctldTimeout=120
SlurmdTimeout=120
NodeName=node-[0-3] CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


@pytest.mark.skipif(
    bool(NO_SLURM), reason=f"NO SLURM: there is no {', '.join(NO_SLURM)} (packages slurm-wlm, munge)"
)
def test_the_slurm_job_runs_under_slurm(cluster: Cluster) -> None:
    conf = cluster.home / "slurm.conf"
    conf.write_text(CONF)
    key = cluster.home / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    logs = []
    for host in cluster.hosts:
        at = "--log-file=/tmp/munge.log", "--pid-file=/tmp/munge.pid", "--seed-file=/tmp/munge.seed"
        words = ["munged", "--force", "--foreground", f"--key-file={key}", "--socket=/tmp/munge.socket", *at]
        logs.append(cluster.start(host, *words)[1])
        until("munge", lambda host=host: host.path("/tmp/munge.socket").exists() or None)  # type: ignore[misc]
    logs.append(cluster.start(cluster.hosts[0], "slurmctld", "-D", "-f", str(conf))[1])
    logs += [
        cluster.start(host, "slurmd", "-D", "-f", str(conf), "-N", host.name)[1] for host in cluster.hosts
    ]
    logs.append(cluster.home / "job.log")

    def says(*words: str) -> str:
        return cluster.output(cluster.hosts[0], *words, SLURM_CONF=str(conf))

    try:
        until("four idle nodes", lambda: says("sinfo", "-Nho", "%T").split() == ["idle"] * 4 or None)
        job = says("sbatch", "--parsable", f"--output={cluster.home}/job.log", "job.sh").strip()
        ended = until("the job's end", lambda: over(says("scontrol", "show", "job", job)), 4 * PATIENCE)
        assert "JobState=COMPLETED" in ended
        assert f"version {STEPS} is served" in (cluster.home / "job.log").read_text()
    except BaseException:
        for log in filter(Path.exists, logs):
            sys.stderr.write(f"== {log.name}\n{log.read_text()[-2000:]}\n")
        raise
    assert not list(cluster.home.glob("run-*/token"))
    cluster.has_what_was_trained()


def over(job: str) -> str | None:
    """What is known of a job, once it is over."""
    return (
        None
        if any(f"JobState={state}" in job for state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"))
        else job
    )
