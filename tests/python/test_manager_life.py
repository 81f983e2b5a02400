"""A WeightManager's life in one process: its agent, a resume, its end, and what follows a version."""

from __future__ import annotations

import gc
import http.server
import json
import os
import signal
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from controlled import Command, is_gone, until
from test_manager import QUIET, published, same
from windlass import (
    Receiver,
    WeightManager,
    WindlassDenied,
    WindlassError,
    WindlassInvalid,
    WindlassNotFound,
    WindlassPeerLost,
    WindlassStale,
    WindlassTimeout,
    WindlassUnsupported,
)
from windlass.config import WeightManagerConfig
from windlass.controller import Notified


@pytest.fixture
def home() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="manager-") as folder:
        yield folder


def test_an_agent_listens_before_anything_is_known_and_stays_where_it_is(home: str) -> None:
    with WeightManager(model_id="early", region_dir=home, timeout=30.0) as wm:
        endpoint = wm.listen()
        assert endpoint is not None
        assert wm.listen() == wm.endpoint == endpoint
        assert wm.token_file is not None
        token = Path(wm.token_file).read_text().strip()
        request = urllib.request.Request(
            f"{endpoint}/get_version", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)["version"] is None
        with Receiver(Path(home) / "images", endpoint=endpoint, token=token) as receiver:
            came: list[Any] = []
            waiting = threading.Thread(target=lambda: came.append(receiver.wait(1, 60.0)))
            waiting.start()
            weights = {"a": torch.randn(8)}
            wm.offload(weights, 1, 0, 1)
            assert wm.listen() == endpoint
            waiting.join(60.0)
            assert came[0].image.identity.version == 1
            with receiver.hold() as image:
                assert torch.equal(image.tensors["a"], weights["a"])
    assert os.listdir(home) == ["images"]
    with WeightManager(model_id="early", region_dir=home, timeout=30.0) as wm:
        # One that never publishes leaves nothing behind either.
        wm.listen()
    assert os.listdir(home) == ["images"]


def test_resume_is_a_new_life_that_receivers_follow_to_the_same_port(home: str) -> None:
    with WeightManager(model_id="lives", region_dir=home) as wm:
        old = {"a": torch.zeros(5)}
        wm.offload(old, 9, 0, 1)
        endpoint, first = wm.endpoint, wm.incarnation
        assert wm.token_file is not None
        token = Path(wm.token_file).read_text().strip()
        assert endpoint is not None
        with Receiver(f"{home}/image", endpoint=endpoint, token=token) as receiver:
            receiver.wait(9)
            wm.resume()
            assert wm.version is None
            # Another model, even.
            new = {"b": torch.ones(7), "c": torch.ones(2)}
            wm.offload(new, 3, 0, 1)
            assert wm.incarnation != first
            assert wm.endpoint == endpoint
            until("the receiver did not follow", lambda: _synced(receiver) == 3)
            with receiver.hold() as image:
                assert image.incarnation == wm.incarnation
                same({n: t.clone() for n, t in image.tensors.items()}, new)


def test_a_new_life_takes_the_region_from_an_agent_that_was_started_by_hand(home: str) -> None:
    with WeightManager(model_id="anew", region_dir=home, agent=QUIET, timeout=60.0) as wm:
        wm.offload({"a": torch.zeros(5)}, 9, 0, 1)
        region, first = wm.region, wm.incarnation
        assert region is not None and first is not None
        agent = Command(Path(home, "agent.log"), "agent", "--region", region)
        try:
            endpoint = agent.event("listening")["endpoint"]
            with Receiver(f"{home}/image", region=region) as receiver:
                receiver.wait(9)
                wm.resume()
                new = {"b": torch.ones(7), "c": torch.ones(2)}
                wm.offload(new, 3, 0, 1)
                assert wm.incarnation is not None and wm.incarnation > first
                assert agent.event("listening", 1)["endpoint"] == endpoint
                until("the receiver did not follow", lambda: _synced(receiver) == 3)
                with receiver.hold() as image:
                    same({n: t.clone() for n, t in image.tensors.items()}, new)
        finally:
            agent.end()


def _synced(receiver: Receiver) -> int | None:
    try:
        receiver.sync(5.0)
    except (WindlassPeerLost, WindlassTimeout, WindlassNotFound, WindlassDenied):
        return None
    return receiver.version


def test_after_the_end_everything_says_so_and_nothing_is_left(home: str) -> None:
    with WeightManager(model_id="ended", region_dir=home) as wm:
        for call in (wm.wait_delta_ready, wm.notify_version):
            with pytest.raises(WindlassNotFound, match="offload"):
                call()
        wm.prepare({"a": torch.ones(2)}, 0, 1)
        with pytest.raises(WindlassNotFound, match="offloaded"):
            wm.wait_delta_ready()
        wm.offload({"a": torch.ones(2)}, 1, 0, 1)
        assert wm.endpoint is not None
        agent = wm.status()["agent"]["pid"]
        wm.close()
        wm.close()
    assert is_gone(agent)
    assert os.listdir(home) == []
    uses: list[Callable[[], Any]] = [
        lambda: wm.offload({"a": torch.ones(2)}, 2, 0, 1),
        lambda: wm.prepare({"a": torch.ones(2)}, 0, 1),
        wm.wait_delta_ready,
        wm.notify_version,
        wm.notify_version_async,
        wm.resume,
    ]
    for use in uses:
        with pytest.raises(WindlassInvalid, match="closed"):
            use()
    assert (wm.version, wm.region, wm.endpoint, wm.incarnation) == (None, None, None, None)


def test_a_manager_that_nobody_closed_ends_its_agent(home: str) -> None:
    wm = WeightManager(model_id="lost", region_dir=home)
    wm.offload({"a": torch.ones(2)}, 1, 0, 1)
    assert wm.endpoint is not None
    agent = wm.status()["agent"]["pid"]
    del wm
    gc.collect()
    until("the agent lives on", lambda: is_gone(agent))
    assert os.listdir(home) == []


def test_models_do_not_disturb_each_other_and_a_name_is_taken_once(home: str) -> None:
    common = {"region_dir": home, "agent": QUIET, "timeout": 1.0}
    with (
        WeightManager(model_id="actor", **common) as actor,
        WeightManager(model_id="critic", **common) as critic,
    ):
        actor.offload({"a": torch.ones(2)}, 1, 0, 1)
        critic.offload({"a": torch.zeros(2)}, 7, 0, 1)
        with WeightManager(model_id="actor", **common) as second:
            with pytest.raises(WindlassError) as e:
                second.offload({"a": torch.ones(2)}, 1, 0, 1)
            assert "in use by" in str(e.value)
            assert "model id" in str(e.value)
            actor.offload({"a": torch.full((2,), 3.0)}, 2, 0, 1)
            same(published(actor), {"a": torch.full((2,), 3.0)})
            same(published(critic), {"a": torch.zeros(2)})
            actor.close()
            assert second.offload({"a": torch.ones(2)}, 1, 0, 1).new


def test_an_agent_that_cannot_start_takes_the_region_with_it(home: str) -> None:
    """The first offload failed and left the region open: the second one found it in use by itself."""
    with WeightManager(
        model_id="late", region_dir=home, timeout=5.0, agent={"log": f"{home}/no/such/log"}
    ) as wm:
        for _ in range(2):
            with pytest.raises(Exception, match="log") as e:
                wm.offload({"a": torch.ones(2)}, 1, 0, 1)
            assert "in use" not in str(e.value)
            assert os.listdir(home) == []


# What follows a version.


def test_sealing_is_waited_for_through_a_killed_agent(home: str) -> None:
    with WeightManager(model_id="sealed", region_dir=home) as wm:
        weight = torch.zeros(1000)
        wm.offload({"a": weight}, 1, 0, 1)
        first = wm.wait_delta_ready(timeout=30.0)
        assert wm.wait_delta_ready(1) == first
        pid = wm.status()["agent"]["pid"]
        os.kill(pid, signal.SIGKILL)
        weight += 1
        begun = time.monotonic()
        wm.offload({"a": weight}, 2, 0, 1)
        assert time.monotonic() - begun < 5.0
        assert wm.wait_delta_ready(2, 30.0) != first
        for version in (3, 4):
            weight += 1
            wm.offload({"a": weight}, version, 0, 1)
        assert wm.wait_delta_ready(timeout=30.0)
        with pytest.raises(WindlassStale, match="no longer kept"):
            wm.wait_delta_ready(1, 5.0)
        with pytest.raises(WindlassTimeout, match="version 9"):
            wm.wait_delta_ready(9, 0.1)
        assert wm.status()["agent"]["restarts"] == 1


def test_without_an_agent_the_wait_says_that_there_is_none(home: str) -> None:
    with WeightManager(model_id="quiet", region_dir=home, agent=QUIET) as wm:
        wm.offload({"a": torch.ones(2)}, 1, 0, 1)
        with pytest.raises(WindlassTimeout, match=r"agent\.enabled is False"):
            wm.wait_delta_ready(timeout=0.1)


def test_without_a_controller_gate_and_notify_are_errors_unless_that_was_said(home: str) -> None:
    """They used to return at once, and nobody saw that nothing was waited for."""
    with WeightManager(model_id="unsaid", region_dir=home, agent={"enabled": False}) as wm:
        wm.offload({"a": torch.ones(2)}, 1, 0, 1)
        for call in (wm.notify_version, wm.notify_version_async, lambda: wm.gate(1)):
            with pytest.raises(WindlassInvalid, match="no controller") as error:
                call()
            assert "controller=None" in error.value.advice
    assert WeightManagerConfig.from_dict(wm.config.to_dict()) == wm.config
    told = {"enabled": False}
    with WeightManager(model_id="alone", region_dir=home, agent=told, controller="http://127.0.0.1:9") as wm:
        wm.offload({"a": torch.ones(2)}, 1, 0, 1)
        with pytest.raises(WindlassUnsupported, match=r"agent\.enabled is False"):
            wm.notify_version()


def test_a_version_that_was_never_offloaded_is_not_announced(home: str) -> None:
    """A controller that is told of it would serve nothing older."""
    with WeightManager(model_id="false", region_dir=home, controller="http://127.0.0.1:9") as wm:
        wm.offload({"a": torch.ones(2)}, 3, 0, 1)
        with pytest.raises(WindlassInvalid, match="version 1000 was not offloaded; the newest is 3"):
            wm.notify_version(1000)


def test_three_versions_with_the_same_bytes_are_warned_of_once(
    home: str, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.ones(2)
    with (
        caplog.at_level("WARNING", logger="windlass"),
        WeightManager(model_id="still", region_dir=home) as wm,
    ):

        def publish(*versions: int) -> int:
            for version in versions:
                wm.offload({"a": weight}, version, 0, 1)
                wm.wait_delta_ready(version, 60.0)
            return caplog.text.count("have the same bytes")

        assert publish(1, 2) == 0
        assert publish(4) == 1 and "versions 1, 2, 4 have" in caplog.text
        assert publish(5) == 1
        weight += 1
        assert publish(6, 7) == 1
        assert publish(8) == 2


NOTIFIED = b'{"ok": true, "wait": false, "ahead": 1, "set": "told", "served": null}'


class Controller(http.server.ThreadingHTTPServer):
    """A controller that answers as it is told to."""

    daemon_threads = True
    answer: tuple[int, bytes] | None = (200, NOTIFIED)

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.heard: list[dict[str, Any]] = []
        self.over = threading.Event()


class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Controller)
        words = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server.heard.append({"path": self.path, **words})
        if server.answer is None:
            server.over.wait(60.0)
            return
        self.send_response(server.answer[0])
        self.end_headers()
        self.wfile.write(server.answer[1])

    def log_message(self, *_: Any) -> None:
        pass


def test_the_controller_hears_of_versions_and_its_failures_are_told_apart(home: str) -> None:
    with Controller() as controller:
        threading.Thread(target=controller.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{controller.server_port}"
        with WeightManager(model_id="told", region_dir=home, controller=url) as wm:
            wm.prepare({"a": torch.ones(2)}, 0, 1)
            with pytest.raises(WindlassNotFound, match="nothing was offloaded"):
                wm.notify_version()
            wm.offload({"a": torch.ones(2)}, 4, 0, 1)
            assert wm.notify_version() == Notified(wait=False, ahead=1, set="told")
            heard = controller.heard.pop()
            (span,) = heard.pop("spans")[:1]
            assert (span["lane"], span["what"], span["bytes"]) == ("trainer", "offload", 8)
            assert span["began_ms_ago"] > span["ended_ms_ago"] >= 0
            assert heard == {
                "path": "/notify_version",
                "model_id": "told",
                "incarnation": wm.incarnation,
                "version": 4,
                "sender_endpoint": wm.endpoint,
                "sync": False,
            }
            wm.offload({"a": torch.full((2,), 2.0)}, 5, 0, 1)
            controller.answer = (200, NOTIFIED.replace(b"false", b"true"))
            told = wm.notify_version_async(5).result(30.0)
            assert told is not None
            assert told.wait
            heard = controller.heard[-1]
            # Of a version that was sealed, more is known.
            assert [s["what"] for s in heard["spans"]] == ["offload", "seal"]
            assert heard["delta_ratio"] > 0
            assert 0 <= heard["delta_sparsity"] <= 1
            failures: list[tuple[tuple[int, bytes], type[Exception], str]] = [
                ((409, b"gate is closed"), WindlassStale, "409: gate is closed"),
                ((401, b"no"), WindlassDenied, "401"),
                ((500, b"\xff broken"), WindlassPeerLost, "500"),
                ((200, b"<html>"), WindlassInvalid, "not JSON"),
                ((200, b"[1]"), WindlassInvalid, "not a JSON object"),
                ((200, b""), WindlassInvalid, "makes no sense"),
                ((200, b'{"wait": false, "ahead": "x", "set": "s"}'), WindlassInvalid, "makes no sense"),
            ]
            for answer, kind, text in failures:
                controller.answer = answer
                with pytest.raises(kind, match=text):
                    wm.notify_version()
                with pytest.raises(kind, match="version 5 of 'told'"):
                    wm.notify_version_async().result(30.0)
            controller.answer = None
            begun = time.monotonic()
            with pytest.raises(WindlassTimeout, match=r"within 0\.\d+ s"):
                wm.notify_version(timeout=0.3)
            assert time.monotonic() - begun < 5.0
            controller.over.set()
        controller.shutdown()


def test_a_controller_that_is_not_there_is_named(home: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        # Bound and not listening: connections are refused.
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with WeightManager(model_id="alone", region_dir=home, controller=url) as wm:
            wm.offload({"a": torch.ones(2)}, 1, 0, 1)
            with pytest.raises(WindlassPeerLost, match=url):
                wm.notify_version()


def test_without_a_controller_nothing_is_said_and_no_agent_is_waited_for(home: str) -> None:
    """It used to wait for the agent to listen before it found that there is nobody to tell."""
    with WeightManager(model_id="mute", region_dir=home, controller=None) as wm:
        wm.offload({"a": torch.ones(2)}, 1, 0, 1)
        until("there is no agent", lambda: wm.status()["agent"]["pid"] is not None)
        pid = wm.status()["agent"]["pid"]
        os.kill(pid, signal.SIGSTOP)
        begun = time.monotonic()
        assert wm.notify_version() is None
        assert wm.notify_version_async().result(0) is None
        assert wm.gate(1) is None
        assert time.monotonic() - begun < 1.0
        os.kill(pid, signal.SIGCONT)
