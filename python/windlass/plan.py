"""Who writes which bytes of an image, and from where.

Owns: the :class:`Plan` of one rank, made once when the first version is offloaded. It joins what this rank holds
(:mod:`windlass.placement`) with what tensors are called and shaped in the image (:mod:`windlass.names`), lets ranks
tell each other, proves that together they write every byte of every tensor exactly once, and turns this rank's part
into copies. Called by :class:`windlass.WeightManager`. Must not: write anything.

Ranks that hold the same box (replicas, HSDP) each write a slice of it. The rules are the same on every rank and use
only what was exchanged, so all ranks come to the same answer without another word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from windlass import placement
from windlass._windlass import Layout
from windlass.dtypes import dtype_name, torch_dtype
from windlass.errors import WindlassInvalid, WindlassPeerLost, WindlassUnsupported
from windlass.exchange import Exchange, together
from windlass.memory import tensor_at
from windlass.placement import Box, Share

if TYPE_CHECKING:
    from windlass.derived import Derived
    from windlass.merged import Merged
    from windlass.names import DtypeRules, View

__all__ = ["Names", "Naming", "OnDevice", "Plan", "addresses", "device_addresses", "follow", "make_plan"]

#: A box smaller than this is written by one of its holders, not by all.
SMALL = 1 << 20


class Names(Protocol):
    """What parameters are called, as :class:`windlass.SourceMap` knows it."""

    def views(self, name: str, shape: tuple[int, ...]) -> tuple[View, ...]:
        """The tensors of the image that a parameter becomes."""
        ...


@dataclass(frozen=True)
class Naming:
    """How parameters become tensors of the image."""

    names: Names
    #: Which of these tensors belong to the image.
    keep: Callable[[Iterable[str]], frozenset[str]]
    #: The dtype of a tensor by its name and the trainer's dtype.
    dtype: Callable[[str, str], str]
    #: Which of them are quantised, and how.
    rules: DtypeRules | None = None
    #: Quantised weights of which elements of one scale are on several ranks, and how many scales each has.
    shared: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """A box of an image tensor that this rank could write, and the elements that it comes from."""

    tensor: str
    box: Box
    #: Of the source, in elements, for each dimension of the image tensor.
    strides: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class Source:
    """A parameter as it was given."""

    name: str
    #: The object of the last call; the same one needs no second look.
    given: Any
    shares: list[Share]
    #: By share: what this rank holds, then what it writes.
    targets: list[list[Target]] = field(default_factory=list)
    #: What the copies were computed for: shape, strides, dtype and device of the local memory.
    form: tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device] | None = None
    #: Where that memory was when it was last looked at closely, and its shape, strides and dtype.
    address: int = 0
    looked: tuple[tuple[int, ...], tuple[int, ...], torch.dtype | None] = ((), (), None)
    #: What is made of other sources here (:mod:`windlass.derived`, :mod:`windlass.merged`), and which of it this is.
    derived: Derived | Merged | None = None
    what: str = ""
    #: Whether all of it is published as something that is made of it.
    spent: bool = False


@dataclass(frozen=True)
class Cast:
    """A copy that torch makes: another dtype, another device, or memory without a contiguous dimension."""

    source: int
    share: int
    target: Target


#: Where the first run goes, its bytes, and (count, stride in the image, stride in the source) of the dimensions.
Strided = tuple[int, int, list[tuple[int, int, int]]]


@dataclass
class OnDevice:
    """What a GPU copies of this rank's share: tensors in the dtype of the image, and fp32 ones of which it has bf16."""

    ordinal: int
    #: As :attr:`Plan.addresses`.
    addresses: list[tuple[int, list[int]]] = field(default_factory=list)
    copies: list[Strided] = field(default_factory=list)
    #: Which of them are rounded to bf16.
    casts: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """What this rank does for each version."""

    layout: Layout
    #: By name: dtype, shape, offset, bytes.
    table: dict[str, tuple[str, tuple[int, ...], int, int]]
    sources: list[Source]
    #: For every source that is not gathered: which one, and for the copies that Rust makes of it the bytes from its
    #: first element; and the copies themselves.
    addresses: list[tuple[int, list[int]]]
    copies: list[Strided]
    #: What a GPU copies, if anything of this rank's is on one.
    device: OnDevice | None
    casts: list[Cast]
    #: Parameters that all ranks gather together, in this order, and write slices of.
    gathered: list[Cast]
    #: For each host that publishes, the ranks that write there, in the order of their places in its region.
    hosts: list[list[int]]
    #: Which of them this rank is on; ``None`` if its host does not publish.
    host: int | None
    #: The blocks that this host's region holds, if several publish.
    part: list[tuple[int, int]] | None
    #: The blocks that this rank writes, all of them whole, if ranks asked for cuts between them.
    blocks: list[tuple[int, int]] | None
    bytes: int
    #: How many parameters went which way, and why.
    reasons: dict[str, int]
    #: Pairs of sources that are one tensor of the image: the alias, and what it stands for.
    tied: list[tuple[int, int]]
    #: How many of the sources were given; the others are made of them.
    given: int = 0
    #: As :attr:`Naming.shared`.
    shared: dict[str, tuple[int, ...]] = field(default_factory=dict)


def not_pairs(given: object) -> WindlassInvalid:
    """The error for something that holds no named tensors."""
    return WindlassInvalid(
        f"offload() was given {_short(given)}; it takes a model, (name, tensor) pairs such as "
        "model.named_parameters(), a mapping, or a WeightSource"
    )


def _short(given: object) -> str:
    return (
        f"a {type(given).__name__} of shape {list(given.shape)}"
        if isinstance(given, torch.Tensor)
        else (
            repr(given)
            if isinstance(given, (str, bytes, int, float, type(None)))
            else f"a {type(given).__name__}"
        )
    )


def pair_of(item: Any) -> tuple[str, Any]:
    """A name and its tensor."""
    if isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], str):
        return item[0], item[1]
    raise WindlassInvalid(
        f"offload() takes (name, tensor) pairs, and one item was {_short(item)}: pass model.named_parameters(), "
        "not model.parameters()"
    )


def describe_sources(named: Iterable[tuple[str, Any]]) -> list[Source]:
    """What this rank holds of everything that was given."""
    out: list[Source] = []
    seen: set[str] = set()
    for item in named:
        name, given = pair_of(item)
        shares = list(placement.describe(name, given))
        for share in shares:
            if not share.name:
                raise WindlassInvalid(f"a {_short(given)} has an empty name; every parameter needs one")
            if share.name in seen:
                raise WindlassInvalid(f"parameter {share.name!r} comes twice; every parameter has one name")
            seen.add(share.name)
        out.append(Source(name, given, shares))
    return out


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes share."""
    out = tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b, strict=True))
    return None if any(s >= e for s, e in out) else out


def targets_of(share: Share, views: Sequence[View]) -> list[Target]:
    """The boxes of image tensors that a share covers."""
    if share.gathered:
        pieces: tuple[placement.Piece, ...] = placement.strided_pieces(
            placement.whole(share.shape), placement.contiguous_strides(share.shape)
        )
    else:
        pieces = share.pieces
    out = []
    for view in views:
        for piece in pieces:
            common = intersect(piece.box, view.box)
            if common is None:
                continue
            offset = piece.offset
            for (start, _), (first, _), stride in zip(common, piece.box, piece.strides, strict=True):
                offset += (start - first) * stride
            box = tuple(
                (common[d][0] - view.box[d][0] + at, common[d][1] - view.box[d][0] + at)
                for d, at in zip(view.dims, view.at, strict=True)
            )
            out.append(Target(view.name, box, tuple(piece.strides[d] for d in view.dims), offset))
    return out


def packing(dtype: str) -> int:
    """Elements of the image in one element of torch."""
    return 2 if dtype == "float4_e2m1fn_x2" else 1


def boxes_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, if there are any."""
    if len(boxes) < 2:
        return None
    if len(set(boxes)) < len(boxes):
        twice = next(b for i, b in enumerate(boxes) if b in boxes[:i])
        return twice, twice
    rank = len(boxes[0])
    varying = [d for d in range(rank) if any(b[d] != boxes[0][d] for b in boxes)]
    if len(varying) == 1:
        # Sharded along one dimension, the usual case: neighbours tell.
        d = varying[0]
        ordered = sorted(boxes, key=lambda b: b[d])
        for a, b in zip(ordered, ordered[1:], strict=False):
            if a[d][1] > b[d][0]:
                return a, b
        return None
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            if intersect(a, b) is not None:
                return a, b
    return None


def volume(box: Box) -> int:
    """Elements in a box."""
    return math.prod(e - s for s, e in box)


def slice_of(box: Box, index: int, count: int, element: int, turn: int) -> Box | None:
    """The part of a box that the holder ``index`` of ``count`` writes."""
    if count == 1:
        return box
    if volume(box) * element < SMALL or not box:
        return box if index == turn % count else None
    # Along the first dimension that has a row for each: those rows are contiguous in the image.
    dim = next((d for d, (s, e) in enumerate(box) if e - s >= count), None)
    if dim is None:
        return box if index == turn % count else None
    start, stop = box[dim]
    size = stop - start
    low, high = start + size * index // count, start + size * (index + 1) // count
    return (*box[:dim], (low, high), *box[dim + 1 :])


def make_plan(
    sources: list[Source] | Exception,
    naming: Naming,
    *,
    rank: int,
    node: str,
    exchange: Exchange,
    timeout: float,
    by_rank: bool = False,
    gpu: int | None = None,
) -> Plan:
    """Agrees with the other ranks. An error on one of them becomes an error on all.

    With ``by_rank``, on all ranks, blocks end where the share of a rank does, so that each is one rank's. ``gpu`` is the
    number of the one device whose tensors need not go by torch.
    """

    def tell() -> dict[str, Any]:
        if isinstance(sources, Exception):
            raise sources
        return {**_tell(sources, naming, node), "by_rank": by_rank}

    said = together(exchange, tell, "publish", timeout)
    assert not isinstance(sources, Exception)
    given = sum(source.derived is None for source in sources)
    return replace(_agree(sources, said, rank, gpu), given=given, shared=naming.shared)


def _tell(sources: list[Source], naming: Naming, node: str) -> dict[str, Any]:
    """What this rank says: for each image tensor its dtype, its shape and the boxes held here."""
    tensors: dict[str, tuple[str, list[int], list[list[int]]]] = {}
    storage: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    empty: list[str] = []
    all_views = {s.name: naming.names.views(s.name, s.shape) for source in sources for s in source.shares}
    kept = naming.keep(v.name for views in all_views.values() for v in views) if all_views else frozenset()
    _check_apart(all_views, kept)
    for source in sources:
        source.targets = []
        for share in source.shares:
            views = [v for v in all_views[share.name] if v.name in kept]
            dtypes = _dtypes(share, views, naming)
            if len(views) == 1 and views[0].shape == share.shape:
                key = _identity(source, share)
                if key is None:
                    empty.append(views[0].name)
                elif key in storage and storage[key] != views[0].name:
                    aliases[views[0].name] = storage[key]
                else:
                    storage[key] = views[0].name
            targets = targets_of(share, views)
            source.targets.append(targets)
            for view in views:
                row = tensors.setdefault(view.name, (dtypes[view.name], list(view.shape), []))
                if row[0] != dtypes[view.name] or row[1] != list(view.shape):
                    raise WindlassInvalid(
                        f"parameters disagree about {view.name!r}: {row[0]} {row[1]} and "
                        f"{dtypes[view.name]} {list(view.shape)} (from {share.name!r})"
                    )
            for target in targets:
                tensors[target.tensor][2].append([n for edge in target.box for n in edge])
    rows = [[name, *row] for name, row in tensors.items()]
    return {"node": node, "tensors": rows, "aliases": aliases, "empty": empty}


def _check_apart(all_views: dict[str, tuple[View, ...]], kept: frozenset[str]) -> None:
    """No two parameters may go to the same elements of an image tensor: one of them would be lost."""
    from_whom: dict[str, list[tuple[Box, str]]] = {}
    for parameter, views in all_views.items():
        for view in views:
            if view.name in kept and volume(view.image_box):
                from_whom.setdefault(view.name, []).append((view.image_box, parameter))
    for name, boxes in from_whom.items():
        overlap = boxes_overlap([box for box, _ in boxes]) if len(boxes) > 1 else None
        if overlap is None:
            continue
        # Equal boxes are found by their place, since they cannot be told apart.
        first = next(i for i, (box, _) in enumerate(boxes) if box == overlap[0])
        second = next(i for i, (box, _) in enumerate(boxes) if box == overlap[1] and i != first)
        raise WindlassInvalid(
            f"parameters {boxes[first][1]!r} and {boxes[second][1]!r} both become {name!r}; give each a name of its "
            "own (a pattern that renames or splits must keep what tells them apart)"
        )


def _dtypes(share: Share, views: Sequence[View], naming: Naming) -> dict[str, str]:
    """The dtype of each image tensor. What is left out may have any."""
    if not views:
        return {}
    try:
        own = dtype_name(share.dtype)
    except WindlassUnsupported as e:
        raise WindlassUnsupported(f"parameter {share.name!r}: {e}", e.advice) from e
    return {v.name: naming.dtype(v.name, own) for v in views}


def _identity(source: Source, share: Share) -> Any:
    """What tied parameters have in common; nothing where nothing of them is here."""
    flat = share.reason.startswith(("FSDP1", "ZeRO"))
    if share.gathered or source.given is None or source.derived is not None or flat:
        return id(source.given), share.name
    local = share.fetch(source.given)
    if local.numel() == 0 or local.device.type == "meta":
        return None
    return local.data_ptr(), tuple(local.shape), local.stride(), local.dtype


def _agree(sources: list[Source], said: list[dict[str, Any]], rank: int, gpu: int | None) -> Plan:
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    who: dict[str, int] = {}
    holders: dict[str, dict[Box, list[int]]] = {}
    for other, words in enumerate(said):
        for name, dtype, shape, boxes in words["tensors"]:
            known = shapes.setdefault(name, (dtype, tuple(shape)))
            if known != (dtype, tuple(shape)):
                raise WindlassInvalid(
                    f"ranks disagree about {name!r}: {known[0]} {list(known[1])} on rank {who[name]}, {dtype} {shape} "
                    f"on rank {other}; every rank must describe the whole tensor"
                )
            who.setdefault(name, other)
            held = holders.setdefault(name, {})
            for flat in boxes:
                box = tuple(zip(flat[::2], flat[1::2], strict=True))
                ranks = held.setdefault(box, [])
                if not ranks or ranks[-1] != other:
                    ranks.append(other)
    if not shapes:
        raise WindlassInvalid("there are no tensors to publish; offload() was given nothing, on every rank")
    aliases = _aliases(said)
    for alias in aliases:
        shapes.pop(alias, None)
        holders.pop(alias, None)
    for name, (_, shape) in shapes.items():
        _check_whole(name, shape, list(holders[name]))
    hosts, owners = _hosts(said, shapes, holders)
    if len(hosts) > 1 or len(hosts[0]) < len(said):
        here = [set(ranks) for ranks in hosts]
        for name, held in holders.items():
            for box, ranks in held.items():
                ranks[:] = [r for r in ranks if r in here[owners[name][box]]]
    tensors = [(name, dtype, _image_shape(dtype, shape)) for name, (dtype, shape) in shapes.items()]
    writers = None
    if all(words["by_rank"] for words in said):
        writers = _writers(Layout(tensors, aliases), shapes, holders)
    cuts = _cuts(owners, shapes) if len(hosts) > 1 else None
    layout = Layout(tensors, aliases, cuts if writers is None else _cuts(writers, shapes))
    table = {
        name: (dtype, shapes[name][1], offset, size) for name, dtype, _, offset, size in layout.tensors()
    }
    host = next((i for i, ranks in enumerate(hosts) if rank in ranks), None)
    part = None
    if len(hosts) > 1 and host is not None:
        part = layout.parts(len(hosts), _owned(owners, shapes))[host]
    blocks = None if writers is None else layout.parts(len(said), _owned(writers, shapes))[rank]
    return _mine(sources, layout, table, holders, hosts, host, part, blocks, rank, aliases, gpu)


def _writers(
    layout: Layout, shapes: dict[str, tuple[str, tuple[int, ...]]], holders: dict[str, dict[Box, list[int]]]
) -> dict[str, dict[Box, int]]:
    """Which rank writes which box, as :func:`_part` divides them."""
    out: dict[str, dict[Box, int]] = {}
    # The order of the image does not depend on its cuts.
    for turn, (name, *_) in enumerate(layout.tensors()):
        element = _element(torch_dtype(shapes[name][0]))
        out[name] = {}
        for box, ranks in holders[name].items():
            for index, rank in enumerate(ranks):
                mine = slice_of(box, index, len(ranks), element, turn)
                if mine is not None and (volume(mine) or not mine):
                    out[name][mine] = rank
    return out


def _image_shape(dtype: str, shape: tuple[int, ...]) -> list[int]:
    return [*shape[:-1], shape[-1] * packing(dtype)] if shape else []


def _aliases(said: list[dict[str, Any]]) -> dict[str, str]:
    """Names that stand for the same tensor: some rank saw it, and every other saw the same or nothing."""
    out: dict[str, str] = {}
    for words in said:
        for alias, target in words["aliases"].items():
            if all(
                w["aliases"].get(alias) == target or alias in w["empty"] or target in w["empty"] for w in said
            ):
                out[alias] = target
    # No chains: a target is a tensor.
    return {alias: target for alias, target in out.items() if target not in out}


def _check_whole(name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    overlap = boxes_overlap(boxes)
    if overlap is not None:
        raise WindlassInvalid(
            f"{name!r}: ranks hold overlapping but different parts of it, {overlap[0]} and {overlap[1]}; "
            "its placement cannot be published shard by shard"
        )
    have, need = sum(volume(b) for b in boxes), math.prod(shape)
    if have != need:
        raise WindlassInvalid(
            f"{name!r} of shape {list(shape)} has {need} elements and the ranks hold {have} of them; "
            "every part must be held by a rank that calls offload()"
        )


def _hosts(
    said: list[dict[str, Any]],
    shapes: dict[str, tuple[str, tuple[int, ...]]],
    holders: dict[str, dict[Box, list[int]]],
) -> tuple[list[list[int]], dict[str, dict[Box, int]]]:
    """The hosts that publish, each with its ranks, and which of them writes which box.

    A host that holds everything publishes alone, the first one if there are several. Otherwise all hosts publish the
    boxes that they hold; one that several hold goes to the host that has the least so far.
    """
    nodes: dict[str, list[int]] = {}
    for rank, words in enumerate(said):
        nodes.setdefault(words["node"], []).append(rank)
    for ranks in nodes.values():
        here = set(ranks)
        if all(here.intersection(r) for held in holders.values() for r in held.values()):
            return [ranks], {name: dict.fromkeys(held, 0) for name, held in holders.items()}
    hosts = list(nodes.values())
    of_rank = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    load = [0] * len(hosts)
    owners: dict[str, dict[Box, int]] = {}
    # In the order of the image, which is the same for all.
    for name in sorted(holders):
        element = _element(torch_dtype(shapes[name][0]))
        owners[name] = {}
        for box in sorted(holders[name]):
            able = sorted({of_rank[r] for r in holders[name][box]}, key=lambda h: (load[h], h))
            owners[name][box] = able[0]
            load[able[0]] += volume(box) * element
    return hosts, owners


def _cuts(
    owners: dict[str, dict[Box, int]], shapes: dict[str, tuple[str, tuple[int, ...]]]
) -> list[tuple[str, list[tuple[int, list[int]]]]]:
    """Where blocks must end so that each has one owner: (dimension, bounds) of tensors that have several."""
    out = []
    for name, boxes in owners.items():
        if len(set(boxes.values())) < 2:
            continue
        dtype, shape = shapes[name]
        cuts = []
        for dim in range(len(shape)):
            # Packed elements are counted one by one in the image.
            factor = packing(dtype) if dim == len(shape) - 1 else 1
            bounds = sorted({edge * factor for box in boxes for edge in box[dim]} - {0, shape[dim] * factor})
            if bounds:
                cuts.append((dim, bounds))
        out.append((name, cuts))
    return out


def _owned(
    owners: dict[str, dict[Box, int]], shapes: dict[str, tuple[str, tuple[int, ...]]]
) -> list[tuple[str, list[tuple[list[int], list[int], int]]]]:
    """Boxes with their hosts, as the layout wants them."""

    def corner(name: str, box: Box, side: int) -> list[int]:
        dtype = shapes[name][0]
        at = [edge[side] for edge in box]
        return [*at[:-1], at[-1] * packing(dtype)] if at else []

    return [
        (name, [(corner(name, box, 0), corner(name, box, 1), host) for box, host in boxes.items()])
        for name, boxes in owners.items()
    ]


def merged(dims: list[tuple[int, int, int]], element: int) -> tuple[int, list[tuple[int, int, int]]]:
    """A run in bytes and the dimensions around it, from (count, stride in the image, stride in the source)."""
    run = element
    out: list[tuple[int, int, int]] = []
    for count, to, source in reversed([d for d in dims if d[0] != 1]):
        if not out and to == run and source == run:
            run *= count
        elif out and to == out[0][0] * out[0][1] and source == out[0][0] * out[0][2]:
            out[0] = (out[0][0] * count, out[0][1], out[0][2])
        else:
            out.insert(0, (count, to, source))
    return run, out


def _mine(
    sources: list[Source],
    layout: Layout,
    table: dict[str, tuple[str, tuple[int, ...], int, int]],
    holders: dict[str, dict[Box, list[int]]],
    hosts: list[list[int]],
    host: int | None,
    part: list[tuple[int, int]] | None,
    blocks: list[tuple[int, int]] | None,
    rank: int,
    aliases: dict[str, str],
    gpu: int | None,
) -> Plan:
    turns = {name: turn for turn, name in enumerate(table)}
    addresses: list[tuple[int, list[int]]] = []
    copies: list[Strided] = []
    device = None if gpu is None else OnDevice(gpu)
    casts: list[Cast] = []
    gathered: list[Cast] = []
    reasons: dict[str, int] = {}
    total = 0
    tied = _tied(sources, aliases)
    for i, source in enumerate(sources):
        offsets: list[int] = []
        on_device = False
        written: set[tuple[str, Box]] = set()
        for s, share in enumerate(source.shares):
            if source.targets[s]:
                reasons[share.reason] = reasons.get(share.reason, 0) + 1
            mine: list[Target] = []
            for target in source.targets[s]:
                slice_here = _part(target, table, holders, turns, rank)
                if slice_here is not None and (slice_here.tensor, slice_here.box) not in written:
                    written.add((slice_here.tensor, slice_here.box))
                    mine.append(slice_here)
            source.targets[s] = mine
            if share.gathered:
                # All ranks gather, also those that write nothing of it.
                if not source.spent:
                    gathered += [Cast(i, s, t) for t in mine] or [Cast(i, s, _NOTHING)]
                total += sum(volume(t.box) for t in mine) * _element(share.dtype)
                continue
            if source.derived is not None and source.derived.device is None:
                # Made when it is written, not before.
                casts += [Cast(i, s, t) for t in mine]
                total += sum(volume(t.box) for t in mine) * _element(share.dtype)
                continue
            local = share.fetch(source.given) if mine else None
            for target in mine:
                assert local is not None
                dtype, _, _, _ = table[target.tensor]
                element = _element(torch_dtype(dtype))
                total += volume(target.box) * element
                kind = torch_dtype(dtype)
                rounds = (share.dtype, kind) == (torch.float32, torch.bfloat16)
                copy = None
                if device is not None and local.is_cuda and local.get_device() == device.ordinal:
                    if share.dtype == kind or rounds:
                        device.copies.append(_strided(target, table, element, share.dtype.itemsize))
                        device.casts.append(rounds)
                        offsets.append(target.offset * share.dtype.itemsize)
                        on_device = True
                        continue
                elif local.is_cpu and share.dtype == kind:
                    copy = _copy(target, table, element)
                if copy is None:
                    casts.append(Cast(i, s, target))
                else:
                    offsets.append(target.offset * element)
                    copies.append(copy)
            if local is not None:
                source.form = (tuple(local.shape), local.stride(), local.dtype, local.device)
        if source.form is not None:
            where = device.addresses if on_device and device is not None else addresses
            where.append((i, offsets))
    return Plan(
        layout,
        table,
        sources,
        addresses,
        copies,
        device if device is not None and device.copies else None,
        casts,
        gathered,
        hosts,
        host,
        part,
        blocks,
        total,
        reasons,
        tied,
    )


def _tied(sources: list[Source], aliases: dict[str, str]) -> list[tuple[int, int]]:
    """Which sources were found to be the same tensor as another one."""
    of = {t.tensor: i for i, source in enumerate(sources) for targets in source.targets for t in targets}
    return [(of[alias], of[target]) for alias, target in aliases.items() if alias in of and target in of]


_NOTHING = Target("", (), (), 0)


def _element(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _part(
    target: Target,
    table: dict[str, tuple[str, tuple[int, ...], int, int]],
    holders: dict[str, dict[Box, list[int]]],
    turns: dict[str, int],
    rank: int,
) -> Target | None:
    """What of a target this rank writes."""
    ranks = holders.get(target.tensor, {}).get(target.box)
    if not ranks or rank not in ranks:
        return None
    element = _element(torch_dtype(table[target.tensor][0]))
    box = slice_of(target.box, ranks.index(rank), len(ranks), element, turns[target.tensor])
    if box is None or volume(box) == 0:
        return None
    moved = sum(
        (now[0] - then[0]) * stride for now, then, stride in zip(box, target.box, target.strides, strict=True)
    )
    return Target(target.tensor, box, target.strides, target.offset + moved)


def _copy(
    target: Target, table: dict[str, tuple[str, tuple[int, ...], int, int]], element: int
) -> Strided | None:
    """The copy as Rust makes it; nothing if its runs would be single elements."""
    copy = _strided(target, table, element, element)
    _, run, outer = copy
    if run == element and math.prod(c for c, _, _ in outer) > 1:
        return None
    return copy


def _strided(
    target: Target, table: dict[str, tuple[str, tuple[int, ...], int, int]], element: int, wide: int
) -> Strided:
    """A copy of elements of ``element`` bytes in the image and of ``wide`` in the source."""
    _, shape, offset, _ = table[target.tensor]
    strides = placement.contiguous_strides(shape)
    at = offset + sum(s * stride for (s, _), stride in zip(target.box, strides, strict=True)) * element
    dims = [
        (e - s, to * element, source * element)
        for (s, e), to, source in zip(target.box, strides, target.strides, strict=True)
    ]
    run, outer = merged(dims, element)
    return at, run, [(count, to, source // element * wide) for count, to, source in outer]


def placed(plan: Plan, data: torch.Tensor, target: Target) -> torch.Tensor:
    """The box of an image tensor in ``data`` (see :func:`windlass.memory.flat`)."""
    dtype, shape, offset, size = plan.table[target.tensor]
    view = tensor_at(data, offset, size, dtype, shape)
    return view[tuple(slice(s, e) for s, e in target.box)]


def taken(local: torch.Tensor, target: Target) -> torch.Tensor:
    """The same box in this rank's memory."""
    size = tuple(e - s for s, e in target.box)
    local = local.detach()
    return torch.as_strided(local, size, target.strides, local.storage_offset() + target.offset)


def each_cast(plan: Plan, casts: Iterable[Cast]) -> Iterator[tuple[Target, torch.Tensor]]:
    """Boxes and what goes there, a gathered tensor at a time."""
    last: tuple[int, int] | None = None
    local: torch.Tensor | None = None
    for cast in casts:
        source = plan.sources[cast.source]
        if last != (cast.source, cast.share) or local is None:
            # The one before goes first: at most one is here at a time.
            local = None
            local = source.shares[cast.share].fetch(source.given)
            last = (cast.source, cast.share)
        if cast.target is not _NOTHING:
            yield cast.target, taken(local, cast.target)


def follow(plan: Plan, given: Iterable[tuple[str, Any]]) -> None:
    """Sees that the same parameters came, and takes new objects where there are new ones."""
    sources = plan.sources
    count = 0
    for item in given:
        name, tensor = item if type(item) is tuple and len(item) == 2 else pair_of(item)
        if count >= plan.given:
            raise WindlassInvalid(
                f"parameter {name!r} was not there when the first version was offloaded; call resume() after "
                "changing a model"
            )
        source = sources[count]
        if tensor is not source.given or name != source.name:
            _rebind(source, count, name, tensor)
        count += 1
    if count < plan.given:
        raise WindlassInvalid(
            f"parameter {sources[count].name!r} is missing; it was there when the first version was offloaded"
        )


def _rebind(source: Source, index: int, name: Any, given: Any) -> None:
    """Takes a new object for a parameter, if it is placed as the old one was."""
    if name != source.name:
        raise WindlassInvalid(
            f"parameter {index} was called {source.name!r} and is now called {name!r}; the tensors of a model and "
            "their order do not change: make another WeightManager for another model, or call resume()"
        )
    if hasattr(source.given, "full_tensor") and not hasattr(given, "full_tensor"):
        raise WindlassInvalid(
            f"parameter {name!r} was sharded when the first version was offloaded and is whole now: FSDP2 leaves "
            "parameters gathered after a forward pass without a backward one. Offload the model itself instead of its "
            "parameters, or call reshard() on its FSDP modules first"
        )
    shares = list(placement.describe(name, given))
    for new, old in zip(shares, source.shares, strict=False):
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise WindlassInvalid(
                f"parameter {new.name!r} was {dtype_name(old.dtype)} {list(old.shape)} when the first version was "
                f"offloaded and is now {new.dtype} {list(new.shape)}; call resume() after changing a model"
            )
    before = [(s.name, s.pieces, s.gathered) for s in source.shares]
    if [(s.name, s.pieces, s.gathered) for s in shares] != before:
        raise WindlassInvalid(
            f"parameter {name!r} has another placement or other strides than when the first version was offloaded; "
            "call resume() after changing how a model is placed"
        )
    source.given, source.shares = given, shares


def addresses(plan: Plan) -> list[int]:
    """Where the memory of each copy is now. An error if it is not what the copies were computed for: a parameter may
    have been moved, cast or resized without becoming another object."""
    out = _addresses(plan.sources, plan.addresses)
    sources = plan.sources
    for alias, target in plan.tied:
        a, b = sources[alias], sources[target]
        if a.given is not b.given and _identity(a, a.shares[0]) != _identity(b, b.shares[0]):
            raise WindlassInvalid(
                f"{a.name!r} was the same tensor as {b.name!r} when the first version was offloaded, and is another "
                "one now; call resume() after untying weights"
            )
    return out


def device_addresses(plan: Plan) -> list[int]:
    """The same of what a GPU copies."""
    return [] if plan.device is None else _addresses(plan.sources, plan.device.addresses)


def _addresses(sources: list[Source], rows: list[tuple[int, list[int]]]) -> list[int]:
    out: list[int] = []
    for index, offsets in rows:
        source = sources[index]
        local = source.shares[0].fetch(source.given)
        address = local.data_ptr()
        shape, strides, dtype = source.looked
        # With many tensors every question counts; these are the ones whose answer can change.
        if (
            address != source.address
            or local.shape != shape
            or local.dtype is not dtype
            or local.stride() != strides
        ):
            _look(source, local, address)
        if len(offsets) == 1:
            out.append(address + offsets[0])
        else:
            out.extend([address + offset for offset in offsets])
    return out


def _look(source: Source, local: torch.Tensor, address: int) -> None:
    """Sees whether local memory is what the copies were computed for."""
    assert source.form is not None
    shape, strides, dtype, _ = source.form
    if (local.shape, local.stride(), local.dtype, local.device) != source.form:
        raise moved(source.name, (shape, strides, dtype), local)
    if address == 0 and local.nbytes:
        raise freed(source.name)
    source.address, source.looked = address, (shape, strides, dtype)


def moved(
    name: str, form: tuple[tuple[int, ...], tuple[int, ...], torch.dtype], local: torch.Tensor
) -> WindlassInvalid:
    """The error for memory that is not what a plan was made for."""
    shape, strides, dtype = form
    return WindlassInvalid(
        f"the local memory of {name!r} was {dtype_name(dtype)} {list(shape)} with strides {list(strides)} "
        f"when the first version was offloaded, and is now {local.dtype} {list(local.shape)} with strides "
        f"{list(local.stride())} on {local.device}; call resume() after moving or casting a model"
    )


def freed(name: str) -> WindlassInvalid:
    """The error for memory that is not there any more."""
    return WindlassInvalid(
        f"the memory of {name!r} was freed (its storage has no bytes); offload() before that, or after it is there again"
    )


def lost(what: str, error: Exception) -> WindlassPeerLost:
    """An error of the trainer's own collectives, with what was being done."""
    return WindlassPeerLost(f"{what}: {error}", "see whether all ranks are alive and call offload() in step")
