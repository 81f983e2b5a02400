"""Broadcast over gloo between real processes."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ranks import Ranks, run_ranks
from windlass import WindlassInvalid, WindlassTimeout
from windlass.transfer.broadcast import BroadcastTransferStrategy
from windlass.transfer.group import UpdateGroup, node_address, open_store
from windlass.transfer.request import BroadcastWeightUpdateRequest
from windlass.transfer.sync_info import EmptyWeightSyncInfo, TorchDistributedWeightSyncInfo


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """One trainer and three processes for engines, which share no process group."""
    with Ranks(4, group=False) as ranks:
        yield ranks


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def strategy(**more: object) -> BroadcastTransferStrategy:
    return BroadcastTransferStrategy(
        {
            "engines": [{}],
            "weight_sync_backend": "gloo",
            "master_addr": "127.0.0.1",
            "timeout": 3.0,
            "join_timeout": 3.0,
            **more,
        }
    )


def test_engines_of_different_shapes_receive_every_version_bit_by_bit(pool: Ranks) -> None:
    trainer, *engines = pool.run("broadcast_ranks:sync_a_model", [3], timeout=100)
    assert trainer["versions"] == [1, 2, 3]
    assert trainer["offsets"] == [1, 3]
    assert [engine["rank"] for engine in engines] == [1, 2, 3]
    for engine in engines:
        assert engine["digests"] == trainer["digests"]
        # Whole modules are loaded together.
        assert max(engine["loads"]) > 1


def test_every_dtype_a_scalar_and_a_strided_view_arrive_as_they_were(pool: Ranks) -> None:
    trainer, engine, *_ = pool.run("broadcast_ranks:every_dtype", timeout=100)
    assert engine["digests"] == trainer


def test_a_chunk_is_announced_before_its_bytes_and_sent_in_the_order_of_names(pool: Ranks) -> None:
    order, *_ = pool.run("broadcast_ranks:announced_first", timeout=100)
    # The engine may have loaded the last tensor before the sender knows that it is sent.
    assert [what for what in order if not what.startswith("loaded")] == [
        "announced a b", "broadcast a", "sent a", "broadcast b", "sent b", "announced c", "broadcast c", "sent c",
    ]  # fmt: skip
    assert [what for what in order if not what.startswith("sent")] == [
        "announced a b", "broadcast a", "broadcast b", "loaded a b", "announced c", "broadcast c", "loaded c",
    ]  # fmt: skip


def test_a_receiver_holds_one_tensor_at_a_time_and_none_afterwards(pool: Ranks) -> None:
    _, grown, *_ = pool.run("broadcast_ranks:peak_memory", [32, 8], timeout=100)
    # Eight tensors of 32 MiB: one is being received while the one before may not have been let go of yet.
    assert grown["peak"] < 3 * 32, grown
    assert grown["after"] < 32, grown


@pytest.mark.parametrize(
    ("how", "kinds", "words"),
    [
        ("die", {"WindlassPeerLost", "WindlassTimeout"}, "layers.1.weight"),
        ("refuse", {"RuntimeError"}, "engine 1: no such parameter"),
        ("silent", {"WindlassTimeout"}, "layers.1.weight"),
    ],
)
def test_an_engine_that_fails_in_the_middle_is_an_error_within_the_deadline(
    pool: Ranks, how: str, kinds: set[str], words: str
) -> None:
    told, *_ = pool.run("broadcast_ranks:an_engine_fails", [how], timeout=60)
    assert told["seconds"] < 15, told
    first, second = told["errors"]
    assert first[0] in kinds, told
    assert words in first[1], told
    # Nothing more is sent on a broken group.
    assert "broke before" in second[1], told


@pytest.mark.parametrize("fail_at", [0, 2])
def test_training_ranks_meet_once_per_chunk_and_fail_together(fail_at: int) -> None:
    zero, one, engine = run_ranks(3, "broadcast_ranks:trainer_ranks", [fail_at], timeout=100, group=False)
    if fail_at:
        assert "the engine said no" in zero["error"][1]
        assert one["error"][0] == "WindlassPeerLost"
        assert "another training rank failed to send chunk 2" in one["error"][1]
        assert engine["loads"] == [1]
        # One before the first chunk, and one for each of the two.
        assert zero["meetings"] == one["meetings"] == 3
        # The deadline is 60 s: nobody waits for the broadcast that the engine takes no part in.
        assert one["seconds"] < 40
    else:
        assert zero["error"] is one["error"] is None
        assert zero["meetings"] == one["meetings"] == len(engine["loads"]) + 2


def test_the_port_of_the_sync_info_is_bound_until_the_group_ends() -> None:
    made = strategy()
    info = made.create_sync_info()
    assert info.world_size == 2
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("0.0.0.0", info.master_port))
    with pytest.raises(WindlassTimeout, match=r"was not complete within 3 s: rank 1 did not sign in"):
        made.create_sender(info)


def test_the_address_of_the_sync_info_is_that_of_rank_zeros_node(pool: Ranks) -> None:
    trainer, engine, *_ = pool.run("broadcast_ranks:by_the_nodes_own_address", timeout=100)
    assert engine["digests"] == trainer["digests"]
    address = trainer["address"]
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as own:
        # Only an address of this node can be bound.
        own.bind((address, 0))
    routes = [line.split()[:2] for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    if any(target == "00000000" and name != "lo" for name, target in routes):
        # Other nodes can reach this one, and so its address must be one that they know.
        assert not ipaddress.ip_address(address).is_loopback


@pytest.mark.parametrize(
    ("reachable", "address"),
    [({socket.AF_INET, socket.AF_INET6}, "10.1.2.3"), ({socket.AF_INET6}, "fd00::7"), (set(), "127.0.0.1")],
)
def test_the_address_of_a_node_is_that_of_the_interface_that_leads_out(
    reachable: set[int], address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Probe(contextlib.nullcontext[Any]):
        def __init__(self, family: int, kind: int) -> None:
            assert kind == socket.SOCK_DGRAM, "nothing is sent"
            super().__init__(self)
            self.family = family

        def connect(self, where: tuple[str, int]) -> None:
            if self.family not in reachable:
                raise OSError("network is unreachable")

        def getsockname(self) -> tuple[str, int]:
            return ("10.1.2.3" if self.family == socket.AF_INET else "fd00::7"), 1

    monkeypatch.setattr("windlass.transfer.group.socket.socket", Probe)
    assert node_address("agent.advertise_host") == address
    warned = [r.getMessage() for r in caplog.records if "no default route" in r.getMessage()]
    assert len(warned) == (not reachable)
    assert all("set agent.advertise_host" in text for text in warned)


@pytest.mark.parametrize("fails", [False, True])
def test_caches_are_emptied_before_and_after_and_then_ranks_meet(fails: bool) -> None:
    zero, one, _ = run_ranks(3, "broadcast_ranks:caches_are_emptied", [fails], timeout=100, group=False)
    for told in (zero, one):
        notes = told["notes"]
        assert notes[0] == "empty"
        # Also after a failure: nobody is left waiting, and the memory is given back.
        assert notes[-2:] == ["empty", "meet to sync version 1"]
        assert notes.count("empty") == 2
        assert (told["error"] is not None) == fails
    assert 0 < zero["notes"].index("update") < len(zero["notes"]) - 2


def test_joining_twice_is_an_error_unless_overriding_is_asked_for(pool: Ranks) -> None:
    trainer, engine, *_ = pool.run("broadcast_ranks:join_twice", timeout=60)
    assert "joined update group 'weight_update_group' as rank 0 already" in trainer["refused"]
    assert "joined update group 'weight_update_group' as rank 1 already" in engine["refused"]
    assert trainer["first_closed"]
    assert engine["first_closed"]
    assert engine["received"] == 7.0


def test_one_rank_for_two_processes_is_an_error() -> None:
    info, store = _group()
    store.add(f"windlass/{info.group_name}/1", 1)
    with pytest.raises(WindlassInvalid, match=r"rank 1 of .* was joined before"):
        UpdateGroup(info, 1, timeout=2)
    with pytest.raises(WindlassInvalid, match="rank 2 is none of the 2 ranks"):
        UpdateGroup(info, 2, timeout=2)


def test_a_trainer_that_is_not_there_is_a_timeout_that_names_the_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        info = TorchDistributedWeightSyncInfo("127.0.0.1", taken.getsockname()[1], 2, backend="gloo")
        begun = time.monotonic()
        with pytest.raises(WindlassTimeout, match=rf"127.0.0.1:{info.master_port}.*store was not reached"):
            strategy(join_timeout=1.0).create_receiver(info, rank=1)
        assert time.monotonic() - begun < 10


def test_wrong_orders_and_wrong_kinds_are_named() -> None:
    info, _store = _group()
    with pytest.raises(WindlassInvalid, match="does not hold the store"):
        strategy().create_sender(info)
    with pytest.raises(WindlassInvalid, match="broadcast needs TorchDistributed"):
        strategy().create_sender(EmptyWeightSyncInfo())
    with pytest.raises(WindlassInvalid, match="rank 0 of the update group is the trainer"):
        strategy().create_receiver(info, rank=0)
    with pytest.raises(WindlassInvalid, match="names no engines"):
        strategy(engines=[]).create_sync_info()
    with pytest.raises(WindlassInvalid, match="group_nam.*did you mean 'group_name'"):
        strategy(group_nam="x")
    with pytest.raises(WindlassInvalid, match="expected a shape"):
        strategy(engines=[{"tensor": 2}])
    assert strategy().get_request_type() is BroadcastWeightUpdateRequest


def _group() -> tuple[TorchDistributedWeightSyncInfo, object]:
    store = open_store("127.0.0.1", 5.0)
    return TorchDistributedWeightSyncInfo("127.0.0.1", store.port, 2, backend="gloo"), store


def test_asyncio_is_free_while_a_receiver_waits() -> None:
    async def run() -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.05)
                ticks += 1

        info, _store = _group()
        ticking = asyncio.ensure_future(tick())
        with pytest.raises(WindlassTimeout):
            await asyncio.to_thread(strategy(join_timeout=1.0).create_receiver, info, rank=1)
        ticking.cancel()
        return ticks

    assert asyncio.run(run()) > 5
