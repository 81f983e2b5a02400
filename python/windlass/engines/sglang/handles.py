"""Weights into a server on this host by handles to the trainer's memory, of its GPU or of the host.

Owns: :class:`Handles`, what the workers of one server are told of requests of the IPC strategies, and what they answer. The
text of a request goes through ``/update_weights_from_tensor`` as an order does, to the loader that runs in every worker
(:mod:`windlass.engines.sglang.custom`); it opens the handle of its own device and loads what is there. Weights cross neither HTTP
nor a pickle. Called by :class:`windlass.engines.remote.SglangEngine`. Must not: pause, or open a session.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from windlass.engines.sglang import payload
from windlass.engines.sglang.custom import PATH
from windlass.engines.sglang.engine import Facts, connect
from windlass.engines.sglang.reports import raise_worst, read_reports, reports_in, silence
from windlass.errors import WindlassUnsupported
from windlass.transfer.base import strategy_from_config
from windlass.transfer.request import CudaIpcWeightUpdateRequest, PackedCudaIpcWeightUpdateRequest

if TYPE_CHECKING:
    from windlass.http import HttpClient
    from windlass.load.order import Report
    from windlass.transfer.request import WeightUpdateRequest

__all__ = ["REQUESTS", "Handles"]

#: What is told by handles.
REQUESTS = (CudaIpcWeightUpdateRequest, PackedCudaIpcWeightUpdateRequest)
#: Where memory is shared, reports can be left.
WHERE = Path("/dev/shm")


class Handles:
    """One server whose workers open the trainer's memory."""

    def __init__(self, server: HttpClient, strategy: Mapping[str, object], facts: Facts) -> None:
        self._server, self._strategy, self._facts = server, dict(strategy), facts
        #: Whether workers may have something open.
        self.opened = False
        #: What the workers said last.
        self.reports: list[Report] = []

    @classmethod
    def of(cls, server: HttpClient, strategy: Mapping[str, object]) -> Handles:
        """Asks the server whether it can."""
        if strategy_from_config(strategy).get_request_type() not in REQUESTS:
            raise WindlassUnsupported(
                f"{server.name}: {strategy.get('strategy')!r} is no strategy that an SGLang server takes without joining",
                "use broadcast, cuda_ipc, packed_cuda_ipc or lora",
            )
        facts = connect(server).facts(timeout=server.timeout)
        if PATH not in facts.loaders:
            raise WindlassUnsupported(
                f"{server.name} was started without --custom-weight-loader {PATH}, and opens no handles of ours",
                "start it with that flag, or use tcp, or broadcast over gloo",
            )
        if facts.dp > 1:
            raise WindlassUnsupported(
                f"{server.name} has {facts.dp} data-parallel replicas, which SGLang loads from disk only",
                "use tcp",
            )
        return cls(server, strategy, facts)

    def update(self, request: WeightUpdateRequest, *, first: bool, ends: bool) -> None:
        """Every worker loads what a request says; ``first`` begins an update."""
        self.opened = True
        self._tell("update", {"strategy": self._strategy, "request": request.to_dict(), "first": first}, ends)

    def finish(self, *, ends: bool) -> None:
        """Every worker ends the update."""
        self._tell("finish", {}, ends)

    def close(self, *, ends: bool) -> None:
        """Every worker lets go of the trainer's memory."""
        self._tell("close", {}, ends)
        self.opened = False

    def _tell(self, step: Literal["update", "finish", "close"], told: Mapping[str, Any], ends: bool) -> None:
        with reports_in(WHERE) as own:
            text = payload.order({"receive": {"step": step, "reports": own, **told}, "ends": ends})
            body = {
                "serialized_named_tensors": [base64.b64encode(text).decode()] * self._facts.tp,
                "load_format": PATH,
                "flush_cache": False,
                "selector": "target",
            }
            self._server.post("/update_weights_from_tensor", body, stage=step)
            found, silent = read_reports(own, self._facts.tp * self._facts.pp)
            self.reports = found
            raise_worst(self._server.name, found)
            if silent:
                raise silence(self._server.name, silent[0], f"the step {step!r} of an update")
