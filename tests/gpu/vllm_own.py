"""vLLM's own ways to give a server new weights on one GPU, for `gpu_vllm.py --beside`: what a trainer would do without Windlass.

| way | the trainer | the server |
|---|---|---|
| `reload` | writes a checkpoint to a tmpfs | `reload_weights` with its path, by `/collective_rpc` |
| `ipc` | sends CUDA handles of its parameters (`IPCTrainerWeightTransferEngine`) | `/update_weights` |

Both pause generation (`keep`), empty the prefix cache, as the policy `reset` does, and resume. The server needs its development
mode (:data:`ENV`) and :data:`OPTIONS`, and must have begun from a checkpoint: vLLM cannot reload one that began with `dummy`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

ENV = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
OPTIONS = ["--weight-transfer-config", json.dumps({"backend": "ipc"})]
WAYS = ("ipc", "reload")


def ipc_sender(url: str, model: Any, packed_bytes: int = 0) -> Any:
    """The trainer's end of vLLM's IPC backend. It sends handles of all parameters, or packs them into a buffer of so many bytes first."""
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

    wire = {"packed": True, "packed_buffer_size_bytes": packed_bytes} if packed_bytes else {}
    return IPCTrainerWeightTransferEngine.trainer_init(
        IPCTrainerInitInfo(rank=0, **wire),
        client=HTTPVLLMWeightSyncClient(url),
        source=ModuleSource(model),
    )


class Own:
    """The two ways, into one server."""

    def __init__(self, engine: Any, model: Any, checkpoint: Path) -> None:
        self._engine, self._model, self._checkpoint = engine, model, checkpoint
        self._sender: Any = None

    def sync(self, way: str) -> dict[str, float]:
        """One version, in milliseconds."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        if way == "reload":
            self._model.save_pretrained(self._checkpoint)
        written = time.perf_counter()
        self._post("/pause?mode=keep&clear_cache=false")
        paused = time.perf_counter()
        if way == "reload":
            self._post(
                "/collective_rpc",
                {"method": "reload_weights", "kwargs": {"weights_path": str(self._checkpoint)}},
            )
        else:
            self._sending().send_weights()
        self._post("/reset_prefix_cache?reset_running_requests=true")
        self._post("/resume")
        ended = time.perf_counter()
        # Handles are of the parameters themselves: they may not change until the server has read them.
        free = written if way == "reload" else ended
        return {
            "trainer_blocked_ms": 1e3 * (free - began),
            "engine_pause_ms": 1e3 * (ended - paused),
            "step_to_visible_ms": 1e3 * (ended - began),
        }

    def _sending(self) -> Any:
        if self._sender is None:
            self._sender = ipc_sender(self._engine.url, self._model)
        return self._sender

    def _post(self, path: str, body: Any = None) -> None:
        self._engine.request("POST", path, body or {}, timeout=600.0)
