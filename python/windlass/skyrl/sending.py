"""A sync of SkyRL's policy, whichever shape of SkyRL asks for it.

Owns: :class:`Sending`, one per rank of the policy, and :class:`Servers`, which has all workers of SkyRL's vLLM servers do something. Called
by :mod:`windlass.skyrl.strategies` and :mod:`windlass.skyrl.factory`. Must not: import SkyRL.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from windlass.errors import WindlassError
from windlass.frameworks.sender import Published, Sender, listed, settings_of
from windlass.http import HttpClient
from windlass.load.order import Failure, LoadOrder
from windlass.receive.pulling import default_image_dir

if TYPE_CHECKING:
    import torch

__all__ = ["Sending", "Servers"]

log = logging.getLogger("windlass")

#: How often engines are asked whether a version has come to their host.
LOOK_S = 0.02

T = TypeVar("T")


class Servers:
    """The vLLM servers of a run, by vLLM's own routes for development, which SkyRL opens."""

    def __init__(self, urls: Iterable[str]) -> None:
        self._servers = [HttpClient(url, attempts=1) for url in urls]

    def __len__(self) -> int:
        return len(self._servers)

    def pause(self, until: float) -> None:
        """Requests in flight are kept, and go on after :meth:`resume`."""
        self._post("pause", "/pause", until, query={"mode": "keep", "clear_cache": False})

    def resume(self, until: float) -> None:
        """The servers generate again."""
        self._post("resume", "/resume", until)

    def reset_prefix_cache(self, until: float) -> None:
        """Prefixes that were computed with other weights are given up, also those of requests in flight."""
        query = {"reset_running_requests": True}
        said = self._post("reset the cache", "/reset_prefix_cache", until, query=query)
        refused = [server.url for server, one in zip(self._servers, said) if one.get("success") is False]
        if refused:
            log.warning("%s kept prefixes that were computed with the weights before", ", ".join(refused))

    def workers(
        self, method: str, argument: object, until: float, *, heed: bool = True
    ) -> list[dict[str, Any]]:
        """What all workers of all servers answer; the first error of theirs is raised, unless it is not to be heeded."""
        body = {"method": method, "args": [] if argument is None else [argument]}

        def ask(server: HttpClient) -> list[dict[str, Any]]:
            answer = server.post("/collective_rpc", body, stage=method, timeout=_left(until)).object()
            told: list[dict[str, Any]] = answer.get("results") or []
            if not told:
                raise WindlassError(
                    f"{method}: the workers of {server.url} answered nothing",
                    "see whether windlass is installed in their environment",
                )
            for one in told:
                if heed and one.get("error") is not None:
                    failure = Failure.from_dict(one["error"])
                    raise type(failure.error())(f"{server.url}: {failure.text}", failure.advice)
            return told

        return [one for told in self._each(ask) for one in told]

    def _post(self, stage: str, path: str, until: float, **how: Any) -> Sequence[dict[str, Any]]:
        return self._each(lambda server: server.post(path, stage=stage, timeout=_left(until), **how).object())

    def _each(self, act: Callable[[HttpClient], T]) -> Sequence[T]:
        """All servers at once; the error of the first is raised when all have answered."""
        with ThreadPoolExecutor(max(1, len(self._servers)), thread_name_prefix="windlass-skyrl") as pool:
            return [call.result() for call in [pool.submit(act, server) for server in self._servers]]


class Sending:
    """One rank of the policy: publishes, and on the first rank has all engines load."""

    def __init__(self, settings: Mapping[str, Any], dtype: str | None = None) -> None:
        self._timeout = float(settings.get("timeout", 600.0))
        self._image_dir = settings.get("image_dir")
        model_id, checkpoint = settings.get("model_id", "policy"), settings.get("checkpoint")
        # A checkpoint says the dtype of each of its tensors.
        dtype = None if checkpoint is not None else dtype
        told = settings_of(model_id, settings.get("manager"), dtype=dtype, checkpoint=checkpoint)
        self._sender = Sender.in_ray(told)
        #: The figures of the last sync.
        self.metrics: dict[str, float] = {}

    def where(self) -> dict[str, Any]:
        """Where engines pull from; known before the first tensor is."""
        model_id, image_dir = self._sender.manager.config.model_id, self._image_dir or default_image_dir()
        return {**asdict(self._sender.source()), "image_dir": image_dir, "model_id": model_id}

    def deadline(self) -> float:
        """By when a sync that begins now has to end."""
        return time.monotonic() + self._timeout

    def publish(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Published:
        """On every rank: publishes what passes by."""
        return self._sender.publish(weights, self._timeout)

    def publish_model(self, model: torch.nn.Module) -> Published:
        """On every rank: publishes a model, of which each may have shards."""
        return self._sender.publish_model(model, self._timeout)

    def load(self, published: Published, servers: Servers, until: float) -> str:
        """On the first rank: brings a version to all engines while they generate, pauses them and has them load it; its label. They
        stay paused. After a failure they generate, unless the weights of one are not whole."""
        identity, begun = published.identity, time.monotonic()
        digest = self._sender.sealed(_left(until))
        order = self._sender.source().order(identity, _left(until), self._image_dir)
        told = servers.workers("windlass_pull", order, until)
        while not all(one["done"] for one in told):
            time.sleep(LOOK_S)
            told = servers.workers("windlass_pulled", None, until)
        staged = time.monotonic()
        load = LoadOrder(**asdict(identity), image=told[0]["image"], digest=digest, timeout=_left(until))
        try:
            servers.pause(until)
            servers.workers("windlass_load", load.to_dict(), until)
        except BaseException:
            self._resume_if_whole(servers)
            raise
        self.metrics = {
            **published.metrics(),
            "windlass/wire_bytes": float(sum(one["wire_bytes"] for one in told)),
            "windlass/stage_s": staged - begun,
            "windlass/load_s": time.monotonic() - staged,
        }
        log.info("%s is loaded by %d engines: %s", identity, len(servers), listed(self.metrics))
        return load.label

    def _resume_if_whole(self, servers: Servers) -> None:
        """Engines whose weights are whole, and all of one version, go on."""
        until = time.monotonic() + 60.0
        try:
            reports = servers.workers("windlass_report", None, until, heed=False)
            whole = all(one["state"] == "clean" for one in reports)
            if whole and len({str(one["live"]) for one in reports}) == 1:
                servers.resume(until)
                return
        except WindlassError as e:
            log.error("the engines stay paused, since they do not say how their weights are: %s", e)
            return
        log.error("the engines stay paused: not all of them have whole weights of one version")

    def close(self) -> None:
        """Ends publishing. The engines go on with the last version."""
        self._sender.close()


def _left(until: float) -> float:
    return max(1.0, until - time.monotonic())
