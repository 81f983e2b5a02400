"""One rehearsal of an engine's own loader, written down copy by copy.

Owns: :func:`trace`, which runs ``load_weights`` once with the tensors of an image and records every copy from a source
tensor to a parameter as boxes and strides. Called by :mod:`windlass.load.live` before anything is written. Must not:
change a parameter. A copy into a parameter is recorded and *not* carried out, and neither is anything else that would
write to one; tensors of the image are never written to either.

How a copy is understood. A view shares the storage of what it is a view of, so that any tensor met during the
rehearsal is placed by its storage, offset, sizes and strides: whichever slices, transposes and selections lie between
the source and the copy need no understanding. What makes a new tensor from a source (a sum, a cast, a permuted copy)
leaves that path: the parameters that such values reach are not replayable, with the name of the operation as the
reason. A plain duplicate (``clone``, a move to another device) keeps its values and stays on the path.

Invariants:

1. No parameter and no source has other bytes after the rehearsal (``test_a_rehearsal_changes_no_parameter``).
2. A copy is listed only if the values of its source elements are what the loader would have written, bit by bit:
   dtypes equal, no operation in between (``test_a_cast_is_not_replayed``, ``test_a_sum_is_not_replayed``).
3. A name that the loader refuses is told apart from a tensor that does not fit
   (``test_a_name_that_the_engine_does_not_know_is_an_extra``, ``test_a_wrong_shape_is_named_before_any_write``).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.dtypes import dtype_name
from windlass.errors import WindlassError, WindlassInvalid

__all__ = ["Constant", "Copy", "Load", "Target", "Trace", "box_count", "trace", "warm_up"]

#: An engine's loader: takes names and tensors, and returns the names that it loaded, or nothing.
Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]

#: How often a loader may refuse a name before it is taken for broken.
MAX_UNEXPECTED = 256

aten = torch.ops.aten

#: What gives a new tensor with the same values.
_DUPLICATES = {aten.clone.default, aten._to_copy.default, aten.contiguous.default, aten.alias_copy.default}
_FILLS = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}


@dataclass(frozen=True)
class Copy:
    """Elements of a source tensor that go to elements of a target: a box of ``sizes`` on both sides, in elements."""

    source: str
    source_offset: int
    source_strides: tuple[int, ...]
    target: int
    target_offset: int
    target_strides: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many elements."""
        return box_count(self.sizes)


@dataclass(frozen=True)
class Constant:
    """Elements of a target that the loader fills with the same value whatever the image holds, such as padding."""

    target: int
    offset: int
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    value: float


@dataclass(frozen=True)
class Target:
    """A tensor of the engine that the loader may write: where it belongs, and what stands in for it."""

    module: str
    attribute: str
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        """As in ``named_parameters()``."""
        return f"{self.module}.{self.attribute}" if self.module else self.attribute


@dataclass
class Trace:
    """What a rehearsal showed."""

    targets: Sequence[Target]
    copies: list[Copy] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    #: Targets that cannot be replayed, by their index, and why.
    reasons: dict[int, str] = field(default_factory=dict)
    #: Why nothing can be replayed, if so.
    refusal: str | None = None
    #: The names that the loader said it loaded, if it said so.
    loaded: frozenset[str] | None = None
    #: Names that the loader refused.
    unexpected: list[str] = field(default_factory=list)
    #: Sources whose values reach a target in any way, and the targets.
    reached: dict[str, set[int]] = field(default_factory=dict)
    #: Sources that reach a target in another dtype: (source, target) indices by name.
    casts: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: Sources that the loader writes to: it must be given copies of them.
    written_sources: set[str] = field(default_factory=set)

    def elements_of(self, target: int) -> int:
        """How many elements of a target the copies and constants write, each counted as often as it is written."""
        copied = sum(copy.count for copy in self.copies if copy.target == target)
        return copied + sum(box_count(c.sizes) for c in self.constants if c.target == target)

    def elements_read(self) -> dict[str, int]:
        """How many elements of each source the copies read."""
        read: dict[str, int] = {}
        for copy in self.copies:
            read[copy.source] = read.get(copy.source, 0) + copy.count
        return read


def box_count(sizes: Sequence[int]) -> int:
    """Elements of a box. One without dimensions has one."""
    count = 1
    for size in sizes:
        count *= size
    return count


def warm_up() -> None:
    """Runs an operation as a rehearsal does: the first one makes torch import hundreds of modules, which takes seconds.

    Otherwise that happens while the first version is loaded, when the engine is paused.
    """
    with torch.no_grad(), _Recorder({}, []):
        torch.empty(1)


def trace(load: Load, sources: Mapping[str, torch.Tensor], targets: Sequence[Target]) -> Trace:
    """Runs ``load`` with ``sources`` and writes down what it would do to ``targets``.

    Names that the loader refuses are left out and listed. A tensor that does not fit is an error that names it.
    """
    unexpected: list[str] = []
    while True:
        feed = _Feed(sources, set(unexpected))
        recorder = _Recorder(sources, targets)
        try:
            with torch.no_grad(), recorder:
                loaded = load(iter(feed))
        except WindlassError:
            raise
        except Exception as e:
            if feed.last is None or not _is_refusal(e) or feed.last in unexpected:
                raise _does_not_fit(e, feed.last, sources) from e
            if len(unexpected) == MAX_UNEXPECTED:
                raise WindlassInvalid(
                    f"the engine knows none of {MAX_UNEXPECTED} tensors of the image, the last {feed.last!r}: {e}",
                    "see whether the image is of the model that the engine serves",
                ) from e
            unexpected.append(feed.last)
            continue
        found = recorder.trace
        found.unexpected = unexpected
        if isinstance(loaded, (set, frozenset, list, tuple)):
            found.loaded = frozenset(str(name) for name in loaded)
        return found


def _is_refusal(e: Exception) -> bool:
    """Whether an exception says that a name is unknown, in the ways that loaders say so."""
    text = str(e).lower()
    return isinstance(e, KeyError) or (
        isinstance(e, ValueError) and ("no module or parameter" in text or "unexpected" in text)
    )


def _does_not_fit(e: Exception, name: str | None, sources: Mapping[str, torch.Tensor]) -> WindlassInvalid:
    if name is None:
        return WindlassInvalid(f"the engine's loader fails before it takes a tensor: {type(e).__name__}: {e}")
    tensor = sources[name]
    said = f": {e}" if str(e) else ""
    return WindlassInvalid(
        f"the engine does not take {name!r} as {dtype_name(tensor.dtype)} {list(tensor.shape)}: "
        f"{type(e).__name__}{said}",
        "publish the model that the engine was started with, with its shapes",
        name="does_not_fit",
    )


class _Feed:
    """Names and tensors in an order in which those of a module follow each other, and which was given last."""

    def __init__(self, sources: Mapping[str, torch.Tensor], without: set[str]) -> None:
        self._sources = sources
        self._without = without
        self.last: str | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in sorted(self._sources):
            if name not in self._without:
                self.last = name
                yield name, self._sources[name]


@dataclass(frozen=True)
class _Place:
    """Where a storage's bytes belong: an index or a name, and the element of it that lies at ``start``."""

    key: int | str
    start: int
    end: int
    offset: int


class _Storages:
    """Finds what lies at an address of a storage. Several tensors may share one."""

    def __init__(self) -> None:
        self._by_storage: dict[int, tuple[list[int], list[_Place]]] = {}
        # A storage that is freed gives its identity to the next one.
        self._kept: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor, key: int | str, offset: int = 0) -> None:
        """``tensor`` must be dense: its elements fill one stretch of its storage."""
        self._kept.append(tensor)
        start = int(tensor.storage_offset()) * tensor.element_size()
        place = _Place(key, start, start + tensor.numel() * tensor.element_size(), offset)
        starts, places = self._by_storage.setdefault(tensor.untyped_storage()._cdata, ([], []))
        at = bisect.bisect(starts, start)
        starts.insert(at, start)
        places.insert(at, place)

    def find(self, tensor: torch.Tensor) -> tuple[_Place, int] | None:
        """The place that a tensor begins in, and its first element there."""
        starts, places = self._by_storage.get(tensor.untyped_storage()._cdata, ((), ()))
        at = tensor.storage_offset() * tensor.element_size()
        i = bisect.bisect(starts, at) - 1
        if i < 0:
            return None
        place = places[i]
        if at >= place.end and not (at == place.end and tensor.numel() == 0) and place.end > place.start:
            return None
        return place, (at - place.start) // tensor.element_size() + place.offset

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in one of the storages, wherever."""
        return tensor.untyped_storage()._cdata in self._by_storage


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches every operation of a rehearsal."""

    def __init__(self, sources: Mapping[str, torch.Tensor], targets: Sequence[Target]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace(targets)
        self._sources = _Storages()
        self._targets = _Storages()
        self._tensors = [target.tensor for target in targets]
        #: By storage: the operation that made its values, and of which sources.
        self._derived: dict[int, tuple[str, frozenset[str]]] = {}
        self._kept: list[torch.Tensor] = []
        self._sizes: dict[str, int] = {}
        for name in sources:
            tensor = sources[name]
            self._sizes[name] = tensor.element_size()
            self._sources.add(tensor, name)
        for i, target in enumerate(targets):
            self._targets.add(target.tensor, i)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        for tensor in written:
            if self._targets.holds(tensor):
                self._record(func, tensor, args, kwargs)
                return tensor
            if self._sources.holds(tensor):
                self.trace.written_sources |= self._origin(tensor)
                self.trace.refusal = self.trace.refusal or f"the loader writes to its input by {func}"
                return tensor
        given = list(_tensors((args, kwargs)))
        result = func(*args, **kwargs)
        self._follow(func, given, written, result)
        return result

    def _record(self, func: Any, into: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Something that would write to a parameter."""
        if into.numel() == 0:
            return
        found = self._targets.find(into)
        target = self._target_of(into) if found is None else int(found[0].key)
        if found is None or target < 0:
            self.trace.refusal = self.trace.refusal or f"{func} writes outside of a parameter"
            return
        at = found[1]
        if func is aten.copy_.default:
            self._copied(target, at, into, args[1])
        elif func in _FILLS:
            value = 0.0 if func is aten.zero_.default else args[1]
            if isinstance(value, torch.Tensor):
                value = float("nan") if value.is_meta else value.item()
            place = (target, at, tuple(into.stride()), tuple(into.shape))
            self.trace.constants.append(Constant(*place, float(value)))
        else:
            self._refuse(target, f"the loader writes to it by {func}", self._origins((args, kwargs)))

    def _copied(self, target: int, at: int, into: torch.Tensor, values: torch.Tensor) -> None:
        whole = self._tensors[target]
        names = self._origin(values)
        found = self._sources.find(values)
        if found is None:
            made = self._derived.get(values.untyped_storage()._cdata)
            reason = (
                "is written with values that are not of the image" if made is None else f"passes {made[0]}"
            )
            self._refuse(target, reason, names)
            return
        name = str(found[0].key)
        if values.numel() != into.numel():
            raise WindlassInvalid(
                f"{name!r} does not fit: {list(values.shape)} of it would go to {list(into.shape)} of "
                f"{self.trace.targets[target].name!r}, which is {list(whole.shape)}",
                "publish the model that the engine was started with, with its shapes",
                name="does_not_fit",
            )
        size = self._sizes[name]
        if (
            values.dtype != into.dtype
            or into.element_size() != whole.element_size()
            or size != into.element_size()
        ):
            self.trace.casts[name] = (dtype_name(values.dtype), dtype_name(into.dtype))
            self._refuse(
                target, f"is cast from {dtype_name(values.dtype)} to {dtype_name(into.dtype)}", names
            )
            return
        spread = values.expand(into.shape)
        self.trace.reached.setdefault(name, set()).add(target)
        self.trace.copies.append(
            Copy(name, found[1], tuple(spread.stride()), target, at, tuple(into.stride()), tuple(into.shape))
        )

    def _refuse(self, target: int, reason: str, sources: frozenset[str]) -> None:
        self.trace.reasons.setdefault(target, reason)
        for name in sources:
            self.trace.reached.setdefault(name, set()).add(target)

    def _target_of(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()._cdata
        for i, own in enumerate(self._tensors):
            if own.untyped_storage()._cdata == storage:
                return i
        return -1

    def _follow(self, func: Any, given: list[torch.Tensor], written: list[torch.Tensor], result: Any) -> None:
        """What an operation that was carried out made of sources."""
        names = (
            frozenset[str]().union(*(self._origin(tensor) for tensor in given)) if given else frozenset[str]()
        )
        if not names:
            return
        fresh = [
            t
            for t in [*_tensors(result), *written]
            if not self._sources.holds(t) and not self._targets.holds(t)
        ]
        if not any(True for _ in _tensors(result)):
            # A number that Python sees may end anywhere.
            self.trace.refusal = (
                self.trace.refusal or f"the loader looks at values of {sorted(names)[0]!r} by {func}"
            )
        for tensor in fresh:
            self._kept.append(tensor)
            origin = self._sources.find(given[0]) if len(given) == 1 else None
            if (
                origin is not None
                and func in _DUPLICATES
                and tensor.dtype == given[0].dtype
                and tensor.stride() == given[0].stride()
                and tensor.is_contiguous()
            ):
                self._sources.add(tensor, origin[0].key, origin[1])
            else:
                self._derived[tensor.untyped_storage()._cdata] = (str(func), names)

    def _origin(self, tensor: torch.Tensor) -> frozenset[str]:
        found = self._sources.find(tensor)
        if found is not None:
            return frozenset((str(found[0].key),))
        made = self._derived.get(tensor.untyped_storage()._cdata)
        return frozenset() if made is None else made[1]

    def _origins(self, value: Any) -> frozenset[str]:
        return frozenset[str]().union(*(self._origin(t) for t in _tensors(value)))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes to, by its schema."""
    out: list[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        out.extend(_tensors(value))
    return out


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
