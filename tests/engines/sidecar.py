"""What the tests of the sidecar need beside engines: the sidecar itself, a trainer, and a way to hold requests.

Owns: :class:`Sidecar`, a real ``windlass receive --engine`` as a child process; :class:`Proxy`, which stands between it
and an engine and holds chosen requests, so that a test can kill somebody at an exact moment; :class:`Trainer`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import servers
import tiny
from windlass import WeightManager

#: How long anything may take on a machine that does a lot else.
PATIENCE = 120.0


class Sidecar:
    """``windlass receive`` with engines, or another service, and what it says."""

    def __init__(self, *options: str, service: str = "receive", env: Mapping[str, str] = {}) -> None:
        import os

        command = [sys.executable, "-m", "windlass", service, "--json", *options]
        environment = {**os.environ, "PYTHONPATH": str(servers.PACKAGE), **env}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.events: list[dict[str, Any]] = []
        self._seen = 0
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self.events.append({"event": "ended"})
            self._changed.notify_all()

    def wait(self, event: str, timeout: float = PATIENCE, **fields: Any) -> dict[str, Any]:
        """The next event of this name with these fields."""
        until = time.monotonic() + timeout
        with self._changed:
            while True:
                while self._seen < len(self.events):
                    found = self.events[self._seen]
                    self._seen += 1
                    if found.get("event") == event and all(found.get(k) == v for k, v in fields.items()):
                        return found
                left = until - time.monotonic()
                if left <= 0 or self.events[-1:] == [{"event": "ended"}]:
                    raise TimeoutError(f"no event {event!r} with {fields}; it said {self.events[-20:]}")
                self._changed.wait(left)

    def kill(self) -> None:
        """SIGKILL; its guard, if there is one, lives on."""
        self.process.kill()
        self.process.wait(30)

    def __enter__(self) -> Sidecar:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()


class Proxy:
    """Passes requests on to an engine; holds those to a path before they are sent, or their answers."""

    def __init__(self, target: servers.Server) -> None:
        self._target = target
        self._held: dict[str, str] = {}
        self._changed = threading.Condition()
        self.holding: list[str] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy._pass(self)

            def do_POST(self) -> None:
                proxy._pass(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def hold(self, path: str, what: str) -> None:
        """Holds the ``request`` or the ``answer`` of the next requests to a path."""
        with self._changed:
            self._held[path] = what
            self.holding.clear()

    def wait_held(self, path: str) -> None:
        """Returns when something is held."""
        with self._changed:
            assert self._changed.wait_for(lambda: path in self.holding, PATIENCE), f"nobody asked for {path}"

    def release(self) -> None:
        """Lets everything go."""
        with self._changed:
            self._held.clear()
            self._changed.notify_all()

    def _stop_at(self, path: str, what: str) -> None:
        with self._changed:
            if self._held.get(path) == what:
                self.holding.append(path)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._held.get(path) != what, PATIENCE)

    def _pass(self, request: BaseHTTPRequestHandler) -> None:
        length = int(request.headers.get("content-length") or 0)
        body = request.rfile.read(length)
        if request.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int(request.rfile.readline(), 16):
                body += request.rfile.read(size)
                request.rfile.readline()
            request.rfile.readline()
        path = request.path.partition("?")[0]
        self._stop_at(path, "request")
        keep = ("content-type", "authorization")
        headers = {k: v for k, v in request.headers.items() if k.lower() in keep}
        request.close_connection = True
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self._target.port, timeout=PATIENCE)
            connection.request(request.command, request.path, body or None, headers)
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
            self._stop_at(path, "answer")
            request.send_response(answer.status)
            request.send_header("content-type", answer.getheader("content-type") or "application/json")
            request.send_header("content-length", str(len(data)))
            request.send_header("connection", "close")
            request.end_headers()
            request.wfile.write(data)

    def close(self) -> None:
        """Ends it."""
        self.release()
        self._server.shutdown()
        self._server.server_close()


class Trainer:
    """Publishes versions of a tiny model."""

    def __init__(self, home: Path, kind: tiny.Kind) -> None:
        self.home = home
        self.model = tiny.model(kind)
        self.version = 0
        home.mkdir(exist_ok=True)
        self.manager = WeightManager(model_id="policy", region_dir=str(home))
        #: The same for every life.
        self.region = home / "windlass-policy"

    def publish(self, *, all_of_it: bool = False, extra: Mapping[str, Any] = {}) -> int:
        """A training step and its version."""
        self.version += 1
        if all_of_it:
            tiny.stir(self.model, self.version)
        else:
            tiny.stir_some(self.model, self.version)
        self.offload(list(self.model.named_parameters()) + list(extra.items()))
        return self.version

    def offload(self, named: Sequence[tuple[str, Any]]) -> None:
        self.manager.offload(iter(named), self.version, 0, 1)
        self.manager.wait_delta_ready(self.version)

    def start_over(self) -> None:
        """Another life of the trainer, whose tensors may be others."""
        self.manager.close()
        self.manager = WeightManager(model_id="policy", region_dir=str(self.home))

    def close(self) -> None:
        """Ends its agent."""
        self.manager.close()
