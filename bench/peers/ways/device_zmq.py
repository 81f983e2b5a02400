"""ZeroMQ over TCP, from pinned buffers and into them (``by_zmq`` on the host)."""

from __future__ import annotations

from typing import Any

import torch

from peers.peer import PATIENCE, Engine, Landing, Meeting, Pause, Peer, Tensors, Trainer, lacks
from peers.staging import Incoming, Outgoing, buckets
from peers.ways.by_zmq import QUEUED, socket_of

#: Bytes of a message.
BUCKET = 64 << 20


class Pusher(Trainer):
    def __init__(self, weights: Tensors, meeting: Meeting) -> None:
        self._buckets = buckets(weights.values(), BUCKET)
        self._out = Outgoing(next(iter(weights.values())).device, BUCKET, 2 * QUEUED)
        self._socket = socket_of("PUSH")
        meeting.put("zmq", self._socket.bind_to_random_port("tcp://127.0.0.1"))

    def send(self, version: int) -> None:
        self._socket.send(version.to_bytes(8, "little"))
        messages: list[Any] = []
        for host in self._out.each(self._buckets, lambda number: messages[number].wait(PATIENCE)):
            messages.append(self._socket.send(host.numpy(), copy=False, track=True))
        for message in messages:
            message.wait(PATIENCE)


class Puller(Engine):
    def __init__(self, landing: Landing, meeting: Meeting) -> None:
        self._landing = landing
        self._buckets = buckets(landing.tensors.values(), BUCKET)
        self._in = Incoming(next(iter(landing.tensors.values())).device, BUCKET, 2 * QUEUED)
        self._socket = socket_of("PULL")
        self._socket.connect(f"tcp://127.0.0.1:{meeting.get('zmq')}")

    def take(self, version: int) -> None:
        assert int.from_bytes(self._socket.recv(), "little") == version
        with self._landing.open():
            for number, bucket in enumerate(self._buckets):
                message = self._socket.recv(copy=False)
                # From ZeroMQ's own memory, which is not pinned.
                host = self._in.room(number, bucket)
                host.copy_(torch.frombuffer(message.buffer, dtype=torch.uint8))
                self._in.put(number, bucket)


class Zmq(Peer):
    packages = ("pyzmq", "torch")
    settings = f"pinned buffers and messages of {BUCKET >> 20} MiB, no copies at the sender (copy=False), {QUEUED} messages queued"

    def __init__(self, staged: bool) -> None:
        self._staged = staged
        self.name = "ZeroMQ" + (", staged" if staged else "")
        self.what = "PUSH to PULL of buckets in host memory, and from there " + (
            "into a second copy of the model, then one copy" if staged else "into the live parameters"
        )

    def missing(self) -> str | None:
        return lacks("zmq")

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        return Pusher(weights, meeting)

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Puller(Landing(weights, pause, self._staged), meeting)


PEERS = [Zmq(staged=False), Zmq(staged=True)]
