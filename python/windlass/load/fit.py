"""Whether an image fits an engine.

Owns: the checks of a rehearsal, each of which names what does not fit. Called by :class:`windlass.load.live.Live` before
the first write. Must not: write anything.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from windlass._windlass import Layout
from windlass.dtypes import dtype_name
from windlass.errors import WindlassInvalid
from windlass.load.session import Session
from windlass.load.trace import Trace

__all__ = ["check_changed", "check_missing", "check_reads", "listed"]

#: How many names an error lists.
NAMED = 8


def check_changed(layout: Layout, accepted: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Shapes and dtypes of an engine that serves do not change from version to version."""
    for name, dtype, shape, _, _ in layout.tensors():
        before = accepted.get(name)
        if before is None or before == (dtype, tuple(shape)):
            continue
        what = "dtype" if before[0] != dtype else "shape"
        raise WindlassInvalid(
            f"the {what} of {name!r} changed from {before[0]} {list(before[1])} to {dtype} {list(shape)}; nothing "
            "was loaded",
            "publish the model that the engine was started with, or restart the engine",
            name=f"{what}_changed",
        )
    gone = sorted(accepted.keys() - {row[0] for row in layout.tensors()} - set(layout.aliases()))
    if gone:
        raise missing(gone, "which earlier versions had")


def check_missing(session: Session, found: Trace) -> None:
    """Parameters that the loader would leave as they are."""
    written = (
        {copy.target for copy in found.copies} | {c.target for c in found.constants} | set(found.reasons)
    )
    live = dict(session.model.named_parameters(remove_duplicate=False))
    tied: dict[int, set[int]] = {}
    for i, target in enumerate(found.targets):
        tensor = live.get(target.name)
        if tensor is not None and tensor.numel():
            tied.setdefault(tensor.data_ptr(), set()).add(i)
    together = {i: group for group in tied.values() for i in group}
    modules = dict(session.model.named_modules())
    unwritten = []
    for i, target in enumerate(found.targets):
        said = session.hides_writes and found.loaded is not None and target.name in found.loaded
        if not target.tensor.numel() or said or (together.get(i, {i}) & written):
            continue
        module = modules.get(target.module)
        if module is None or not session.optional(module, target.attribute):
            unwritten.append(target.name)
    if unwritten:
        raise missing(
            unwritten, "so that these parameters of the engine would stay as they are", what="weights for"
        )
    short = []
    for i, target in enumerate(found.targets):
        count = found.elements_of(i)
        if i in written and i not in found.reasons and count < target.tensor.numel():
            short.append(f"{target.name} ({count} of {target.tensor.numel()} elements)")
    if short:
        raise missing(short, "so that parts of these parameters would stay as they are", what="weights for")


def check_reads(session: Session, found: Trace, tensors: Mapping[str, torch.Tensor]) -> None:
    """Tensors of which the loader would drop a part, because they are larger than it thinks."""
    modules = dict(session.model.named_modules())
    for name, count in found.elements_read().items():
        tensor = tensors[name]
        reached = found.reached.get(name, set())
        if any(i in found.reasons for i in reached):
            continue
        rows = next(
            (
                rows
                for i in reached
                if (module := modules.get(found.targets[i].module)) is not None
                and (rows := session.vocabulary(module)) is not None
            ),
            None,
        )
        fits = count * session.shares >= tensor.numel() if rows is None else tensor.shape[0] == rows
        if not fits:
            raise WindlassInvalid(
                f"{name!r} is {dtype_name(tensor.dtype)} {list(tensor.shape)}, of which the engine would take "
                f"{count} elements on each of {session.shares} ranks and drop the rest",
                "publish the model that the engine was started with, with its shapes",
                name="does_not_fit",
            )
    for name, (given, kept) in found.casts.items():
        if not (_is_float(given) and _is_float(kept)):
            raise WindlassInvalid(
                f"{name!r} is {given} in the image and {kept} in the engine",
                "publish it in the engine's dtype",
                name="wrong_dtype",
            )


def missing(names: list[str], consequence: str, what: str = "") -> WindlassInvalid:
    """The error that names what an image lacks."""
    lacks = f"{what} " if what else ""
    return WindlassInvalid(
        f"the image lacks {lacks}{listed(names)}, {consequence}; nothing was loaded",
        "publish all tensors of the model that the engine was started with",
        name="missing_tensor",
    )


def listed(names: list[str]) -> str:
    """Some of the names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))
