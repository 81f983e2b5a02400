"""Which modules may be written to directly, and which must go through the engine's own loader.

Owns: :func:`snapshot`, what a module holds besides its parameters, and :func:`qualify`, the verdict for each module of
a model. Called by :mod:`windlass.load.live` around the first load of a layout, which is always the engine's own full
reload with all of its post-processing. Must not: write to the model.

A module qualifies only if

1. the rehearsal showed that copies and constants cover each of its parameters wholly, none of them twice;
2. its class and the way it treats weights are on the engine's list (:class:`Judge`);
3. all tensors that it holds anywhere (parameters, buffers, attributes, in lists, in objects of the engine, in closures)
   are covered, the same memory as a covered one, or on the engine's list of those that do not come from weights;
4. after the reload, each parameter has, bit by bit and in the memory it had before, what the copies would write;
5. nothing on that list changed during the reload.

An unknown tensor may be derived from any weights nearby, as MLA's matrices are: it disqualifies everything below the
parent of the module that holds it. Modules that share a source tensor qualify together or not at all, since a source
goes through the engine's loader or past it, never both.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from windlass.load.trace import Copy, Trace, box_count

__all__ = [
    "Holds",
    "Judge",
    "Snapshot",
    "Verdict",
    "own_tensors",
    "qualify",
    "snapshot",
    "without",
]

#: Plain values, which hold no tensor.
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type, types.ModuleType,
)  # fmt: skip
#: How far objects of the engine are looked through for tensors.
_DEPTH = 5
#: Tensors up to this size are compared by their bytes before and after; larger ones by where they are.
_KEEP_BYTES = 64 << 20


#: Whether elements of a parameter are, bit by bit, those of a copy's source.
Holds = Callable[[Copy, torch.Tensor], bool]


class Judge(Protocol):
    """What an engine's adapter knows of its modules."""

    def refuses(self, name: str, module: torch.nn.Module) -> str | None:
        """Why a module with parameters is not on the list; ``None`` if it is."""

    def independent(self, name: str, module: torch.nn.Module, attribute: str) -> bool:
        """Whether a tensor of a module is known not to come from weights."""

    def serving(self, attribute: str) -> bool:
        """Whether a tensor belongs to serving, such as the cache: it is not looked at."""

    def looks_into(self, value: object) -> bool:
        """Whether an object belongs to the engine and may hold tensors."""


@dataclass(frozen=True)
class _Seen:
    """A tensor at one moment."""

    where: tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]
    bytes: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor, *, keep: bool) -> _Seen:
        where = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
        small = keep and not tensor.is_meta and tensor.numel() * tensor.element_size() <= _KEEP_BYTES
        return cls(where, _bytes(tensor).clone() if small else None)

    def same(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the same now: by its bytes, wherever and on which device they are, or by its place if it was
        too large."""
        now = _Seen.of(tensor, keep=False)
        if self.bytes is None or tensor.is_meta:
            return now.where == self.where
        if now.where[1:3] != self.where[1:3]:
            return False
        return torch.equal(self.bytes, _bytes(tensor).to(self.bytes.device))


@dataclass
class Snapshot:
    """What a model held before a reload: its parameters by place, its other tensors by place and bytes."""

    parameters: dict[str, _Seen] = field(default_factory=dict)
    others: dict[str, dict[str, _Seen]] = field(default_factory=dict)


@dataclass
class Verdict:
    """What is replayed and what is not."""

    #: Copies into modules that qualified.
    copies: list[Copy] = field(default_factory=list)
    #: Sources that are replayed, and those that go through the engine's loader. Together, all that the engine takes.
    replayed: set[str] = field(default_factory=set)
    session: set[str] = field(default_factory=set)
    modules: int = 0
    #: Why the others did not, by module: those that take tensors, and all.
    why: dict[str, str] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)


def own_tensors(module: torch.nn.Module, judge: Judge) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a module holds itself and not through a child, with the way to it."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield name, buffer
    skip = {"_parameters", "_buffers", "_modules"}
    seen: set[int] = {id(module)}
    for name, value in vars(module).items():
        if name not in skip and not name.endswith("_hooks"):
            yield from _inside(name, value, judge, seen, _DEPTH)


def _inside(
    path: str, value: Any, judge: Judge, seen: set[int], depth: int
) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if isinstance(value, (*_PLAIN, torch.nn.Module)) or depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (list, tuple, set, frozenset)):
        for i, item in enumerate(value):
            yield from _inside(f"{path}[{i}]", item, judge, seen, depth - 1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _inside(f"{path}[{key!r}]", item, judge, seen, depth - 1)
    elif isinstance(value, (types.FunctionType, types.MethodType)):
        closure = getattr(value, "__func__", value).__closure__ or ()
        for i, cell in enumerate(closure):
            try:
                held = cell.cell_contents
            except ValueError:
                continue
            if _is_opaque(held):
                # Something compiled, such as a packed weight: it may be anything.
                yield f"{path}()", torch.empty(0)
            yield from _inside(f"{path}(){i}", held, judge, seen, depth - 1)
    elif judge.looks_into(value):
        for name, item in getattr(value, "__dict__", {}).items():
            yield from _inside(f"{path}.{name}", item, judge, seen, depth - 1)


def _is_opaque(value: object) -> bool:
    """Whether a value in a closure is neither plain data nor something that can be looked into."""
    known = (*_PLAIN, torch.nn.Module, torch.Tensor, list, tuple, set, frozenset, dict)
    return not isinstance(value, known) and not callable(value) and not hasattr(value, "__dict__")


def snapshot(model: torch.nn.Module, judge: Judge, covered: Iterable[str]) -> Snapshot:
    """What there is before a reload. ``covered`` are the parameters that the rehearsal wrote."""
    written = set(covered)
    out = Snapshot()
    for prefix, module in model.named_modules():
        for attribute, tensor in own_tensors(module, judge):
            name = f"{prefix}.{attribute}" if prefix else attribute
            if judge.serving(attribute):
                continue
            if name in written:
                out.parameters[name] = _Seen.of(tensor, keep=False)
            else:
                out.others.setdefault(prefix, {})[attribute] = _Seen.of(tensor, keep=True)
    return out


def qualify(
    model: torch.nn.Module,
    judge: Judge,
    trace: Trace,
    before: Snapshot,
    sources: Callable[[str], torch.Tensor] | None = None,
    *,
    holds: Holds | None = None,
) -> Verdict:
    """The verdict after a full reload of ``sources``, or of what ``holds`` knows of them. Where neither is given, whether
    parameters hold what the copies would write is left to be found out: see :func:`without`."""
    if holds is None:
        holds = _believed if sources is None else _as_in(sources)
    live = dict(model.named_parameters(remove_duplicate=False))
    bad: dict[str, str] = {}
    targets = dict(enumerate(trace.targets))
    copied = _by_target(trace.copies)
    whole = {
        targets[i].name: tensor
        for i in copied
        if (tensor := live.get(targets[i].name)) is not None
        and trace.elements_of(i) == tensor.numel()
        and i not in trace.reasons
    }
    refused = {targets[i].name: reason for i, reason in trace.reasons.items()}
    storages = {tensor.untyped_storage().data_ptr() for tensor in whole.values() if tensor.numel()}
    for prefix, module in model.named_modules():
        reason = _of_module(prefix, module, judge, before, whole, storages, refused)
        if reason is None:
            continue
        text, spreads = reason
        if spreads:
            # What is derived may be derived from any weights near it.
            top = prefix.rpartition(".")[0]
            for name, _ in model.named_modules():
                if not top or name == top or name.startswith(f"{top}."):
                    bad.setdefault(name, f"{prefix or 'the model'}: {text}")
        else:
            bad.setdefault(prefix, text)
    for i, target in targets.items():
        if target.module in bad:
            continue
        reason_here = _of_target(
            i, trace, live.get(target.name), before.parameters.get(target.name), copied, holds
        )
        if reason_here is not None:
            bad[target.module] = f"{target.attribute} {reason_here}"
    if trace.refusal is not None:
        bad = {target.module: trace.refusal for target in targets.values()}
    return _settle(trace, bad)


def _of_module(
    prefix: str,
    module: torch.nn.Module,
    judge: Judge,
    before: Snapshot,
    whole: Mapping[str, torch.Tensor],
    storages: set[int],
    refused: Mapping[str, str],
) -> tuple[str, bool] | None:
    """Why a module does not qualify, and whether that says something of its neighbours."""
    was = before.others.get(prefix, {})
    now = dict(own_tensors(module, judge))
    for attribute, tensor in now.items():
        name = f"{prefix}.{attribute}" if prefix else attribute
        if name in whole or judge.serving(attribute):
            continue
        if (
            tensor.numel()
            and tensor.device.type != "meta"
            and tensor.untyped_storage().data_ptr() in storages
        ):
            continue
        if attribute in module._parameters:
            if name in refused:
                return f"{attribute} {refused[name]}", False
            if tensor.numel() == 0:
                return f"{attribute} is kept in another form", False
            return f"{attribute} is not written wholly by copies", False
        if not judge.independent(prefix, module, attribute):
            return f"{attribute} is a tensor of unknown origin", True
        seen = was.get(attribute)
        if seen is None or not seen.same(tensor):
            return f"{attribute} changed during the reload", True
    if module._parameters and any(p is not None for p in module._parameters.values()):
        unknown = judge.refuses(prefix, module)
        if unknown is not None:
            return unknown, False
    return None


def _of_target(
    i: int,
    trace: Trace,
    tensor: torch.Tensor | None,
    seen: _Seen | None,
    copied: Mapping[int, list[Copy]],
    holds: Holds,
) -> str | None:
    """Why one parameter cannot be replayed."""
    if i in trace.reasons:
        return trace.reasons[i]
    target = trace.targets[i]
    if i not in copied:
        # Written by nothing: either another name of one that is, or covered by the check of its module.
        return None
    if tensor is None:
        return "is gone after the reload"
    stand_in = target.tensor
    if (tensor.shape, tensor.stride(), tensor.dtype) != (stand_in.shape, stand_in.stride(), stand_in.dtype):
        return "is kept in another form"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"is on {tensor.device}, where plans are not replayed"
    if not tensor.is_contiguous():
        return "is not contiguous"
    if seen is None or _Seen.of(tensor, keep=False).where != seen.where:
        return "moved during the reload"
    written = torch.zeros(tensor.numel(), dtype=torch.bool, device=tensor.device)
    for constant in (c for c in trace.constants if c.target == i):
        box = torch.as_strided(
            tensor, constant.sizes, constant.strides, tensor.storage_offset() + constant.offset
        )
        if not bool((box == constant.value).all()):
            return f"was not filled with {constant.value}"
        torch.as_strided(written, constant.sizes, constant.strides, constant.offset).fill_(True)
    for copy in copied[i]:
        mark = torch.as_strided(written, copy.sizes, copy.target_strides, copy.target_offset)
        if bool(mark.any()):
            return "is written twice in some places"
        mark.fill_(True)
        there = torch.as_strided(
            tensor, copy.sizes, copy.target_strides, tensor.storage_offset() + copy.target_offset
        )
        if not holds(copy, there):
            return _changed(copy.source)
    return None if bool(written.all()) else "is not written wholly by copies"


def _as_in(sources: Callable[[str], torch.Tensor]) -> Holds:
    def holds(copy: Copy, there: torch.Tensor) -> bool:
        source = sources(copy.source)
        wanted = torch.as_strided(
            source, copy.sizes, copy.source_strides, source.storage_offset() + copy.source_offset
        )
        return torch.equal(_bytes(there), _bytes(wanted).to(there.device))

    return holds


def _believed(_copy: Copy, _there: torch.Tensor) -> bool:
    return True


def without(trace: Trace, verdict: Verdict, wrong: Iterable[str]) -> Verdict:
    """The verdict once it is known which sources the parameters do not hold as the copies would write them."""
    bad = dict(verdict.bad)
    found = set(wrong)
    for copy in trace.copies:
        if copy.source in found:
            target = trace.targets[copy.target]
            bad.setdefault(target.module, f"{target.attribute} {_changed(copy.source)}")
    return _settle(trace, bad)


def _changed(source: str) -> str:
    return f"is not {source} as it was loaded: the engine changes it afterwards"


def _settle(trace: Trace, bad: dict[str, str]) -> Verdict:
    """Spreads refusals over modules that share sources, and divides the sources."""
    modules_of = {
        source: {trace.targets[i].module for i in reached} for source, reached in trace.reached.items()
    }
    changed = True
    while changed:
        changed = False
        for source, modules in modules_of.items():
            if modules & bad.keys() and not modules <= bad.keys():
                for module in modules - bad.keys():
                    bad[module] = f"shares {source} with a module that is not replayed"
                changed = True
    out = Verdict(bad=bad)
    kept = {target.module for target in trace.targets} - bad.keys()
    for source, modules in modules_of.items():
        (out.replayed if modules and modules <= kept else out.session).add(source)
    out.copies = [copy for copy in trace.copies if copy.source in out.replayed]
    written = {trace.targets[copy.target].module for copy in out.copies}
    out.modules = len(written)
    with_copies = {module for modules in modules_of.values() for module in modules}
    out.why = {module: reason for module, reason in bad.items() if module in with_copies}
    return out


def _by_target(copies: Iterable[Copy]) -> dict[int, list[Copy]]:
    out: dict[int, list[Copy]] = {}
    for copy in copies:
        if box_count(copy.sizes):
            out.setdefault(copy.target, []).append(copy)
    return out


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous()
    return (flat.reshape(1) if flat.dim() == 0 else flat).view(torch.uint8)
