"""The two processes of a measurement: a trainer and an engine, each with weights and one end of a peer.

Owns: what runs in them, and :class:`Pair`, by which the runner drives them. Words and answers go over pipes, which no counter of
bytes sees. Times are those of the system's monotonic clock, which all processes share. Must not: know a peer.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

#: How long a side may take to answer, and to close.
ANSWER_S, CLOSE_S = 240.0, 30.0


def peer_of(place: str) -> Any:
    """``MODULE:NAME`` of the list of peers in a module."""
    module, _, name = place.partition(":")
    return next(peer for peer in importlib.import_module(module).PEERS if peer.name == name)


def trim() -> None:
    """Gives back what was freed, so that memory of the benchmark itself is not counted."""
    ctypes.CDLL(None).malloc_trim(0)


def serve(link: Connection, role: str, place: str, size: str, seed: int, share: float, home: str, port: int, server: str, device_name: str) -> None:  # fmt: skip
    """One side, until it is told to close."""
    os.setsid()
    sys.stdout.flush()
    from peers.device import Device
    from peers.model import SIZES, Weights
    from peers.peer import Meeting, Pause

    device = Device(device_name)
    pause = Pause(device.wait)
    weights: Any = None
    end: Any = None

    def answer(word: str, given: Any) -> Any:
        nonlocal weights, end
        if word == "weights":
            device.use()
            weights = Weights(SIZES[size], seed, share, device_name)
            trim()
            device.trim()
            return weights.nbytes
        if word == "open":
            peer, meeting = peer_of(place), Meeting(Path(home), port, server)
            if role == "trainer":
                end = peer.trainer(weights.tensors, meeting)
            else:
                end = peer.engine({} if weights is None else weights.tensors, meeting, pause)
            return peer.versions()
        if word == "step":
            changed = weights.step()
            device.wait()
            trim()
            return changed
        if word == "trim":
            return device.trim() if weights is not None else None
        if word == "version":
            pause.seconds, pause.ended = 0.0, None
            began = time.monotonic()
            if role == "trainer":
                end.send(given)
                device.wait_stream()
            else:
                end.take(given)
            # What an engine's end does after the pause is done while the engine serves.
            return {"began": began, "ended": pause.ended or time.monotonic(), "pause": pause.seconds}
        if word == "settle":
            return end.settle()
        if word == "digest":
            return (end.digest() if role == "engine" else None) or weights.digest(fused=given)
        if word == "close":
            return end.close() if end is not None else None
        raise ValueError(word)

    while True:
        try:
            word, given = link.recv()
        except EOFError:
            os._exit(0)
        try:
            link.send((None, answer(word, given)))
        except BaseException as e:
            link.send((f"{type(e).__name__}: {e}\n{traceback.format_exc()}", None))
        if word == "close":
            # Libraries that a peer has loaded may have threads that do not end.
            os._exit(0)


class Side:
    """One of the processes, seen from the runner."""

    def __init__(self, context: Any, *words: Any) -> None:
        self.role = words[0]
        self._link, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *words), daemon=False)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid

    def tell(self, word: str, given: Any = None) -> None:
        self._link.send((word, given))

    def hear(self, patience: float | None = None) -> Any:
        patience = patience or ANSWER_S
        if not self._link.poll(patience):
            raise TimeoutError(f"the {self.role} has not answered within {patience:g} s")
        try:
            error, answer = self._link.recv()
        except EOFError:
            raise RuntimeError(f"the {self.role} has ended") from None
        if error is not None:
            raise RuntimeError(f"the {self.role}: {error}")
        return answer

    def answers_before(self, other: Side, patience: float | None) -> bool:
        """Waits for the first of the two."""
        return self._link in wait([self._link, other._link], patience or ANSWER_S)

    def ask(self, word: str, given: Any = None) -> Any:
        self.tell(word, given)
        return self.hear()

    def end(self) -> None:
        self._link.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)


class Pair:
    """A trainer and an engine with one peer between them."""

    def __init__(self, context: Any, place: str, size: str, seed: int, share: float, port: int, server: str = "", device: str = "cpu") -> None:  # fmt: skip
        self.home = Path(tempfile.mkdtemp(prefix="windlass-peers-", dir="/dev/shm"))
        self.served = bool(server)
        #: Whether its processes come to rest after a version, as far as is known.
        self.rests = True
        words = (place, size, seed, share, str(self.home), port, server)
        self.trainer = Side(context, "trainer", *words, device)
        # With a server, the engine's end has no weights, and needs no device.
        self.engine = Side(context, "engine", *words, "cpu" if server else device)

    def both(self, word: str, given: Any = None, patience: float | None = None) -> tuple[Any, Any]:
        """The engine is told first, and both answer."""
        self.engine.tell(word, given)
        self.trainer.tell(word, given)
        # One that has failed is heard before the other, which waits for it in vain.
        first = self.engine if self.engine.answers_before(self.trainer, patience) else self.trainer
        answers = {side: side.hear(patience) for side in (first, *{self.trainer, self.engine} - {first})}
        return answers[self.trainer], answers[self.engine]

    def weights(self) -> int:
        """Both hold them; the parameters of a real engine are in its server."""
        self.trainer.tell("weights")
        if not self.served:
            self.engine.ask("weights")
        return int(self.trainer.hear())

    def equal(self) -> bool:
        """Whether the engine's parameters are the trainer's, bit for bit."""
        trainer, engine = self.both("digest", self.served)
        return bool(trainer == engine)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.both("close", patience=CLOSE_S)
        for side in (self.trainer, self.engine):
            side.end()
        shutil.rmtree(self.home, ignore_errors=True)


def forks() -> Any:
    """Processes that fork from one that has imported torch."""
    # The process that forks does not get the path of this one otherwise.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "numpy", "peers.model", "peers.peer"])
    return context
