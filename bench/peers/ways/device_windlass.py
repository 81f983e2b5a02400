"""Windlass on a GPU: deltas over TCP as in docs/own-engine.md, and the packed IPC that it chooses for engines on a trainer's GPU."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from peers.peer import Engine, Line, Meeting, Pause, Peer, Tensors, Trainer, lacks
from peers.ways.by_windlass import Windlass
from peers.ways.device_ipc import hear_bytes, say_bytes

#: Bytes of a bucket: the default of `weight_transfer_threshold_cuda_ipc_GB`.
BUCKET = 1 << 30


class Deltas(Windlass):
    what = "deltas over TCP, staged on the device, and from there into the parameters; the host's image follows after the pause"
    settings = 'offload_mode="delta", keep_deltas=4, as docs/gpu.md and docs/own-engine.md advise'


class Requests:
    """The engine, as Windlass asks it: an update is answered when its copies were started."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def update_weights(self, request: Any) -> None:
        say_bytes(self._line, request.to_json().encode())
        await asyncio.to_thread(self._line.hear)


class Sender(Trainer):
    def __init__(self, weights: Tensors, meeting: Meeting) -> None:
        import gpu_ipc

        from windlass import strategy_from_config

        self._weights, self._buckets = dict(weights), gpu_ipc.buckets
        strategy = strategy_from_config({"strategy": "packed_cuda_ipc"})
        self._made = strategy.create_sender(strategy.create_sync_info())
        self._sender = self._made.__enter__()
        self._line = Line.listen(meeting)

    def send(self, version: int) -> None:
        chunks = self._buckets(self._weights, BUCKET)
        asyncio.run(self._sender.send_chunks(chunks, Requests(self._line)))
        self._line.say(0)
        # Parameters that were lent may change when the engine has read them.
        assert self._line.hear() == (version,)

    def close(self) -> None:
        self._made.__exit__(None, None, None)


class Receiver(Engine):
    def __init__(self, weights: Tensors, meeting: Meeting, pause: Pause) -> None:
        from windlass import strategy_from_config
        from windlass.load.planned import PlannedLoader
        from windlass.load.trace import Copy

        self._pause = pause
        live = [tensor.view(-1) for tensor in weights.values()]
        copies = [
            Copy(name, 0, (1,), place, 0, (1,), (live[place].numel(),)) for place, name in enumerate(weights)
        ]
        self._loader = PlannedLoader(live, copies)
        strategy = strategy_from_config({"strategy": "packed_cuda_ipc"})
        self._receiver = strategy.create_receiver(strategy.create_sync_info())
        self._loop = asyncio.new_event_loop()
        self._line = Line.connect(meeting)

    def take(self, version: int) -> None:
        from windlass.transfer.request import parse_request

        text = hear_bytes(self._line)
        with self._pause():
            while text:
                request = parse_request(bytes(text))
                self._loop.run_until_complete(self._receiver.receive_and_load_weights(request, self._loader))
                self._line.say(len(text))
                text = hear_bytes(self._line)
        self._line.say(version)

    def close(self) -> None:
        self._receiver.close()


class PackedIpc(Peer):
    name = "Windlass, packed CUDA IPC"
    what = 'strategy "packed_cuda_ipc": parameters that have not moved are lent, others packed into an arena; one launch for each request'
    settings = f"buckets of {BUCKET >> 30} GiB, the default"
    packages = ("torch",)

    def missing(self) -> str | None:
        if not torch.cuda.is_available():
            return "it needs a CUDA device"
        return lacks("windlass._windlass")

    def versions(self) -> dict[str, str]:
        import windlass

        return {"windlass": windlass.__version__, **super().versions()}

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        return Sender(weights, meeting)

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Receiver(weights, meeting, pause)


DELTAS, PACKED = Deltas(), PackedIpc()
PEERS: list[Peer] = [DELTAS, PACKED]
