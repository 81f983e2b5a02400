"""Who writes which bytes of an image.

Owns: the :class:`Division` of an image among ranks. Each rank says what it holds (:func:`tell`). From what all of them said, each
makes the same division, which proves that together they write every byte of every tensor exactly once. Ranks that hold the same
box (replicas, HSDP) each write a slice of it. Called by :mod:`windlass.publish.plan`. Must not: know this rank's memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from windlass._windlass import Layout
from windlass.dtypes import dtype_name, torch_dtype
from windlass.errors import WindlassInvalid, WindlassUnsupported
from windlass.publish.boxes import boxes_overlap, slice_of, volume
from windlass.publish.placement import Box, Share
from windlass.publish.sources import Naming, Source, Target, identity_of, targets_of

if TYPE_CHECKING:
    from windlass.names import View

__all__ = ["Division", "Entry", "Held", "tell"]

#: A smaller slice of a tensor, in elements, is no block of its own: its hash would be of about its size.
LEAST_SLICE = 1024


class Entry(NamedTuple):
    """A tensor of the image, as torch has it, and where it is."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


def tell(sources: list[Source], naming: Naming, node: str) -> dict[str, Any]:
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
                key = identity_of(source, share)
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


@dataclass
class Held:
    """A tensor of the image, and the ranks that hold each box of it."""

    dtype: str
    shape: tuple[int, ...]
    #: The first rank that described it.
    rank: int
    boxes: dict[Box, list[int]] = field(default_factory=dict)

    @property
    def itemsize(self) -> int:
        """Bytes of one element of torch."""
        return torch_dtype(self.dtype).itemsize

    def unpacked(self, edges: Sequence[int]) -> list[int]:
        """A shape or a corner in elements of the image, which counts packed ones one by one."""
        return [*edges[:-1], edges[-1] * packing(self.dtype)] if edges else []

    def slices(self, turn: int) -> dict[Box, int]:
        """Which rank writes which box. ``turn`` decides about boxes that are too small to be cut."""
        out = {}
        for box, ranks in self.boxes.items():
            for index, rank in enumerate(ranks):
                mine = slice_of(box, index, len(ranks), self.itemsize, turn)
                if mine is not None and (volume(mine) or not mine):
                    out[mine] = rank
        return out

    def check_whole(self, name: str) -> None:
        """Sees that the boxes are every element once."""
        overlap = boxes_overlap(list(self.boxes))
        if overlap is not None:
            raise WindlassInvalid(
                f"{name!r}: ranks hold overlapping but different parts of it, {overlap[0]} and {overlap[1]}; "
                "its placement cannot be published shard by shard"
            )
        have, need = sum(map(volume, self.boxes)), math.prod(self.shape)
        if have != need:
            raise WindlassInvalid(
                f"{name!r} of shape {list(self.shape)} has {need} elements and the ranks hold {have} of them; "
                "every part must be held by a rank that calls offload()"
            )


#: By tensor, the owner of each box: a rank or a host.
Owners = dict[str, dict[Box, int]]


class Division:
    """The image, and who writes which bytes of it, from what all ranks said."""

    def __init__(self, said: list[dict[str, Any]]) -> None:
        self._ranks = len(said)
        self._held = _held(said)
        #: Further names of tensors.
        self.aliases = _aliases(said)
        for alias in self.aliases:
            self._held.pop(alias, None)
        for name, held in self._held.items():
            held.check_whole(name)
        #: For each host that publishes, the ranks that write there, in the order of their places in its region.
        self.hosts, self._owners = self._divide(said)
        if len(self.hosts) > 1 or len(self.hosts[0]) < len(said):
            here = [set(ranks) for ranks in self.hosts]
            for name, held in self._held.items():
                for box, ranks in held.boxes.items():
                    ranks[:] = [r for r in ranks if r in here[self._owners[name][box]]]
        tensors = [(name, held.dtype, held.unpacked(held.shape)) for name, held in self._held.items()]
        # The order of the image does not depend on its cuts.
        bare = Layout(tensors, self.aliases)
        self._turns = {name: turn for turn, (name, *_) in enumerate(bare.tensors())}
        self._writers: Owners | None = None
        if all(words["by_rank"] for words in said):
            self._writers = {name: self._held[name].slices(turn) for name, turn in self._turns.items()}
        owners = self._writers if self._writers is not None else self._owners if len(self.hosts) > 1 else {}
        cuts = self._cuts(owners, _slices(said))
        #: The image.
        self.layout = Layout(tensors, self.aliases, cuts) if cuts else bare
        #: Its tensors by name.
        self.table = {
            name: Entry(dtype, self._held[name].shape, offset, size)
            for name, dtype, _, offset, size in self.layout.tensors()
        }

    def host_of(self, rank: int) -> int | None:
        """Which of the hosts that publish a rank is on; ``None`` if its host does not publish."""
        return next((host for host, ranks in enumerate(self.hosts) if rank in ranks), None)

    def part_of(self, host: int | None) -> list[tuple[int, int]] | None:
        """The blocks that a host's region holds, if several publish."""
        if host is None or len(self.hosts) < 2:
            return None
        return self.layout.parts(len(self.hosts), self._corners(self._owners))[host]

    def blocks_of(self, rank: int) -> list[tuple[int, int]] | None:
        """The blocks that a rank writes, all of them whole, if ranks asked for cuts between them."""
        if self._writers is None:
            return None
        return self.layout.parts(self._ranks, self._corners(self._writers))[rank]

    def slice_for(self, rank: int, target: Target) -> Target | None:
        """What of a target a rank writes."""
        held = self._held.get(target.tensor)
        ranks = None if held is None else held.boxes.get(target.box)
        if held is None or not ranks or rank not in ranks:
            return None
        turn = self._turns[target.tensor]
        box = slice_of(target.box, ranks.index(rank), len(ranks), held.itemsize, turn)
        if box is None or volume(box) == 0:
            return None
        edges = zip(box, target.box, target.strides, strict=True)
        moved = sum((now[0] - then[0]) * stride for now, then, stride in edges)
        return Target(target.tensor, box, target.strides, target.offset + moved)

    def _divide(self, said: list[dict[str, Any]]) -> tuple[list[list[int]], Owners]:
        """The hosts that publish, each with its ranks, and which of them writes which box.

        A host that holds everything publishes alone, the first one if there are several. Otherwise all hosts publish the
        boxes that they hold; one that several hold goes to the host that has the least so far.
        """
        nodes: dict[str, list[int]] = {}
        for rank, words in enumerate(said):
            nodes.setdefault(words["node"], []).append(rank)
        for ranks in nodes.values():
            here = set(ranks)
            if all(here.intersection(r) for held in self._held.values() for r in held.boxes.values()):
                return [ranks], {name: dict.fromkeys(held.boxes, 0) for name, held in self._held.items()}
        hosts = list(nodes.values())
        of_rank = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
        load = [0] * len(hosts)
        owners: Owners = {}
        # In the order of the image, which is the same for all.
        for name, held in sorted(self._held.items()):
            owners[name] = {}
            for box, ranks in sorted(held.boxes.items()):
                host = min({of_rank[r] for r in ranks}, key=lambda h: (load[h], h))
                owners[name][box] = host
                load[host] += volume(box) * held.itemsize
        return hosts, owners

    def _cuts(self, owners: Owners, slices: int) -> list[tuple[str, list[tuple[int, list[int]]]]]:
        """Where blocks must end, as (dimension, bounds): so that each has one owner, and so that the rows or columns of each
        of the ``slices`` of an engine are blocks of their own."""
        out = []
        for name, held in self._held.items():
            shape = held.unpacked(held.shape)
            found: list[set[int]] = [set() for _ in shape]
            boxes = owners.get(name, {})
            if len(set(boxes.values())) > 1:
                for box in boxes:
                    for corner in zip(*box, strict=True):
                        for dim, edge in enumerate(held.unpacked(corner)):
                            found[dim].add(edge)
            left = math.prod(shape)
            # Columns first: rows are blocks of their own anyway, but for a block at each end.
            for dim in [len(shape) - 1, *range(len(shape) - 1)] if len(shape) > 1 else []:
                if shape[dim] % slices == 0 and left >= slices * LEAST_SLICE:
                    found[dim].update(shape[dim] // slices * i for i in range(slices))
                    left //= slices
            bounds = [(dim, sorted(at - {0, shape[dim]})) for dim, at in enumerate(found)]
            if any(at for _, at in bounds):
                out.append((name, [(dim, at) for dim, at in bounds if at]))
        return out

    def _corners(self, owners: Owners) -> list[tuple[str, list[tuple[list[int], list[int], int]]]]:
        """Boxes with their owners, as the layout takes them: first and last corner."""

        def corner(name: str, box: Box, side: int) -> list[int]:
            return self._held[name].unpacked([edge[side] for edge in box])

        return [
            (name, [(corner(name, box, 0), corner(name, box, 1), owner) for box, owner in boxes.items()])
            for name, boxes in owners.items()
        ]


def _slices(said: list[dict[str, Any]]) -> int:
    """Into how many slices columns are cut, which all ranks must say alike."""
    first = int(said[0]["slices"])
    for rank, words in enumerate(said):
        if words["slices"] != first:
            raise WindlassInvalid(
                f"rank 0 has slices={first} and rank {rank} slices={words['slices']}; give all ranks the same"
            )
    return first


def packing(dtype: str) -> int:
    """Elements of the image in one element of torch."""
    return 2 if dtype == "float4_e2m1fn_x2" else 1


def _held(said: list[dict[str, Any]]) -> dict[str, Held]:
    """Every tensor, and which ranks hold what of it."""
    out: dict[str, Held] = {}
    for rank, words in enumerate(said):
        for name, dtype, shape, boxes in words["tensors"]:
            held = out.setdefault(name, Held(dtype, tuple(shape), rank))
            if (held.dtype, held.shape) != (dtype, tuple(shape)):
                raise WindlassInvalid(
                    f"ranks disagree about {name!r}: {held.dtype} {list(held.shape)} on rank {held.rank}, {dtype} {shape} "
                    f"on rank {rank}; every rank must describe the whole tensor"
                )
            for flat in boxes:
                ranks = held.boxes.setdefault(tuple(zip(flat[::2], flat[1::2], strict=True)), [])
                if not ranks or ranks[-1] != rank:
                    ranks.append(rank)
    if not out:
        raise WindlassInvalid("there are no tensors to publish; offload() was given nothing, on every rank")
    return out


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
