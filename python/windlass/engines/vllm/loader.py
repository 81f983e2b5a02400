"""Weights into a vLLM that this process has: an ``LLM``, an ``AsyncLLM``, or a worker itself.

Owns: :class:`VLLMWeightLoader`. Called by strategies and by training loops that hold their engine. Must not: pause
generation (see :mod:`windlass.engines.vllm.endpoint` for servers): call it between requests.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import AsyncIterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.errors import WindlassInvalid
from windlass.load.order import Failure, LoadOrder, Report
from windlass.receive.receiver import Image
from windlass.transfer.base import NamedTensors, WeightLoader, each_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from windlass.load.live import Live
    from windlass.plain import Plain

__all__ = ["VLLMWeightLoader"]


class VLLMWeightLoader(WeightLoader):
    """Loads into a vLLM engine of this process.

    >>> loader = VLLMWeightLoader(llm)                        # doctest: +SKIP
    >>> reports = await loader.load_image(order)              # doctest: +SKIP

    ``engine`` is an ``LLM``, an ``AsyncLLM`` (its workers may be processes of their own), or a worker. ``scratch`` is
    where tensors pass on the way to workers in other processes; ``reset_cache`` clears the prefix cache after a load.
    """

    def __init__(self, engine: Any, *, scratch: str | Path = "/dev/shm", reset_cache: bool = True) -> None:
        if not any(hasattr(engine, name) for name in ("collective_rpc", "get_model")):
            raise WindlassInvalid(
                f"{engine!r} is neither an LLM, an AsyncLLM nor a worker of vLLM: it has neither collective_rpc nor get_model"
            )
        self._engine = engine
        self._scratch = Path(scratch)
        self._reset = reset_cache
        self._adapters: Any | None = None

    async def load_weights(self, named_tensors: NamedTensors) -> None:
        """Loads tensors: the first time by vLLM's own reload, then by the copies that it made. Give all of those of each
        layer together, and in an iterator that makes them one by one the same ones every time.

        A worker takes them where they are, on its GPU or not; to workers in other processes they go by a file."""
        worker = self._worker()
        if worker is not None:
            from windlass.engines.vllm.extension import live_of

            live = live_of(worker.get_model(), worker.vllm_config)
            if isinstance(named_tensors, AsyncIterable):
                await self._stream(live, named_tensors)
            else:
                live.load_tensors({name: t.detach() async for name, t in each_tensor(named_tensors)})
        else:
            from safetensors.torch import save_file

            with tempfile.TemporaryDirectory(dir=self._scratch, prefix="windlass-") as folder:
                path = str(Path(folder) / "tensors.safetensors")
                # A receiver may use the memory of one for the next.
                save_file(
                    {
                        name: tensor.detach().to("cpu", copy=True).contiguous()
                        async for name, tensor in each_tensor(named_tensors)
                    },
                    path,
                )
                self._agreed(await self._call("windlass_load_file", path))
        await self._clear()

    @staticmethod
    async def _stream(live: Live, named_tensors: AsyncIterable[tuple[str, torch.Tensor]]) -> None:
        try:
            async for name, tensor in named_tensors:
                live.series.feed([(name, tensor.detach())])
            live.series.finish()
        except BaseException as e:
            live.series.abandon(e)
            raise

    async def load_image(self, order: LoadOrder | Mapping[str, object] | Image) -> list[Report]:
        """Loads a version from an image into every worker, and returns their reports. An image that this process holds
        may be given itself."""
        if isinstance(order, Image):
            given = LoadOrder.of(order)
        else:
            given = order if isinstance(order, LoadOrder) else LoadOrder.from_dict(order)
        self._agreed(await self._call("windlass_check", given.to_dict()))
        reports = self._agreed(await self._call("windlass_load", given.to_dict()))
        await self._clear()
        return reports

    async def load_lora(self, path: str | Path) -> None:
        """Loads the adapter in a PEFT directory, in place of the one before; :attr:`adapter` is what to generate with."""
        if self._adapters is None:
            from windlass.engines.vllm.lora import VllmAdapters

            self._adapters = VllmAdapters(self._engine)
        await self._adapters.load(path)

    @property
    def adapter(self) -> Any | None:
        """The ``LoRARequest`` of the newest adapter."""
        return None if self._adapters is None else self._adapters.current

    async def reports(self) -> list[Report]:
        """What the workers say of themselves."""
        return [Report.from_dict(told) for told in await self._call("windlass_report")]

    def _worker(self) -> Any | None:
        """The worker, if it is what was given or lives in this process alone."""
        if hasattr(self._engine, "get_model") and hasattr(self._engine, "vllm_config"):
            return self._engine
        return None

    async def _call(self, method: str, *args: Any) -> list[Plain]:
        worker = self._worker()
        if worker is not None:
            import windlass.engines.vllm.extension as extension

            return [getattr(extension, method)(worker, *args)]
        told = self._engine.collective_rpc(method, args=args)
        return list(await told if inspect.isawaitable(told) else told)

    async def _clear(self) -> None:
        if self._reset and hasattr(self._engine, "reset_prefix_cache"):
            done = self._engine.reset_prefix_cache()
            done = await done if inspect.isawaitable(done) else done
            if done is False:
                raise WindlassInvalid(
                    "the weights are new, and the prefix cache could not be reset: requests are running",
                    "load between requests",
                )

    @staticmethod
    def _agreed(told: list[Plain]) -> list[Report]:
        for report in told:
            if report.get("error") is not None:
                raise Failure.from_dict(report["error"]).error()
        return [Report.from_dict(report) for report in told]
