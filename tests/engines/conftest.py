"""What the tests with real engines share: the models on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tiny.Kind], Path]:
    """The directory of a tiny model's first checkpoint, made once for each kind."""
    made: dict[str, Path] = {}

    def of(kind: tiny.Kind) -> Path:
        if kind not in made:
            path = tmp_path_factory.mktemp(kind)
            tiny.make_model(kind, path)
            made[kind] = path
        return made[kind]

    return of
