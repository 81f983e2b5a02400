"""A request in flight: streamed, so that it is known when it has begun."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any


class Flight:
    """One streamed request. Returns from its constructor when the first token is there."""

    def __init__(self, url: str, path: str, body: Mapping[str, Any]) -> None:
        parts = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=300)
        words = json.dumps({"stream": True, **body})
        self._connection.request("POST", path, words, {"Content-Type": "application/json"})
        self._last: dict[str, Any] = {}
        #: Every piece of the answer.
        self.pieces: list[dict[str, Any]] = []
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        if not self._begun.wait(180):
            raise TimeoutError("the request did not begin")

    def _read(self) -> None:
        try:
            for line in self._connection.getresponse():
                text = line.decode().strip().removeprefix("data: ")
                if text.startswith("{"):
                    self._last = json.loads(text)
                    self.pieces.append(self._last)
                    self._begun.set()
        finally:
            self._begun.set()
            self._connection.close()

    @property
    def done(self) -> bool:
        """Whether its answer has ended."""
        return not self._thread.is_alive()

    def result(self, timeout: float = 300.0) -> dict[str, Any]:
        """The whole answer."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError("the request did not end")
        return self._last


def of_sglang(url: str, prompt: Sequence[int], tokens: int, **more: Any) -> Flight:
    """A request to an SGLang server, whose last piece is the whole answer."""
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    return Flight(url, "/generate", {"input_ids": list(prompt), "sampling_params": sampling, **more})


def of_vllm(url: str, prompt: Sequence[int], tokens: int) -> Flight:
    """A request to a vLLM server, whose pieces are tokens."""
    body = {"model": "tiny", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0.0}
    return Flight(url, "/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True})
