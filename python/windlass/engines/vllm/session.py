"""vLLM's own full reload, and what is known of its modules.

Owns: :class:`VllmSession`, which begins, feeds and finishes vLLM's layerwise reload of one worker's model, rehearses
its loader without touching a weight, and says which modules may be written to directly. Called by
:class:`windlass.load.live.Live`. Must not: decide what is loaded, or import vLLM before it is used.

vLLM loads into tensors of the checkpoint's form, post-processes each layer, and copies the result into the memory that
its kernels know. On a CPU it forgets two things, both repaired here: experts that were loaded again are not packed
again, and an output layer that is tied to the embedding keeps the packed weights of before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from windlass.errors import WindlassUnsupported
from windlass.load.session import class_name, is_listed, replace, without_data
from windlass.load.trace import Target

__all__ = ["VllmSession"]

log = logging.getLogger("windlass")

_LINEAR = {
    f"vllm.model_executor.layers.linear.{name}"
    for name in (
        "ColumnParallelLinear",
        "MergedColumnParallelLinear",
        "QKVParallelLinear",
        "ReplicatedLinear",
        "RowParallelLinear",
    )
} | {"vllm.model_executor.layers.fused_moe.router.gate_linear.GateLinear"}
_EMBEDDING = {
    f"vllm.model_executor.layers.vocab_parallel_embedding.{name}"
    for name in ("ParallelLMHead", "VocabParallelEmbedding")
}
_EXPERTS = {"vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts"}
_NORM = {
    "vllm.model_executor.layers.layernorm.RMSNorm",
    "vllm.model_executor.layers.layernorm.GemmaRMSNorm",
    "torch.nn.modules.normalization.LayerNorm",
}

#: Classes whose parameters are used as they were loaded, with the method that treats their weights where they have one.
#: Whether post-processing leaves them alone is seen for each module when it is qualified; this list says for which
#: classes seeing that is enough.
_ALLOWED: dict[str, set[str]] = {
    **{name: {"vllm.model_executor.layers.linear.UnquantizedLinearMethod"} for name in _LINEAR},
    **{
        name: {"vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod"}
        for name in _EMBEDDING
    },
    **{
        name: {
            "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod",
        }
        for name in _EXPERTS
    },
    **{name: set() for name in _NORM},
}

#: Tensors that do not come from weights, by the module that defines their class.
_INDEPENDENT: dict[str, set[str]] = {
    "vllm.model_executor.layers.rotary_embedding.": {"cos_sin_cache", "cos_sin_cache_cpu", "inv_freq"},
    # The scales of an unquantised cache: ones.
    "vllm.model_executor.layers.attention.attention.": {
        "_k_scale",
        "_v_scale",
        "_q_scale",
        "_prob_scale",
        "_k_scale_cpu",
        "_v_scale_cpu",
    },
    "vllm.model_executor.layers.fused_moe.": {"_expert_map", "expert_mask"},
}
#: Parameters that checkpoints need not have, by the module that defines their class: vLLM makes them for every quantised model,
#: takes a default where a checkpoint says nothing, and removes them.
_OPTIONAL: dict[str, set[str]] = {
    "vllm.model_executor.layers.attention.": {
        *(f"{which}_scale" for which in ("q", "k", "v", "prob")),
        *(f"{which}_zero_point" for which in ("q", "k", "v")),
    },
}
#: Methods for quantised weights that use them as they were loaded, whatever they are, if they have one of these kernels. Others
#: make them anew, which may look like nothing for some weights.
_BLOCK_FP8 = "vllm.model_executor.layers.quantization.fp8.Fp8LinearMethod"
_BLOCK_KERNELS = {
    "vllm.model_executor.kernels.linear.scaled_mm.cutlass.CutlassFp8BlockScaledMMKernel",
    "vllm.model_executor.kernels.linear.scaled_mm.triton.TritonFp8BlockScaledMMKernel",
}
#: The cache, which the scheduler gave to the attention.
_SERVING = ("kv_cache",)


class VllmSession:
    """vLLM's way to load into ``model``, one worker's share of it.

    ``vllm_config`` is the worker's; ``model_config`` another one where the model is not the worker's main one, such as
    a draft model.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, model_config: Any | None = None) -> None:
        self.model = model
        self._vllm_config = vllm_config
        self._model_config = model_config or vllm_config.model_config
        self._kernels: list[tuple[Any, Any]] = []

    # What it is.

    @property
    def parallelism(self) -> str:
        """The shares of the model, as part of a plan's key."""
        parallel = self._vllm_config.parallel_config
        return (
            f"tp{parallel.tensor_parallel_size}.pp{parallel.pipeline_parallel_size}"
            f".ep{int(bool(getattr(parallel, 'enable_expert_parallel', False)))}"
        )

    @property
    def shares(self) -> int:
        """How many workers may hold parts of one tensor."""
        return int(self._vllm_config.parallel_config.tensor_parallel_size)

    @property
    def partial(self) -> str | None:
        """Why this worker need not take every tensor of the image; ``None`` if it must."""
        parallel = self._vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            return "other stages of the pipeline"
        if getattr(parallel, "enable_expert_parallel", False):
            return "experts of other ranks"
        return None

    @property
    def hides_writes(self) -> bool:
        """Whether loaders keep tensors back and write later, so that a rehearsal cannot see every write."""
        return getattr(self._model_config, "quantization", None) is not None

    def refuses_plan(self) -> str | None:
        """Why nothing may be replayed now; ``None`` if it may."""
        parallel = self._vllm_config.parallel_config
        if getattr(parallel, "enable_eplb", False):
            return "expert rebalancing is on: experts move between ranks"
        if getattr(self._vllm_config, "lora_config", None) is not None:
            return "LoRA is on: layers are wrapped"
        return None

    # Judge.

    def refuses(self, name: str, module: torch.nn.Module) -> str | None:
        """Why a module is not on the list."""
        methods = _ALLOWED.get(class_name(module))
        if methods is None:
            return f"{class_name(module)} is not on the list"
        method = getattr(module, "quant_method", None)
        if method is None:
            return None if not methods else f"{type(module).__name__} has no method for its weights"
        if class_name(method) in methods:
            return None
        if class_name(module) in _LINEAR and class_name(method) == _BLOCK_FP8:
            kernel = getattr(method, "fp8_linear", None)
            if getattr(method, "block_quant", False) and class_name(kernel) in _BLOCK_KERNELS:
                return None
            return f"{class_name(kernel)} of {type(method).__name__} is not on the list"
        return f"{class_name(method)} is not on the list"

    def optional(self, module: torch.nn.Module, attribute: str) -> bool:
        """Whether a checkpoint need not have a parameter."""
        if "dummy" in str(self._vllm_config.load_config.load_format) and "fp8" in str(
            self._vllm_config.cache_config.cache_dtype
        ):
            # What the engine has is made up, and it would be used.
            return False
        return is_listed(attribute, module, _OPTIONAL)

    def independent(self, name: str, module: torch.nn.Module, attribute: str) -> bool:
        """Whether a tensor is known not to come from weights."""
        return is_listed(attribute, module, _INDEPENDENT)

    def serving(self, attribute: str) -> bool:
        """The cache is not a weight."""
        return attribute.startswith(_SERVING)

    def looks_into(self, value: object) -> bool:
        """Objects of vLLM hold tensors, but not its configuration."""
        home = type(value).__module__
        return home.startswith("vllm.") and not home.startswith(
            ("vllm.config", "vllm.logger", "vllm.platforms")
        )

    def vocabulary(self, module: torch.nn.Module) -> int | None:
        """Rows of the checkpoint's tensor where the engine pads them."""
        rows = getattr(module, "org_vocab_size", None)
        return int(rows) if isinstance(rows, int) else None

    # Rehearsal.

    @contextmanager
    def rehearsal(self) -> Iterator[list[Target]]:
        """Puts tensors without data, in the form of the checkpoint, in place of the model's own, which come back at the
        end, the same objects in the same order."""
        layers = [(prefix, layer) for prefix, layer in self.model.named_modules()]
        kept = [
            (layer, dict(layer._parameters), dict(layer._buffers), set(layer._non_persistent_buffers_set))
            for _, layer in layers
        ]
        try:
            with self._current():
                self._to_meta(layers)
                yield [
                    Target(prefix, name, parameter)
                    for prefix, layer in layers
                    for name, parameter in layer._parameters.items()
                    if parameter is not None
                ]
        finally:
            for layer, parameters, buffers, fleeting in kept:
                replace(layer._parameters, parameters)
                replace(layer._buffers, buffers)
                layer._non_persistent_buffers_set.clear()
                layer._non_persistent_buffers_set.update(fleeting)

    def _to_meta(self, layers: list[tuple[str, torch.nn.Module]]) -> None:
        reload = _reload()
        for _, layer in layers:
            parameters, buffers = dict(layer._parameters), dict(layer._buffers)
            if reload is not None:
                info = reload.get_layerwise_info(layer)
                if any(info.restore_metadata):
                    # The checkpoint's form, and what vLLM never takes out of a layer.
                    first, second = info.restore_metadata
                    parameters = {**_never_taken(parameters), **first}
                    buffers = {**_never_taken(buffers), **second}
            replace(layer._parameters, {k: _stand_in(v, layer) for k, v in parameters.items()})
            replace(layer._buffers, {k: _stand_in(v, layer) for k, v in buffers.items()})

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """The model's own loader."""
        return self.model.load_weights(weights)  # type: ignore[operator]

    # The session itself.

    def begin(self) -> None:
        """Prepares every layer to be loaded. From here on the model cannot serve until :meth:`finish`."""
        reload = _reload()
        if reload is None and any(p.numel() == 0 for p in self.model.parameters()):
            raise WindlassUnsupported(
                "this vLLM cannot load weights again that it has packed: it has no layerwise reload",
                "use vLLM 0.21 or later, or a device on which weights are not packed",
            )
        self._forget_kernels()
        if reload is not None:
            with self._current(), self._device():
                reload.initialize_layerwise_reload(self.model)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Feeds tensors, all of those of each layer."""
        with torch.no_grad(), self._current(), self._device():
            self.load_weights(weights)

    def finish(self) -> None:
        """Post-processes what was loaded, and puts everything back in place."""
        reload = _reload()
        with torch.no_grad(), self._current(), self._device():
            if reload is not None:
                reload.finalize_layerwise_reload(self.model, self._model_config)
            else:
                self._process_all()
        self._restore_kernels()
        self._repack_tied()

    def abandon(self) -> None:
        """Puts the model's tensors back after a failure, so that another session can begin. Weights may be mixed."""
        reload = _reload()
        try:
            if reload is not None:
                for layer in self.model.modules():
                    info = reload.get_layerwise_info(layer)
                    info.loaded_weights.clear()
                    info.load_numel = 0
                with torch.no_grad(), self._current(), self._device():
                    reload.finalize_layerwise_reload(self.model, self._model_config)
        finally:
            self._restore_kernels()

    def incomplete(self) -> list[str]:
        """Layers that were fed in part. Those that pad their rows never come whole."""
        reload = _reload()
        if reload is None:
            return []
        out = []
        for prefix, layer in self.model.named_modules():
            info = reload.get_layerwise_info(layer)
            whole = info.load_numel_total
            if whole is not None and 0 < info.load_numel < whole and self.vocabulary(layer) is None:
                out.append(prefix)
        return out

    def _process_all(self) -> None:
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        process_weights_after_loading(self.model, self._model_config, self._where())

    def _current(self) -> AbstractContextManager[Any]:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._vllm_config)  # type: ignore[no-any-return]

    def _where(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def _device(self) -> AbstractContextManager[Any]:
        where = self._where()
        return nullcontext() if where.type in ("cpu", "meta") else where

    # What vLLM forgets on a CPU.

    def _forget_kernels(self) -> None:
        """Experts are packed when their kernel is made: have it made again."""
        self._kernels = []
        if not _on_cpu():
            return
        for module in self.model.modules():
            method = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                assert method is not None
                self._kernels.append((method, method.moe_kernel))
                method.moe_kernel = None

    def _restore_kernels(self) -> None:
        """Those of layers that were not loaded."""
        for method, kernel in self._kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        self._kernels = []

    def _repack_tied(self) -> None:
        """An output layer that has the embedding's weight is not loaded by itself, and packs it nevertheless."""
        if not _on_cpu():
            return
        owners: dict[int, list[torch.nn.Module]] = {}
        for module in self.model.modules():
            weight = module._parameters.get("weight")
            if weight is not None and weight.numel() and hasattr(module, "quant_method"):
                owners.setdefault(weight.data_ptr(), []).append(module)
        with torch.no_grad(), self._current():
            for modules in owners.values():
                for module in modules if len(modules) > 1 else ():
                    module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr, operator]


def _reload() -> Any | None:
    """vLLM's layerwise reload, where this vLLM has one."""
    try:
        from vllm.model_executor.model_loader.reload import layerwise
    except ImportError:
        return None
    return layerwise


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _never_taken(tensors: dict[str, Any]) -> dict[str, Any]:
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    return {name: tensor for name, tensor in tensors.items() if name in SKIP_TENSORS}


def _stand_in(tensor: torch.Tensor | None, layer: torch.nn.Module) -> torch.Tensor | None:
    """A tensor without data, of the same class and with the same attributes. Its loader is the first one: vLLM leaves
    those of earlier reloads on the tensors that it remembers."""
    if tensor is None:
        return None
    stand_in = without_data(tensor)
    if _reload() is not None:
        from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

        restore_layer_refs(stand_in, layer)
    # A property of some classes, which keep it under another name.
    for name in ("weight_loader", "_weight_loader"):
        loader: Any = stand_in.__dict__.get(name)
        while getattr(loader, "__name__", "") == "online_process_loader":
            loader = loader.__wrapped__
            stand_in.__dict__[name] = loader
    return stand_in
