"""Modules by names other than the place of their file.

Owns: :func:`install`, called once by ``import windlass``. ``windlass.vllm``, ``windlass.sglang`` and ``windlass.ray`` are
names that users write in flags and programs, and stay. The others are where modules were before 0.2 and go with it: an
import by one of them warns.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Names that stay.
ALIASES = {name: f"engines.{name}" for name in ("ray", "sglang", "vllm")}
#: Names that go.
MOVED = {
    **{
        name: f"publish.{name}"
        for name in (
            "announce",
            "derived",
            "manager",
            "merged",
            "placement",
            "quantise",
            "supervise",
        )
    },
    "given": "publish.inputs",
    "leave": "publish.teardown",
    "on_gpu": "publish.gpu",
    "plan": "publish.division",
    "chunk": "extract.chunk",
    "lora": "extract.lora",
    **{name: f"transfer.{name}" for name in ("client", "facts", "request", "sync", "sync_info")},
    "strategy": "transfer.base",
    "strategies": "transfer",
    "strategies.document": "document",
    **{
        f"strategies.{name}": f"transfer.ipc.{name}"
        for name in ("arena", "device", "door", "lending", "packed")
    },
    "strategies.ipc": "transfer.ipc.strategy",
    "follow": "receive.follow",
    "memory": "receive.memory",
    "receiver": "receive.receiver",
    "remote": "engines.remote",
}


class _Moved(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        head, _, tail = fullname.partition(".")
        place = _place(tail) if head == "windlass" else None
        return (
            None if place is None else ModuleSpec(fullname, self, origin=f"windlass.{place}", is_package=True)
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        if spec.name.split(".")[1] not in ALIASES:
            warnings.warn(
                f"{spec.name} is {spec.origin} now; the old name goes with 0.2",
                DeprecationWarning,
                stacklevel=2,
            )
        module = import_module(spec.origin)
        # The import system sets `__spec__` to that of the old name; `exec_module` puts the module's own back.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _place(name: str) -> str | None:
    """Where the module of an old name is, below ``windlass``."""
    known = ALIASES.get(name) or MOVED.get(name)
    if known is not None or "." not in name:
        return known
    parent, _, leaf = name.rpartition(".")
    place = _place(parent)
    return None if place is None else f"{place}.{leaf}"


def install() -> None:
    """Makes the other names importable. The finder comes first: the parent of `windlass.vllm.x` has a path of its own."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Moved())
