"""XOR with the version before, on the device, compressed by zstd on the host, over one stream (``by_xor`` on the host)."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from peers import zstd
from peers.peer import Engine, Line, Meeting, Pause, Peer, Tensors, Trainer, why_not
from peers.staging import Incoming, Outgoing, buckets, length
from peers.ways.by_xor import LEVEL, whole

#: Bytes that are compressed at once by one of the threads.
BUCKET = 16 << 20
THREADS = os.cpu_count() or 1


class Sender(Trainer):
    def __init__(self, weights: Tensors, meeting: Meeting) -> None:
        self._now = [whole(t) for t in weights.values()]
        self._before = [t.clone() for t in self._now]
        self._buckets = buckets(self._before, BUCKET)
        # As many again are copied while these are compressed.
        self._out = Outgoing(self._now[0].device, BUCKET, 2 * THREADS)
        self._packed = [torch.zeros(zstd.room(BUCKET), dtype=torch.uint8) for _ in range(self._out.count)]
        self._pool = ThreadPoolExecutor(THREADS)
        self._line = Line.listen(meeting)

    def send(self, version: int) -> None:
        self._line.say(version)
        # What was the version before becomes the difference, is sent, and becomes the new version.
        for now, before in zip(self._now, self._before):
            before.bitwise_xor_(now)
        waiting: deque[tuple[int, Future[int]]] = deque()

        def send_until(free: int) -> None:
            """Sends what is compressed, in order, up to a bucket, whose memory is free then."""
            while waiting and waiting[0][0] <= free:
                number, size = waiting.popleft()
                data = self._packed[number % self._out.count][: size.result()]
                self._line.say(data.numel())
                self._line.write(data.numpy())

        for number, host in enumerate(self._out.each(self._buckets, send_until)):
            into = self._packed[number % self._out.count]
            waiting.append((number, self._pool.submit(zstd.compress, host, into, LEVEL)))
            while waiting and waiting[0][1].done():
                send_until(waiting[0][0])
        send_until(len(self._buckets))
        for now, before in zip(self._now, self._before):
            before.copy_(now)


class Receiver(Engine):
    def __init__(self, weights: Tensors, meeting: Meeting, pause: Pause) -> None:
        self._live, self._pause = [whole(t) for t in weights.values()], pause
        self._changes = [torch.zeros_like(t) for t in self._live]
        self._buckets = buckets(self._changes, BUCKET)
        self._in = Incoming(self._live[0].device, BUCKET, 2 * THREADS)
        self._packed = [torch.zeros(zstd.room(BUCKET), dtype=torch.uint8) for _ in range(self._in.count)]
        self._pool = ThreadPoolExecutor(THREADS)
        self._line = Line.connect(meeting)

    def take(self, version: int) -> None:
        assert self._line.hear() == (version,)
        # Unpacked and on the device before the pause, so that the pause is only the XOR.
        waiting: deque[tuple[int, Future[None]]] = deque()

        def put_first() -> None:
            number, done = waiting.popleft()
            done.result()
            self._in.put(number, self._buckets[number])

        for number, bucket in enumerate(self._buckets):
            while waiting and (len(waiting) >= self._in.count or waiting[0][1].done()):
                put_first()
            host = self._in.room(number, bucket)[: length(bucket)]
            packed = self._packed[number % self._in.count][: self._line.hear()[0]]
            self._line.read(packed.numpy())
            waiting.append((number, self._pool.submit(zstd.decompress, packed, host)))
        while waiting:
            put_first()
        with self._pause():
            for live, change in zip(self._live, self._changes):
                live.bitwise_xor_(change)


class Xor(Peer):
    name = "XOR + zstd"
    what = "XOR with the version before on the device, zstd on the host, one TCP stream; unpacked and on the device before the pause"
    settings = f"level {LEVEL}, {BUCKET >> 20} MiB for each thread, as many threads as cores; pinned buffers"
    packages = ("torch",)

    def missing(self) -> str | None:
        return why_not(zstd.library)

    def versions(self) -> dict[str, str]:
        return {**super().versions(), **({} if self.missing() else {"libzstd": zstd.version()})}

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        return Sender(weights, meeting)

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Receiver(weights, meeting, pause)


PEERS = [Xor()]
