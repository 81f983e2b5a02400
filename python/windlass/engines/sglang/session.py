"""SGLang's own reload of one worker's model, and what is known of its modules.

Owns: :class:`SglangSession`, which loads a model by its own ``load_weights`` and SGLang's post-processing, rehearses that
loader without touching a weight, and says which modules may be written to directly; and :func:`watch`, which notices
weights that change by another way. Called by :class:`windlass.load.live.Live` inside a worker. Must not: decide what is
loaded, or import SGLang before it is used.

From 0.5.21 on, SGLang accepts tensors only between ``/begin_weight_update`` and ``/end_weight_update``. The first restores
the modules whose method can undo its packing; the second post-processes every module, whether anything was loaded into it
or not. For a module that is packed in place and cannot be restored (AMX tiles, interleaved experts) that would pack packed
weights. So this session post-processes by itself, which is also what modules are judged by, and then has the end of the
update skip the modules that are final already (:meth:`SglangSession.settle`), once.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from windlass.load.session import class_name, is_listed, replace, without_data
from windlass.load.trace import Target

__all__ = ["SglangSession", "watch"]

log = logging.getLogger("windlass")

_LINEAR = {
    f"sglang.srt.layers.linear.{name}"
    for name in (
        "ColumnParallelLinear",
        "MergedColumnParallelLinear",
        "QKVParallelLinear",
        "ReplicatedLinear",
        "RowParallelLinear",
    )
}
_EMBEDDING = {
    f"sglang.srt.layers.vocab_parallel_embedding.{name}"
    for name in ("ParallelLMHead", "VocabParallelEmbedding")
}
_EXPERTS = {"sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE"}
_NORM = {
    "sglang.srt.layers.layernorm.RMSNorm",
    "sglang.srt.layers.layernorm.LayerNorm",
    "torch.nn.modules.normalization.LayerNorm",
}
_UNQUANTISED = "sglang.srt.layers.quantization.unquant."

#: Classes whose parameters are used as they were loaded, with the method that treats their weights where they have one.
#: Whether post-processing leaves them alone is seen for each module when it is qualified; this list says for which
#: classes seeing that is enough.
_ALLOWED: dict[str, set[str]] = {
    **{name: {_UNQUANTISED + "UnquantizedLinearMethod"} for name in _LINEAR},
    # An output layer on a CPU with AMX has a method that packs it.
    **{name: {_UNQUANTISED + "UnquantizedEmbeddingMethod"} for name in _EMBEDDING},
    **{name: {_UNQUANTISED + "UnquantizedFusedMoEMethod"} for name in _EXPERTS},
    **{name: set() for name in _NORM},
}

#: Tensors that do not come from weights, by the module that defines their class.
_INDEPENDENT: dict[str, set[str]] = {
    "sglang.srt.layers.rotary_embedding.": {"cos_sin_cache", "axis_map"},
    "sglang.srt.layers.moe.": {"expert_mask_gpu"},
}
#: What holds no weights, or other objects than those of the model.
_NOT_LOOKED_INTO = (
    "sglang.srt.configs.",
    "sglang.srt.distributed.",
    "sglang.srt.environ",
    "sglang.srt.runtime_context",
    "sglang.srt.server_args",
)

#: How long after the deadline of an order the end of its update is expected.
_END_S = 60.0


class SglangSession:
    """SGLang's way to load into ``model``, one worker's share of it.

    ``ends`` says whether ``/end_weight_update`` follows, which post-processes once more. A driver sets it with each order.
    """

    #: The loaders write at once.
    hides_writes = False

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.ends = False
        #: Modules that the end of the present update is to leave alone, and until when.
        self._final: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._until = 0.0
        self._processed = False

    # What it is.

    @property
    def parallelism(self) -> str:
        """The shares of the model, as part of a plan's key."""
        return f"tp{_width('tp_size')}.pp{_width('pp_size')}.ep{_width('moe_ep_size')}"

    @property
    def shares(self) -> int:
        """How many workers may hold parts of one tensor."""
        return _width("tp_size")

    @property
    def partial(self) -> str | None:
        """Why this worker need not take every tensor of the image; ``None`` if it must."""
        if _width("pp_size") > 1:
            return "other stages of the pipeline"
        if _width("moe_ep_size") > 1:
            return "experts of other ranks"
        return None

    def optional(self, module: torch.nn.Module, attribute: str) -> bool:
        """Whether a checkpoint need not have a parameter: scales of a quantised cache have defaults."""
        return type(module).__name__ == "RadixAttention" and attribute in ("k_scale", "v_scale")

    def refuses_plan(self) -> str | None:
        """Why nothing may be replayed now; ``None`` if it may."""
        args = _server_args()
        if getattr(args, "enable_lora", False) or getattr(args, "lora_paths", None):
            return "LoRA is on: layers are wrapped"
        if getattr(args, "enable_eplb", False):
            return "expert rebalancing is on: experts move between ranks"
        if (getattr(args, "cpu_offload_gb", 0) or 0) > 0 or (
            getattr(args, "offload_group_size", -1) or -1
        ) > 0:
            return "weights are offloaded to the host: parameters move"
        if getattr(self.model, "flash_rl_initial_load_complete", False):
            return "SGLang quantises weights while it loads them"
        return None

    # Judge.

    def refuses(self, name: str, module: torch.nn.Module) -> str | None:
        """Why a module is not on the list."""
        methods = _ALLOWED.get(class_name(module))
        if methods is None:
            return f"{class_name(module)} is not on the list"
        method = getattr(module, "quant_method", None)
        packed = _packed(module, method)
        if packed is not None:
            return packed
        if method is None:
            return None if not methods else f"{type(module).__name__} has no method for its weights"
        return None if class_name(method) in methods else f"{class_name(method)} is not on the list"

    def independent(self, name: str, module: torch.nn.Module, attribute: str) -> bool:
        """Whether a tensor is known not to come from weights."""
        return is_listed(attribute, module, _INDEPENDENT)

    def serving(self, attribute: str) -> bool:
        """The cache is not held by modules."""
        return False

    def looks_into(self, value: object) -> bool:
        """Objects of SGLang hold tensors, but not its configuration or its process groups."""
        home = type(value).__module__
        return home.startswith("sglang.") and not home.startswith(_NOT_LOOKED_INTO)

    def vocabulary(self, module: torch.nn.Module) -> int | None:
        """Rows of the checkpoint's tensor where the engine pads them."""
        rows = getattr(module, "org_vocab_size", None)
        return int(rows) if isinstance(rows, int) else None

    # Rehearsal.

    @contextmanager
    def rehearsal(self) -> Iterator[list[Target]]:
        """Puts tensors without data in place of the model's parameters and buffers. They come back at the end, the same
        objects, and so does every other attribute: some loaders derive tensors as soon as they have loaded."""
        kept = [
            (prefix, layer, dict(vars(layer)), dict(layer._parameters), dict(layer._buffers))
            for prefix, layer in self.model.named_modules()
        ]
        try:
            targets = []
            for prefix, layer, _, parameters, buffers in kept:
                for name, parameter in parameters.items():
                    if parameter is not None:
                        layer._parameters[name] = stand_in = without_data(parameter)
                        targets.append(Target(prefix, name, stand_in))
                layer._buffers.update({k: without_data(v) for k, v in buffers.items() if v is not None})
            yield targets
        finally:
            for _, layer, attributes, parameters, buffers in kept:
                replace(vars(layer), attributes)
                replace(layer._parameters, parameters)
                replace(layer._buffers, buffers)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """The model's own loader."""
        return self.model.load_weights(weights)  # type: ignore[operator]

    # The session itself.

    def begin(self) -> None:
        """Undoes packing that can be undone. Where SGLang has done so already, nothing is left to undo."""
        self._processed = False
        loader = _default_loader()
        if loader is not None and hasattr(loader, "restore_weights_before_loading"):
            loader.restore_weights_before_loading(self.model, self._device())

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Feeds tensors, all of those of each layer."""
        with torch.no_grad():
            self.load_weights(weights)

    def finish(self) -> None:
        """Post-processes what was loaded."""
        with torch.no_grad():
            loader = _default_loader()
            if loader is not None and hasattr(loader, "postprocess_weights"):
                loader.postprocess_weights(self.model, self._device())
            else:
                for module, method in self._methods():
                    method.process_weights_after_loading(module)
        self._processed = True
        synchronize()

    def abandon(self) -> None:
        """Nothing is held back: weights may be mixed, and the next whole load goes over all of them."""

    def incomplete(self) -> list[str]:
        """Nothing is kept back."""
        return []

    # The end of the update around it.

    def enter(self, ends: bool) -> None:
        """A driver's call begins. What an earlier one left for its end does not hold any more."""
        self.ends, self._processed = ends, False
        self._final.clear()

    def settle(self, timeout: float) -> None:
        """The call is over: the end of the update, if one follows, leaves alone what needs nothing.

        After a load through this session that is every module. After anything else it is every module whose packing was
        not undone: nothing was loaded into those since they were processed last.
        """
        if not self.ends:
            return
        self._until = time.monotonic() + timeout + _END_S
        for module, method in self._methods():
            if self._processed or _packed(module, method) or not _restores(method):
                self._final.add(module)
                _let_skip(method, self._skips)

    def _skips(self, module: torch.nn.Module) -> bool:
        """Whether a module is final, asked once by the end of an update."""
        if module not in self._final:
            return False
        self._final.discard(module)
        return time.monotonic() < self._until

    def _methods(self) -> list[tuple[torch.nn.Module, Any]]:
        found = [(module, getattr(module, "quant_method", None)) for module in self.model.modules()]
        return [
            (module, method) for module, method in found if hasattr(method, "process_weights_after_loading")
        ]

    def _device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))


def watch(forget: Callable[[torch.nn.Module, str], None]) -> None:
    """From now on, what else changes a model's weights in this process is told: SGLang's other routes, the memory that is
    released for a trainer, and the weight checker when it resets tensors. Again is nothing."""
    try:
        from sglang.srt.managers.scheduler_components import weight_updater as scheduler
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    except ImportError:
        log.warning(
            "this SGLang is not known: weights that another driver changes are found by a sample only"
        )
        return

    def told(owner: Any, name: str, model: Callable[..., Any]) -> None:
        original = getattr(owner, name, None)
        if original is None or hasattr(original, "_windlass_watched"):
            return

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            changed = model(*args, **kwargs)
            if changed is not None:
                forget(changed, f"{name} was called")
            return original(*args, **kwargs)

        watched._windlass_watched = True  # type: ignore[attr-defined]
        setattr(owner, name, watched)

    for name in ("update_weights_from_disk", "load_weights_from_distributed", "update_weights_from_ipc"):
        told(WeightUpdater, name, lambda updater, *_, **__: updater.get_model())
    told(WeightUpdater, "update_weights_from_tensor", _by_tensor)
    told(
        ModelRunner,
        "check_weights",
        lambda runner, action, *_, **__: runner.model if "reset" in action else None,
    )
    told(scheduler, "_export_static_state", lambda model: model)


def _by_tensor(updater: Any, named_tensors: Any, load_format: str | None = None) -> Any:
    """The model, unless it is our own loader that is called."""
    return None if (load_format or "").startswith("windlass.") else updater.get_model()


def _let_skip(method: Any, skips: Callable[[torch.nn.Module], bool]) -> None:
    """Has a method ask before it processes a module. Again is nothing."""
    original = method.process_weights_after_loading
    if hasattr(original, "_windlass_asks"):
        return

    @functools.wraps(original)
    def asks(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return None if skips(layer) else original(layer, *args, **kwargs)

    asks._windlass_asks = True  # type: ignore[attr-defined]
    method.process_weights_after_loading = asks


def _packed(module: torch.nn.Module, method: Any) -> str | None:
    """How SGLang changes a module's weights in place, with no way back; ``None`` if it does not."""
    if getattr(module, "use_intel_amx_backend", False):
        return "SGLang packs it for AMX after each load"
    if getattr(method, "w13_swiglu_interleaved", False):
        return "SGLang interleaves gate and up after each load"
    return None


def _restores(method: Any) -> bool:
    """Whether a method can undo what it does to weights."""
    try:
        from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
    except ImportError:
        return False
    nothing = getattr(QuantizeMethodBase, "restore_weights_before_loading", None)
    return getattr(type(method), "restore_weights_before_loading", nothing) is not nothing


def _default_loader() -> Any | None:
    try:
        from sglang.srt.model_loader.loader import DefaultModelLoader
    except ImportError:
        return None
    return DefaultModelLoader


def _width(name: str) -> int:
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:
        return 1
    return int(getattr(get_parallel(), name, None) or 1)


def _server_args() -> Any:
    try:
        from sglang.srt.runtime_context import get_server_args
    except ImportError:
        return None
    return get_server_args()


def synchronize() -> None:
    """Returns when the device has read what it was given."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
