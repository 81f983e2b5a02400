"""Trainers, receivers and a controller on hosts of their own, with TLS; hosts that lose their network, and hosts that die."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import PATIENCE, ROOT, Bench, Host, bench, missing, until
from safetensors.torch import load_file

TLS = ROOT / "tests" / "python" / "tls"
LACKS = missing()
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(LACKS is not None, reason=f"NO BENCH OF HOSTS: {LACKS}"),
]


class World:
    """Two hosts of trainers with two ranks each, four of engines, and one of the controller."""

    def __init__(self, home: Path, hosts: Bench) -> None:
        self.home, self.hosts = home, hosts
        (home / "token").touch(0o600)
        (home / "token").write_text(secrets.token_hex(16))
        shutil.copy(TLS / "hosts.key", home)
        (home / "hosts.key").chmod(0o600)
        self._tls = [f"--tls-cert={TLS / 'hosts.pem'}", f"--tls-key={home / 'hosts.key'}"]
        self._token = f"--token-file={home / 'token'}"
        self.trainers = [hosts.host(f"trainer-{n}") for n in range(2)]
        self.engines = [hosts.host(f"engine-{n}") for n in range(4)]
        self._control = hosts.host("control")
        self.url = f"https://{self._control.address}:7100"
        self.ranks: list[subprocess.Popen[str]] = []

    def start(self, host: Host, *words: str) -> Path:
        """A service on a host, and where it says what it does."""
        log = self.home / f"{host.name}-{words[0]}-{secrets.token_hex(2)}.log"
        with log.open("w") as out:
            host.python("-m", "windlass", *words, self._token, "--json", "--with-parent", out=out)
        return log

    def control(self) -> None:
        place = [f"--bind={self._control.address}", "--ports=7100", *self._tls]
        log = self.start(self._control, "controller", "--set=rollout=policy", "--heartbeat=3", *place)
        self.event(log, "listening")

    def receive(self, host: Host) -> Path:
        words = [f"--controller={self.url}", "--model=policy", "--dir=/dev/shm/images", f"--name={host.name}"]
        return self.start(host, "receive", *words, f"--tls-ca={TLS / 'ca.pem'}", "--as-dir=/dev/shm/w/v%d")

    def train(self) -> None:
        for rank in range(4):
            host = self.trainers[rank // 2]
            manager = {
                "model_id": "policy",
                "controller": self.url,
                "controller_token_file": str(self.home / "token"),
                "tls_cert": str(TLS / "hosts.pem"),
                "tls_key": str(self.home / "hosts.key"),
                "tls_ca": str(TLS / "ca.pem"),
                "agent": {"bind": host.address, "token_file": str(self.home / "token")},
            }
            meet = f"tcp://{self.trainers[0].address}:29500"
            settings = {"rank": rank, "ranks": 4, "meet": meet, "layers": 8, "manager": manager}
            words = [str(ROOT / "tests/hosts/trainer.py"), json.dumps(settings | {"home": str(self.home)})]
            env = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            self.ranks.append(host.python(*words, env=env, out=subprocess.PIPE))

    def step(self, version: int) -> None:
        """All ranks publish a version."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{version}\n")
            rank.stdin.flush()
        for rank in self.ranks:
            assert rank.stdout is not None
            said = rank.stdout.readline()
            assert said, f"a rank ended with {rank.wait(PATIENCE)}"
            assert json.loads(said) == {"version": version}

    def has(self, host: Host, version: int) -> None:
        """Waits until a host has a version, bit by bit."""
        path = host.path(f"/dev/shm/w/v{version}/model.safetensors")
        until(f"version {version} on {host.name}", lambda: path.exists() or None)
        found, wanted = load_file(path), torch.load(self.home / f"{version}.pt")
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name].view(torch.int16), value.view(torch.int16)), (host.name, name)

    def event(self, log: Path, name: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            lines = map(json.loads, log.read_text().splitlines())
            return next((line for line in lines if line.get("event") == name), None)

        found: dict[str, Any] = until(f"{name} in {log.name}", look)
        return found


@pytest.fixture
def world() -> Iterator[World]:
    # Hosts have a /tmp and a /dev/shm of their own.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="windlass-hosts-") as home, bench() as hosts:
        yield World(Path(home), hosts)


def test_versions_of_two_hosts_reach_four_also_one_that_was_away_and_one_that_died(world: World) -> None:
    world.control()
    logs = [world.receive(host) for host in world.engines]
    for log in logs:
        world.event(log, "joined")
    world.train()
    for version in (1, 2):
        world.step(version)
        for host in world.engines:
            world.has(host, version)
    # Both trainers' hosts have sent their part, inside TLS.
    size = (world.home / "1.pt").stat().st_size
    assert all(host.sent() > size for host in world.trainers)

    # A host without a network is not waited for, and takes what it missed when it is back.
    away, rest = world.engines[3], world.engines[:3]
    away.unplug()
    world.step(3)
    for host in rest:
        world.has(host, 3)
    assert not away.path("/dev/shm/w/v3").exists()
    away.plug()
    world.has(away, 3)

    # A host that died comes back with nothing, and gets everything.
    world.engines[2].kill()
    world.step(4)
    for host in (*world.engines[:2], away):
        world.has(host, 4)
    world.engines[2] = world.hosts.host("engine-2")
    world.receive(world.engines[2])
    world.has(world.engines[2], 4)
    world.step(5)
    for host in world.engines:
        world.has(host, 5)
    for rank in world.ranks:
        assert rank.stdin is not None
        rank.stdin.close()
    assert [rank.wait(PATIENCE) for rank in world.ranks] == [0] * 4
