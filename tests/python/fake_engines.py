"""Servers that speak the engines' HTTP dialects and remember what they were asked; for what real ones do, see
``tests/engines``."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: What a route answers: status and body, or a function of (body) that gives both.
Answer = Any


class Fake:
    """One server. ``routes`` maps "METHOD /path" to an answer; what is not there is 404."""

    def __init__(self, routes: dict[str, Answer]) -> None:
        self.routes = dict(routes)
        self.asked: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.queries: list[str] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                path, _, query = self.path.partition("?")
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                fake.asked.append((path, body))
                fake.headers.append({name.lower(): value for name, value in self.headers.items()})
                fake.queries.append(query)
                answer = fake.routes.get(f"{self.command} {path}", (404, {"detail": "Not Found"}))
                if callable(answer):
                    answer = answer(body)
                if answer is None:
                    # Hangs up without a word.
                    self.close_connection = True
                    return
                status, value = answer
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = _serve

            def log_message(self, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(routes: dict[str, Answer]) -> Iterator[Fake]:
    fake = Fake(routes)
    try:
        yield fake
    finally:
        fake.close()


def slowly(seconds: float, answer: tuple[int, Any]) -> Callable[[Any], tuple[int, Any]]:
    def wait(body: Any) -> tuple[int, Any]:
        time.sleep(seconds)
        return answer

    return wait


OK = (200, {"success": True})

VLLM = {
    f"POST /{path}": OK
    for path in (
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "shutdown_weight_transfer_engine",
        "pause",
        "resume",
        "reset_prefix_cache",
        "collective_rpc",
        "v1/load_lora_adapter",
    )
}
VLLM_LEGACY = {
    f"POST /{path}": OK
    for path in (
        "init_weight_update_communicator",
        "update_weights",
        "destroy_weights_update_group",
        "reset_prefix_cache",
    )
}
SGLANG = {
    f"POST /{path}": OK
    for path in (
        "init_weights_update_group",
        "begin_weight_update",
        "update_weights_from_distributed",
        "end_weight_update",
        "update_weight_version",
        "destroy_weights_update_group",
        "flush_cache",
        "pause_generation",
        "continue_generation",
        "load_lora_adapter",
        "unload_lora_adapter",
        "update_weights_from_disk",
    )
}
