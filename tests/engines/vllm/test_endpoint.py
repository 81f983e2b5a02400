"""A production server, without dev mode: our routes, our token, and a pause that ends by itself."""

from __future__ import annotations

import http.client
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import servers
import tiny
from flight import Flight, of_vllm
from publishing import Publishing

TOKEN = "a-secret-of-this-test"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
KIND: tiny.Kind = "qwen3moe"


class World:
    """A server, a trainer that it follows, and what was sent last."""

    def __init__(self, server: servers.Vllm, publishing: Publishing) -> None:
        self.server = server
        self.publishing = publishing
        self.trainer = tiny.model(KIND)
        self.version = 0

    def publish(self) -> dict[str, Any]:
        """The order for a new version."""
        self.version += 1
        tiny.stir(self.trainer, self.version)
        return self.publishing.publish(self.trainer, self.version)

    def load(self, order: dict[str, Any], **pause: Any) -> Any:
        body = {"order": order, "pause": pause}
        return self.server.post("/windlass/v1/load", body, headers=HEADERS, timeout=90)

    def status(self) -> Any:
        return self.server.get("/windlass/v1/status", headers=HEADERS)

    def wait(self, what: Callable[[Any], bool], seconds: float = 30.0) -> Any:
        until = time.monotonic() + seconds
        while True:
            status = self.status()
            if what(status):
                return status
            assert time.monotonic() < until, status
            time.sleep(0.02)


@pytest.fixture(scope="module")
def world(checkpoint: Callable[[tiny.Kind], Path]) -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="engine-") as home:
        options = {"dev": False, "plugins": "windlass,plain_weights", "env": {"WINDLASS_TOKEN": TOKEN}}
        with Publishing(Path(home)) as publishing, servers.Vllm(checkpoint(KIND), **options) as server:
            yield World(server, publishing)


def refused(call: Callable[[], Any]) -> tuple[int, Any]:
    with pytest.raises(servers.HttpFailure) as caught:
        call()
    return caught.value.status, json.loads(caught.value.body)["error"]


@pytest.mark.timeout(400)
def test_a_server_without_dev_mode_follows_five_versions(world: World) -> None:
    hows = []
    for mode in ("keep", "wait", "abort", "keep", "keep"):
        order = world.publish()
        told = world.load(order, mode=mode)
        assert world.server.answers() == tiny.answers(world.trainer)
        hows.append(told["workers"][0]["last"]["how"])
        status = world.status()
        label = f"windlass:{order['incarnation']:016x}:{order['version']}"
        assert (status["weight_version"], status["paused"], status["fenced"]) == (label, False, False)
    # Weights of a CPU are packed: nothing is written past the engine's loader.
    assert hows == ["session"] * 5
    assert world.load(order)["workers"][0]["last"]["how"] == "skipped"


@pytest.mark.timeout(400)
def test_a_request_without_the_token_is_refused(world: World) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
        status, error = refused(lambda h=headers: world.server.get("/windlass/v1/status", headers=h))
        assert (status, error["kind"]) == (401, "denied")
    assert refused(lambda: world.server.post("/windlass/v1/load", {}, headers=HEADERS))[0] == 400


@pytest.mark.timeout(400)
def test_a_load_goes_on_when_its_client_is_gone(world: World) -> None:
    order = world.publish()
    body = json.dumps({"order": order})
    connection = http.client.HTTPConnection("127.0.0.1", world.server.port)
    connection.request("POST", "/windlass/v1/load", body, {**HEADERS, "Content-Type": "application/json"})
    connection.close()
    wanted = f":{order['version']}"
    world.wait(lambda s: s["weight_version"].endswith(wanted) and not s["paused"])
    assert world.server.answers() == tiny.answers(world.trainer)


def tokens_of(flight: Flight) -> int:
    """How many tokens came."""
    return sum(len(choice.get("token_ids") or ()) for piece in flight.pieces for choice in piece["choices"])


@pytest.mark.timeout(400)
def test_a_pause_that_does_not_come_about_within_its_lease_is_taken_back(world: World) -> None:
    for _ in range(8):
        before = world.status()["weight_version"]
        order = world.publish()
        busy = of_vllm(world.server.url, [5, 6], 450)
        try:
            status, error = refused(lambda order=order: world.load(order, mode="wait", lease=0.05))
            assert (status, error["kind"]) == (504, "timeout")
            now = world.wait(lambda s: not s["paused"])
            assert (now["weight_version"], now["transaction"]) == (before, None)
            break
        except pytest.fail.Exception:
            # On a busy machine the answer may be complete before the order is there.
            assert world.status()["weight_version"] != before
        finally:
            busy.result()
    else:
        raise AssertionError("no order found the answer incomplete")
    assert tokens_of(busy) == 450
    world.load(order)
    assert world.server.answers() == tiny.answers(world.trainer)


@pytest.mark.timeout(400)
def test_requests_in_flight_go_on_with_the_new_weights_when_they_are_kept(world: World) -> None:
    order = world.publish()
    busy = of_vllm(world.server.url, [9, 8], 400)
    world.load(order, mode="keep")
    busy.result()
    assert tokens_of(busy) == 400
    assert world.server.answers() == tiny.answers(world.trainer)


@pytest.mark.timeout(400)
def test_what_does_not_fit_is_named_and_the_old_version_goes_on_serving(world: World) -> None:
    world.load(world.publish())
    before, answers = world.status()["weight_version"], world.server.answers()
    good = world.publishing.tensors()
    norm = "model.layers.1.input_layernorm.weight"
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("missing", {k: v for k, v in good.items() if k != norm}, norm),
        ("shape", {**good, norm: good[norm].repeat(2)}, norm),
        ("dtype", {**good, norm: good[norm].double()}, norm),
    ]
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="engine-") as home:
        for case, weights, name in cases:
            with Publishing(Path(home) / case, "policy") as other:
                order = other.publish(weights, world.version + 1)
                status, error = refused(lambda o=order: world.load(o))
                assert (status, error["kind"]) == (400, "invalid"), case
                assert name in error["text"], case
    stale = {**world.publishing.order(), "version": world.version + 7}
    assert refused(lambda: world.load(stale))[0] == 409
    now = world.status()
    assert (now["weight_version"], now["paused"], now["workers"][0]["state"]) == (before, False, "clean")
    assert world.server.answers() == answers
    world.load(world.publish())
    assert world.server.answers() == tiny.answers(world.trainer)
