"""ZeroMQ over TCP: a message for each tensor, sent from the parameters' own memory."""

from __future__ import annotations

from typing import Any

from peers.peer import PATIENCE, Engine, Landing, Meeting, Pause, Peer, Tensors, Trainer, lacks, raw

#: Messages that are queued at each end.
QUEUED = 4


def socket_of(kind: str) -> Any:
    import zmq

    made = zmq.Context.instance().socket(getattr(zmq, kind))
    made.setsockopt(zmq.SNDHWM, QUEUED)
    made.setsockopt(zmq.RCVHWM, QUEUED)
    made.setsockopt(zmq.SNDTIMEO, int(PATIENCE * 1000))
    made.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
    return made


class Pusher(Trainer):
    def __init__(self, weights: Tensors, meeting: Meeting) -> None:
        self._weights = weights
        self._socket = socket_of("PUSH")
        meeting.put("zmq", self._socket.bind_to_random_port("tcp://127.0.0.1"))

    def send(self, version: int) -> None:
        self._socket.send(version.to_bytes(8, "little"))
        messages = [self._socket.send(raw(t), copy=False, track=True) for t in self._weights.values()]
        for message in messages:
            message.wait(PATIENCE)


class Puller(Engine):
    def __init__(self, landing: Landing, meeting: Meeting) -> None:
        self._landing = landing
        self._socket = socket_of("PULL")
        self._socket.connect(f"tcp://127.0.0.1:{meeting.get('zmq')}")

    def take(self, version: int) -> None:
        import torch

        assert int.from_bytes(self._socket.recv(), "little") == version
        with self._landing.open() as tensors:
            for tensor in tensors.values():
                message = self._socket.recv(copy=False)
                tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(message.buffer, dtype=torch.uint8))


class Zmq(Peer):
    packages = ("pyzmq", "torch")
    settings = f"no copies at the sender (copy=False), {QUEUED} messages queued"

    def __init__(self, staged: bool) -> None:
        self._staged = staged
        self.name = "ZeroMQ" + (", staged" if staged else "")
        self.what = "PUSH to PULL, a message for each tensor, " + (
            "into a second copy of the model, then one copy" if staged else "into the live parameters"
        )

    def missing(self) -> str | None:
        return lacks("zmq")

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        return Pusher(weights, meeting)

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Puller(Landing(weights, pause, self._staged), meeting)


PEERS = [Zmq(staged=False), Zmq(staged=True)]
