"""What verl loads when it is imported: makes the backend ``windlass`` known once there is something to make it known to.

Owns: the hook behind the import of ``verl.checkpoint_engine.base``. verl loads this module in every process that imports verl, most
of which never sync weights: it costs them nothing. Must not: raise; verl would hide it.
"""

from __future__ import annotations

import importlib.machinery
import logging
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__: list[str] = []

log = logging.getLogger("windlass")

#: The module that has the registry.
BASE = "verl.checkpoint_engine.base"


class _AfterImport(importlib.machinery.PathFinder):
    """Finds the module as Python would, and registers the backend after it has run."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != BASE:
            return None
        spec = super().find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run: Any = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _register(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register(module: ModuleType) -> None:
    try:
        from windlass.verl.manager import install

        install(module)
    except Exception:
        log.warning("verl has no checkpoint engine 'windlass':", exc_info=True)


if BASE in sys.modules:
    _register(sys.modules[BASE])
elif _AfterImport not in sys.meta_path:
    sys.meta_path.insert(0, _AfterImport)
