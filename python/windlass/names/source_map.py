"""The source map: from a trainer's parameters to the tensors of the image.

A map is a pipeline. A parameter's name is first cleaned (see :mod:`windlass.names.clean`); then each rule in
turn looks at every image tensor that the rules before it made, and may rename it, split it, place it into a
larger one or drop it. Rules see names and shapes, never data. The order is

1. wrappers and PEFT,
2. the model's own conversion (`from_model`, `from_config`, `for_model_type`),
3. rules given to the constructor, then those added by methods, in the order they were added.

Who uses it: the manager, once for each parameter when it plans its copies. What it must not do: touch a
tensor, talk to other ranks, or guess. A fused tensor of experts of an unknown architecture is an error,
because half of all checkpoints hold it in one way and half in the other.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from windlass.errors import WindlassError, WindlassInvalid, WindlassUnsupported
from windlass.names.architectures import AS_IS, FUSED_EXPERTS, PER_EXPERT
from windlass.names.clean import Clean
from windlass.names.view import Shape, View, compose, split_rows, tile_exactly, transpose, whole

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

__all__ = ["Rule", "SourceMap", "names_of"]

logger = logging.getLogger("windlass")

#: What a rule makes of an image tensor: its views, or None where it has nothing to say.
Rule = Callable[[str, Shape], "Sequence[View] | None"]


@dataclass(frozen=True, slots=True)
class _Rename:
    pattern: re.Pattern[str]
    replacement: str

    def __call__(self, name: str, shape: Shape) -> Sequence[View] | None:
        renamed, count = self.pattern.subn(self.replacement, name)
        return [whole(renamed, shape)] if count else None


@dataclass(frozen=True, slots=True)
class _Split:
    pattern: re.Pattern[str]
    function: Callable[[str, Shape], Sequence[View]]
    partial: bool

    def __call__(self, name: str, shape: Shape) -> Sequence[View] | None:
        if self.pattern.fullmatch(name) is None:
            return None
        views = self.function(name, shape)
        if not self.partial and not tile_exactly([view.box for view in views], shape):
            raise WindlassInvalid(
                f"the rule {self.pattern.pattern!r} does not cover {name!r} of shape {list(shape)} exactly "
                f"once: it gives {[view.box for view in views]}",
                "cover every element once, or pass partial=True where some are meant to be left out",
            )
        return views


@dataclass(frozen=True, slots=True)
class _Merge:
    pattern: re.Pattern[str]
    into: str
    parts: Mapping[str, int]
    dim: int

    def __call__(self, name: str, shape: Shape) -> Sequence[View] | None:
        match = self.pattern.fullmatch(name)
        if match is None:
            return None
        part = match["part"]
        if part not in self.parts or not shape or self.parts[part] != shape[self.dim]:
            raise WindlassInvalid(
                f"parameter {name!r} of shape {list(shape)} does not fit the merge into {self.into!r}: "
                f"its parts have sizes {dict(self.parts)} in dimension {self.dim}"
            )
        dim = self.dim % len(shape)
        start = 0
        for other, size in self.parts.items():
            if other == part:
                break
            start += size
        total = tuple(sum(self.parts.values()) if d == dim else size for d, size in enumerate(shape))
        at = tuple(start if d == dim else 0 for d in range(len(shape)))
        box = tuple((0, size) for size in shape)
        return [View(box, match.expand(self.into), total, at, tuple(range(len(shape))))]


@dataclass(frozen=True, slots=True)
class _Drop:
    pattern: re.Pattern[str]

    def __call__(self, name: str, shape: Shape) -> Sequence[View] | None:
        return None if self.pattern.fullmatch(name) is None else ()


@dataclass(frozen=True, slots=True)
class _Keep:
    """Says nothing, but vouches for fused names."""

    pattern: re.Pattern[str]

    def __call__(self, name: str, shape: Shape) -> Sequence[View] | None:
        return None


@dataclass(frozen=True, slots=True)
class _Model:
    """What a model's own conversion makes of each of its tensors."""

    #: By name: the shape, and the views or why there are none.
    table: Mapping[str, tuple[Shape, tuple[View, ...] | str]]

    def __call__(self, name: str, shape: Shape) -> Sequence[View] | None:
        entry = self.table.get(name)
        if entry is None:
            return None
        expected, views = entry
        if expected != shape:
            raise WindlassInvalid(
                f"parameter {name!r} has shape {list(shape)}, but the model had {list(expected)}",
                "give global shapes, not shards'; after changing the model make the map anew",
            )
        if isinstance(views, str):
            raise WindlassUnsupported(
                f"parameter {name!r} {views}", "gather it and publish it under its own name"
            )
        return views


class SourceMap:
    """From a parameter's name and global shape to boxes of image tensors.

    >>> names = SourceMap().rename(r"^actor\\.", "").drop(r"v_head\\..*")
    >>> [view.name for view in names.views("module.actor.lm_head.weight", (512, 64))]
    ['lm_head.weight']
    >>> names.views("v_head.weight", (1, 64))
    ()

    Maps do not change: each method returns a new one.
    """

    def __init__(
        self,
        rules: Iterable[Rule] = (),
        *,
        wrappers: bool = True,
        peft: bool = True,
        saved_modules: str | None = None,
    ) -> None:
        """Make a map of rules, which see names after wrappers and PEFT were taken off (unless switched off).

        PEFT keeps a trained copy of some modules (`modules_to_save`). The base image takes the originals, and
        the copies travel with the adapter; `saved_modules="default"` takes the copies of that adapter
        instead.
        """
        self._clean = Clean(wrappers=wrappers, peft=peft, saved_modules=saved_modules)
        self._rules: tuple[Rule, ...] = tuple(rules)
        self._settled = False
        self._model: tuple[tuple[str, Shape], ...] | None = None
        self._said: set[str] = set()

    @classmethod
    def for_model_type(cls, model_type: str, **options: Any) -> Self:
        """The map of an architecture known by its `config.model_type`; `options` are the constructor's.

        >>> qwen = SourceMap.for_model_type("qwen3_moe")
        >>> [view.name for view in qwen.views("model.layers.0.mlp.experts.down_proj", (2, 64, 32))]
        ['model.layers.0.mlp.experts.0.down_proj.weight', 'model.layers.0.mlp.experts.1.down_proj.weight']
        """
        made = cls(**options)
        if model_type in PER_EXPERT:
            made._rules = (PER_EXPERT[model_type], *made._rules)
        elif model_type not in AS_IS:
            raise WindlassInvalid(
                f"no names are built in for model type {model_type!r}; known are "
                f"{', '.join(sorted({*PER_EXPERT, *AS_IS}))}",
                "use SourceMap.from_model(model) or SourceMap.from_config(config), which ask transformers",
            )
        made._settled = True
        return made

    @classmethod
    def from_model(cls, model: torch.nn.Module, **options: Any) -> Self:
        """The map of a transformers model, derived from what its `save_pretrained` would do.

        `options` are the constructor's.

        The model may be wrapped (DDP, FSDP, `torch.compile`, PEFT, DeepSpeed, a module with a value head);
        only its names, global shapes and configuration are read. Parameters that are not the transformers
        model's pass through under their own names.
        """
        from windlass.names import conversion

        made = cls(**options)
        inner = conversion.convert(model, made._clean)
        made._clean = replace(made._clean, prefix=inner.prefix, known=frozenset(inner.table))
        made._rules = (_Model(inner.table), *made._rules)
        made._model = inner.inventory
        made._settled = True
        return made

    @classmethod
    def from_config(cls, config: object, **options: Any) -> Self:
        """The map of the causal language model of a transformers configuration, or of a directory with one.

        Nothing is allocated: the model is built on the meta device.
        """
        from windlass.names import conversion

        return cls.from_model(conversion.skeleton_of_config(config), **options)

    def rename(self, pattern: str, replacement: str) -> Self:
        """Rename by a regular expression, as :func:`re.sub` does (anywhere in the name unless anchored)."""
        return self.then(_Rename(_compile(pattern), replacement))

    def split(
        self, pattern: str, function: Callable[[str, Shape], Sequence[View]], *, partial: bool = False
    ) -> Self:
        """Hand tensors whose whole name matches to a function of (name, shape) that returns their views.

        The views must cover the tensor exactly once, or at most once with `partial` (rows of padding).
        """
        return self.then(_Split(_compile(pattern), function, partial))

    def split_rows(self, pattern: str, sizes: Mapping[str, int], dim: int = 0) -> Self:
        """Split fused tensors whose whole name matches.

        `sizes` gives the new names, in which `\\\\1` stands for a group of the pattern, and their rows.

        >>> names = SourceMap().split_rows(
        ...     r"(.*)\\.qkv\\.weight", {r"\\1.q.weight": 8, r"\\1.k.weight": 4, r"\\1.v.weight": 4})
        >>> [(view.name, view.shape) for view in names.views("attn.qkv.weight", (16, 2))]
        [('attn.q.weight', (8, 2)), ('attn.k.weight', (4, 2)), ('attn.v.weight', (4, 2))]
        """
        compiled = _compile(pattern)

        def split(name: str, shape: Shape) -> Sequence[View]:
            match = compiled.fullmatch(name)
            assert match is not None, "the rule asks only for names that match"
            return split_rows(name, shape, {match.expand(part): size for part, size in sizes.items()}, dim)

        return self.then(_Split(compiled, split, False))

    def transpose(self, pattern: str, dims: Sequence[int] | None = None) -> Self:
        """Permute the dimensions of tensors whose whole name matches (reverse them without `dims`)."""
        return self.split(pattern, lambda name, shape: transpose(name, shape, dims))

    def merge(self, pattern: str, into: str, parts: Mapping[str, int], dim: int = 0) -> Self:
        """Put several tensors into one.

        `parts` gives, in order, what the group `part` of the pattern may match, and its size along `dim`.

        >>> names = SourceMap().merge(
        ...     r"(.*)\\.(?P<part>gate|up)\\.weight", r"\\1.gate_up.weight", {"gate": 8, "up": 8})
        >>> [view] = names.views("mlp.up.weight", (8, 4))
        >>> view.name, view.shape, view.at
        ('mlp.gate_up.weight', (16, 4), (8, 0))
        """
        compiled = _compile(pattern)
        if "part" not in compiled.groupindex:
            raise WindlassInvalid(
                f"the pattern {pattern!r} of a merge needs a group named part, as in (?P<part>gate|up)"
            )
        return self.then(_Merge(compiled, into, dict(parts), dim))

    def drop(self, pattern: str) -> Self:
        """Leave out tensors whose whole name matches, as the model has it or as the rules before made it."""
        return self.then(_Drop(_compile(pattern)))

    def keep(self, pattern: str) -> Self:
        """Vouch that fused experts whose whole name matches are called and shaped so in the checkpoint."""
        return self.then(_Keep(_compile(pattern)))

    def then(self, *rules: Rule) -> Self:
        """Add rules at the end."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._rules = (*self._rules, *rules)
        made._said = set()
        return made

    def views(self, name: str, shape: Sequence[int]) -> tuple[View, ...]:
        """The views of a parameter; none if it is not part of the image."""
        size = tuple(int(n) for n in shape)
        cleaned = self._clean(name)
        if cleaned is None:
            self._say_dropped(name)
            return ()
        # A parameter without views can be dropped only before the model's rule is asked for them.
        if any(isinstance(rule, _Drop) and rule.pattern.fullmatch(cleaned) for rule in self._rules):
            return ()
        views: list[View] = [whole(cleaned, size)]
        try:
            for rule in self._rules:
                views = [out for view in views for out in _apply(rule, view)]
            for view in views:
                self._check_fused(view)
        except WindlassError as error:
            if name not in str(error):
                raise type(error)(f"parameter {name!r}: {error}", error.advice) from error
            raise
        return tuple(views)

    def is_adapter(self, name: str) -> bool:
        """Whether a parameter is taken for an adapter's, and left out by its name alone.

        >>> SourceMap().is_adapter("model.layers.0.q_proj.lora_A.default.weight")
        True
        """
        return self._clean(name) is None

    def with_saved_modules(self, adapter: str) -> Self:
        """The same map with `saved_modules`, unless it has an adapter for that already."""
        if self._clean.saved_modules is not None:
            return self
        made = self.then()
        made._clean = replace(made._clean, saved_modules=adapter)
        return made

    def written(self) -> dict[str, Shape] | None:
        """The names and shapes of the model's checkpoint, where the map was made from a model; else None.

        Persistent buffers are among them.
        """
        if self._model is None:
            return None
        found: dict[str, Shape] = {}
        for name, shape in self._model:
            for view in self.views(name, shape):
                found[view.name] = view.shape
        return found

    def _check_fused(self, view: View) -> None:
        if self._settled or len(view.shape) != 3 or FUSED_EXPERTS.fullmatch(view.name) is None:
            return
        if any(isinstance(rule, _Keep) and rule.pattern.fullmatch(view.name) for rule in self._rules):
            return
        raise WindlassInvalid(
            f"{view.name!r} holds fused experts; whether the checkpoint does too depends on the architecture",
            "use SourceMap.from_model(model), SourceMap.for_model_type(config.model_type), "
            "or .keep(pattern) if the checkpoint has this very name",
        )

    def _say_dropped(self, name: str) -> None:
        if ".modules_to_save." in name and "modules_to_save" not in self._said:
            self._said.add("modules_to_save")
            logger.warning(
                "PEFT trains a copy of some modules (%s); the base image holds the originals and the copies "
                "travel with the adapter (saved_modules=<adapter> publishes the copies instead)",
                name,
            )


def names_of(model: torch.nn.Module) -> SourceMap:
    """The map of a model: from its configuration if transformers made it, else its names without what wrappers add."""
    # A program with such a model has imported the library; importing it for others would cost seconds.
    transformers = sys.modules.get("transformers")
    if transformers is not None and any(isinstance(m, transformers.PreTrainedModel) for m in model.modules()):
        return SourceMap.from_model(model)
    return SourceMap()


def _apply(rule: Rule, view: View) -> Iterable[View]:
    made = rule(view.name, view.shape)
    return (view,) if made is None else compose(view, made)


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise WindlassInvalid(f"{pattern!r} is not a regular expression: {error}") from error
