"""Weights that are published quantised: tensors of the image that are made from parameters when a version is offloaded.

Owns: :class:`Derived`, a quantised weight with its scales on this rank; :func:`derive`, which puts them in the place of what
they are made from; and :func:`refresh`, which makes them anew for a version. Called by :class:`windlass.WeightManager`. Must
not: know a region, or how a scheme rounds (:mod:`windlass.publish.quantise`).

A quantised weight and its scales are two ordinary tensors of the image, so they have one version and receivers switch both at
once. Each rank quantises what it holds. Where the elements that share a scale are on several ranks, ranks tell each other the
largest magnitudes, a few bytes for each scale and one all-reduce for the whole model; weights are never gathered for it.

On the GPU that copies or compares, the quantised tensors are kept, because their addresses are needed: one byte for each element.
Elsewhere one is made at a time, straight before it is written into the slot.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from windlass.dtypes import dtype_name, torch_dtype
from windlass.errors import WindlassInvalid, WindlassUnsupported
from windlass.exchange import Exchange, agree_on_all_ranks
from windlass.names.view import View, whole
from windlass.publish import placement, quantise
from windlass.publish.boxes import volume
from windlass.publish.placement import Box, Piece, Share
from windlass.publish.sources import Naming, Source, Target, freed, moved, taken, targets_of

if TYPE_CHECKING:
    from windlass.names import Scheme
    from windlass.publish.plan import Plan
    from windlass.publish.sources import Names

__all__ = ["Derived", "derive", "refresh", "stream_value"]

log = logging.getLogger("windlass")

#: What a derived source is called in errors, and where names are keys: its image name may be a parameter's, too.
MADE = "quantised "


@dataclass(frozen=True)
class Part:
    """Some of a parameter that this rank holds, and the box of the weight that it is."""

    source: Source
    share: int
    target: Target
    #: Shape, strides and dtype that the strides of the target were computed for; nothing if it is gathered.
    form: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None

    @property
    def box(self) -> Box:
        return self.target.box

    def values(self) -> torch.Tensor:
        """The elements, as they are now."""
        source = self.source
        local = source.shares[self.share].fetch(source.given).detach()
        if self.form is not None and (tuple(local.shape), local.stride(), local.dtype) != self.form:
            raise moved(source.name, self.form, local)
        if local.numel() and local.data_ptr() == 0:
            raise freed(source.name)
        return taken(local, self.target)


@dataclass(eq=False)
class Derived:
    """A quantised weight of the image and its scales, as far as they are made on this rank."""

    name: str
    scheme: Scheme
    shape: tuple[int, ...]
    #: What its elements are rounded to before.
    base: torch.dtype
    parts: list[Part]
    #: Whether elements of one scale are on several ranks, or in several parts.
    shared: bool = False
    #: Where it is kept; nothing if it is made when it is asked for.
    device: torch.device | None = None
    #: The largest magnitudes of this version: of the whole tensor if they are shared, else of each part.
    found: list[torch.Tensor] | None = None
    #: What is kept: the weight and the scales.
    kept: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def gathered(self) -> bool:
        return any(part.source.shares[part.share].gathered for part in self.parts)

    @property
    def scale_shape(self) -> tuple[int, int]:
        return self.scheme.scale_shape(self.shape)

    @property
    def scale_type(self) -> torch.dtype:
        return quantise.scale_dtype(self.scheme, self.base)

    def boxes(self, what: str) -> list[Box]:
        """The boxes of the weight or of the scales that are made here, one after another."""
        boxes = [part.box for part in self.parts]
        if what == "weight":
            return boxes
        if self.shared:
            return [placement.whole(self.scale_shape)]
        return [quantise.group_box(self.scheme, self.shape, box) for box in boxes]

    def size(self) -> int:
        """Bytes of what is made here."""
        weight = sum(volume(box) for box in self.boxes("weight"))
        return weight + sum(volume(box) for box in self.boxes("scale")) * self.scale_type.itemsize

    def magnitudes(self) -> torch.Tensor:
        """The largest magnitude of each scale, as far as this rank holds its elements; zeros elsewhere."""
        out = torch.zeros(self.scale_shape, dtype=torch.float32, device=self.device)
        for part in self.parts:
            found = self._largest(part, part.values()).to(out.device)
            here = _within(out, quantise.group_box(self.scheme, self.shape, part.box))
            torch.maximum(here, found, out=here)
        return out

    def make(self, what: str) -> torch.Tensor:
        """The weight or the scales, boxes one after another."""
        kept = self.kept.get(what)
        if kept is None and self.device is not None:
            dtype = torch_dtype(self.scheme.dtype) if what == "weight" else self.scale_type
            room = sum(volume(box) for box in self.boxes(what))
            kept = self.kept[what] = torch.empty(room, dtype=dtype, device=self.device)
        # What is kept is made by refresh().
        return self._made(what) if kept is None else kept

    def refresh(self, what: str) -> None:
        """Makes what is kept anew."""
        kept = self.kept.get(what)
        if kept is not None:
            self._made(what, kept)

    def of(self, what: str, values: torch.Tensor) -> torch.Tensor:
        """The weight or the scales of a whole tensor that came from elsewhere."""
        [part] = self.parts
        values = taken(values, part.target)
        amax = self._largest(part, values)
        if what == "scale":
            return quantise.scales(self.scheme, amax, self.base).flatten()
        out = torch.empty(self.shape, dtype=torch_dtype(self.scheme.dtype), device=values.device)
        self._quantise(part, values, amax, out)
        return out.flatten()

    def _made(self, what: str, into: torch.Tensor | None = None) -> torch.Tensor:
        if what == "scale":
            amax = self._found()
            flat = torch.cat([a.flatten() for a in amax]) if len(amax) > 1 else amax[0].flatten()
            made = quantise.scales(self.scheme, flat, self.base)
            return made if into is None else into.copy_(made)
        out, at = into, 0
        for i, part in enumerate(self.parts):
            values = part.values()
            if out is None:
                room = sum(volume(p.box) for p in self.parts)
                out = torch.empty(room, dtype=torch_dtype(self.scheme.dtype), device=values.device)
            size = volume(part.box)
            rows, columns = (b - a for a, b in part.box)
            self._quantise(part, values, self._magnitudes_of(i), out[at : at + size].view(rows, columns))
            at += size
        assert out is not None
        return out

    def _found(self) -> list[torch.Tensor]:
        if self.found is None:
            assert not self.shared
            self.found = [self._largest(part, part.values()) for part in self.parts]
        return self.found

    def _magnitudes_of(self, part: int) -> torch.Tensor:
        found = self._found()
        if not self.shared:
            return found[part]
        return _within(found[0], quantise.group_box(self.scheme, self.shape, self.parts[part].box))

    def _largest(self, part: Part, values: torch.Tensor) -> torch.Tensor:
        return quantise.largest(self.scheme, self.shape, part.box, values, self.base)

    def _quantise(self, part: Part, values: torch.Tensor, amax: torch.Tensor, out: torch.Tensor) -> None:
        amax = amax.to(values.device)
        quantise.quantised(self.scheme, self.shape, part.box, values, self.base, amax, out)


def _within(grid: torch.Tensor, box: Box) -> torch.Tensor:
    return grid[tuple(slice(a, b) for a, b in box)]


class _Renamed:
    """The names of a model without the weights that are quantised, and those of what is made of them."""

    def __init__(self, names: Names, made: dict[str, str], quantised: frozenset[str]) -> None:
        self._names, self._made, self._quantised = names, made, quantised

    def views(self, name: str, shape: tuple[int, ...]) -> tuple[View, ...]:
        """As :meth:`windlass.SourceMap.views`."""
        made = self._made.get(name)
        if made is not None:
            return (whole(made, shape),)
        return tuple(view for view in self._names.views(name, shape) if view.name not in self._quantised)


def derive(
    sources: list[Source] | Exception, naming: Naming, exchange: Exchange, gpu: int | None, timeout: float
) -> tuple[list[Source], Naming]:
    """Puts quantised weights and their scales after the parameters that they are made from.

    All ranks call it, and an error on one is an error on all. What is on the device ``gpu`` is kept there.
    """
    rules = naming.rules
    assert rules is not None
    kept: frozenset[str] = frozenset()
    made: dict[str, Derived] = {}
    used: set[str] = set()

    def tell() -> dict[str, Any]:
        nonlocal kept
        if isinstance(sources, Exception):
            raise sources
        views = [
            (source, i, naming.names.views(share.name, share.shape))
            for source in sources
            for i, share in enumerate(source.shares)
        ]
        kept = naming.keep(view.name for _, _, every in views for view in every)
        for source, i, every in views:
            used.update(_take(source, i, [v for v in every if v.name in kept], naming, made))
        shared = [name for name, derived in made.items() if not _is_apart(derived)]
        return {
            "shared": {name: list(made[name].scale_shape) for name in shared},
            "used": sorted(used),
        }

    said = agree_on_all_ranks(exchange, tell, "quantise", timeout)
    assert not isinstance(sources, Exception)
    unused = set(rules.schemes).difference(*(words["used"] for words in said))
    if unused:
        glob = min(unused)
        raise WindlassInvalid(
            f"dtypes[{glob!r}] = {rules.schemes[glob].name!r} quantises nothing: no 2-D weight of a Linear layer has a name "
            "that it matches first",
            "rules are tried in their order, and patterns are of names in the checkpoint",
        )
    shared = {name: tuple(shape) for words in said for name, shape in words["shared"].items()}
    for name, derived in made.items():
        derived.shared = name in shared
        derived.device = _device(derived, gpu)
    out, renamed = _sources(made)
    if made:
        _say(made, len(shared))
    scales = frozenset(derived.scheme.scale_name(name) for name, derived in made.items())
    everything = kept | scales
    for source in sources:
        source.spent = source.spent or (
            bool(out)
            and all(
                view.name in made or view.name not in kept
                for share in source.shares
                for view in naming.names.views(share.name, share.shape)
            )
        )
    return [*sources, *out], replace(
        naming,
        names=_Renamed(naming.names, renamed, frozenset(made)),
        keep=lambda _: everything,
        dtype=lambda name, own: own if name in scales or name in made else naming.dtype(name, own),
        shared=shared,
    )


def _take(
    source: Source, index: int, views: Sequence[View], naming: Naming, made: dict[str, Derived]
) -> Iterable[str]:
    """Finds what is quantised of a share; the rules that say so."""
    rules, share = naming.rules, source.shares[index]
    assert rules is not None
    own = dtype_name(share.dtype) if views else ""
    form = None
    for view in views:
        found = rules.scheme_of(view.name, own, view.shape)
        if found is None:
            continue
        glob, scheme = found
        base = torch_dtype(rules.base_of(view.name, own))
        known = made.setdefault(view.name, Derived(view.name, scheme, view.shape, base, []))
        if (known.shape, known.base) != (view.shape, base):
            raise WindlassInvalid(
                f"parameters disagree about {view.name!r}: {known.base} {list(known.shape)} and {base} "
                f"{list(view.shape)} (from {share.name!r})"
            )
        targets = targets_of(share, [view])
        if targets and not share.gathered and form is None:
            local = share.fetch(source.given)
            form = (tuple(local.shape), local.stride(), local.dtype)
        known.parts += [Part(source, index, target, form) for target in targets]
        if known.gathered and (len(known.parts) > 1 or known.parts[0].box != placement.whole(view.shape)):
            raise WindlassUnsupported(
                f"{view.name!r} cannot be published as {scheme.name}: it is put together of several parts, and "
                f"{share.name!r} can only be gathered or exported whole ({share.reason})",
                f"give it a dtype before the pattern that quantises it: dtypes={{{view.name!r}: {own!r}, ...}}",
            )
        yield glob


def _is_apart(derived: Derived) -> bool:
    """Whether each part of a weight here can be quantised without the others."""
    return all(quantise.is_aligned(derived.scheme, derived.shape, part.box) for part in derived.parts)


def _device(derived: Derived, gpu: int | None) -> torch.device | None:
    """The GPU that a quantised weight is kept on, if all of it is made there."""
    if gpu is None or derived.gathered or not derived.parts:
        return None
    places = {part.source.shares[part.share].fetch(part.source.given).device for part in derived.parts}
    where = torch.device("cuda", gpu)
    return where if places == {where} else None


def _sources(made: dict[str, Derived]) -> tuple[list[Source], dict[str, str]]:
    """Quantised weights and scales as sources, and what their shares are called in the image."""
    out: list[Source] = []
    renamed: dict[str, str] = {}
    for name, derived in made.items():
        scheme = derived.scheme
        rows = (
            ("weight", name, derived.shape, torch_dtype(scheme.dtype)),
            ("scale", scheme.scale_name(name), derived.scale_shape, derived.scale_type),
        )
        for what, called, shape, dtype in rows:
            pieces, at = [], 0
            for box in derived.boxes(what):
                strides = placement.contiguous_strides([b - a for a, b in box])
                pieces.append(Piece(box, at, strides))
                at += volume(box)
            renamed[MADE + called] = called
            share = Share(
                MADE + called,
                tuple(shape),
                dtype,
                () if derived.gathered else tuple(pieces),
                functools.partial(_fetch, what),
                gathered=derived.gathered,
                reason=_reason(derived),
            )
            out.append(Source(MADE + called, derived, [share], derived=derived, what=what))
    return out, renamed


def _fetch(what: str, derived: Derived) -> torch.Tensor:
    if derived.gathered:
        [part] = derived.parts
        source = part.source
        return derived.of(what, source.shares[part.share].fetch(source.given).detach())
    return derived.make(what)


def _reason(derived: Derived) -> str:
    if not derived.parts:
        return f"{derived.scheme.name} of another rank"
    how = derived.parts[0].source.shares[derived.parts[0].share].reason
    return f"{derived.scheme.name} of {how}" + (", scales across ranks" if derived.shared else "")


def _say(made: dict[str, Derived], shared: int) -> None:
    schemes = ", ".join(sorted({derived.scheme.name for derived in made.values()}))
    log.info("%d weights are published quantised (%s), each with its scales", len(made), schemes)
    if shared:
        log.info(
            "of %d weights, elements of one scale are on several ranks or in several parts: their largest magnitudes are "
            "exchanged for every version",
            shared,
        )
    if any(derived.gathered for derived in made.values()):
        count = sum(derived.gathered for derived in made.values())
        log.warning("%d quantised weights are gathered or exported whole, twice for every version", count)
    kept = sum(derived.size() for derived in made.values() if derived.device is not None)
    if kept:
        log.info("quantised weights are kept on the GPU: %.1f GB", kept / 1e9)


def refresh(plan: Plan, exchange: Exchange, timeout: float) -> None:
    """Forgets the version before, and makes anew what is kept. All ranks call it at the same time."""
    derived = {
        source.derived.name: source.derived
        for source in plan.sources[plan.given :]
        if isinstance(source.derived, Derived)
    }
    for each in derived.values():
        each.found = None
    if plan.shared:
        _exchange(derived, plan.shared, exchange, timeout)
    for source in plan.sources[plan.given :]:
        if source.derived is not None and any(source.targets):
            source.derived.refresh(source.what)


def _exchange(
    derived: dict[str, Derived], shared: dict[str, tuple[int, ...]], exchange: Exchange, timeout: float
) -> None:
    """The largest magnitudes over all ranks, of everything at once."""
    names = sorted(shared)
    every = [derived[name].magnitudes() if name in derived else torch.zeros(shared[name]) for name in names]
    device = every[0].device if len({grid.device for grid in every}) == 1 else torch.device("cpu")
    mine = torch.cat([grid.flatten().to(device) for grid in every])
    # Magnitudes are ordered as their bits are, and a NaN is above them all.
    what = "agree on the scales of quantised weights"
    found = exchange.largest(mine.view(torch.int32), timeout, what).view(torch.float32)
    for name, part in zip(
        names, torch.split(found, [math.prod(shared[name]) for name in names]), strict=True
    ):
        if name in derived:
            derived[name].found = [part.view(shared[name])]


def stream_value(source: Source) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]]:
    """For a source that is made of exported weights: which one, and how."""
    derived = source.derived
    if not isinstance(derived, Derived):
        return source.name, _as_it_is
    return derived.parts[0].source.name, functools.partial(derived.of, source.what)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
