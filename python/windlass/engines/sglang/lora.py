"""LoRA adapters into a running SGLang engine.

Owns: :class:`SGLangLora`. Every version of an adapter has a name of its own, so that a request that began with one version
ends with it, and nothing is overwritten: the new one is loaded, then the previous one is unloaded, which waits for the
requests that use it. The base weights are not touched. Must not: write adapters (:func:`windlass.extract.lora.save_lora` does).

The server is started with ``--enable-lora --max-lora-rank R --lora-target-modules …``; a request names the adapter by
``lora_path`` (``/generate``) or behind a colon in ``model`` (OpenAI routes).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass import _windlass
from windlass.engines.sglang import payload
from windlass.engines.sglang.engine import Facts, connect
from windlass.engines.sglang.served import Shape
from windlass.errors import WindlassInvalid, WindlassNotFound, WindlassTimeout, WindlassUnsupported
from windlass.names.checkpoint import checkpoint_layout

if TYPE_CHECKING:
    from windlass.extract.lora import LoraState

__all__ = ["SGLangLora"]

log = logging.getLogger("windlass")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class SGLangLora:
    """Keeps one adapter of an engine at its newest version.

    >>> adapters = SGLangLora("http://127.0.0.1:30000", adapter="policy")     # doctest: +SKIP
    >>> await adapters.load_path("/mnt/adapters/policy-7", version=7)         # doctest: +SKIP
    'policy-7'

    ``adapter`` is the name without its version. ``pinned`` keeps it on the device.
    """

    def __init__(
        self,
        engine: object,
        *,
        adapter: str,
        name: str | None = None,
        api_key: str | None = None,
        pinned: bool = False,
        timeout: float = 120.0,
    ) -> None:
        if not adapter or not all(c.isalnum() or c in "-_." for c in adapter):
            raise WindlassInvalid(
                f"{adapter!r} is not a name for an adapter: expected letters, digits, '-', '_', '.'"
            )
        if not timeout > 0:
            raise WindlassInvalid(f"timeout {timeout!r} must be above zero")
        self._engine = connect(engine, name=name, api_key=api_key)
        self._adapter, self._pinned, self._timeout = adapter, pinned, timeout
        self._current: str | None = None
        self._busy = threading.Lock()

    @property
    def current(self) -> str | None:
        """The name by which requests use the newest version; ``None`` before the first."""
        return self._current

    async def load_path(self, path: str | Path, version: int) -> str:
        """Loads a PEFT directory that the engine sees under the same path, and returns the name of the version."""
        return await asyncio.to_thread(self._load_path, Path(path), version)

    async def load_state(self, state: LoraState, version: int) -> str:
        """Loads an adapter from memory (see :func:`windlass.extract.lora.collect_lora`), by value."""
        return await asyncio.to_thread(self._load_state, state, version)

    async def unload(self) -> None:
        """Unloads the newest version."""
        if self._current is not None:
            await asyncio.to_thread(self._unload, self._current, time.monotonic() + self._timeout)
            self._current = None

    def _load_path(self, path: Path, version: int) -> str:
        try:
            config = json.loads((path / CONFIG).read_text())
        except FileNotFoundError as e:
            raise WindlassNotFound(f"{path} is not an adapter: it has no {CONFIG}") from e
        except ValueError as e:
            raise WindlassInvalid(f"{path / CONFIG} is not JSON: {e}") from e
        body = {"lora_path": str(path.resolve())}
        return self._load("load_lora_adapter", body, config, checkpoint_layout(path / WEIGHTS), version)

    def _load_state(self, state: LoraState, version: int) -> str:
        shapes: dict[str, Shape] = {
            name: (_windlass.dtype_name(str(tensor.dtype)), tuple(tensor.shape))
            for name, tensor in state.tensors.items()
        }
        facts = self._engine.facts(timeout=self._timeout)
        body = {
            "config_dict": state.config,
            "serialized_named_tensors": self._engine.payloads(payload.named(state.tensors), facts.tp),
        }
        return self._load("load_lora_adapter_from_tensors", body, state.config, shapes, version)

    def _load(
        self, route: str, body: Mapping[str, Any], config: Any, shapes: Mapping[str, Shape], version: int
    ) -> str:
        until = time.monotonic() + self._timeout
        if not self._busy.acquire(timeout=self._timeout):
            raise WindlassTimeout(f"{self._engine.name}: another adapter is still being loaded")
        try:
            name = f"{self._adapter}-{version}"
            self._check(self._engine.facts(timeout=_left(until)), config, shapes, name)
            whole = {**body, "lora_name": name, "pinned": self._pinned}
            reply = self._engine.ask(route, whole, stage="load an adapter", timeout=_left(until))
            if not reply.ok and "already loaded" in reply.message:
                # An earlier attempt whose answer was lost: what it loaded cannot be compared, so it is replaced.
                self._unload(name, until)
                reply = self._engine.ask(route, whole, stage="load an adapter", timeout=_left(until))
            if not reply.known:
                raise WindlassUnsupported(reply.message, "load it from a path, or use a newer SGLang")
            if not reply.ok:
                raise WindlassInvalid(
                    f"{self._engine.name}: the adapter {name} was refused: {reply.message}",
                    f"the engine goes on with {self._current or 'the base model'}",
                )
            previous, self._current = self._current, name
            if previous is not None and previous != name:
                self._unload(previous, until)
            return name
        finally:
            self._busy.release()

    def _unload(self, name: str, until: float) -> None:
        reply = self._engine.ask(
            "unload_lora_adapter", {"lora_name": name}, stage="unload an adapter", timeout=_left(until)
        )
        if not reply.ok:
            # An engine that was restarted has none of them; what counts is that the new one is there.
            log.warning("%s: the adapter %s was not unloaded: %s", self._engine.name, name, reply.message)

    def _check(self, facts: Facts, config: Any, shapes: Mapping[str, Shape], name: str) -> None:
        """Whether the engine can take it, before it is asked to."""
        what = f"{self._engine.name}: the adapter {name}"
        if not facts.lora:
            raise WindlassUnsupported(
                f"{self._engine.name} serves no adapters", "start it with --enable-lora"
            )
        if facts.dp > 1:
            raise WindlassUnsupported(f"{self._engine.name} has {facts.dp} data-parallel replicas")
        if not isinstance(config, Mapping) or str(config.get("peft_type", "LORA")).upper() != "LORA":
            raise WindlassInvalid(f"{what} is not a LoRA adapter by its configuration")
        rank = config.get("r")
        if not isinstance(rank, int) or rank < 1:
            raise WindlassInvalid(f"{what} has rank {rank!r}")
        if facts.max_lora_rank is not None and rank > facts.max_lora_rank:
            raise WindlassInvalid(
                f"{what} has rank {rank}, the engine takes {facts.max_lora_rank} at most",
                "start the engine with a larger --max-lora-rank",
            )
        if not shapes:
            raise WindlassInvalid(f"{what} has no tensors")
        patterns = config.get("rank_pattern") or {}
        for tensor, (dtype, shape) in shapes.items():
            part = 0 if ".lora_A" in tensor else 1 if ".lora_B" in tensor else None
            if part is None:
                raise WindlassInvalid(
                    f"{what}: {tensor} is neither lora_A nor lora_B, which the engine cannot take"
                )
            if dtype not in ("float32", "bfloat16", "float16"):
                raise WindlassInvalid(f"{what}: {tensor} is {dtype}")
            if len(shape) != 2 or not math.prod(shape) or (shape[part] != rank and not patterns):
                raise WindlassInvalid(
                    f"{what}: {tensor} has shape {list(shape)}, which does not go with rank {rank}"
                )
        lone = [n for n in shapes if _other(n) not in shapes]
        if lone:
            raise WindlassInvalid(f"{what}: {lone[0]} has no other half")
        targets = config.get("target_modules")
        if (
            facts.lora_targets
            and isinstance(targets, list)
            and not {"all", "all-linear"} & facts.lora_targets
        ):
            strange = {str(t).rsplit(".", 1)[-1] for t in targets} - facts.lora_targets
            if strange:
                raise WindlassInvalid(
                    f"{what} is for {sorted(strange)[0]}, the engine has places for {sorted(facts.lora_targets)}",
                    "start the engine with --lora-target-modules of the adapter",
                )


def _other(name: str) -> str:
    if ".lora_A" in name:
        return name.replace(".lora_A", ".lora_B")
    return name.replace(".lora_B", ".lora_A")


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise WindlassTimeout("the deadline of the adapter passed", "raise the timeout")
    return left
