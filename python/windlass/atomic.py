"""Files and directories that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["replacing"]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside ``path`` for a new file, link or directory, which takes its place at the end of the block.

    There is no fsync: what must survive a power cut, the block syncs itself. Files of running processes mean nothing after one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder) / "state") as draft:
    ...         _ = draft.write_text("whole")
    ...     [(file.name, file.read_text()) for file in Path(folder).iterdir()]
    [('state', 'whole')]
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _remove(draft)
    try:
        yield draft
        os.replace(draft, path)
    except BaseException:
        _remove(draft)
        raise


def _remove(draft: Path) -> None:
    if draft.is_dir() and not draft.is_symlink():
        shutil.rmtree(draft, ignore_errors=True)
    else:
        draft.unlink(missing_ok=True)
