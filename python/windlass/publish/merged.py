"""LoRA adapters merged into what is published: the weights that PEFT's ``merge_and_unload()`` would leave, bit for bit.

Owns: :func:`merge`, which puts merged weights in the place of what they are
made from; :class:`Merging`, which brings the adapters of a version together. Called by :class:`windlass.WeightManager`. Must
not: change the model, or know a region.

The arithmetic is PEFT's own: it is called on stand-ins of its layers, which have the same classes and settings and tensors of
their own. Each rank merges the boxes that it holds; only adapters are gathered, in one all-reduce. The product of an adapter is
always taken whole, also by a rank that adds a few rows of it: a matrix product of some rows need not have the bits of those rows
in the product of all. A DoRA weight is scaled by norms, so where it is sharded it is gathered, one at a time.

Merged weights are made one at a time, straight before they are written. Where a GPU compares versions, they are kept on it,
because their addresses are needed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from windlass.dtypes import dtype_name, torch_dtype
from windlass.errors import WindlassInvalid, WindlassUnsupported
from windlass.exchange import Alone, Exchange, agree_on_all_ranks
from windlass.extract.adapters import REMEDY, Adapted, Layer, adapters_of
from windlass.names.clean import WRAPPERS, unwrapped
from windlass.publish import placement
from windlass.publish.boxes import volume
from windlass.publish.derived import Part
from windlass.publish.placement import Piece, Share
from windlass.publish.sources import Naming, Source, Target, taken

if TYPE_CHECKING:
    from windlass.names.view import View
    from windlass.publish.sources import Names

__all__ = ["Merged", "Merging", "merge"]

log = logging.getLogger("windlass")

#: What the source of a merged weight is called, before the name of its parameter.
MADE = "merged "


@dataclass(eq=False)
class Merged:
    """A parameter with its adapters merged, as far as it is made on this rank."""

    name: str
    merging: Merging
    source: Source
    share: int
    #: Layers that adapt it, and which of their parameters it is. Several where it is tied.
    layers: list[tuple[str, str]]
    parts: list[Part]
    #: Whether it is gathered, because it can only be merged whole, or because there is no other way to have it.
    gathered: bool = False
    #: Where it is kept; nothing if it is made when it is asked for.
    device: torch.device | None = None
    kept: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shares[self.share].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.shares[self.share].dtype

    def size(self) -> int:
        """Bytes of what is made here."""
        return sum(volume(part.box) for part in self.parts) * self.dtype.itemsize

    def make(self) -> torch.Tensor:
        """The merged boxes one after another; the whole tensor if it is gathered."""
        if self.device is not None and self.kept is None:
            self.kept = torch.empty(self.size() // self.dtype.itemsize, dtype=self.dtype, device=self.device)
        # What is kept is made by refresh().
        return self._made() if self.kept is None else self.kept

    def keep(self, gpu: int | None) -> None:
        """Has it kept, if all of it is made on the device ``gpu``."""
        places = {part.values().device for part in self.parts}
        if gpu is not None and places == {torch.device("cuda", gpu)}:
            [self.device] = places

    def refresh(self, what: str) -> None:
        """Makes what is kept anew."""
        if self.kept is not None:
            self._made(self.kept)

    @torch.no_grad()
    def _made(self, into: torch.Tensor | None = None) -> torch.Tensor:
        if self.gathered:
            whole = self.merging.whole(self.source, self.share, what="gather a weight to merge").clone()
            return self._merged([(placement.whole(self.shape), whole)])[0].contiguous()
        values = [part.values() for part in self.parts]
        out = into
        if out is None:
            room = sum(v.numel() for v in values)
            out = torch.empty(room, dtype=self.dtype, device=values[0].device if values else None)
        boxes, at = [], 0
        for part, value in zip(self.parts, values, strict=True):
            here = out[at : at + value.numel()].view(value.shape)
            here.copy_(value)
            boxes.append((part.box, here))
            at += value.numel()
        for (_, here), made in zip(boxes, self._merged(boxes), strict=True):
            if made is not here:
                here.copy_(made)
        return out

    def _merged(self, boxes: list[tuple[placement.Box, torch.Tensor]]) -> list[torch.Tensor]:
        """The boxes with what adapters add to them, which is added in place where it can be."""
        out = [values for _, values in boxes]
        for path, parameter in self.layers if boxes else ():
            layer = self.merging.adapted.layers[path]
            # What is merged in the model itself is in its weight already.
            adapters = [a for a in layer.adapters if a not in layer.module.merged_adapters]
            if not layer.is_plain():
                out = [self._whole(layer, parameter, adapters, out[0])]
                continue
            for adapter in adapters:
                delta = self._delta(layer, parameter, adapter, out[0])
                for (box, _), values in zip(boxes, out, strict=True):
                    values += delta[tuple(slice(a, b) for a, b in box)]
        return out

    def _delta(self, layer: Layer, parameter: str, adapter: str, like: torch.Tensor) -> torch.Tensor:
        """What an adapter adds to the whole parameter, in the dtype that PEFT adds it in."""
        values = self.merging.values(layer, like.device)
        if parameter == "bias":
            made: torch.Tensor = values[f"lora_B.{adapter}.bias"] * layer.module.scaling[adapter]
            return made
        # Its form is asked for, and never its elements.
        values[f"{layer.base}.{parameter}"] = like.new_empty(1).expand(self.shape)
        made = stand_in(layer.module, values).get_delta_weight(adapter)
        is_embedding = adapter in layer.module.lora_embedding_A
        return made.to(like.dtype) if is_embedding else made

    def _whole(self, layer: Layer, parameter: str, adapters: list[str], weight: torch.Tensor) -> torch.Tensor:
        """A whole weight, merged by PEFT itself."""
        values = self.merging.values(layer, weight.device)
        # An object of its own: PEFT gives it other memory.
        values[f"{layer.base}.{parameter}"] = weight.detach()
        stand = stand_in(layer.module, values)
        stand.merge(adapter_names=adapters)
        made: torch.Tensor = getattr(stand.get_base_layer(), parameter).detach()
        return made


def stand_in(module: Any, values: dict[str, torch.Tensor], prefix: str = "") -> Any:
    """A module of the same classes and settings with these tensors, and without hooks; the others are the module's own."""
    for wrapper in WRAPPERS:
        if wrapper in module._modules:
            return stand_in(module._modules[wrapper], values, prefix)
    # Not by its constructor: fully_shard gives modules one that makes another module.
    made = object.__new__(type(module))
    state = {
        name: copy.copy(value) if isinstance(value, (dict, list, set)) else value
        for name, value in vars(module).items()
        if not name.endswith("_hooks")
    }
    hooks: dict[str, Any] = {name: type(vars(module)[name])() for name in vars(module) if name not in state}
    made.__dict__.update({**state, **hooks})
    for name, value in values.items():
        if name.startswith(prefix) and "." not in name[len(prefix) :]:
            # FSDP1 shows parameters as plain attributes at times.
            made.__dict__.pop(name[len(prefix) :], None)
            made._parameters[name[len(prefix) :]] = value
    for name, child in module._modules.items():
        if child is not None:
            made._modules[name] = stand_in(child, values, f"{prefix}{name}.")
    return made


class Merging:
    """The adapters of a model, brought together for each version."""

    def __init__(self, adapted: Adapted, sources: Iterable[Source]) -> None:
        self.adapted = adapted
        self._state = adapted.state()
        self._exchange: Exchange = Alone(1)
        self._timeout = 0.0
        self._by_name: dict[str, tuple[Source, int]] = {}
        self._by_object: dict[int, tuple[Source, int]] = {}
        for source in sources:
            for index, share in enumerate(source.shares):
                self._by_name[unwrapped(share.name)] = (source, index)
            if len(source.shares) == 1:
                self._by_object[id(source.given)] = (source, 0)
        #: Tensors of adapters that some rank does not have whole: dtype and shape, and their values of this version.
        self._partial: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._gathered: dict[str, torch.Tensor] = {}
        #: Where each tensor of an adapter is found: under its own name, or under that of what it is tied to.
        self._found = {
            f"{layer.path}.{leaf}": found
            for layer in adapted.layers.values()
            for leaf in layer.leaves()
            if (found := self._find(f"{layer.path}.{leaf}", _reach(layer.module, leaf))) is not None
        }

    def _find(self, name: str, live: Any) -> tuple[Source, int] | None:
        return self._by_name.get(name) or self._by_object.get(id(live))

    def taken(self) -> set[str]:
        """The names of the parameters that are published by being merged."""
        return {source.shares[index].name for source, index in self._found.values()}

    def parameters(self) -> list[tuple[Source, int, list[tuple[str, str]]]]:
        """What is adapted here, and by which parameters of which layers."""
        out: dict[tuple[int, int], tuple[Source, int, list[tuple[str, str]]]] = {}
        for layer in self.adapted.layers.values():
            for parameter in layer.parameters() if layer.adapters else ():
                name = f"{layer.path}.{layer.base}.{parameter}"
                live = getattr(_reach(layer.module, layer.base), parameter, None)
                found = self._find(name, live)
                if found is None:
                    # Another rank may have it, under pipeline parallelism; not if the adapter is here.
                    raise WindlassInvalid(f"{name!r} is adapted, and is not among the model's parameters")
                row = out.setdefault((id(found[0]), found[1]), (*found, []))
                row[2].append((layer.path, parameter))
        return list(out.values())

    def partial(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Tensors of adapters that this rank does not have whole."""
        return {
            name: (dtype_name(source.shares[index].dtype), source.shares[index].shape)
            for name, (source, index) in self._found.items()
            if not is_whole(source.shares[index])
        }

    def begin(
        self, partial: dict[str, tuple[str, tuple[int, ...]]], exchange: Exchange, timeout: float
    ) -> None:
        """Takes what ranks have told each other, and the first values."""
        if partial and isinstance(exchange, Alone):
            raise WindlassInvalid(
                f"{min(partial)!r} is spread over ranks that share no process group",
                "initialise torch.distributed before the first offload",
            )
        self._partial = dict(sorted(partial.items()))
        self.refresh(exchange, timeout)

    def follow(self, model: torch.nn.Module) -> None:
        """Takes another object for the same model."""
        if self.adapted.model() is model:
            return
        adapted = adapters_of(model)
        if adapted.state().keys() != self._state.keys():
            raise WindlassInvalid(
                "the model has other adapters than before; call resume() after changing a model"
            )
        self.adapted = adapted

    def refresh(self, exchange: Exchange, timeout: float) -> None:
        """The adapters as they are now. All ranks call it at the same time."""
        self._exchange, self._timeout = exchange, timeout
        for path, now in self.adapted.state().items():
            if now != self._state[path]:
                raise WindlassInvalid(
                    f"the active adapters of {path!r} were {list(self._state[path])} when the first version was "
                    f"offloaded and are {list(now)} now; call resume() after another choice of adapters"
                )
        self._gathered = {}
        if not self._partial:
            return
        rows = []
        for name, (dtype, shape) in self._partial.items():
            whole = torch.zeros(shape, dtype=torch_dtype(dtype))
            if name in self._found:
                source, index = self._found[name]
                whole = _put(source, index)
            rows.append(whole)
        device = rows[0].device if len({row.device for row in rows}) == 1 else torch.device("cpu")
        mine = torch.cat([row.reshape(-1).view(torch.uint8).to(device) for row in rows])
        found = exchange.largest(mine, timeout, "gather the adapters")
        parts = torch.split(found, [row.nbytes for row in rows])
        for name, row, part in zip(self._partial, rows, parts, strict=True):
            # A copy, because a part of bytes need not begin where an element may.
            self._gathered[name] = part.clone().view(row.dtype).view(row.shape)

    def values(self, layer: Layer, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of a layer's adapters, whole, by their names from it."""
        out = {}
        for leaf in layer.leaves():
            name = f"{layer.path}.{leaf}"
            if name in self._gathered:
                out[leaf] = self._gathered[name].to(device)
                continue
            if name not in self._found:
                raise WindlassInvalid(f"{name!r} is not among the model's parameters")
            source, index = self._found[name]
            out[leaf] = _part(source, index).values().to(device)
        return out

    def whole(self, source: Source, index: int, what: str) -> torch.Tensor:
        """A whole parameter. All ranks ask for it at the same time."""
        share = source.shares[index]
        if share.gathered:
            return share.fetch(source.given).detach()
        mine = _put(source, index)
        found = self._exchange.largest(mine.reshape(-1).view(torch.uint8), self._timeout, what)
        return found.view(mine.dtype).view(mine.shape)


def _reach(module: Any, path: str) -> Any:
    """What is at a path inside a module, whatever wraps what is in between; nothing if it is not there."""
    at = module
    for part in path.split("."):
        if isinstance(at, (torch.nn.ModuleDict, torch.nn.ParameterDict)):
            at = dict(at.items()).get(part)
        else:
            at = getattr(at, part, None)
    return at


def is_whole(share: Share) -> bool:
    """Whether all of a parameter is in this rank's memory."""
    return any(piece.box == placement.whole(share.shape) for piece in share.pieces) or 0 in share.shape


def _part(source: Source, index: int) -> Part:
    """All of a parameter that is whole here."""
    [piece] = source.shares[index].pieces
    return Part(source, index, Target("", piece.box, piece.strides, piece.offset), None)


def _put(source: Source, index: int) -> torch.Tensor:
    """What is here of a parameter in its place, and zeros elsewhere."""
    share = source.shares[index]
    local = share.fetch(source.given).detach()
    out = torch.zeros(share.shape, dtype=share.dtype, device=local.device)
    for piece in share.pieces:
        target = Target("", piece.box, piece.strides, piece.offset)
        out[tuple(slice(a, b) for a, b in piece.box)] = taken(local, target)
    return out


class _Names:
    """The names of a model, with merged weights in the place of what they are made from."""

    def __init__(self, names: Names, merged: frozenset[str]) -> None:
        self._names, self._merged = names, merged

    def views(self, name: str, shape: tuple[int, ...]) -> tuple[View, ...]:
        """As :meth:`windlass.SourceMap.views`."""
        if name.startswith(MADE):
            return self._names.views(name.removeprefix(MADE), shape)
        return () if name in self._merged else self._names.views(name, shape)


def merge(
    sources: list[Source] | Exception,
    naming: Naming,
    adapted: Adapted | None,
    exchange: Exchange,
    timeout: float,
) -> tuple[list[Source], Naming, Merging | None]:
    """Puts merged weights after the parameters that they are made from.

    All ranks call it, and an error on one is an error on all.
    """
    merging: Merging | None = None
    rows: list[tuple[Source, int, list[tuple[str, str]]]] = []

    def tell() -> dict[str, Any]:
        nonlocal merging, rows
        if isinstance(sources, Exception):
            raise sources
        taken: set[str] = set()
        partial, bases = {}, []
        if adapted is not None:
            merging = Merging(adapted, sources)
            rows, taken = merging.parameters(), merging.taken()
            partial = merging.partial()
            bases = [
                source.shares[index].name
                for source, index, layers in rows
                if not is_whole(source.shares[index])
                and any(not adapted.layers[path].is_plain() for path, _ in layers)
            ]
        _check_left_out(sources, naming.names, taken, adapted is not None)
        return {"partial": partial, "bases": bases}

    said = agree_on_all_ranks(exchange, tell, "merge adapters", timeout)
    assert not isinstance(sources, Exception)
    if merging is None:
        return sources, naming, None
    partial: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, words in enumerate(said):
        for name, (dtype, shape) in words["partial"].items():
            known = partial.setdefault(name, (dtype, tuple(shape)))
            if known != (dtype, tuple(shape)):
                raise WindlassInvalid(
                    f"ranks disagree about {name!r}: {known} and, on rank {rank}, {(dtype, shape)}"
                )
    bases = {name for words in said for name in words["bases"]}
    merging.begin(partial, exchange, timeout)
    out = [_source(merging, source, index, layers, bases) for source, index, layers in rows]
    for source, _, _ in rows:
        # Several parameters are in one flat one of FSDP1.
        source.spent = len(source.shares) == 1
    if out:
        log.info("LoRA adapters are merged into %d published weights", len(out))
    names = frozenset(source.shares[index].name for source, index, _ in rows)
    return [*sources, *out], replace(naming, names=_Names(naming.names, names)), merging


def _source(
    merging: Merging, source: Source, index: int, layers: list[tuple[str, str]], bases: set[str]
) -> Source:
    share = source.shares[index]
    gathered = share.gathered or share.name in bases
    form, parts, pieces, at = None, [], [], 0
    if share.pieces and not gathered:
        local = share.fetch(source.given)
        form = (tuple(local.shape), local.stride(), local.dtype)
        for piece in share.pieces:
            parts.append(Part(source, index, Target("", piece.box, piece.strides, piece.offset), form))
            pieces.append(Piece(piece.box, at, placement.contiguous_strides([b - a for a, b in piece.box])))
            at += volume(piece.box)
    merged = Merged(share.name, merging, source, index, layers, parts, gathered)
    name = MADE + share.name
    made = Share(
        name,
        share.shape,
        share.dtype,
        tuple(pieces),
        Merged.make,
        gathered=gathered,
        reason=f"LoRA merged into {share.reason}",
    )
    return Source(name, merged, [made], derived=merged, what="weight")


def _check_left_out(sources: list[Source], names: Names, taken: set[str], is_model: bool) -> None:
    """Nothing that is trained may be missing from the image because of its name."""
    is_adapter: Callable[[str], bool] = getattr(names, "is_adapter", lambda name: False)
    left = [
        share.name
        for source in sources
        for index, share in enumerate(source.shares)
        if share.name not in taken and is_adapter(share.name) and (not is_model or is_trained(source, index))
    ]
    if not left:
        return
    told = ", ".join(repr(name) for name in left[:3]) + (", ..." if len(left) > 3 else "")
    if is_model:
        raise WindlassUnsupported(
            f"{len(left)} trainable parameters would be left out of the image: {told}", REMEDY
        )
    raise WindlassInvalid(
        f"{len(left)} parameters have names of PEFT's adapters and would be left out of the image: {told}",
        'give offload() the model itself, which has its adapters merged then; with lora="base" they are left out, and '
        "names=SourceMap(peft=False) takes such names as they are",
    )


def is_trained(source: Source, index: int) -> bool:
    """Whether a parameter gets gradients."""
    inside = getattr(source.given, "_params", None)
    if inside and len(inside) == len(source.shares):
        return bool(inside[index].requires_grad)
    return bool(getattr(source.given, "requires_grad", False))
