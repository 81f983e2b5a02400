"""Which tensors belong to the image.

Trainers have tensors that no engine loads: value heads, scores, critics. Where the names of the checkpoint
are known (a checkpoint was given, or the map was made from the model) every name that is not among them is an
extra; where they are not, extras are told by their usual names. An extra that is trained and has no such name is an
error: it would be missed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from windlass.errors import WindlassInvalid

__all__ = ["Chosen", "Selection", "is_usual_extra"]

logger = logging.getLogger("windlass")

_HEADS = ("v_head", "value_head", "critic_head", "reward_head")
_USUAL_EXTRAS = ("score.*", *(f"{head}.*" for head in _HEADS), *(f"*.{head}.*" for head in _HEADS))


def is_usual_extra(name: str) -> bool:
    """Whether a tensor has the usual name of one that no engine loads.

    >>> is_usual_extra("v_head.weight"), is_usual_extra("lm_head.weight")
    (True, False)
    """
    return _matches(name, _USUAL_EXTRAS)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a selection made of some names."""

    #: Part of the image, in the order given.
    kept: tuple[str, ...]
    #: Left out because the user said so.
    excluded: tuple[str, ...]
    #: Left out because no checkpoint has them.
    extras: tuple[str, ...]
    #: In the checkpoint, but not among the names given (tied names, or a part of the model that is not
    #: trained).
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """Chooses image tensors by globs of their names.

    >>> Selection(exclude=["lm_head.*"]).choose(["model.norm.weight", "lm_head.weight", "v_head.weight"]).kept
    ('model.norm.weight',)
    """

    #: Only these, if any are given; a name that matches is never an extra.
    include: Collection[str] = ()
    #: Not these.
    exclude: Collection[str] = ()
    #: Leave extras out and say so once, or refuse them.
    extras: Literal["ignore", "error"] = "ignore"

    def __post_init__(self) -> None:
        for field, globs in (("include", self.include), ("exclude", self.exclude)):
            if isinstance(globs, str):
                raise WindlassInvalid(f"{field} is the string {globs!r}; give a list of globs: [{globs!r}]")
        if self.extras not in ("ignore", "error"):
            raise WindlassInvalid(f'extras is {self.extras!r}; it may be "ignore" or "error"')

    def choose(
        self,
        names: Iterable[str],
        checkpoint: Collection[str] | None = None,
        trained: Collection[str] = (),
    ) -> Chosen:
        """Choose among image names, given the checkpoint's names where they are known.

        What was left out or is missing is logged here: call it once for a model. It is an error if something of ``trained``
        is an extra, unless it has the usual name of one.
        """
        kept: list[str] = []
        excluded: list[str] = []
        extras: list[str] = []
        every = list(dict.fromkeys(names))
        known = None if checkpoint is None else frozenset(checkpoint)
        for name in every:
            included = _matches(name, self.include)
            if _matches(name, self.exclude) or (self.include and not included):
                excluded.append(name)
            elif not included and (_matches(name, _USUAL_EXTRAS) if known is None else name not in known):
                extras.append(name)
            else:
                kept.append(name)
        missing = sorted((known or frozenset()) - set(every))
        missing = [name for name in missing if not _matches(name, self.exclude)]
        if self.include:
            missing = [name for name in missing if _matches(name, self.include)]
        lost = [name for name in extras if name in trained and not _matches(name, _USUAL_EXTRAS)]
        if lost:
            raise WindlassInvalid(
                f"{len(lost)} trainable parameters are not part of the checkpoint and would be left out of the image: "
                f"{_some(lost)}",
                "include=[...] publishes them, exclude=[...] leaves them out",
            )
        self._report(every, kept, extras, missing)
        return Chosen(tuple(kept), tuple(excluded), tuple(extras), tuple(missing))

    def _report(self, every: list[str], kept: list[str], extras: list[str], missing: list[str]) -> None:
        if extras and self.extras == "error":
            raise WindlassInvalid(
                f"{len(extras)} tensors are not part of the checkpoint: {_some(extras)}",
                'exclude them, or set extras="ignore"',
            )
        if every and not kept:
            raise WindlassInvalid(
                f"none of the {len(every)} tensors is part of the image ({_some(every)})",
                "check include and exclude, and that names are the checkpoint's: SourceMap.from_model(model)",
            )
        if extras:
            logger.warning(
                "%d tensors are not part of the checkpoint and are left out (include=[...] keeps them): %s",
                len(extras),
                _some(extras, 64),
            )
        if missing:
            logger.warning("%d tensors of the checkpoint are not published: %s", len(missing), _some(missing))


def _matches(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _some(names: list[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
