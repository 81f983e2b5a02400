"""What a transformers model's `save_pretrained` would write, traced without any data.

transformers converts between a model's parameters and its checkpoint by a table of operations for each
architecture (merge the experts, concatenate, transpose, permute for rotary embeddings). Rather than copying
that table, its own reverse conversion is run once on stand-ins that carry no elements, only a record of where
each block of theirs comes from (:mod:`windlass.names.trace`). What comes out is read back as views.

A result that is no rearrangement of parameters (arithmetic, a cast) has no views; the parameters behind it
say so when they are asked for, so that a user may drop them first.

This module imports torch and transformers and is imported only by `SourceMap.from_model` and `from_config`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from windlass.errors import WindlassInvalid, WindlassUnsupported
from windlass.names.clean import WRAPPERS, Clean
from windlass.names.trace import Traced
from windlass.names.view import Shape, View, whole

__all__ = ["Conversion", "convert", "persistent_buffers", "skeleton_of_config"]


@dataclass(frozen=True, slots=True)
class Conversion:
    """What became of a model's tensors."""

    #: By cleaned name: the global shape, and the views or why there are none.
    table: dict[str, tuple[Shape, tuple[View, ...] | str]]
    #: Parameters and persistent buffers, each storage once, as `save_pretrained` has them.
    inventory: tuple[tuple[str, Shape], ...]
    #: Where the transformers model stands inside the given one, without wrappers.
    prefix: str


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a state dictionary has, such as the correction biases of DeepSeek's routers.

    `named_parameters()` does not have them, and `save_pretrained` writes them.

    >>> import torch
    >>> [name for name, _ in persistent_buffers(torch.nn.BatchNorm1d(2))]
    ['running_mean', 'running_var', 'num_batches_tracked']
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield (f"{prefix}.{name}" if prefix else name), buffer


def skeleton_of_config(config: object) -> Any:
    """The causal language model of a configuration, on the meta device."""
    import transformers

    if not isinstance(config, transformers.PretrainedConfig):
        config = transformers.AutoConfig.from_pretrained(config)
    with torch.device("meta"):
        build: Any = transformers.AutoModelForCausalLM.from_config
        return build(config)


def convert(model: torch.nn.Module, clean: Clean) -> Conversion:
    """Trace the conversion of a model, wrapped or not."""
    path, inner = _find(model)
    prefix = ".".join(part for part in path.split(".") if part and part not in WRAPPERS)
    plain = _is_plain(inner)
    reference = inner if plain else _skeleton(inner)
    tensors = dict(_tensors(inner, reference, clean, plain))
    ignored = set(getattr(reference, "_keys_to_ignore_on_save", None) or ())
    state = {
        name: Traced.source(name, shape, dtype)
        for name, (shape, dtype, _) in tensors.items()
        if name not in ignored
    }

    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad():
        try:
            made = revert_weight_conversion(reference, dict(state))
        except Exception as error:
            raise WindlassUnsupported(
                f"transformers could not say what {type(reference).__name__}.save_pretrained writes: {error}",
                "give the names by hand with SourceMap().rename(...) and .split(...)",
            ) from error
    table = _read_back(tensors, ignored, made)
    inventory = tuple((name, shape) for name, (shape, _, alias) in tensors.items() if not alias)
    return Conversion(table, inventory, prefix)


def _find(model: Any) -> tuple[str, Any]:
    """The outermost transformers model, and its path."""
    import transformers

    if not isinstance(model, torch.nn.Module):
        inner = getattr(model, "module", None)
        if not isinstance(inner, torch.nn.Module):
            raise WindlassInvalid(f"a {type(model).__name__} is no module; give the model itself")
        model = inner
    for path, module in model.named_modules():
        if isinstance(module, transformers.PreTrainedModel):
            return path, module
    raise WindlassInvalid(
        f"there is no transformers model inside {type(model).__name__}",
        "use SourceMap() and add rules with .rename(...) and .split_rows(...)",
    )


def _is_plain(model: torch.nn.Module) -> bool:
    """Whether module paths and parameter shapes are those of the architecture."""
    clean = Clean()
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[-1] == "_flat_param" or clean(name) != name or hasattr(parameter, "ds_shape"):
            return False
    return not any(_is_sharded(module) for module in model.modules())


def _is_sharded(module: torch.nn.Module) -> bool:
    return any(base.__name__ in ("FSDPModule", "FullyShardedDataParallel") for base in type(module).__mro__)


def _skeleton(model: Any) -> Any:
    """The same architecture on the meta device, without wrappers or adapters inside."""
    import transformers

    # fully_shard makes a class of its own for each module; the architecture's is the first that is not
    # sharded.
    architecture = next(
        base
        for base in type(model).__mro__
        if issubclass(base, transformers.PreTrainedModel)
        and not any(parent.__name__ == "FSDPModule" for parent in base.__mro__)
    )
    try:
        with torch.device("meta"):
            made = architecture(copy.deepcopy(model.config))
    except Exception as error:
        raise WindlassUnsupported(
            f"the wrapped {architecture.__name__} cannot be built anew from its configuration: {error}",
            "make the map before wrapping: SourceMap.from_model(model)",
        ) from error
    # How a checkpoint was loaded decides how it is saved.
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        made._weight_conversions = conversions
    return made


def _tensors(
    model: Any, reference: Any, clean: Clean, plain: bool
) -> Iterator[tuple[str, tuple[Shape, torch.dtype, bool]]]:
    """Names, global shapes, dtypes, and whether a name is another's alias."""
    if any(_is_sharded(module) and not _has_global_shapes(module) for module in model.modules()):
        model, plain = reference, True
    own = {name for name, _ in (*model.named_parameters(), *persistent_buffers(model))}
    every = (*model.named_parameters(remove_duplicate=False), *persistent_buffers(model))
    for name, tensor in every:
        cleaned = name if plain else clean(name)
        if cleaned is not None:
            shape = tuple(int(size) for size in getattr(tensor, "ds_shape", tensor.shape))
            yield cleaned, (shape, tensor.dtype, name not in own)


def _has_global_shapes(module: torch.nn.Module) -> bool:
    return all(base.__name__ != "FullyShardedDataParallel" for base in type(module).__mro__)


def _read_back(
    tensors: dict[str, tuple[Shape, torch.dtype, bool]], ignored: set[str], made: dict[str, Any]
) -> dict[str, tuple[Shape, tuple[View, ...] | str]]:
    """Sort the blocks of the image tensors by the parameters that they come from."""
    views: dict[str, list[View]] = {}
    reasons: dict[str, str] = {}
    for name, result in made.items():
        if not isinstance(result, Traced):
            continue
        # Reading the views may find that some cannot be told, so the reasons come second.
        for source, view in result.views(name):
            views.setdefault(source, []).append(view)
        for source, why in result.reasons.items():
            reasons[source] = f"becomes the checkpoint's {name!r} by {why}: no view, it will need gathering"
    table: dict[str, tuple[Shape, tuple[View, ...] | str]] = {}
    for name, (shape, _, _) in tensors.items():
        if name in ignored:
            table[name] = (shape, ())
        elif name in reasons:
            table[name] = (shape, reasons[name])
        elif name in views:
            table[name] = (shape, tuple(views[name]))
        elif 0 in shape and name in made:
            table[name] = (shape, (whole(name, shape),))
        else:
            table[name] = (
                shape,
                "is left out of the checkpoint by transformers: another parameter takes its name",
            )
    return table
