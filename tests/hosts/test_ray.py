"""A real Ray cluster, each node on a host of its own: the section "Several nodes" of the guide to Ray, typed; a node that dies."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import PATIENCE, ROOT, Host, bench, missing

pytest.importorskip("ray")
LACKS = missing()
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(LACKS is not None, reason=f"NO BENCH OF HOSTS: {LACKS}"),
]
#: Small nodes that start no process before it is needed.
SMALL = " --num-cpus=2 --object-store-memory=80000000 --disable-usage-stats --include-log-monitor=false --temp-dir=/tmp/ray"
QUIET = {
    # How soon Ray sees that a node is gone.
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # Ray's workers stand back for everything else on the machine, such as other tests.
    "RAY_worker_niceness": "0",
    # It kills workers when the machine is short of memory, also by what other tests use.
    "RAY_memory_monitor_refresh_ms": "0",
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "1",
}
#: The model of the guide.
BYTES = 8 * (512 * 512 + 512) * 2


def section() -> str:
    (text,) = re.findall(
        r"^## Several nodes\n(.*?)^## ", (ROOT / "docs/ray.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return str(text)


class Cluster:
    """A head and three nodes, started by the lines of the guide."""

    def __init__(self, home: Path, hosts: list[Host]) -> None:
        self.home, self.hosts = home, {host.name: host for host in hosts}
        token = home / "ray-token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        blocks = re.findall(r"```sh\n(.*?)```", section(), re.DOTALL)
        self._export, *starts = blocks[0].strip().splitlines()
        self._head, self._run = hosts[0], blocks[1].strip()
        assert len(starts) == len(hosts)
        (program,) = re.findall(r"```python\n(.*?)```", section(), re.DOTALL)
        (home / "nodes.py").write_text(program)
        # The nodes need a head. They start at the same time.
        self._start([(self._head, starts[0] + " --include-dashboard=false")])
        self._start(list(zip(hosts[1:], starts[1:], strict=True)))

    def type(self, host: Host, line: str) -> subprocess.Popen[str]:
        """A line of the guide, on a host."""
        env = {"HEAD": self._head.address, "ADDRESS": host.address, "SHARED": str(self.home), **QUIET}
        env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        words = ["bash", "-euc", f"{self._export}\ncd {self.home}\n{line}"]
        return host.start(*words, env=env, out=subprocess.PIPE, err=subprocess.STDOUT)

    def _start(self, nodes: list[tuple[Host, str]], turns: int = 4) -> None:
        started = [(host, line, self.type(host, line + SMALL)) for host, line in nodes]
        late = []
        for host, line, node in started:
            said = node.communicate(timeout=4 * PATIENCE)[0]
            # A busy machine may not keep the deadlines that Ray's own processes have at the start.
            if "timed out during startup" in said and turns > 1:
                self.type(host, "ray stop --force").communicate(timeout=PATIENCE)
                late.append((host, line))
            else:
                assert node.returncode == 0, said[-3000:]
        if late:
            self._start(late, turns - 1)

    def sent_by_trainers(self) -> int:
        return sum(self.hosts[name].sent() for name in ("head", "node-1"))

    def drive(self, *words: str) -> Driver:
        return Driver(self.type(self._head, " ".join([self._run, *words])))


class Driver:
    """The program of the guide."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        # A program that hangs is ended, and the test with it.
        self._deadline = threading.Timer(6 * PATIENCE, process.kill)
        self._deadline.start()

    def line(self, begin: str) -> list[str]:
        """The words of the next line that begins so."""
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:
            if line.startswith(begin):
                return line.split()
            said.append(line)
        raise AssertionError(f"never {begin!r}; the program said {''.join(said)[-3000:]}")

    def step(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def reached(self, version: int) -> str:
        """The digest of a version, which all engines have."""
        _, trained, *engines = self.line(f"{version} ")
        assert engines == [trained, trained]
        return trained

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(PATIENCE) == 0
        self._deadline.cancel()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Hosts have a /tmp and a /dev/shm of their own.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="windlass-ray-") as home, bench() as hosts:
        yield Cluster(Path(home), [hosts.host(name) for name in ("head", "node-1", "node-2", "node-3")])


def test_actors_on_four_nodes_sync_by_broadcast(cluster: Cluster) -> None:
    driver = cluster.drive("broadcast")
    for version in (1, 2):
        driver.step()
        driver.reached(version)
    driver.end()


def test_versions_reach_engines_on_other_nodes_and_one_in_the_place_of_a_node_that_died(
    cluster: Cluster,
) -> None:
    driver = cluster.drive()
    places = driver.line("engines on")[2:]
    assert sorted(places) == ["node-2", "node-3"]
    seen, sent = [], [cluster.sent_by_trainers()]
    for version in (1, 2):
        driver.step()
        seen.append(driver.reached(version))
        sent.append(cluster.sent_by_trainers())
    # The trainers gather all weights to compute the digest. What they send besides is an image, then a delta.
    assert sent[1] - sent[0] > 2 * BYTES
    assert sent[2] - sent[1] < 1.5 * BYTES
    cluster.hosts[places[1]].kill()
    driver.step()
    lost = " ".join(driver.line("lost:"))
    assert "engine 1 died" in lost
    assert "engine 0 died" not in lost
    left = driver.line("left:")[1:]
    assert driver.line("engines on")[2:] == [places[0], "node-1"]
    newest = driver.reached(3)
    # The engine that remained had one version or the other, whole.
    assert left[0] in (seen[1], newest)
    assert left[1] == "None"
    driver.step()
    driver.reached(4)
    driver.end()
