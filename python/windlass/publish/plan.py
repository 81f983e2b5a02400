"""What this rank does for each version.

Owns: the :class:`Plan` of one rank, made once when the first version is offloaded: which of its memory goes where in the image,
by copies of Rust, of a GPU or of torch. Called by :class:`windlass.WeightManager`. Must not: write anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from windlass.dtypes import torch_dtype
from windlass.errors import WindlassInvalid
from windlass.exchange import Exchange, agree_on_all_ranks
from windlass.publish import placement
from windlass.publish.boxes import volume
from windlass.publish.division import Division, Entry, tell
from windlass.publish.placement import Box
from windlass.publish.sources import (
    NOTHING,
    Naming,
    Source,
    Target,
    freed,
    identity_of,
    moved,
    pair_of,
    rebind,
    taken,
)
from windlass.receive.memory import tensor_at

if TYPE_CHECKING:
    from windlass._windlass import Layout

__all__ = [
    "Cast",
    "OnDevice",
    "Plan",
    "addresses",
    "device_addresses",
    "each_cast",
    "follow",
    "make_plan",
    "placed",
]


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


@dataclass
class Plan:
    """What this rank does for each version."""

    layout: Layout
    #: The tensors of the image by name.
    table: dict[str, Entry]
    sources: list[Source]
    #: What a GPU copies, if anything of this rank's is on one.
    device: OnDevice | None
    #: As :attr:`Division.hosts`.
    hosts: list[list[int]]
    #: Which of them this rank is on; ``None`` if its host does not publish.
    host: int | None
    #: The blocks that this host's region holds, if several publish.
    part: list[tuple[int, int]] | None
    #: The blocks that this rank writes, all of them whole, if ranks asked for cuts between them.
    blocks: list[tuple[int, int]] | None
    #: Pairs of sources that are one tensor of the image: the alias, and what it stands for.
    tied: list[tuple[int, int]]
    #: How many of the sources were given; the others are made of them.
    given: int
    #: As :attr:`Naming.shared`.
    shared: dict[str, tuple[int, ...]]
    #: For every source that is not gathered: which one, and for the copies that Rust makes of it the bytes from its
    #: first element; and the copies themselves.
    addresses: list[tuple[int, list[int]]] = field(default_factory=list)
    copies: list[Strided] = field(default_factory=list)
    casts: list[Cast] = field(default_factory=list)
    #: Parameters that all ranks gather together, in this order, and write slices of.
    gathered: list[Cast] = field(default_factory=list)
    #: Bytes that this rank writes.
    bytes: int = 0
    #: How many parameters went which way, and why.
    reasons: dict[str, int] = field(default_factory=dict)


def make_plan(
    sources: list[Source] | Exception,
    naming: Naming,
    *,
    rank: int,
    node: str,
    exchange: Exchange,
    timeout: float,
    by_rank: bool = False,
    slices: int = 1,
    gpu: int | None = None,
) -> Plan:
    """Agrees with the other ranks. An error on one of them becomes an error on all.

    With ``by_rank``, on all ranks, blocks end where the share of a rank does, so that each is one rank's. Columns are cut into
    ``slices``. ``gpu`` is the
    number of the one device whose tensors need not go by torch.
    """

    def words() -> dict[str, Any]:
        if isinstance(sources, Exception):
            raise sources
        return {**tell(sources, naming, node), "by_rank": by_rank, "slices": slices}

    said = agree_on_all_ranks(exchange, words, "publish", timeout)
    assert not isinstance(sources, Exception)
    division = Division(said)
    host = division.host_of(rank)
    plan = Plan(
        division.layout,
        division.table,
        sources,
        device=None if gpu is None else OnDevice(gpu),
        hosts=division.hosts,
        host=host,
        part=division.part_of(host),
        blocks=division.blocks_of(rank),
        tied=_tied(sources, division.aliases),
        given=sum(source.derived is None for source in sources),
        shared=naming.shared,
    )
    for index in range(len(sources)):
        _plan_source(plan, index, division, rank)
    if plan.device is not None and not plan.device.copies:
        plan.device = None
    return plan


def _plan_source(plan: Plan, index: int, division: Division, rank: int) -> None:
    """Adds what this rank writes of one source."""
    source, offsets, device = plan.sources[index], [], plan.device
    on_device = False
    written: set[tuple[str, Box]] = set()
    for s, share in enumerate(source.shares):
        if source.targets[s]:
            plan.reasons[share.reason] = plan.reasons.get(share.reason, 0) + 1
        mine: list[Target] = []
        for whole in source.targets[s]:
            target = division.slice_for(rank, whole)
            if target is not None and (target.tensor, target.box) not in written:
                written.add((target.tensor, target.box))
                mine.append(target)
        source.targets[s] = mine
        if share.gathered:
            # All ranks gather, also those that write nothing of it.
            if not source.spent:
                plan.gathered += [Cast(index, s, t) for t in mine] or [Cast(index, s, NOTHING)]
            plan.bytes += sum(volume(t.box) for t in mine) * share.dtype.itemsize
            continue
        if source.derived is not None and source.derived.device is None:
            # Made when it is written, not before.
            plan.casts += [Cast(index, s, t) for t in mine]
            plan.bytes += sum(volume(t.box) for t in mine) * share.dtype.itemsize
            continue
        local = share.fetch(source.given) if mine else None
        for target in mine:
            assert local is not None
            kind = torch_dtype(plan.table[target.tensor].dtype)
            plan.bytes += volume(target.box) * kind.itemsize
            rounds = (share.dtype, kind) == (torch.float32, torch.bfloat16)
            copy = None
            if device is not None and local.is_cuda and local.get_device() == device.ordinal:
                if share.dtype == kind or rounds:
                    device.copies.append(_strided(target, plan.table, kind.itemsize, share.dtype.itemsize))
                    device.casts.append(rounds)
                    offsets.append(target.offset * share.dtype.itemsize)
                    on_device = True
                    continue
            elif local.is_cpu and share.dtype == kind:
                copy = _copy(target, plan.table, kind.itemsize)
            if copy is None:
                plan.casts.append(Cast(index, s, target))
            else:
                offsets.append(target.offset * kind.itemsize)
                plan.copies.append(copy)
        if local is not None:
            source.form = (tuple(local.shape), local.stride(), local.dtype, local.device)
    if source.form is not None:
        rows = device.addresses if on_device and device is not None else plan.addresses
        rows.append((index, offsets))


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


def _tied(sources: list[Source], aliases: dict[str, str]) -> list[tuple[int, int]]:
    """Which sources were found to be the same tensor as another one."""
    of = {t.tensor: i for i, source in enumerate(sources) for targets in source.targets for t in targets}
    return [(of[alias], of[target]) for alias, target in aliases.items() if alias in of and target in of]


def _copy(target: Target, table: dict[str, Entry], element: int) -> Strided | None:
    """The copy as Rust makes it; nothing if its runs would be single elements."""
    copy = _strided(target, table, element, element)
    _, run, outer = copy
    if run == element and math.prod(c for c, _, _ in outer) > 1:
        return None
    return copy


def _strided(target: Target, table: dict[str, Entry], element: int, wide: int) -> Strided:
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
    """The box of an image tensor in ``data`` (see :func:`windlass.receive.memory.flat`)."""
    dtype, shape, offset, size = plan.table[target.tensor]
    view = tensor_at(data, offset, size, dtype, shape)
    return view[tuple(slice(s, e) for s, e in target.box)]


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
        if cast.target is not NOTHING:
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
            rebind(source, count, name, tensor)
        count += 1
    if count < plan.given:
        raise WindlassInvalid(
            f"parameter {sources[count].name!r} is missing; it was there when the first version was offloaded"
        )


def addresses(plan: Plan) -> list[int]:
    """Where the memory of each copy is now. An error if it is not what the copies were computed for: a parameter may
    have been moved, cast or resized without becoming another object."""
    out = _addresses(plan.sources, plan.addresses)
    sources = plan.sources
    for alias, target in plan.tied:
        a, b = sources[alias], sources[target]
        if a.given is not b.given and identity_of(a, a.shares[0]) != identity_of(b, b.shares[0]):
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
