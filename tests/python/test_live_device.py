"""What :class:`windlass.load.Live` does with parameters on a GPU, with a device that is made up of host memory.

The device's own part is tested on one (``tests/gpu/device.py``, ``tests/gpu/end_to_end.py``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from windlass import Follower, Receiver, WeightManager, _windlass
from windlass.engines.vllm import extension
from windlass.engines.vllm.staging import Staging
from windlass.errors import (
    WindlassCorrupt,
    WindlassError,
    WindlassExhausted,
    WindlassInvalid,
    WindlassStale,
    WindlassUnsupported,
)
from windlass.load import Live, LoadOrder, ModelSession, Report, take
from windlass.load import device as device_module
from windlass.load import live as live_module
from windlass.load.device import DeviceWeights, device_weights

sys.path.append(str(Path(__file__).resolve().parent.parent / "gpu"))

import reference  # noqa: E402


class Plan:
    """A plan of a device: records are the parameters as they will be, and fit only what they were made from."""

    def __init__(self, native: Any, tensors: Sequence[torch.Tensor], image: str) -> None:
        self.native, self.tensors, self.image = native, tensors, image
        self.calls: list[str] = []
        self.fails: dict[str, WindlassError] = {}
        #: What the next delta that no image shows leads to.
        self.fetched: list[torch.Tensor] = []

    @property
    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.tensors]

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]

    def dense_held(self, held: Any, stream: int, threads: int, timeout: float) -> Any:
        self._called("dense")
        return self.native.dense(held, self.addresses, threads)

    def pin_files(self) -> None:
        if "pin" in self.fails:
            raise self.fails["pin"]

    def sum_blocks(self, stream: int, timeout: float) -> None:
        self._called("sums")

    def stage_held(
        self, held: Any, base: tuple[int, int], prove: int | None, timeout: float
    ) -> tuple[list[Any], str | None]:
        self._called("stage")
        records = Records([t.clone() for t in self.tensors], [t.clone() for t in self.tensors])
        self.native.sparse(held, *base, [t.data_ptr() for t in records.after])
        return [records], self.proof(prove)

    def stage_fetched(
        self, fetched: Any, base: tuple[int, int], prove: int | None, timeout: float
    ) -> tuple[list[Any], str | None]:
        self._called("stage")
        return [Records([t.clone() for t in self.tensors], self.fetched)], self.proof(prove)

    def proof(self, prove: int | None) -> str | None:
        """The digest of the parameters, if they are to be proved."""
        if prove is None:
            return None
        held = _windlass.open_image(self.image, 60.0, 60.0)
        try:
            told = json.loads(_windlass.combine_digests(held.layout(), [self.digest(0, 60.0)]))
        finally:
            held.finish()
        digest: str | None = told["digest"]
        return digest

    def begin_handed(
        self,
        files: list[tuple[str, int]],
        model_id: str,
        base: tuple[int, int],
        target: tuple[int, int],
        prove: int | None,
        timeout: float,
    ) -> Job:
        self._called("begin")
        self.handed = (files, model_id, base, target)
        return Job(self, prove)

    def reserve(self, size: int) -> None:
        self._called("reserve")

    def apply(self, records: Records, stream: int, timeout: float) -> tuple[int, int]:
        self._called("apply")
        if not all(torch.equal(a, b) for a, b in zip(records.before, self.tensors)):
            raise WindlassCorrupt("the weights in place are not those that the delta begins from")
        for tensor, value in zip(self.tensors, records.after):
            tensor.data.copy_(value)
        return 1, 0

    def difference(self, held: Any, stream: int, threads: int, timeout: float) -> list[str]:
        self._called("difference")
        return list(self.native.sampled_difference(held, self.addresses, 1 << 62, 0))

    def digest(self, stream: int, timeout: float) -> str:
        self._called("digest")
        return str(self.native.digest(self.addresses))


class Job:
    """A delta on its way, which has arrived when the test says so."""

    done = False

    def __init__(self, plan: Plan, prove: int | None) -> None:
        self._plan, self._prove = plan, prove

    def take(self) -> tuple[list[Any], str | None]:
        self._plan._called("arrive")
        records = Records([t.clone() for t in self._plan.tensors], self._plan.fetched)
        return [records], self._plan.proof(self._prove)


class Records:
    bytes = 100

    def __init__(self, before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
        self.before, self.after = before, after


class Bench:
    """A trainer, its receiver, and an engine on the made-up device."""

    def __init__(self, home: Path, wm: WeightManager, receiver: Receiver) -> None:
        self.wm, self.receiver, self.image = wm, receiver, home / "image" / "p"
        self.trainer = reference.plain("tiny", "cpu", 1)
        self.model = reference.fuse(reference.plain("tiny", "cpu", 99))
        self.live = Live(reference.ReferenceSession(self.model), verify_every=3)
        self.version = 0

    def fused(self) -> list[torch.Tensor]:
        """The parameters of the device as they are with the trainer's weights."""
        fresh = reference.fuse(reference.plain("tiny", "cpu", 5))
        reference.ReferenceSession(fresh).load(self.trainer.named_parameters())
        values = dict(fresh.named_parameters())
        names = {p.data_ptr(): name for name, p in self.model.named_parameters()}
        return [values[names[t.data_ptr()]].detach() for t in self.plan.tensors]

    def publish(self) -> LoadOrder:
        """The next version, as an order."""
        self.announce()
        self.receiver.wait(self.version, 60)
        with self.receiver.hold() as image:
            return LoadOrder.of(image)

    def announce(self) -> None:
        """The next version, of which the receiver knows nothing yet."""
        self.version += 1
        for parameter in self.trainer.parameters():
            parameter.view(-1)[self.version :: 37] += 0.5
        self.wm.offload(dict(self.trainer.named_parameters()), self.version, 0, 1)
        self.wm.wait_delta_ready(timeout=60)

    @property
    def plan(self) -> Plan:
        assert self.live._plan is not None and self.live._plan.device is not None
        plan: Any = self.live._plan.device._plan
        return plan  # type: ignore[no-any-return]

    def calls(self) -> list[str]:
        """What was asked of the device since the last time."""
        said = list(self.plan.calls)
        self.plan.calls.clear()
        return said

    def check(self, report: Report, how: str) -> None:
        """The engine holds what the trainer does."""
        assert report.last is not None and report.live is not None
        assert (report.state, report.last.how, report.live.version) == ("clean", how, self.version), report
        fresh = reference.fuse(reference.plain("tiny", "cpu", 5))
        reference.ReferenceSession(fresh).load(self.trainer.named_parameters())
        for (name, wanted), found in zip(fresh.named_parameters(), self.model.parameters()):
            assert torch.equal(wanted, found), name

    def start(self) -> None:
        self.check(self.live.load(self.publish()), "session")
        assert self.calls() == []


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Bench]]:
    class Gpu:
        @staticmethod
        def open(ordinal: int) -> Gpu:
            return Gpu()

        def warm(self) -> None:
            """There is nothing to compile."""

        def register(self, memory: Any) -> Any:
            return SimpleNamespace(close=lambda: None)

        def load_plan(self, native: Any, addresses: list[int]) -> Plan:
            return Plan(native, tensors, image)

    image = ""
    tensors: Sequence[torch.Tensor] = ()

    def made(native: Any, given: Sequence[torch.Tensor]) -> DeviceWeights:
        nonlocal tensors
        tensors = given
        return DeviceWeights(native, given, torch.device("cuda", 0))

    monkeypatch.setattr(device_module._windlass, "Gpu", Gpu)
    monkeypatch.setattr(live_module, "device_weights", made)
    monkeypatch.setattr(DeviceWeights, "_stream", 0)
    monkeypatch.setattr(DeviceWeights, "_aside", SimpleNamespace(cuda_stream=0))
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="device-") as home,
        WeightManager(model_id="p", region_dir=home, timeout=60.0) as wm,
    ):
        wm.offload(dict(reference.plain("tiny", "cpu", 1).named_parameters()), 0, 0, 1)
        image = f"{home}/image/p"
        with Receiver(f"{home}/image", region=wm.region, keep_deltas=8) as receiver:
            yield lambda: Bench(Path(home), wm, receiver)


def test_what_was_staged_is_only_applied(make: Callable[[], Bench]) -> None:
    bench = make()
    bench.start()
    for first in (True, False):
        order = bench.publish()
        before = [p.clone() for p in bench.model.parameters()]
        assert bench.live.stage(order)
        assert all(torch.equal(a, b) for a, b in zip(before, bench.model.parameters())), "staging wrote"
        # Sums are taken once; from then on records carry them along.
        assert bench.calls() == [*(["sums"] if first else []), "stage", "digest"]
        assert bench.live.stage(order) and bench.calls() == []
        bench.check(bench.live.load(order), "sparse")
        assert bench.calls() == ["apply"]
    # Without staging, a load does all of it; and the third after the last proof is compared wholly.
    for calls in (["stage", "apply"], ["stage", "apply", "difference"], ["stage", "apply"]):
        bench.check(bench.live.load(bench.publish()), "sparse")
        assert bench.calls() == calls
    digest = bench.live.digest()
    assert digest["parts"] is not None and bench.calls() == ["digest"]


def test_files_that_cannot_be_pinned_do_not_spoil_a_load(make: Callable[[], Bench]) -> None:
    bench = make()
    bench.start()
    bench.plan.fails["pin"] = WindlassExhausted("cannot start a thread")
    bench.check(bench.live.load(bench.publish()), "sparse")


def test_records_that_were_staged_for_another_version_are_dropped(make: Callable[[], Bench]) -> None:
    bench = make()
    bench.start()
    assert bench.live.stage(bench.publish())
    order = bench.publish()
    bench.calls()
    bench.check(bench.live.load(order), "sparse")
    assert bench.calls() == ["stage", "apply"]
    # Nor are they of use for a whole load.
    order = bench.publish()
    assert bench.live.stage(order)
    bench.calls()
    dense = LoadOrder.from_dict({**order.to_dict(), "how": "dense"})
    assert not bench.live.stage(dense)
    bench.check(bench.live.load(dense), "dense")
    assert bench.calls() == ["dense"]


def test_weights_that_somebody_changed_on_a_device_are_loaded_whole(
    make: Callable[[], Bench], caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    bench.start()
    caplog.set_level(logging.INFO, "windlass")
    # Before staging: the digest shows it.
    order = bench.publish()
    next(iter(bench.model.parameters()))[3] += 1.0
    assert not bench.live.stage(order)
    assert "the weights are not known any more" in caplog.text
    bench.check(bench.live.load(order), "dense")
    # Between staging and the load: records do not fit.
    order = bench.publish()
    assert bench.live.stage(order)
    next(iter(bench.model.parameters()))[3] += 1.0
    bench.check(bench.live.load(order), "dense")
    assert "not those that the delta begins from" in caplog.text


def test_a_device_without_room_falls_back_to_the_engine(
    make: Callable[[], Bench], caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    bench.start()
    caplog.set_level(logging.INFO, "windlass")
    full = WindlassExhausted("a delta needs 1 GiB and 3 MiB are free")
    bench.plan.fails["stage"] = full
    order = bench.publish()
    assert not bench.live.stage(order)
    assert "version 2 is not staged: a delta needs 1 GiB" in caplog.text
    bench.check(bench.live.load(order), "dense")
    bench.plan.fails["dense"] = full
    bench.check(bench.live.load(bench.publish()), "session")
    assert "own loader was used, which is slow: a delta needs" in caplog.text
    # As soon as there is room again, it is used.
    bench.plan.fails.clear()
    order = bench.publish()
    assert bench.live.stage(order)
    bench.check(bench.live.load(order), "sparse")


def test_a_gpu_that_cannot_be_used_leaves_everything_to_the_engine(
    make: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = live_module.device_weights
    for error, tries in ((WindlassUnsupported("no driver"), 1), (WindlassExhausted("no room"), 3)):
        bench, tried = make(), []
        bench.version = bench.receiver.version or 0

        def refuse(native: Any, tensors: Any, error: WindlassError = error, tried: list[int] = tried) -> None:
            tried.append(1)
            raise error

        monkeypatch.setattr(live_module, "device_weights", refuse)
        for _ in range(3):
            order = bench.publish()
            assert not bench.live.stage(order)
            bench.check(bench.live.load(order), "session")
        assert (len(tried), str(error) in caplog.text) == (tries, True)
        monkeypatch.setattr(live_module, "device_weights", real)


def test_parameters_on_several_devices_are_not_replayed() -> None:
    host, other = torch.zeros(3), torch.zeros(3, device="meta")
    assert device_weights(None, [host, torch.zeros(0, device="meta")]) is None
    with pytest.raises(WindlassUnsupported, match="cpu, meta"):
        device_weights(None, [host, other])
    with pytest.raises(WindlassUnsupported, match="meta"):
        device_weights(None, [other])


def test_a_version_is_taken_over_before_the_image_has_it(make: Callable[[], Bench]) -> None:
    bench = make()
    bench.start()
    bench.check(bench.live.load(bench.publish()), "sparse")
    assert bench.receiver.fetch(0.05) is None
    for _ in range(3):
        bench.calls()
        before = bench.version
        bench.announce()
        fetched = bench.receiver.fetch(60)
        assert fetched is not None and fetched.version == bench.version
        bench.plan.fetched = bench.fused()
        assert bench.live.stage_fetched(fetched)
        assert "stage" in bench.calls()
        bench.check(bench.live.load_fetched(fetched), "sparse")
        assert bench.calls() == ["apply"]
        # The image follows.
        assert bench.receiver.version == before
        assert bench.receiver.show(fetched)["mode"] == "delta"
        assert bench.receiver.version == bench.version
        with pytest.raises(WindlassInvalid, match="shown before"):
            bench.receiver.show(fetched)
    # And the ways of before go on from there.
    bench.check(bench.live.load(bench.publish()), "sparse")


def test_a_delta_that_cannot_be_taken_over_goes_by_the_image(make: Callable[[], Bench]) -> None:
    bench = make()
    bench.start()
    bench.check(bench.live.load(bench.publish()), "sparse")
    bench.announce()
    fetched = bench.receiver.fetch(60)
    assert fetched is not None
    with pytest.raises(WindlassInvalid, match="not staged"):
        bench.live.load_fetched(fetched)
    bench.plan.fails["stage"] = WindlassStale("what was fetched begins elsewhere")
    assert not bench.live.stage_fetched(fetched)
    bench.plan.fails.clear()
    # A record that does not fit leaves the worker dirty, and the image heals it.
    bench.plan.fetched = bench.fused()
    assert bench.live.stage_fetched(fetched)
    bench.plan.fails["apply"] = WindlassCorrupt(
        "the weights in place are not those that the delta begins from"
    )
    report = bench.live.load_fetched(fetched)
    assert report.state == "dirty" and report.live is None and report.error is not None
    bench.plan.fails.clear()
    bench.receiver.show(fetched)
    with bench.receiver.hold() as image:
        order = LoadOrder.of(image)
    bench.check(bench.live.load(order), "dense")


# An engine's own loop.


class Loop:
    """An engine that takes versions with :func:`windlass.load.take`."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.paused = 0
        #: Whether the last pause was left well: an engine that was not stays paused.
        self.is_going = True

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        self.paused += 1
        self.is_going = False
        yield
        self.is_going = True

    def take(self, how: str, timeout: float = 60.0) -> None:
        report = take(self.bench.live, self.bench.receiver, self.pause, timeout)
        assert report is not None and report.live is not None
        assert report.live.version == self.bench.version == self.bench.receiver.version
        self.bench.check(report, how)

    def announce(self) -> None:
        self.bench.announce()
        self.bench.plan.fetched = self.bench.fused()


def test_an_engine_takes_every_version_by_the_best_way(make: Callable[[], Bench]) -> None:
    bench = make()
    loop = Loop(bench)
    loop.take("session")
    assert take(bench.live, bench.receiver, loop.pause, 0.05) is None and loop.paused == 1
    # Before the image.
    for _ in range(2):
        loop.announce()
        bench.calls()
        loop.take("sparse")
        assert "apply" in bench.calls()
    assert take(bench.live, bench.receiver, loop.pause, 0.05) is None
    # A delta that cannot be staged comes by the image.
    loop.announce()
    bench.plan.fails["stage"] = WindlassExhausted("a delta needs 1 GiB")
    loop.take("dense")
    bench.plan.fails.clear()
    # An engine that began anew is behind its image, and need not wait for anything newer.
    bench.live.forget("a test")
    bench.calls()
    loop.take("dense")
    assert loop.is_going and loop.paused == 5


def test_a_version_that_comes_late_has_as_much_time_as_any(
    make: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    loop = Loop(bench)
    loop.take("session")
    loop.announce()
    given: list[float] = []

    def fetch(timeout: float, newer: tuple[int, int]) -> Any:
        given.append(timeout)
        return Receiver.fetch(bench.receiver, timeout, newer)

    monkeypatch.setattr(bench.receiver, "fetch", fetch)
    # What is there already comes with the last moment of the wait.
    loop.take("sparse", timeout=5.0)
    assert given and given[0] > 60.0, given


def test_a_load_that_fails_halfway_is_repeated_in_the_same_pause(make: Callable[[], Bench]) -> None:
    bench = make()
    loop = Loop(bench)
    loop.take("session")
    loop.announce()
    bench.plan.fails["apply"] = WindlassCorrupt("3 of 4 records did not fit")
    loop.take("dense")
    assert loop.is_going and loop.paused == 2
    bench.plan.fails.clear()
    loop.announce()
    loop.take("sparse")


def test_an_engine_that_cannot_be_loaded_is_not_let_go_on(
    make: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    loop = Loop(bench)
    loop.take("session")
    loop.announce()
    bench.plan.fails["apply"] = bench.plan.fails["dense"] = WindlassCorrupt("records did not fit")

    def fail(weights: object) -> None:
        raise RuntimeError("no loader")

    with monkeypatch.context() as patch:
        patch.setattr(bench.live._session, "load", fail)
        with pytest.raises(WindlassCorrupt, match="a mixture"):
            take(bench.live, bench.receiver, loop.pause)
    assert not loop.is_going and loop.paused == 2
    # Once it can be, the next call mends it.
    bench.plan.fails.clear()
    loop.take("dense")
    assert loop.is_going


def test_a_plain_model_follows_without_a_session_of_its_own(tmp_path: Path) -> None:
    trainer, model = reference.plain("tiny", "cpu", 1), reference.plain("tiny", "cpu", 99)
    weights = {name: p.detach() for name, p in trainer.named_parameters()}
    with WeightManager(model_id="plain", region_dir=str(tmp_path), timeout=60) as wm:
        wm.offload(weights, 1, 0, 1)
        wm.wait_delta_ready(1, 60)
        live = Live(ModelSession(model))
        with Receiver(
            tmp_path / "image", endpoint=wm.endpoint, token_file=wm.token_file, keep_deltas=4
        ) as receiver:
            for version, how in ((1, "session"), (2, "sparse"), (3, "sparse")):
                if version > 1:
                    weights["model.norm.weight"].add_(1)
                    wm.offload(weights, version, 0, 1)
                    wm.wait_delta_ready(version, 60)
                report = take(live, receiver, contextlib.nullcontext)
                assert report is not None and report.last is not None and report.plan is not None
                assert (report.live and report.live.version, report.last.how) == (version, how), report
                assert report.plan.session == 0, report.plan
                for name, p in model.named_parameters():
                    assert torch.equal(p, weights[name]), name


def handed(bench: Bench) -> tuple[LoadOrder, Any]:
    """The next version as an order of a receiver that hands the delta over in files, before its image has it."""
    bench.announce()
    newer = bench.receiver.wait_newer(60.0)
    assert newer is not None
    fetched = bench.receiver.fetch(60.0, newer)
    assert fetched is not None
    bench.plan.fetched = bench.fused()
    order = LoadOrder.from_dict(
        {
            "image": str(bench.image),
            "model_id": "p",
            "incarnation": int(fetched.incarnation, 16),
            "version": fetched.version,
            "digest": fetched.digest,
            "delta": {"base": fetched.version - 1, "files": [["/dev/shm/1.delta", 4096]]},
        }
    )
    return order, fetched


def test_a_delta_that_is_handed_over_is_applied_before_the_image(make: Callable[[], Bench]) -> None:
    bench = make()
    bench.start()
    order, fetched = handed(bench)
    with pytest.raises(WindlassInvalid, match="is not staged"):
        bench.live.load(order)
    staging = Staging(bench.live, order)
    assert not staging.done and bench.calls() == ["sums", "begin"]
    (files, model_id, base, target) = bench.plan.handed
    assert (files, model_id, base[1], target[1]) == ([("/dev/shm/1.delta", 4096)], "p", 1, 2)
    assert staging._arriving is not None
    staging._arriving.job.done = True
    assert staging.done and staging.error is None and bench.calls() == ["arrive"]
    report = bench.live.load(order)
    bench.check(report, "sparse")
    assert bench.calls() == ["apply"]
    assert report.plan is not None and report.plan.ahead and report.loads == {"session": 1, "sparse": 1}
    # The image follows, and is what the next delta is loaded from.
    bench.receiver.show(fetched, 60.0)
    bench.check(bench.live.load(bench.publish()), "sparse")


def test_a_delta_for_other_weights_is_refused_and_nothing_is_written(make: Callable[[], Bench]) -> None:
    bench = make()
    bench.start()
    order, fetched = handed(bench)
    before = [p.clone() for p in bench.model.parameters()]
    other = LoadOrder.from_dict({**order.to_dict(), "delta": {"base": 7, "files": [["/dev/shm/1.delta", 1]]}})
    for given, calls in ((other, []), (order, ["begin", "arrive"])):
        if calls:
            bench.plan.fails["arrive"] = WindlassStale("the receiver took it back")
        staging = Staging(bench.live, given)
        staging.join(60.0)
        assert staging.done and isinstance(staging.error, WindlassStale)
        assert [c for c in bench.calls() if c != "sums"] == calls
        with pytest.raises(WindlassInvalid, match="is not staged"):
            bench.live.load(given)
    assert all(torch.equal(a, b) for a, b in zip(before, bench.model.parameters()))
    assert bench.live.report().state == "clean"
    # From the image it is loaded as ever.
    bench.receiver.show(fetched, 60.0)
    with bench.receiver.hold() as image:
        bench.check(bench.live.load(LoadOrder.of(image)), "sparse")


def test_a_delta_is_refused_when_the_weights_are_proved_to_be_others(
    make: Callable[[], Bench], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "windlass")
    bench = make()
    bench.live = Live(reference.ReferenceSession(bench.model), verify_every=1)
    bench.start()
    order, fetched = handed(bench)
    next(iter(bench.model.parameters()))[3] += 1.0
    staging = Staging(bench.live, order)
    staging.join(60.0)
    assert bench.calls() == ["sums", "begin", "arrive", "digest"]
    assert isinstance(staging.error, WindlassStale) and "they have the digest" in caplog.text
    with pytest.raises(WindlassInvalid, match="is not staged"):
        bench.live.load(order)
    bench.receiver.show(fetched, 60.0)
    with bench.receiver.hold() as image:
        bench.check(bench.live.load(LoadOrder.of(image)), "dense")


def test_a_worker_with_a_part_of_the_model_sums_it_up_no_more_often(
    make: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    bench.start()
    asked: list[bool] = []

    def proof(self: Plan, prove: int | None) -> str | None:
        asked.append(prove is not None)
        return None

    monkeypatch.setattr(Plan, "proof", proof)
    for _ in range(6):
        bench.announce()
        fetched = bench.receiver.fetch(60)
        assert fetched is not None
        bench.plan.fetched = bench.fused()
        assert bench.live.stage_fetched(fetched)
        bench.check(bench.live.load_fetched(fetched), "sparse")
        bench.receiver.show(fetched, 60.0)
    assert asked == [False, False, True, False, True, False]


@pytest.mark.parametrize("level", [1, 2])
def test_weights_leave_the_device_only_when_staging_has_read_them(
    make: Callable[[], Bench], level: int
) -> None:
    bench = make()
    bench.start()
    order, _ = handed(bench)
    calls: list[str] = []

    class Worker:
        def get_model(self) -> Any:
            return SimpleNamespace(_windlass_live=bench.live)

        def sleep(self, level: int = 1) -> None:
            calls.extend(bench.calls())
            calls.append("sleep")

    worker = Worker()
    worker.__dict__["_windlass_staging"] = Staging(bench.live, order)
    extension._watched("sleep", Worker.sleep)(worker, level)
    assert calls == ["sums", "begin", "arrive", "sleep"]
    assert (bench.live.report().live is None) == (level == 2)


def test_a_module_that_the_engine_changes_is_found_by_the_sums_of_the_device(
    make: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    # As on a GPU: what was loaded is not compared byte by byte with the image.
    monkeypatch.setattr(Live, "_device", lambda self: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    session: Any = bench.live._session
    finish = session.finish

    def changing() -> None:
        finish()
        dict(bench.model.named_parameters())["model.norm.weight"].data += 1.0

    monkeypatch.setattr(session, "finish", changing)
    report = bench.live.load(bench.publish())
    assert report.plan is not None and report.plan.session == 1
    assert "the engine changes it afterwards" in report.plan.why["model.norm"]
    assert bench.calls() == ["sums", "reserve"]
    # The rest is written directly, and it is said that this one is not.
    report = bench.live.load(bench.publish())
    assert report.last is not None and report.last.how == "sparse"
    assert "model.norm: weight is not model.norm.weight as it was loaded" in report.last.why
    assert report.loads == {"session": 1, "sparse": 1, "unplanned": 1} and not report.plan.ahead


def test_a_load_that_misses_the_plan_is_told_counted_and_in_the_report(
    make: Callable[[], Bench], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    bench.start()
    assert bench.live.report().loads == {"session": 1}, "the first load of a layout is its reference"
    session: Any = bench.live._session
    monkeypatch.setattr(session, "refuses_plan", lambda: "expert rebalancing is on")
    caplog.set_level(logging.WARNING, "windlass")
    for count in (1, 2):
        report = bench.live.load(bench.publish())
        bench.check(report, "session")
        assert report.last is not None and report.last.why == "expert rebalancing is on"
        assert report.loads["unplanned"] == count
    told = [r.getMessage() for r in caplog.records if "own loader was used, which is slow" in r.getMessage()]
    assert told == ["rank 0: the engine's own loader was used, which is slow: expert rebalancing is on"]
    # Once it may be planned again, it is judged anew, and goes by plan from then on.
    monkeypatch.setattr(session, "refuses_plan", lambda: None)
    bench.check(bench.live.load(bench.publish()), "session")
    report = bench.live.load(bench.publish())
    bench.check(report, "sparse")
    assert report.last is not None and not report.last.why


def test_an_order_that_failed_does_not_keep_the_next_one_from_being_staged(
    make: Callable[[], Bench],
) -> None:
    bench = make()
    bench.start()
    bench.model.__dict__["_windlass_live"] = bench.live
    worker = SimpleNamespace(get_model=lambda: bench.model, vllm_config=None)
    order, fetched = handed(bench)
    with pytest.raises(WindlassInvalid, match="is not staged"):
        bench.live.load(order)
    assert extension.windlass_report(worker)["error"] is not None
    bench.receiver.show(fetched, 60.0)
    following = bench.publish().to_dict()
    assert extension.windlass_stage(worker, following)["error"] is None
    extension._settled(worker, 60.0)
    told = extension.windlass_staged(worker)
    assert (told["error"], told["staging"], told["unknown_layout"]) == (None, False, False)
    assert extension.windlass_check(worker, following)["error"] is None
    bench.check(bench.live.load(LoadOrder.from_dict(following)), "sparse")


@pytest.mark.parametrize("text", ["0", "-1", "often", ""])
def test_a_wrong_verify_every_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("WINDLASS_VERIFY_EVERY", text)
    session = reference.ReferenceSession(reference.plain("tiny", "cpu", 1))
    with pytest.raises(
        WindlassInvalid, match=f"WINDLASS_VERIFY_EVERY is {text!r}: expected a whole number from 1"
    ):
        Live(session)
    assert Live(session, verify_every=3)


def test_the_environment_can_have_every_version_verified(
    make: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_VERIFY_EVERY", "1")
    bench = make()
    bench.live = Live(reference.ReferenceSession(bench.model))
    loop = Loop(bench)
    loop.take("session")
    for _ in range(3):
        loop.announce()
        bench.calls()
        loop.take("sparse")
        assert bench.calls().count("digest") == 1


def test_a_follower_takes_live_weights_by_the_best_way(make: Callable[[], Bench]) -> None:
    bench = make()
    loop = Loop(bench)
    follower = Follower(bench.receiver, bench.live, loop.pause)
    assert follower.live is None and not follower.fenced
    run = follower.run(patience=5.0)
    found = next(run)
    assert (found.version, found.mode, follower.live) == (0, "session", (found.incarnation, 0))
    for version in (1, 2):
        loop.announce()
        bench.calls()
        found = next(run)
        assert (found.version, found.mode) == (version, "sparse") and "apply" in bench.calls()
        assert found.digest is not None and found.pause_ms >= found.load_ms > 0
    assert follower.step(0.05) is None and loop.paused == 3


def test_a_follower_whose_live_weights_cannot_be_loaded_is_fenced_until_they_are(
    make: Callable[[], Bench],
) -> None:
    bench = make()
    loop = Loop(bench)
    follower = Follower(bench.receiver, bench.live, loop.pause)
    assert follower.step(60.0) is not None
    loop.announce()

    class Broken:
        def load(self, tensors: Any) -> None:
            raise RuntimeError("a broken session")

    with pytest.MonkeyPatch.context() as broken:
        broken.setitem(bench.plan.fails, "apply", WindlassCorrupt("apply fails"))
        broken.setitem(bench.plan.fails, "dense", WindlassCorrupt("dense fails"))
        broken.setattr(bench.live._session, "load", Broken().load)
        with pytest.raises(WindlassCorrupt, match="could not be loaded, and the weights are a mixture"):
            follower.step(60.0)
    assert follower.fenced and follower.live is None and not loop.is_going
    bench.plan.fails.clear()
    loaded = follower.step(60.0)
    assert loaded is not None and loaded.version == 1
    assert not follower.fenced and loop.is_going and follower.live == (loaded.incarnation, 1)


def test_a_follower_of_live_weights_takes_no_stage(make: Callable[[], Bench]) -> None:
    bench = make()
    with pytest.raises(WindlassInvalid, match="live weights stage by themselves"):
        Follower(bench.receiver, bench.live, stage=lambda image: None)
