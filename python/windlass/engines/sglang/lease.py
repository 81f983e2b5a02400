"""A pause that ends with its owner: a process beside this one that lets an engine go on if this one dies too early.

Owns: :class:`Lease`, this process's end, and :func:`main`, the other. Started with the first pause of a loader and kept
for its life, because starting one takes longer than a load. Must not: do anything while its owner lives, or after
something was written: then only a whole load helps, and the engine stays paused for it.

The owner writes a word for each step (``paused``, ``touched``, ``over``) into the pipe that is the other's standard
input. Its end says that the owner is gone, however that came about.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from typing import IO

from windlass.errors import WindlassError
from windlass.http import HttpClient

__all__ = ["Lease"]

log = logging.getLogger("windlass")

#: How long an engine that does not answer is asked to go on, when its owner is gone.
PATIENCE = 60.0


class Lease:
    """The pause of one server, as far as this process holds it."""

    def __init__(self, url: str, token: str | None) -> None:
        self._place = {"url": url, "token": token}
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def paused(self) -> None:
        """It is about to be paused."""
        if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
            self._start()
        self._say("paused")

    def touched(self) -> None:
        """It is about to be written to."""
        self._say("touched")

    def over(self) -> None:
        """It goes on, or is fenced by its owner."""
        self._say("over")

    def close(self) -> None:
        """Ends the other process."""
        if self._process is not None:
            process, self._process = self._process, None
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            if self._owner == os.getpid():
                self.close()

    def _start(self) -> None:
        self._owner = os.getpid()
        path = os.pathsep.join(p for p in sys.path if p)
        try:
            # In a session of its own: what ends this one's process group must not end it too.
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "import sys, windlass.engines.sglang.lease as other; other.main(sys.stdin)",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        except OSError as e:
            log.warning("nobody will let the engine go on if this process dies while it is paused: %s", e)
            self._process = None
            return
        self._say(json.dumps(self._place))

    def _say(self, word: str) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()
        except OSError as e:
            log.warning("the process that guards the pause is gone: %s", e)


def main(words: IO[str]) -> None:
    """Follows its owner's words to their end, and lets the engine go on if that came too early."""
    place = words.readline()
    if not place:
        return
    state = "over"
    for word in words:
        state = word.strip()
    if state != "paused":
        return
    where = json.loads(place)
    engine = HttpClient(where["url"], token=where["token"], timeout=PATIENCE, attempts=100)
    try:
        engine.post("/continue_generation", {}, stage="continue", idempotent=True)
        told = "goes on with the weights it had"
    except WindlassError as e:
        told = f"may be paused still: {e}"
    sys.stderr.write(f"windlass: whoever had paused {engine.name} is gone; it {told}\n")
