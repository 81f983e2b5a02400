"""Names as wrappers and PEFT write them, back to the names of the model inside.

Decided by names alone, because that is all a rank has for a parameter that it does not hold.

- `_fsdp_wrapped_module`, `_orig_mod` and `_checkpoint_wrapped_module` are added by FSDP1, `torch.compile` and
  activation checkpointing at any depth; nobody names a submodule so, and they are removed wherever they
  stand.
- `module` is what DDP, DataParallel and DeepSpeed add, always outermost: it is removed at the front only, as
  often as it stands there, because a model may well have a submodule of that name deeper inside.
- PEFT adds `base_model.model` (or `base_model` alone, with prompt learning) at the front, `base_layer` where
  a layer was replaced, and its own parameters beside it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from windlass.errors import WindlassInvalid

__all__ = ["ADAPTER_PREFIXES", "WRAPPERS", "Clean", "unwrapped"]

#: Segments that wrappers add at any depth.
WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})

#: How the segments that hold PEFT's own parameters begin: `lora_A.default.weight`, `ia3_l.default`, …
ADAPTER_PREFIXES = (
    *(
        "adamss_",
        "adaption_prompt_",
        "beft_",
        "boft_",
        "bone_",
        "c3a_",
        "cartridge_",
        "cpt_",
        "deft_",
        "delora_",
    ),
    *("fourierft_", "frod_", "glora_", "gralora_", "hada_", "hira_", "hra_", "ia3_", "lily_", "ln_tuning_"),
    *("lokr_", "lora_", "miss_", "multitask_prompt_tuning_", "oft_", "osf_", "p_tuning_", "peanut_", "poly_"),
    *("prefix_tuning_", "prompt_tuning_", "psoft_", "pvera_", "randlora_", "road_", "shadow_", "shira_"),
    *("supertuning_", "tinylora_", "trainable_tokens_", "unilora_", "vblora_", "vera_", "waveft_", "xlora_"),
)
#: Whole segments of PEFT's that hold parameters themselves.
_ADAPTER_SEGMENTS = frozenset(
    {"prompt_encoder", "adaption_prompt", "adaption_gate", "internal_xlora_classifier"}
)
_BASE_SEGMENTS = frozenset({"base_layer", "token_adapter"})


def unwrapped(name: str) -> str:
    """A name without the segments that wrappers add.

    >>> unwrapped("_orig_mod.model._fsdp_wrapped_module.norm")
    'model.norm'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


@dataclass(frozen=True, slots=True)
class Clean:
    """Takes off what wrappers and PEFT put into a parameter's name.

    >>> clean = Clean()
    >>> clean("module._orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    >>> clean("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight") is None
    True
    """

    #: Remove what wrappers add.
    wrappers: bool = True
    #: Remove what PEFT adds, and leave adapter parameters out.
    peft: bool = True
    #: The adapter whose `modules_to_save` copies stand for the original modules; None keeps the originals.
    saved_modules: str | None = None
    #: Where the model stands inside what was given (for example `pretrained_model`), without wrappers.
    prefix: str = ""
    #: The model's own names where they are known; a name among them is never shortened further.
    known: Collection[str] = ()

    def __call__(self, name: str) -> str | None:
        """The name inside, or None for a parameter that is an adapter's."""
        parts = name.split(".")
        if self.wrappers:
            parts = [part for part in parts if part not in WRAPPERS]
        if not parts or parts[-1] == "_flat_param":
            raise WindlassInvalid(
                f"parameter {name!r} is a flat parameter: it has no single name in a checkpoint",
                "wrap with FullyShardedDataParallel(..., use_orig_params=True), or use fully_shard",
            )
        found = self._known(parts)
        if found is not None:
            return found
        if self.wrappers:
            while len(parts) > 1 and parts[0] == "module":
                parts = parts[1:]
        if self.peft:
            inner = self._without_peft(parts)
            if inner is None:
                return None
            parts = inner
        return self._known(parts) or self._unprefixed(parts)

    def _known(self, parts: list[str]) -> str | None:
        """The name if the model has it, with or without the prefix."""
        name = ".".join(parts)
        for candidate in (self._unprefixed(parts), name):
            if candidate in self.known:
                return candidate
        return None

    def _unprefixed(self, parts: list[str]) -> str:
        name = ".".join(parts)
        return name.removeprefix(f"{self.prefix}.") if self.prefix else name

    def _without_peft(self, parts: list[str]) -> list[str] | None:
        if any(part in _ADAPTER_SEGMENTS for part in parts):
            return None
        # An adapter's parameters stand in dictionaries by adapter name, so such a segment is never the last.
        if any(part.startswith(ADAPTER_PREFIXES) for part in parts[:-1]):
            return None
        if "modules_to_save" in parts:
            at = parts.index("modules_to_save")
            if self.saved_modules is None or parts[at + 1 : at + 2] != [self.saved_modules]:
                return None
            parts = parts[:at] + parts[at + 2 :]
        if "original_module" in parts:
            if self.saved_modules is not None:
                return None
            parts = [part for part in parts if part != "original_module"]
        parts = [part for part in parts if part not in _BASE_SEGMENTS]
        if parts[:1] == ["base_model"]:
            parts = parts[2:] if parts[1:2] == ["model"] else parts[1:]
        return parts
