"""Ways into a real vLLM server on a GPU: the sidecar and the plugin of Windlass, and vLLM's own (``tests/gpu/vllm_own.py``)."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from peers.peer import Engine, Line, Meeting, Pause, Peer, Tensors, Trainer, why_not
from peers.ways.by_windlass import module_of
from peers.ways.served import ReloadWeights, Served, WindlassServed, post

#: vLLM's default.
BUFFER = 1 << 30


class Deltas(WindlassServed):
    settings = 'offload_mode="delta"; otherwise as in the README'

    def missing(self) -> str | None:
        plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
        if "windlass" not in plugins.names:
            return "vLLM would not find the plugin: `make gpu-build` writes python/windlass-*.dist-info"
        return super().missing()


class Lender(Trainer):
    """Has vLLM's trainer engine send handles, once the server is paused."""

    def __init__(self, weights: Tensors, meeting: Meeting, packed: bool) -> None:
        import vllm_own

        # Every tensor has to fit into the buffer.
        size = max(BUFFER, *(tensor.nbytes for tensor in weights.values())) if packed else 0
        self._sender: Any = vllm_own.ipc_sender(meeting.server, module_of(weights), size)
        self._line = Line.listen(meeting)

    def send(self, version: int) -> None:
        self._line.say(version)
        self._line.hear()
        # The server reads the live parameters, and has done so when this returns.
        self._sender.send_weights()
        self._line.say(version)


class Borrower(Served):
    """Pauses the server meanwhile, resets its prefix cache and lets it go on."""

    def __init__(self, meeting: Meeting, pause: Pause) -> None:
        super().__init__(meeting, pause)
        self._line = Line.connect(meeting)

    def take(self, version: int) -> None:
        assert self._line.hear() == (version,)
        post(self._url, "/pause?mode=keep&clear_cache=false")
        with self._pause():
            self._line.say(version)
            assert self._line.hear() == (version,)
            post(self._url, "/reset_prefix_cache?reset_running_requests=true")
            post(self._url, "/resume")


class OwnIpc(Peer):
    lane = "vllm"
    packages = ("torch", "vllm")

    def __init__(self, packed: bool) -> None:
        self._packed = packed
        self.name = "vLLM's weight transfer, ipc" + (", packed" if packed else "")
        self.what = "IPCTrainerWeightTransferEngine.send_weights" + (
            ", by way of a buffer" if packed else ": handles of all parameters"
        )
        self.settings = "pause mode keep, prefix cache reset" + (
            ", buffer of 1 GiB, the default, or as large as the largest tensor" if packed else ""
        )

    def missing(self) -> str | None:
        # The trainer's end needs it, too. Importing it takes too long to try it here.
        return why_not(lambda: importlib.metadata.version("vllm"))

    def trainer(self, weights: Tensors, meeting: Meeting) -> Trainer:
        return Lender(weights, meeting, self._packed)

    def engine(self, weights: Tensors, meeting: Meeting, pause: Pause) -> Engine:
        return Borrower(meeting, pause)


PEERS: list[Peer] = [Deltas(), OwnIpc(packed=False), ReloadWeights(), OwnIpc(packed=True)]

#: vLLM's other backends, and why they are left out.
NCCL = "it makes an NCCL communicator of trainer and worker, and NCCL refuses two ranks on one GPU"
LEFT_OUT = {
    **dict.fromkeys(("nccl", "sparse_nccl", "nccl_m2n"), NCCL),
    "sharded_rdt": "it needs Ray's direct transport between actors",
    "modelexpress": "it needs a ModelExpress server",
}
