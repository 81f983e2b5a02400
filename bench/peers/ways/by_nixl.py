"""NIXL: the engine reads the trainer's registered parameters by one-sided reads, by UCX over TCP."""

from __future__ import annotations

import os
import time
from typing import Any

from peers.peer import PATIENCE, Engine, Landing, Line, Meeting, Pause, Peer, Tensors, Trainer, lacks

#: TCP as between hosts without RDMA: no shared memory, no reads of another process.
UCX = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}


def agent_of(name: str, tensors: Tensors) -> Any:
    # Memory of a GPU goes by what UCX has for it.
    if not any(tensor.is_cuda for tensor in tensors.values()):
        os.environ.update(UCX)
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


class Exposed(Trainer):
    def __init__(self, weights: Tensors, meeting: Meeting) -> None:
        self._agent = agent_of("trainer", weights)
        tensors = list(weights.values())
        self._registered = self._agent.register_memory(tensors)
        descriptors = self._agent.get_xfer_descs(tensors)
        (meeting.home / "metadata").write_bytes(self._agent.get_agent_metadata())
        (meeting.home / "descriptors").write_bytes(self._agent.get_serialized_descs(descriptors))
        self._line = Line.listen(meeting)

    def send(self, version: int) -> None:
        self._line.say(version)
        # They are read from the live parameters.
        self._line.hear()


class Reader(Engine):
    def __init__(self, landing: Landing, meeting: Meeting) -> None:
        self._landing = landing
        self._agent = agent_of("engine", landing.tensors)
        tensors = list(landing.tensors.values())
        self._registered = self._agent.register_memory(tensors)
        self._line = Line.connect(meeting)
        remote = self._agent.add_remote_agent((meeting.home / "metadata").read_bytes())
        theirs = self._agent.deserialize_descs((meeting.home / "descriptors").read_bytes())
        self._read = self._agent.initialize_xfer("READ", self._agent.get_xfer_descs(tensors), theirs, remote)

    def take(self, version: int) -> None:
        assert self._line.hear() == (version,)
        with self._landing.open():
            state, until = self._agent.transfer(self._read), time.monotonic() + PATIENCE
            while state == "PROC":
                if time.monotonic() > until:
                    raise TimeoutError("the read has not ended")
                time.sleep(0.0005)
                state = self._agent.check_xfer_state(self._read)
            if state != "DONE":
                raise RuntimeError(f"the read ended as {state}")
            self._line.say(version)


class Nixl(Peer):
    packages = ("nixl-cu12", "torch")
    settings = "UCX_TLS=tcp; memory is registered and the transfer prepared once"

    def __init__(self, staged: bool) -> None:
        self._staged = staged
        self.name = "NIXL over TCP" + (", staged" if staged else "")
        self.what = "one-sided reads of the trainer's parameters " + (
            "into a second copy of the model, then one copy" if staged else "into the live parameters"
        )

    def missing(self) -> str | None:
        return lacks("nixl_cu12._api")

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        return Exposed(weights, meeting)

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Reader(Landing(weights, pause, self._staged), meeting)


PEERS = [Nixl(staged=False), Nixl(staged=True)]
