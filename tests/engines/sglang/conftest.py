"""What the tests with SGLang share."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A directory in shared memory."""
    with tempfile.TemporaryDirectory(prefix="windlass-test-", dir="/dev/shm") as home:
        yield Path(home)
