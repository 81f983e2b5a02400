"""A server that writes down what it is asked, with the answers of an SGLang server."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Recorder:
    """A server that says yes, unless it is told otherwise."""

    def __init__(self, checkpoint: Path) -> None:
        self.home = checkpoint
        self.info: dict[str, Any] = {"version": "0.5.23", "model_path": str(checkpoint), "tp_size": 2}
        #: Answers by route, each used once, the last one for ever: (status, body), or None to hang up.
        self.answers: dict[str, list[tuple[int, Any] | None]] = {}
        self.calls: list[tuple[str, Any]] = []
        #: Whether it has only the earlier names of some routes.
        self.old = False
        self.keys: set[str | None] = set()
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                route = self.path.removeprefix("/")
                recorder.keys.add(self.headers.get("authorization"))
                status, answer = 200, {"success": True, "message": "ok"}
                if self.command == "GET":
                    known = route.startswith("get_") or not recorder.old
                    status, answer = (200, recorder.info) if known else (404, {"detail": "Not Found"})
                else:
                    recorder.calls.append((route, json.loads(body or b"{}")))
                    told = recorder.answers.get(route)
                    if told:
                        given = told.pop(0) if len(told) > 1 else told[0]
                        if given is None:
                            self.connection.close()
                            return
                        status, answer = given
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = _serve

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def routes(self) -> list[str]:
        return [route for route, _ in self.calls]

    def body(self, route: str) -> Any:
        return next(body for called, body in self.calls if called == route)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
