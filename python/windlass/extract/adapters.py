"""What PEFT adapts in a model.

Owns: :func:`adapters_of`, which finds the layers that PEFT has put around others, and refuses a model that cannot be merged.
Called by extractors and by :mod:`windlass.publish.merged`. Must not: change the model.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from windlass.errors import WindlassInvalid, WindlassUnsupported
from windlass.names.clean import unwrapped

__all__ = ["REMEDY", "Adapted", "Layer", "adapters_of"]

#: What to do about a model that cannot be merged.
REMEDY = (
    "publish what PEFT's merge_and_unload() gives of a copy; the weights without their adapters are published with "
    'lora="base", and extracted with lora=False'
)


@dataclass(frozen=True)
class Layer:
    """A layer that PEFT has put around another one."""

    #: Without what wrappers add.
    path: str
    module: Any
    #: Those that are active, in PEFT's order.
    adapters: tuple[str, ...]
    #: Where the adapted layer is, from here: ``base_layer``, or deeper where layers are nested.
    base: str

    def leaves(self) -> list[str]:
        """The tensors of its active adapters, by their names from here."""
        out = []
        for adapter in self.adapters:
            for kind in ("lora_A", "lora_B", "lora_magnitude_vector"):
                if adapter in getattr(self.module, kind):
                    out.append(f"{kind}.{adapter}.weight")
            if self.module.lora_bias.get(adapter):
                out.append(f"lora_B.{adapter}.bias")
            for kind in ("lora_embedding_A", "lora_embedding_B"):
                if adapter in getattr(self.module, kind):
                    out.append(f"{kind}.{adapter}")
        return out

    def is_plain(self) -> bool:
        """Whether its adapters are a product that is added, and nothing more."""
        return not any(adapter in self.module.lora_variant for adapter in self.adapters)

    def parameters(self) -> list[str]:
        """Which parameters of the adapted layer merging changes."""
        if hasattr(self.module, "parameter_name"):
            return [self.module.parameter_name]
        return ["weight"] + ["bias"] * any(self.module.lora_bias.get(a) for a in self.adapters)


@dataclass
class Adapted:
    """What PEFT adapts in a model."""

    model: weakref.ref[torch.nn.Module]
    layers: dict[str, Layer] = field(default_factory=dict)
    #: Modules of which a trained copy is used (``modules_to_save``), and whose copy.
    copies: dict[str, tuple[Any, str]] = field(default_factory=dict)

    @property
    def saved(self) -> str | None:
        """The adapter whose copies of modules stand for the originals."""
        return next((adapter for _, adapter in self.copies.values()), None)

    def state(self) -> dict[str, Any]:
        """What may not change from version to version."""
        return {
            **{path: active_adapters(layer.module) for path, layer in self.layers.items()},
            **{path: tuple(wrapper.active_adapters) for path, (wrapper, _) in self.copies.items()},
        }


def adapters_of(model: torch.nn.Module) -> Adapted:
    """What PEFT adapts in a model. An error for what cannot be merged, by its name."""
    found = Adapted(weakref.ref(model))
    # A program with a PEFT model has imported PEFT.
    peft = sys.modules.get("peft")
    if peft is None:
        return found
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    for name, module in model.named_modules():
        path = unwrapped(name)
        if isinstance(module, peft.PeftModel):
            _check_method(module)
        if isinstance(module, ModulesToSaveWrapper):
            _check_tied(model, path, module)
            for adapter in module.active_adapters:
                found.copies[path] = (module, adapter)
        elif isinstance(module, AuxiliaryTrainingWrapper):
            raise WindlassUnsupported(
                f"{path!r} is adapted by PEFT's {type(module).__name__}, which is not merged here", REMEDY
            )
        elif isinstance(module, BaseTunerLayer):
            found.layers[path] = _layer(path, module)
    if len({adapter for _, adapter in found.copies.values()}) > 1:
        told = ", ".join(f"{path!r} of {adapter!r}" for path, (_, adapter) in list(found.copies.items())[:3])
        raise WindlassUnsupported(f"modules_to_save of several adapters are active: {told}", REMEDY)
    return found


def _check_method(model: Any) -> None:
    for adapter in model.active_adapters:
        config = model.peft_config[adapter]
        method = str(getattr(config.peft_type, "value", config.peft_type))
        if method != "LORA":
            raise WindlassUnsupported(
                f"the adapter {adapter!r} is a {method} adapter, and of PEFT's methods LoRA is merged", REMEDY
            )


def _check_tied(model: torch.nn.Module, path: str, wrapper: Any) -> None:
    """A copy of a tied weight is in the image under one name, and the original would have to be under the other."""
    if not wrapper.active_adapters:
        return
    originals = {id(p): name for name, p in wrapper.original_module.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = unwrapped(name).startswith(f"{path}.")
        if id(parameter) in originals and not inside and "original_module" not in name.split("."):
            raise WindlassUnsupported(
                f"modules_to_save has a trained copy of {path!r}, and {name!r} is still tied to the original",
                "give LoraConfig ensure_weight_tying=True, or untie the weights before",
            )


def _layer(path: str, module: Any) -> Layer:
    from peft.tuners.lora import layer as kinds

    known = (kinds.Linear, kinds.Embedding, kinds.Conv1d, kinds.Conv2d, kinds.Conv3d, kinds.ParamWrapper)
    # fully_shard makes a class of its own for what it shards.
    kind = next(base for base in type(module).__mro__ if base.__module__.startswith("peft."))
    if kind not in known:
        raise WindlassUnsupported(
            f"{path!r} is a {kind.__module__}.{kind.__name__} of PEFT, which is not merged here", REMEDY
        )
    base, inner = "base_layer", module.base_layer
    while hasattr(inner, "base_layer"):
        base, inner = f"{base}.base_layer", inner.base_layer
    layer = Layer(path, module, active_adapters(module), base)
    for adapter in layer.adapters:
        variant = module.lora_variant.get(adapter)
        if variant is not None and not type(variant).__name__.startswith("Dora"):
            raise WindlassUnsupported(
                f"the adapter {adapter!r} of {path!r} is a {type(variant).__name__} of PEFT, which is not merged here",
                REMEDY,
            )
    if "bias" in layer.parameters() and getattr(inner, "bias", None) is None:
        raise WindlassInvalid(f"{path!r} has lora_bias=True and no bias that it could be merged into", REMEDY)
    return layer


def active_adapters(module: Any) -> tuple[str, ...]:
    return tuple(
        adapter
        for adapter in module.active_adapters
        if adapter in module.lora_A or adapter in module.lora_embedding_A
    )
