"""Weight sync of SkyRL by Windlass, for policies and engines that do not share GPUs:

    trainer.override_entrypoint=windlass.skyrl generator.inference_engine.weight_sync_backend=windlass

:func:`main` is SkyRL's own entry point after :func:`install`, which makes the backend known in the driver and in every worker that Ray
starts. A program with an entry point of its own calls :func:`install` before ``ray.init`` instead. docs/skyrl.md has the options.

Owns: :func:`main`, :func:`install`, and what is changed in SkyRL: 0.3 takes a strategy (:mod:`windlass.skyrl.strategies`), its main branch
an engine of vLLM's factory (:mod:`windlass.skyrl.factory`). Must not: change a sync of any other backend.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from types import ModuleType
from typing import Any

from windlass.errors import WindlassInvalid, WindlassUnsupported
from windlass.frameworks import ray_hook
from windlass.frameworks.after_import import after_import
from windlass.skyrl.settings import BACKEND, SETTINGS, VARIABLE

__all__ = ["BACKEND", "install", "main", "setup"]

_SKYRL = "skyrl.backends.skyrl_train"
_SYNC, _SENDERS = f"{_SKYRL}.weight_sync", f"{_SKYRL}.weight_sync.weight_senders"


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
    weight_sync = importlib.import_module(_SYNC)
    known = getattr(weight_sync, "get_transfer_strategy", None)
    ready = known is not None and known(BACKEND, False) == BACKEND
    if ready and _has_factory(weight_sync):
        senders = importlib.import_module(_SENDERS)
        ready = getattr(senders, _BUILD, setup).__module__ == __name__
    if not ready:
        raise WindlassUnsupported(
            "this SkyRL takes neither strategies of weight transfer, as 0.3 does, nor engines of vLLM's factory, as its main branch does "
            "since September 2026; windlass.skyrl knows no other way",
            "use SkyRL 0.3; docs/compatibility.md says what was run",
        )


def setup() -> None:
    """Makes the backend known in this process."""
    after_import(_SYNC, _names)
    after_import(_SENDERS, _senders)
    after_import(f"{_SYNC}.register", _receivers)
    after_import(f"{_SKYRL}.workers.worker_dispatch", _dispatch)


def _has_factory(weight_sync: ModuleType) -> bool:
    """Whether this is the main branch's shape."""
    return hasattr(weight_sync, "get_vllm_receive_backend")


def _names(weight_sync: ModuleType) -> None:
    """SkyRL chooses by the name that a function gives, which does not know the backend. An unknown one would silently be NCCL."""
    if not _has_factory(weight_sync) and not hasattr(weight_sync, "WeightTransferStrategy"):
        raise WindlassUnsupported(
            "this SkyRL has neither strategies of weight transfer nor engines of vLLM's factory",
            "use SkyRL 0.3, or see docs/compatibility.md",
        )
    name_of = weight_sync.get_transfer_strategy

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

    weight_sync.get_transfer_strategy = get_transfer_strategy  # type: ignore[attr-defined]
    if _has_factory(weight_sync):
        # What the servers are started with.
        weight_sync._VLLM_RECEIVE_BACKENDS[BACKEND] = BACKEND
    else:
        from windlass.skyrl.strategies import install_in

        install_in(weight_sync)


#: Of the main branch: what makes the options of vLLM's factory, by the name of a backend.
_BUILD = "_build_sender_init_info"


def _senders(weight_senders: ModuleType) -> None:
    other = getattr(weight_senders, _BUILD)

    def _build_sender_init_info(*, backend: str, **given: Any) -> tuple[Any, Any]:
        if backend != BACKEND:
            told: tuple[Any, Any] = other(backend=backend, **given)
            return told
        from windlass.skyrl.factory import init_info

        # All servers are told the same.
        return init_info(given["rank"], given["server_urls"], given["dtype"]), None

    setattr(weight_senders, _BUILD, _build_sender_init_info)


def _receivers(register: ModuleType) -> None:
    """Of the main branch: what makes receivers known to vLLM, in the driver and in the servers."""
    other = register.register_receive_engines

    def register_receive_engines() -> None:
        from windlass.engines.vllm import register as register_ours

        other()
        register_ours()

    register.register_receive_engines = register_receive_engines  # type: ignore[attr-defined]


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
