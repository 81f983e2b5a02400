"""A request in flight: streamed, so that it is known when it has begun."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.parse
from collections.abc import Sequence
from typing import Any


class Flight:
    """One streamed request to an SGLang server. Returns from its constructor when the first token is there."""

    def __init__(self, url: str, prompt: Sequence[int], tokens: int, **more: Any) -> None:
        parts = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=120)
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True, **more}
        self._connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        self._last: dict[str, Any] = {}
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        if not self._begun.wait(60):
            raise TimeoutError("the request did not begin")

    def _read(self) -> None:
        try:
            for line in self._connection.getresponse():
                text = line.decode().strip().removeprefix("data: ")
                if text.startswith("{"):
                    self._last = json.loads(text)
                    self._begun.set()
        finally:
            self._begun.set()
            self._connection.close()

    @property
    def done(self) -> bool:
        """Whether its answer has ended."""
        return not self._thread.is_alive()

    def result(self, timeout: float = 120.0) -> dict[str, Any]:
        """The whole answer."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError("the request did not end")
        return self._last
