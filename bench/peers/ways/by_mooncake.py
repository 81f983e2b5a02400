"""Mooncake's transfer engine over TCP: the engine reads the trainer's registered parameters in one batch."""

from __future__ import annotations

import os
from typing import Any

from peers.peer import Engine, Landing, Line, Meeting, Pause, Peer, Tensors, Trainer, lacks


def engine_of(tensors: Tensors) -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    from mooncake.engine import TransferEngine

    made = TransferEngine()
    if code := made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError(f"the transfer engine answers {code}")
    found = list(tensors.values())
    if code := made.batch_register_memory([t.data_ptr() for t in found], [t.nbytes for t in found]):
        raise RuntimeError(f"memory cannot be registered: {code}")
    return made


class Exposed(Trainer):
    def __init__(self, weights: Tensors, meeting: Meeting) -> None:
        self._engine = engine_of(weights)
        meeting.put("mooncake", [self._engine.get_rpc_port(), [t.data_ptr() for t in weights.values()]])
        self._line = Line.listen(meeting)

    def send(self, version: int) -> None:
        self._line.say(version)
        # They are read from the live parameters.
        self._line.hear()


class Reader(Engine):
    def __init__(self, landing: Landing, meeting: Meeting) -> None:
        self._landing = landing
        self._engine = engine_of(landing.tensors)
        port, self._theirs = meeting.get("mooncake")
        self._peer = f"127.0.0.1:{port}"
        self._line = Line.connect(meeting)

    def take(self, version: int) -> None:
        assert self._line.hear() == (version,)
        with self._landing.open() as tensors:
            found = list(tensors.values())
            code = self._engine.batch_transfer_sync_read(
                self._peer, [t.data_ptr() for t in found], self._theirs, [t.nbytes for t in found]
            )
            if code:
                raise RuntimeError(f"the read ended with {code}")
            self._line.say(version)


class Mooncake(Peer):
    packages = ("mooncake-transfer-engine-non-cuda", "torch")
    settings = "protocol tcp, handshake without a metadata server; memory is registered once"

    def __init__(self, staged: bool) -> None:
        self._staged = staged
        self.name = "Mooncake over TCP" + (", staged" if staged else "")
        self.what = "one batch of reads of the trainer's parameters " + (
            "into a second copy of the model, then one copy" if staged else "into the live parameters"
        )

    def missing(self) -> str | None:
        return lacks("mooncake.engine")

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        return Exposed(weights, meeting)

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Reader(Landing(weights, pause, self._staged), meeting)


PEERS = [Mooncake(staged=False), Mooncake(staged=True)]
