"""Files and directories that appear and disappear whole.

The rule for fsync: what must survive a power cut is ``durable`` and is synced before it takes its place. Those are adapters, which
are checkpoints. All other files are of running processes and mean nothing after a power cut, and are not synced.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["discard", "replacing"]


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A path next to ``path`` for a new file, link or directory, which takes its place at the end of the block.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder) / "state") as draft:
    ...         _ = draft.write_text("whole")
    ...     [(file.name, file.read_text()) for file in Path(folder).iterdir()]
    [('state', 'whole')]
    """
    draft = _draft(path)
    _remove(draft)
    try:
        yield draft
        if durable:
            for written in (*draft.rglob("*"), draft):
                _sync(written)
        os.replace(draft, path)
    except BaseException:
        _remove(draft)
        raise
    if durable:
        _sync(path.parent)


def discard(path: Path) -> None:
    """Removes a file or a directory. Processes that look for it never find a part of it."""
    draft = _draft(path)
    _remove(draft)
    with contextlib.suppress(FileNotFoundError):
        os.replace(path, draft)
    _remove(draft)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _remove(draft: Path) -> None:
    if draft.is_dir() and not draft.is_symlink():
        shutil.rmtree(draft, ignore_errors=True)
    else:
        draft.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
