"""The HTTP client against real servers on loopback, bad ones among them."""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from windlass.errors import (
    WindlassDenied,
    WindlassExhausted,
    WindlassInvalid,
    WindlassNotFound,
    WindlassPeerLost,
    WindlassStale,
    WindlassTimeout,
)
from windlass.http import HttpClient


def answer(status: int, body: object) -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(text)) + text


@contextlib.contextmanager
def server(serve: Callable[[socket.socket, int, bytes], None]) -> Iterator[tuple[str, list[bytes]]]:
    """A server that reads each request and hands its connection to ``serve`` with the number of the request."""
    listener = socket.create_server(("127.0.0.1", 0))
    seen: list[bytes] = []

    def run() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(10)
                got = b""
                while b"\r\n\r\n" not in got:
                    got += connection.recv(65536) or b"\r\n\r\n"
                head, _, body = got.partition(b"\r\n\r\n")
                length = 0
                for line in head.lower().splitlines():
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                while len(body) < length:
                    body += connection.recv(65536)
                seen.append(head + b"\r\n\r\n" + body)
                with contextlib.suppress(OSError):
                    serve(connection, len(seen), seen[-1])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)
        assert not thread.is_alive()


def always(reply: bytes) -> Callable[[socket.socket, int, bytes], None]:
    return lambda connection, _number, _request: connection.sendall(reply)


def test_a_call_carries_token_query_and_json_and_gives_back_the_answer() -> None:
    with server(always(answer(200, {"ok": True}))) as (url, seen):
        client = HttpClient(url + "/base/", token="s3cret", name="engine 0")
        told = client.post("/load", {"a": [1]}, stage="load", query={"keep": True, "n": 2})
        assert told.object() == {"ok": True}
    head, _, body = seen[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /base/load?keep=true&n=2 HTTP/1.1")
    assert b"authorization: Bearer s3cret" in head
    assert json.loads(body) == {"a": [1]}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, WindlassInvalid),
        (401, WindlassDenied),
        (404, WindlassNotFound),
        (409, WindlassStale),
        (413, WindlassExhausted),
        (500, WindlassPeerLost),
        (504, WindlassTimeout),
    ],
)
def test_an_error_status_names_engine_stage_status_and_body(status: int, kind: type[Exception]) -> None:
    with (
        server(always(answer(status, b"no\nsuch thing"))) as (url, _),
        pytest.raises(
            kind, match=rf"engine 3 at http://.*: POST /x \(begin\): answered {status}: no such thing"
        ) as e,
    ):
        HttpClient(url, name="engine 3").post("/x", {}, stage="begin")
    assert e.value.name == f"http_{status}"
    assert e.value.advice
    copy = pickle.loads(pickle.dumps(e.value))
    assert type(copy) is type(e.value) and str(copy) == str(e.value)


def test_an_error_of_a_windlass_service_keeps_its_kind_and_advice() -> None:
    body = {"error": {"kind": "peer_lost", "text": "the worker is gone", "advice": "start it"}}
    with server(always(answer(409, body))) as (url, _), pytest.raises(WindlassPeerLost) as e:
        HttpClient(url).get("/x", stage="look")
    assert "the worker is gone" in str(e.value)
    assert e.value.advice == "start it"


def test_an_accepted_status_is_an_answer() -> None:
    with server(always(answer(404, b""))) as (url, _):
        assert HttpClient(url).post("/x", stage="look", accept=(404,)).status == 404


@pytest.mark.parametrize("first", [answer(503, b"busy"), b""], ids=["a 503", "a closed connection"])
def test_an_idempotent_call_is_tried_again_and_another_is_not(first: bytes) -> None:
    def serve(connection: socket.socket, number: int, _request: bytes) -> None:
        connection.sendall(first if number % 2 else answer(200, {}))

    with server(serve) as (url, seen):
        client = HttpClient(url)
        assert client.post("/x", {}, stage="look", idempotent=True).status == 200
        assert len(seen) == 2
        with pytest.raises(WindlassPeerLost):
            client.post("/x", {}, stage="load")
        assert len(seen) == 3


def test_retries_end() -> None:
    with server(always(answer(503, b"busy"))) as (url, seen):
        with pytest.raises(WindlassPeerLost, match="503"):
            HttpClient(url, attempts=2).get("/x", stage="look")
        assert len(seen) == 2


def test_a_server_that_says_nothing_meets_the_deadline() -> None:
    done = threading.Event()
    with server(lambda *_: done.wait(10) and None) as (url, seen):
        began = time.monotonic()
        with pytest.raises(WindlassTimeout, match="no answer within 0.3 s"):
            HttpClient(url).get("/x", stage="look", timeout=0.3)
        assert time.monotonic() - began < 5
        done.set()
    assert len(seen) == 1, "a deadline that passed leaves no time for another attempt"


@pytest.mark.parametrize(
    "start", [b"HTTP/1.1 200 OK\r\nx: ", b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n"]
)
def test_a_server_that_trickles_its_answer_meets_the_same_deadline(start: bytes) -> None:
    done = threading.Event()

    def serve(connection: socket.socket, _number: int, _request: bytes) -> None:
        connection.sendall(start)
        while not done.wait(0.02):
            connection.sendall(b"x")

    with server(serve) as (url, _):
        began = time.monotonic()
        with pytest.raises(WindlassTimeout):
            HttpClient(url).get("/x", stage="look", timeout=0.4)
        assert time.monotonic() - began < 5
        done.set()


def test_a_server_that_reads_nothing_meets_the_deadline() -> None:
    # Accepted by the kernel, never by anybody: the socket's buffers fill up.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(WindlassTimeout):
            HttpClient(url).post("/x", b"0" * (32 << 20), stage="load", timeout=0.5)


def test_nobody_there_is_a_lost_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(WindlassPeerLost, match="see|refused"):
        HttpClient(url).get("/x", stage="look")


def test_an_answer_above_the_limit_is_refused() -> None:
    with (
        server(always(answer(200, b"0" * 100))) as (url, _),
        pytest.raises(WindlassExhausted, match="above 99"),
    ):
        HttpClient(url).get("/x", stage="look", limit=99)


def test_an_answer_that_is_no_json_object_says_so() -> None:
    with server(always(answer(200, b"<html>"))) as (url, _), pytest.raises(WindlassInvalid, match="not JSON"):
        HttpClient(url).get("/x", stage="look").object()
    with (
        server(always(answer(200, []))) as (url, _),
        pytest.raises(WindlassInvalid, match="not a JSON object"),
    ):
        HttpClient(url).get("/x", stage="look").object()


@pytest.mark.parametrize(
    "url", ["127.0.0.1:80", "ftp://a", "http://", "http://a:99999", "http://a/?q=1", "http://u:p@a"]
)
def test_what_is_no_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(WindlassInvalid, match="address of a server"):
        HttpClient(url)


def test_a_token_with_a_line_break_is_refused_and_not_repeated() -> None:
    with pytest.raises(WindlassInvalid) as e:
        HttpClient("http://a", token="secret\r\nx: y")
    assert "secret" not in str(e.value)


def test_a_body_that_is_not_plain_data_is_refused() -> None:
    body: Any = {"x": object()}
    with pytest.raises(WindlassInvalid, match="not plain data"):
        HttpClient("http://127.0.0.1:9").post("/x", body, stage="load")
