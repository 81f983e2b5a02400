"""Tries the backends of vLLM's own weight transfer, in vLLM's environment, and prints why each does not start, as JSON lines.

``nccl`` is tried as vLLM does it: a trainer and a worker make vLLM's NCCL communicator, here in two processes. ``ipc`` makes the
trainer's engine, which asks for the GPU whose memory it shares.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import sys
from collections.abc import Callable
from typing import Any


def why_not(attempt: Callable[[], Any]) -> str | None:
    try:
        attempt()
    except BaseException as e:
        text = str(e).strip().splitlines()
        return f"{type(e).__name__}: {text[0] if text else ''}"
    return None


def join(rank: int, port: int, answers: Any) -> None:
    import torch
    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

    answers.put(
        why_not(lambda: stateless_init_process_group("127.0.0.1", port, rank, 2, torch.device("cpu")))
        or "it starts here: no measurement is written for it"
    )


def nccl() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=join, args=(rank, port, answers), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    reason = str(answers.get(timeout=180))
    for process in ranks:
        process.kill()
    return reason


def ipc() -> str:
    import torch
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

    class Client:
        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    made = why_not(
        lambda: IPCTrainerWeightTransferEngine.trainer_init(
            IPCTrainerInitInfo(rank=0), client=Client(), source=ModuleSource(torch.nn.Linear(2, 2))
        )
    )
    return made or "it starts here: no measurement is written for it"


def main() -> None:
    import vllm

    for backend, attempt in (("nccl", nccl), ("ipc", ipc)):
        reason = attempt()
        sys.stdout.write(json.dumps({"backend": backend, "vllm": vllm.__version__, "reason": reason}) + "\n")


if __name__ == "__main__":
    main()
