"""What verl loads when it is imported, in every process: makes the backend ``windlass`` known once verl has a registry for it."""

from __future__ import annotations

from types import ModuleType

from windlass.frameworks.after_import import after_import

__all__: list[str] = []


def _register(base: ModuleType) -> None:
    from windlass.verl.manager import install

    install(base)


after_import("verl.checkpoint_engine.base", _register)
