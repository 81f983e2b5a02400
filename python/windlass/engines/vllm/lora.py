"""Adapters at run time, in a vLLM that this process has.

Owns: :class:`VllmAdapters`, which loads each version of an adapter beside the one before and then takes the older away.
Called by training loops, and by :meth:`VLLMWeightLoader.load_lora <windlass.engines.vllm.loader.VLLMWeightLoader.load_lora>`
for strategies. Servers are told over HTTP (:mod:`windlass.engines.remote`). Must not: touch the base weights.

Every version has a name of its own. vLLM keys its prefix cache by the adapter's name, so that blocks of one version are
never taken for those of the next, and requests in flight end with the version that they began with.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from windlass.errors import WindlassError, WindlassInvalid

__all__ = ["VllmAdapters"]


class VllmAdapters:
    """The versions of one adapter in an ``LLM`` or ``AsyncLLM`` that was started with ``enable_lora=True``.

    >>> adapters = VllmAdapters(llm, "policy")                       # doctest: +SKIP
    >>> request = await adapters.load("/mnt/adapters/7")             # doctest: +SKIP
    >>> llm.generate(prompts, lora_request=request)                  # doctest: +SKIP

    ``keep`` versions stay loaded for requests that are still running; vLLM needs room for one more (``max_loras``,
    ``max_cpu_loras``).
    """

    def __init__(self, engine: Any, name: str = "policy", *, keep: int = 1) -> None:
        engine = getattr(engine, "llm_engine", engine)
        if not (hasattr(engine, "add_lora") and hasattr(engine, "remove_lora")):
            raise WindlassInvalid(f"{engine!r} is neither an LLM nor an AsyncLLM: it has no add_lora")
        if keep < 1:
            raise WindlassInvalid(f"keep is {keep}: expected 1 or more")
        self._engine = engine
        self._name = name
        self._keep = keep
        self._count = 0
        self._loaded: list[Any] = []

    @property
    def current(self) -> Any | None:
        """The ``LoRARequest`` of the newest version."""
        return self._loaded[-1] if self._loaded else None

    async def load(self, path: str | Path, version: int | None = None) -> Any:
        """Loads the PEFT directory at ``path``, and returns the ``LoRARequest`` to generate with."""
        from vllm.lora.request import LoRARequest

        path = Path(path)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            if not (path / file).is_file():
                raise WindlassInvalid(f"{str(path)!r} is no adapter: it has no {file}")
        self._count += 1
        number = self._count if version is None else version
        request = LoRARequest(f"{self._name}-{number}", self._count, str(path))
        if not await _result(self._engine.add_lora(request)):
            raise WindlassError(f"vLLM did not load the adapter at {str(path)!r}", "see vLLM's log")
        self._loaded.append(request)
        while len(self._loaded) > self._keep:
            await _result(self._engine.remove_lora(self._loaded.pop(0).lora_int_id))
        return request


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
