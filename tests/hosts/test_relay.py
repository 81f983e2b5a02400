"""Receivers that pass versions on to each other: what the publisher's host sends, hosts that die, are slow, lie, join late or are away."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import PATIENCE, ROOT, bench, missing, run
from swarm import Swarm, total

TLS = ROOT / "tests" / "python" / "tls"
LACKS = missing()
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(LACKS is not None, reason=f"NO BENCH OF HOSTS: {LACKS}"),
]
RATE, TENTH, FAST = "100mbit", "10mbit", "600mbit"
RECEIVERS, MIB = 6, 16
#: Every so many elements change, which makes a delta that is large enough to be passed on.
CHANGED = 50
#: Requests, acknowledgements and polls of all receivers, without the headers that payload has.
SMALL = 1 << 20


@pytest.fixture
def swarm() -> Iterator[Swarm]:
    # Hosts have a /tmp and a /dev/shm of their own.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="windlass-relay-") as home, bench() as hosts:
        yield Swarm(Path(home), hosts, RATE, RECEIVERS, MIB)


def test_the_publisher_sends_two_images_at_most_and_a_slow_host_delays_nobody(swarm: Swarm) -> None:
    swarm.publish()
    receivers = [swarm.receive(host) for host in swarm.hosts]
    swarm.arrived(receivers)

    before = swarm.source.sent()
    swarm.next()
    images = swarm.arrived(receivers)
    assert {image["mode"] for image in images} == {"full"}
    assert swarm.bytes < swarm.source.sent() - before <= 2 * swarm.bytes + SMALL
    assert sum(image["relayed_bytes"] > 0 for image in images) > RECEIVERS // 2
    # The agent knows who gave what to whom.
    (told,) = (each for each in swarm.status()["relayed"] if each["version"] == swarm.version)
    edges = told["edges"]
    assert (told["base"], told["receivers"]) == (None, RECEIVERS)
    assert sum(edge["bytes"] for edge in edges) == total(images, "wire_bytes")
    assert sum(edge["bytes"] for edge in edges if "by" in edge) == total(images, "relayed_bytes")
    assert {edge["to"] for edge in edges} == {host.name for host in swarm.hosts}

    swarm.next(CHANGED)
    deltas = swarm.arrived(receivers)
    assert {delta["mode"] for delta in deltas} == {"delta"}
    assert total(deltas, "relayed_bytes") > 0

    slow, others = receivers[0], receivers[1:]
    slow.host.shape(TENTH)
    swarm.next()
    swarm.arrived(others)
    assert slow.has(swarm.version) is None
    slow.host.shape(RATE)
    swarm.arrived([slow])


def test_others_finish_when_relays_die_or_are_away(swarm: Swarm) -> None:
    swarm.publish()
    receivers = [swarm.receive(host) for host in swarm.hosts]
    swarm.arrived(receivers)

    before = swarm.source.sent()
    swarm.next()
    swarm.under_way(before, 0.2)
    away, others = receivers[0], receivers[1:]
    away.host.unplug()
    swarm.arrived(others)
    assert away.has(swarm.version) is None
    away.host.plug()
    swarm.arrived([away])

    before = swarm.source.sent()
    swarm.next()
    swarm.under_way(before, 0.2)
    for receiver in receivers[:2]:
        assert receiver.has(swarm.version) is None
        receiver.host.kill()
    swarm.arrived(receivers[2:])


def test_receivers_that_join_late_get_it_from_those_before_them(swarm: Swarm) -> None:
    swarm.publish()
    before = swarm.source.sent()
    early = [swarm.receive(host) for host in swarm.hosts[:3]]
    swarm.under_way(before, 0.2)
    assert not any(receiver.has(swarm.version) for receiver in early)
    late = [swarm.receive(host) for host in swarm.hosts[3:]]
    swarm.arrived(early)
    assert total(swarm.arrived(late), "relayed_bytes") > 0


def test_a_relay_that_lies_is_left_and_named(swarm: Swarm) -> None:
    liar, *others = swarm.hosts
    words = [str(ROOT / "tests/hosts/liar.py"), liar.address, "7300"]
    proxy = liar.python(*words, out=subprocess.PIPE)
    assert proxy.stdout is not None
    assert proxy.stdout.readline() == "listening\n"
    swarm.publish()
    lying = swarm.receive(
        liar, "--relay-bind=127.0.0.1", "--relay-ports=7300", f"--relay-host={liar.address}"
    )
    receivers = [swarm.receive(host) for host in others]
    swarm.arrived([lying, *receivers])
    swarm.next()
    found = swarm.arrived(receivers)
    swarm.arrived([lying])
    liar.kill()
    assert "flipped\n" in proxy.communicate(timeout=PATIENCE)[0]
    assert total(found, "relays_lost") > 0
    named = f'a relay is not asked any more relay="{liar.name}"'
    lines = [line for receiver in receivers for line in receiver.warnings().splitlines() if named in line]
    assert any("with other bytes than were published" in line for line in lines), lines


@pytest.mark.parametrize(
    ("agent", "receiver"), [(["--relay-from=0"], []), ([], ["--no-relay"])], ids=["agent", "receivers"]
)
def test_nothing_is_passed_on_where_relays_are_turned_off(
    swarm: Swarm, agent: list[str], receiver: list[str]
) -> None:
    swarm.source.shape(FAST)
    swarm.publish(*agent)
    receivers = [swarm.receive(host, *receiver) for host in swarm.hosts]
    assert total(swarm.arrived(receivers), "relayed_bytes") == 0
    before = swarm.source.sent()
    swarm.next()
    assert total(swarm.arrived(receivers), "relayed_bytes") == 0
    assert swarm.source.sent() - before > len(receivers) * swarm.bytes
    swarm.next(CHANGED)
    assert total(swarm.arrived(receivers), "relayed_bytes") == 0
    assert swarm.status()["relayed"] == []


@pytest.mark.skipif(shutil.which("nft") is None, reason="NO FIREWALL: there is no nft (package nftables)")
def test_versions_pass_firewalls_that_open_the_ports_of_the_guide(swarm: Swarm) -> None:
    (rules,) = re.findall(r"```nft\n(.*?)```", (ROOT / "docs/hosts.md").read_text(), re.DOTALL)
    assert "7200-7209" in rules
    for host in (swarm.source, *swarm.hosts):
        own = rules.replace("7200-7209", "7000-7009") if host is swarm.source else rules
        subprocess.run(host.inside("nft", "-f", "-"), input=own, text=True, check=True, timeout=PATIENCE)
    swarm.publish("--data-ports=7001-7009")
    receivers = [swarm.receive(host, "--relay-ports=7200-7209") for host in swarm.hosts]
    swarm.arrived(receivers)
    swarm.next()
    found = swarm.arrived(receivers)
    assert total(found, "relayed_bytes") > 0
    assert total(found, "relays_lost") == 0
    # The firewall is there: other ports do not even refuse.
    ask = "import socket, sys\ntry: socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)\nexcept OSError as e: print(type(e).__name__)"
    tried = [
        run(*swarm.source.inside(sys.executable, "-c", ask, swarm.hosts[0].address, port)).strip()
        for port in ("7209", "7210")
    ]
    assert tried == ["ConnectionRefusedError", "TimeoutError"]


def test_relays_with_certificates_pass_on_what_came_through_tls(swarm: Swarm) -> None:
    shutil.copy(TLS / "hosts.key", swarm.home)
    (swarm.home / "hosts.key").chmod(0o600)
    own = [f"--tls-cert={TLS / 'hosts.pem'}", f"--tls-key={swarm.home / 'hosts.key'}"]
    trust = [f"--tls-ca={TLS / 'ca.pem'}"]
    swarm.publish(*own, trust=trust)
    plain = swarm.receive(swarm.hosts[0], *trust, scheme="https")
    relays = [
        swarm.receive(host, *trust, *own, f"--relay-host={host.address}", scheme="https")
        for host in swarm.hosts[1:]
    ]
    swarm.arrived([plain, *relays])
    swarm.next()
    assert total(swarm.arrived(relays), "relayed_bytes") > 0
    swarm.arrived([plain])
    assert "versions are not passed on to other receivers" in plain.warnings()
    assert "no certificate of its own" in plain.warnings()
    assert not any("not passed on" in relay.warnings() for relay in relays)
