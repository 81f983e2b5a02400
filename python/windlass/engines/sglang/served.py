"""What an engine serves, told by the checkpoint it was started from; and whether offered weights fit.

Owns: the rules by which names, shapes and dtypes are judged. The headers are read by :mod:`windlass.names.checkpoint`. Called by the loader before an engine is touched, and by every worker before its first write, with the same
result. Must not: read tensors; import torch or the engine.

An engine's own loader raises in the middle of a load, or skips in silence, when a name, a shape or a dtype is not the
one of its checkpoint. So everything that is loaded is compared with the checkpoint first:

| offered | |
|---|---|
| a name is missing | error, unless it matches ``optional``; tied output embeddings need not be there |
| another shape | error |
| another dtype | error, unless ``cast`` and both are floating point of 16 bits or more |
| a name that the checkpoint does not have | left out, or an error: ``extras`` |
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from windlass.errors import WindlassInvalid, WindlassNotFound, WindlassUnsupported
from windlass.names.checkpoint import checkpoint_layout

__all__ = ["Fit", "Rules", "Served", "Shape"]

#: Dtype (canonical name) and shape of a tensor.
Shape = tuple[str, tuple[int, ...]]

#: How many names a message lists.
LISTED = 5
#: What checkpoints may hold and no engine reads: tables that are computed anew.
COMPUTED = ("*rotary_emb.inv_freq", "*rotary_emb.cos_cached", "*rotary_emb.sin_cached")
_CASTABLE = frozenset({"float64", "float32", "bfloat16", "float16"})


@dataclass(frozen=True)
class Rules:
    """What is allowed to differ from the checkpoint. Plain data: it travels in an order."""

    extras: Literal["ignore", "error"] = "ignore"
    #: Patterns (``fnmatch``) of names that may be missing.
    optional: list[str] = field(default_factory=list)
    #: Whether the engine may cast one floating-point type to another.
    cast: bool = False

    def __post_init__(self) -> None:
        if self.extras not in ("ignore", "error"):
            raise WindlassInvalid(f"extras is {self.extras!r}: expected 'ignore' or 'error'")
        if isinstance(self.optional, str) or not all(isinstance(p, str) for p in self.optional):
            raise WindlassInvalid(f"optional is {self.optional!r}: expected a list of patterns")
        object.__setattr__(self, "optional", list(self.optional))

    def to_dict(self) -> dict[str, Any]:
        """The plain form."""
        return asdict(self)


@dataclass(frozen=True)
class Fit:
    """Weights that fit: which names to load, and which the engine has no place for."""

    take: list[str]
    extras: list[str]


class Served:
    """The tensors of the checkpoint that an engine was started from."""

    def __init__(
        self, tensors: Mapping[str, Shape], *, tied: bool = False, origin: str = "the checkpoint"
    ) -> None:
        self.tensors = dict(tensors)
        #: Whether the output embedding is the input embedding.
        self.tied = tied
        #: Where this is known from, for messages.
        self.origin = origin

    @classmethod
    def from_checkpoint(cls, model: str | os.PathLike[str]) -> Served:
        """Reads the headers of a model directory, or of a hub model that is in the local cache."""
        path = _directory(model)
        if not any(path.glob("*.safetensors")):
            raise WindlassUnsupported(
                f"{path} has no safetensors files, so nobody can tell what the engine serves",
                "save the checkpoint as safetensors, or give checkpoint= another directory",
            )
        tensors = checkpoint_layout(path)
        tied = False
        try:
            config = json.loads((path / "config.json").read_text())
            inner = config.get("text_config") or {}
            tied = bool(config.get("tie_word_embeddings", inner.get("tie_word_embeddings", False)))
        except (OSError, ValueError, AttributeError):
            # Without a configuration nothing is excused.
            pass
        return cls(tensors, tied=tied, origin=str(path))

    def check(self, offered: Mapping[str, Shape], rules: Rules, *, what: str, whole: bool = True) -> Fit:
        """Whether ``offered`` fits; an error that names what does not. ``what`` names it in messages.

        With ``whole`` false, nothing needs to be there.

        >>> served = Served({"w": ("float32", (2,))})
        >>> served.check({"w": ("float32", (2,)), "value_head": ("float32", (1,))}, Rules(), what="version 1").extras
        ['value_head']
        >>> try:
        ...     served.check({"w": ("float32", (3,))}, Rules(), what="version 1")
        ... except WindlassInvalid as e:
        ...     (e.name, str(e))
        ('shape_changed', 'version 1 does not fit the checkpoint: w has shape [3], the engine serves [2]')
        """
        extras = [name for name in offered if name not in self.tensors]
        if extras and rules.extras == "error":
            raise self._misfit(
                what,
                [f"it has {name}, the engine does not" for name in extras],
                "extra_tensor",
                "leave it out where the weights are published (exclude=), or set extras='ignore'",
            )
        if whole:
            missing = [
                name for name in self.tensors if name not in offered and not self._excused(name, rules)
            ]
            if missing:
                raise self._misfit(
                    what,
                    [f"{name} is missing" for name in missing],
                    "missing_tensor",
                    "publish it, or name it in optional= if the engine may keep its old value",
                )
        take = [name for name in offered if name in self.tensors]
        if not take:
            raise WindlassInvalid(f"{what} has no tensor that {self.origin} has", name="missing_tensor")
        wrong = [
            f"{name} has shape {list(offered[name][1])}, the engine serves {list(self.tensors[name][1])}"
            for name in take
            if offered[name][1] != self.tensors[name][1]
        ]
        if wrong:
            raise self._misfit(
                what, wrong, "shape_changed", "publish the model that this engine was started from"
            )
        wrong = [
            f"{name} is {offered[name][0]}, the engine's checkpoint has {self.tensors[name][0]}"
            for name in take
            if not self._dtype_fits(name, offered[name][0], rules)
        ]
        if wrong:
            raise self._misfit(
                what,
                wrong,
                "dtype_changed",
                "publish the dtype of the checkpoint (dtype=), or set cast=True to let the engine cast floats",
            )
        return Fit(take, extras)

    def missing(self, names: Container[str], rules: Rules) -> list[str]:
        """What should be among ``names`` and is not."""
        return [name for name in self.tensors if name not in names and not self._excused(name, rules)]

    def _excused(self, name: str, rules: Rules) -> bool:
        if self.tied and name == "lm_head.weight":
            return True
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in (*COMPUTED, *rules.optional))

    def _dtype_fits(self, name: str, dtype: str, rules: Rules) -> bool:
        served = self.tensors[name][0]
        return dtype == served or (rules.cast and dtype in _CASTABLE and served in _CASTABLE)

    def _misfit(self, what: str, problems: list[str], name: str, advice: str) -> WindlassInvalid:
        listed = "; ".join(problems[:LISTED])
        more = f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
        return WindlassInvalid(f"{what} does not fit {self.origin}: {listed}{more}", advice, name)


def _directory(model: str | os.PathLike[str]) -> Path:
    path = Path(model)
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(model), local_files_only=True))
    except Exception as e:
        # Whatever the hub's client raises, the remedy is the same.
        raise WindlassNotFound(
            f"the engine serves {str(model)!r}, which is neither a directory nor in the local cache of this host",
            "give checkpoint=, a directory with the safetensors files that the engine was started from",
        ) from e
