"""Doing something right after a module of somebody else's was imported, without importing it.

Owns: :func:`after_import`. Called by the adapters whose frameworks load them in every process, most of which never sync weights: it
costs those nothing. Must not: raise into the import of the module.
"""

from __future__ import annotations

import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["after_import"]

log = logging.getLogger("windlass")

Act = Callable[[ModuleType], None]


def after_import(name: str, act: Act) -> None:
    """Calls ``act`` with the module of that name: now if it is imported already, otherwise once it is."""
    module = sys.modules.get(name)
    if module is not None:
        _carefully(act, module)
        return
    _Finder.waiting.setdefault(name, []).append(act)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


class _Finder(importlib.machinery.PathFinder):
    """Finds modules as Python would, and acts after those that are waited for have run."""

    waiting: dict[str, list[Act]] = {}

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in cls.waiting:
            return None
        spec = super().find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run: Any = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            for act in cls.waiting.pop(name, []):
                _carefully(act, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _carefully(act: Act, module: ModuleType) -> None:
    try:
        act(module)
    except Exception:
        log.warning("windlass could not be set up in %s:", module.__name__, exc_info=True)
