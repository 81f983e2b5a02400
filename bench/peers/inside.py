"""What runs in the workers of a real server: a digest of the live parameters, and a broadcast into them.

vLLM calls it through ``collective_rpc`` (``--worker-extension-cls peers.inside.Inside``). The broadcast is how frameworks extend vLLM's
workers: each tensor is received and given to the model's own ``load_weights``. SGLang calls :func:`look` as a custom weight loader, which
loads nothing. Servers must be able to import this without what other peers need.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from peers.model import SIZES, digest


def group(port: int, rank: int, seconds: float) -> Any:
    """A group of two that leaves the default group of the process alone."""
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=seconds))
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=seconds))


def look(model: Any, named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Writes the digest of a model's parameters to the file that the one tensor names."""
    note = Path(json.loads(bytes(named[0][1].tolist()))["digest"])
    note.with_suffix(".new").write_text(digest(dict(model.named_parameters())))
    note.with_suffix(".new").rename(note)


class Inside:
    """Methods of a worker."""

    model_runner: Any

    def peers_digest(self) -> str:
        """Of its parameters, as the runner computes it of the trainer's."""
        return digest(dict(self.model_runner.get_model().named_parameters()))

    def peers_join(self, port: int, seconds: float) -> bool:
        self._peers_group = group(port, 1, seconds)
        return True

    def peers_take(self, size: str) -> bool:
        """All tensors of a model, one after the other."""
        for name, shape in SIZES[size].tensors().items():
            tensor = torch.empty(shape, dtype=torch.bfloat16)
            self._peers_group.broadcast(tensor, 0).wait()
            self.model_runner.model.load_weights([(name, tensor)])
        return True
