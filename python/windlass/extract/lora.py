"""LoRA adapters: found in a model, collected from all ranks, written as PEFT writes them.

The base of a LoRA model does not change, so the adapters are all that a sync has to move. :func:`collect_lora`
gathers them and nothing else, under the names and with the configuration of a PEFT adapter directory, whatever the
model is spread by; :func:`save_lora` writes that directory for engines that load adapters from disk.

Which tensors belong to an adapter is PEFT's decision (``get_peft_model_state_dict``), made on shadows without
memory before anything is gathered. Embeddings are not added to the adapter, even where PEFT's ``save_pretrained``
guesses that they were resized: it asks a server for that.
"""

from __future__ import annotations

import enum
import json
import os
import pathlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from windlass import _windlass
from windlass.atomic import replacing
from windlass.errors import WindlassInvalid, WindlassUnsupported
from windlass.names.clean import unwrapped

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from windlass.extract.source import GatheringExtractor, Source

__all__ = ["LoraState", "collect_lora", "is_lora", "save_lora"]

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class LoraState:
    """An adapter: its tensors by the names of an adapter file, and its configuration as plain data.

    The tensors are copies: training may go on while they are written or sent.
    """

    tensors: Mapping[str, Tensor]
    config: dict[str, Any] = field(default_factory=dict)


def is_lora(model: torch.nn.Module) -> bool:
    """Whether there is a PEFT model with LoRA adapters in this one, under whatever wrappers.

    >>> import torch
    >>> is_lora(torch.nn.Linear(2, 2))
    False
    """
    return _find(model) is not None


def collect_lora(model: torch.nn.Module, adapter: str | None = None) -> LoraState:
    """The adapter of a model that is plain or under DDP, FSDP1, FSDP2 or DeepSpeed, whole on every rank.

    All ranks call it. ``adapter`` names one of several; by default it is the active one. For Megatron models use
    ``MegatronWeightExtractor(bridge, model, lora=True)``.
    """
    from windlass.extract import extractor_for
    from windlass.extract.source import gathered

    sources, config = adapter_sources(model, extractor_for(model), adapter)
    return LoraState({name: tensor.clone() for name, tensor in gathered(sources)}, config)


def adapter_sources(
    model: torch.nn.Module, extractor: GatheringExtractor, adapter: str | None = None
) -> tuple[list[Source], dict[str, Any]]:
    """What makes up the adapter, under final names and not gathered yet, and its configuration."""
    import dataclasses

    import torch
    from peft import get_peft_model_state_dict

    found = _find(model)
    if found is None:
        raise WindlassInvalid(f"{type(model).__name__} has no LoRA adapters", "ask is_lora(model) first")
    prefix, inner = found
    adapter = adapter or _active(inner)
    if adapter not in inner.peft_config:
        raise WindlassInvalid(f"no adapter {adapter!r}", f"there are {sorted(inner.peft_config)}")
    shadows, origin = {}, {}
    for source in [*extractor.sources(model), *extractor.buffer_sources(model)]:
        if source.name.startswith(prefix):
            shadow = torch.empty(source.shape, dtype=source.dtype, device="meta")
            shadows[source.name.removeprefix(prefix)] = shadow
            origin[id(shadow)] = source
    chosen = get_peft_model_state_dict(
        inner, state_dict=shadows, adapter_name=adapter, save_embedding_layers=False
    )
    strange = [name for name, shadow in chosen.items() if id(shadow) not in origin]
    if strange:
        raise WindlassUnsupported(
            f"PEFT computes {strange[0]!r} from other tensors", "save this adapter with PEFT"
        )
    # PEFT's own models name their tensors from the wrapper; transformers' do not, but their files do.
    root = "" if _is_peft(inner) else "base_model.model."
    sources = [
        dataclasses.replace(origin[id(shadow)], name=root + unwrapped(name))
        for name, shadow in chosen.items()
    ]
    return sources, _config(inner.peft_config[adapter])


def save_lora(
    state: LoraState, folder: str | os.PathLike[str], version: int, *, name: str = "adapter"
) -> pathlib.Path:
    """Writes the adapter as ``folder/name-version`` and returns that path; one rank calls it.

    The directory appears whole or not at all, and a version is written once: an engine that was told a path never
    sees its content change. Older versions are left to the caller, who knows when no engine reads them any more.

    >>> import tempfile, torch
    >>> state = LoraState({"base_model.model.q_proj.lora_A.weight": torch.zeros(4, 8)}, {"peft_type": "LORA", "r": 4})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_lora(state, folder, 3)
    ...     path.name, sorted(file.name for file in path.iterdir())
    ('adapter-3', ['adapter_config.json', 'adapter_model.safetensors'])
    """
    folder = pathlib.Path(folder)
    target = folder / f"{name}-{version}"
    if target.exists():
        raise WindlassInvalid(f"{target} is there already", "give every adapter a version of its own")
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(target, durable=True) as draft:
        draft.mkdir()
        _write(draft / WEIGHTS, state.tensors)
        (draft / CONFIG).write_text(json.dumps(state.config, indent=2, sort_keys=True) + "\n")
    return target


def _write(file: pathlib.Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file, tensor by tensor: never more than one of them is held besides."""
    import torch

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # The widest elements first, so that every tensor is aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    at = 0
    for name in order:
        tensor = tensors[name]
        end = at + tensor.numel() * tensor.element_size()
        stored = _windlass.dtype_safetensors(str(tensor.dtype))
        header[name] = {"dtype": stored, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            # The format has no strides.
            flat = tensors[name].detach().to("cpu").contiguous().view(-1).view(torch.uint8)
            out.write(flat.numpy().data)


def _find(model: torch.nn.Module) -> tuple[str, Any] | None:
    """The PEFT model in this one with the prefix of its names, if it has LoRA adapters."""
    from windlass.extract.deepspeed import inner_module

    for name, module in inner_module(model).named_modules():
        if not (_is_peft(module) or vars(module).get("_hf_peft_config_loaded")):
            continue
        if any(
            str(getattr(config.peft_type, "value", config.peft_type)) == "LORA"
            for config in module.peft_config.values()
        ):
            return (f"{name}." if name else "", module)
    return None


def _is_peft(module: object) -> bool:
    # A program with a PEFT model has imported PEFT; importing it for others would cost seconds.
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftModel)


def _active(inner: Any) -> str:
    active = inner.active_adapter if _is_peft(inner) else inner.active_adapters()
    names = [active] if isinstance(active, str) else list(active)
    if len(names) != 1:
        raise WindlassInvalid(f"{len(names)} adapters are active: {names}", "name the one to collect")
    return str(names[0])


def _config(config: Any) -> dict[str, Any]:
    """The configuration as ``save_pretrained`` writes it: plain data, for inference."""
    plain: dict[str, Any] = _jsonable(config.to_dict())
    plain["inference_mode"] = True
    return plain


def _jsonable(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(_jsonable, value), key=str)
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return value
