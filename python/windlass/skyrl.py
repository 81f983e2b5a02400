"""Weight sync of SkyRL by Windlass, for policies and engines that do not share GPUs:

    trainer.override_entrypoint=windlass.skyrl generator.inference_engine.weight_sync_backend=windlass

:func:`main` is SkyRL's own entry point after :func:`install`, which makes the backend known in the driver and in every worker that Ray
starts. A program with an entry point of its own calls :func:`install` before ``ray.init`` instead. docs/skyrl.md has the options.

Owns: :func:`main`, :func:`install` and the strategy of SkyRL 0.3. Must not: change a sync of any other backend.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from types import ModuleType
from typing import Any

from windlass.errors import (
    WindlassError,
    WindlassInvalid,
    WindlassPeerLost,
    WindlassTimeout,
    WindlassUnsupported,
)
from windlass.frameworks import ray_hook
from windlass.frameworks.after_import import after_import
from windlass.load.order import Failure, LoadOrder

__all__ = ["BACKEND", "install", "main", "setup"]

log = logging.getLogger("windlass")

#: The name that a configuration gives.
BACKEND = "windlass"
#: Settings as JSON, for the workers that Ray starts.
VARIABLE = "WINDLASS_SKYRL"
#: What settings there are.
SETTINGS = ("model_id", "image_dir", "checkpoint", "manager", "timeout")
#: How often engines are asked whether a version has come to their host.
LOOK_S = 0.02


def main() -> None:
    """SkyRL's entry point, with the backend."""
    install()
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.entrypoints import main_base

    arguments = [arg for arg in sys.argv[1:] if not arg.startswith("trainer.override_entrypoint=")]
    cfg = SkyRLTrainConfig.from_cli_overrides(arguments)
    main_base.validate_cfg(cfg)
    main_base.initialize_ray(cfg)
    main_base.ray.get(main_base.skyrl_entrypoint.remote(cfg))


def install(**settings: Any) -> None:
    """Makes the backend known in this process, and in all workers of a Ray that is started afterwards.

    ``settings``: ``model_id``, ``image_dir`` (a directory in memory on the engines' hosts), ``checkpoint`` (completes what is never
    sent), ``manager`` (fields of :class:`windlass.WeightManagerConfig`), ``timeout`` (seconds for one sync, 600).
    """
    unknown = sorted(set(settings) - set(SETTINGS))
    if unknown:
        raise WindlassInvalid(f"there is no setting {unknown[0]!r}: expected {', '.join(SETTINGS)}")
    if settings:
        os.environ[VARIABLE] = json.dumps(settings)

    ray_hook.in_every_worker("windlass.skyrl:setup", VARIABLE)
    setup()
    # Here and now, where an error is seen: SkyRL itself would take a name that it does not know for NCCL.
    weight_sync = importlib.import_module("skyrl.backends.skyrl_train.weight_sync")
    known = getattr(weight_sync, "get_transfer_strategy", None)
    if known is None or known(BACKEND, False) != BACKEND:
        raise WindlassUnsupported(
            "this SkyRL does not take strategies of weight transfer as 0.3 does, and windlass.skyrl knows no other way",
            "use SkyRL 0.3; docs/compatibility.md says what was run",
        )


def setup() -> None:
    """Makes the backend known in this process."""
    after_import("skyrl.backends.skyrl_train.weight_sync", _strategies)
    after_import("skyrl.backends.skyrl_train.workers.worker_dispatch", _dispatch)


def _strategies(weight_sync: ModuleType) -> None:
    """SkyRL chooses by two functions, which do not know the backend. An unknown one would silently be NCCL."""
    if not hasattr(weight_sync, "WeightTransferStrategy"):
        raise WindlassUnsupported(
            "this SkyRL has no strategies of weight transfer; windlass.skyrl was made for 0.3",
            "use SkyRL 0.3, or see docs/compatibility.md",
        )
    name_of, class_of = weight_sync.get_transfer_strategy, weight_sync.get_transfer_strategy_cls

    def get_transfer_strategy(weight_sync_backend: str, colocate_all: bool) -> Any:
        if weight_sync_backend != BACKEND:
            return name_of(weight_sync_backend, colocate_all)
        if colocate_all:
            raise WindlassUnsupported(
                "weight_sync_backend is 'windlass', and trainer.placement.colocate_all is set: a colocated engine takes its "
                "weights through the GPU that both share",
                "set trainer.placement.colocate_all=false, or weight_sync_backend=nccl",
            )
        return BACKEND

    def get_transfer_strategy_cls(weight_sync_backend: str, colocate_all: bool) -> Any:
        if get_transfer_strategy(weight_sync_backend, colocate_all) != BACKEND:
            return class_of(weight_sync_backend, colocate_all)
        return _strategy(weight_sync)

    weight_sync.get_transfer_strategy = get_transfer_strategy  # type: ignore[attr-defined]
    weight_sync.get_transfer_strategy_cls = get_transfer_strategy_cls  # type: ignore[attr-defined]


def _strategy(weight_sync: ModuleType) -> Any:
    """The strategy as a class of SkyRL's."""

    class WindlassInitInfo(weight_sync.WeightSyncInitInfo):  # type: ignore[misc, name-defined]
        """What engines are told once."""

        def __init__(self, sender: _Sending) -> None:
            super().__init__(override_existing_receiver=True)
            self.sender = sender

        def for_servers(self, world_size_per_server: int, num_servers: int, dp_size: int = 1) -> list[Any]:
            return [self] * num_servers

        def to_api_payload(self) -> dict[str, Any]:
            return self.sender.where()

    class WindlassSender(weight_sync.WeightTransferSender):  # type: ignore[misc, name-defined]
        """SkyRL's sender."""

        def __init__(self, sending: _Sending, client: Any) -> None:
            self._sending, self._client = sending, client

        async def send_chunks(self, chunks: Iterable[Any], weight_metadata: Any = None, **_: Any) -> None:
            await self._sending.send(chunks, self._client)

        def teardown(self) -> None:
            self._sending.close()

    class WindlassTransferStrategy(weight_sync.WeightTransferStrategy):  # type: ignore[misc, name-defined]
        """What ``weight_sync_backend=windlass`` means."""

        @staticmethod
        def create_init_info(ie_cfg: Any, inference_world_size: Any = None, **_: Any) -> Any:
            return WindlassInitInfo(_Sending(ray_hook.settings_in(VARIABLE, SETTINGS)))

        @staticmethod
        def get_vllm_transfer_engine() -> type:
            from windlass.engines.vllm.backend import WindlassWeightTransferEngine

            return WindlassWeightTransferEngine

        @staticmethod
        def create_sender(init_info: Any, inference_client: Any) -> Any:
            return WindlassSender(init_info.sender, inference_client)

    return WindlassTransferStrategy


class _Sending:
    """One rank of the policy: publishes, and on the first rank has all engines load."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import torch.distributed as dist

        from windlass.frameworks.sender import Sender, settings_of

        self._rank = dist.get_rank()
        self._timeout = float(settings.get("timeout", 600.0))
        self._image_dir = settings.get("image_dir")
        model_id, checkpoint = settings.get("model_id", "policy"), settings.get("checkpoint")
        self._sender = Sender.in_ray(settings_of(model_id, settings.get("manager"), checkpoint=checkpoint))
        #: The figures of the last sync.
        self.metrics: dict[str, float] = {}

    def where(self) -> dict[str, Any]:
        """Where engines pull from; known before the first tensor is."""
        from windlass.receive.pulling import default_image_dir

        model_id, image_dir = self._sender.manager.config.model_id, self._image_dir or default_image_dir()
        return {**asdict(self._sender.source()), "image_dir": image_dir, "model_id": model_id}

    async def send(self, chunks: Iterable[Any], client: Any) -> None:
        """Publishes; on the first rank, brings the version to all engines while they generate, pauses them and has them load it. They
        stay paused: who asked for the sync resumes them, as with SkyRL's own backends. After a failure they generate, unless the
        weights of one are not whole."""
        from windlass.frameworks.sender import listed

        until = time.monotonic() + self._timeout

        def pairs() -> Iterator[tuple[str, Any]]:
            for chunk in chunks:
                yield from zip(chunk.names, chunk.tensors, strict=True)

        published = self._sender.publish(pairs(), self._timeout)
        if self._rank != 0:
            return
        identity = published.identity
        begun = time.monotonic()
        digest = await asyncio.to_thread(self._sender.sealed, _left(until))
        order = self._sender.source().order(identity, _left(until), self._image_dir)
        await self._workers(client, "windlass_pull", order, until)
        told = await self._workers(client, "windlass_pulled", None, until)
        while not all(one["done"] for one in told):
            await asyncio.sleep(LOOK_S)
            told = await self._workers(client, "windlass_pulled", None, until)
        staged = time.monotonic()
        load = LoadOrder(
            **asdict(identity),
            image=told[0]["image"],
            digest=digest,
            timeout=_left(until),
        )
        await asyncio.wait_for(client.pause_generation(), _left(until))
        try:
            await self._workers(client, "windlass_load", load.to_dict(), until)
        except BaseException:
            await self._resume_if_whole(client)
            raise
        self.metrics = {
            **published.metrics(),
            "windlass/wire_bytes": float(sum(one["wire_bytes"] for one in told)),
            "windlass/stage_s": staged - begun,
            "windlass/load_s": time.monotonic() - staged,
        }
        log.info("%s is loaded by %d engines: %s", identity, len(client.server_urls), listed(self.metrics))

    async def _resume_if_whole(self, client: Any) -> None:
        """Engines whose weights are whole, and all of one version, go on."""
        try:
            reports = await self._workers(
                client, "windlass_report", None, time.monotonic() + 60.0, heed=False
            )
        except WindlassError as e:
            log.error("the engines stay paused, since they do not say how their weights are: %s", e)
            return
        if (
            all(one["state"] == "clean" for one in reports)
            and len({str(one["live"]) for one in reports}) == 1
        ):
            await asyncio.wait_for(client.resume_generation(), 60.0)
        else:
            log.error("the engines stay paused: not all of them have whole weights of one version")

    async def _workers(
        self, client: Any, method: str, argument: Any, until: float, *, heed: bool = True
    ) -> list[dict[str, Any]]:
        """What all workers of all servers answer; the first error of theirs is raised, unless it is not to be heeded. SkyRL's client
        has no deadline of its own."""
        body = {"method": method, "args": [] if argument is None else [argument]}
        try:
            said = await asyncio.wait_for(client._call_all_servers("/collective_rpc", body), _left(until))
        except asyncio.TimeoutError as e:
            raise WindlassTimeout(f"{method}: not all engines answered within {self._timeout:g} s") from e
        except OSError as e:
            raise WindlassPeerLost(f"{method}: an engine does not answer: {e}") from e
        told: list[dict[str, Any]] = []
        for url, answer in said.items():
            for one in (answer.get("body") or {}).get("results") or []:
                if heed and one.get("error") is not None:
                    failure = Failure.from_dict(one["error"])
                    raise type(failure.error())(f"{url}: {failure.text}", failure.advice)
                told.append(one)
        if not told:
            raise WindlassError(
                f"{method}: the engines answered nothing",
                "see whether windlass is installed in their environment",
            )
        return told

    def close(self) -> None:
        self._sender.close()


def _left(until: float) -> float:
    return max(1.0, until - time.monotonic())


def _dispatch(worker_dispatch: ModuleType) -> None:
    """SkyRL pauses the engines before it asks for a sync; this backend does it itself, when everything has come to their hosts."""
    other = worker_dispatch.WorkerDispatch.save_weights_for_sampler

    async def save_weights_for_sampler(self: Any, model_id: str | None = None) -> None:
        ours = self.cfg.generator.inference_engine.weight_sync_backend == BACKEND
        client = self._inference_engine_client
        if not ours or client is None or self.cfg.trainer.policy.model.lora.rank > 0:
            await other(self, model_id=model_id)
            return
        self.ensure_active_adapter("policy", model_id)
        self._broadcast_to_inference_engines(client, model_id=model_id)
        await client.resume_generation()
        client.increment_weight_version()

    worker_dispatch.WorkerDispatch.save_weights_for_sampler = save_weights_for_sampler
