"""What processes of a host read of one image.

Owns: :data:`Selection`, the document of ``windlass receive --slice``, and :class:`Reading`, by which each of an engine's
workers says what it reads, in a file next to the image that it keeps locked while it lives. Called by
:mod:`windlass.receive.pulling`, where the process that pulls brings what any of them reads. Must not: know an engine.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.errors import WindlassCancelled, WindlassTimeout

if TYPE_CHECKING:
    from windlass._windlass import Held

__all__ = ["Reading", "Selection", "distinct", "merged"]

#: By the name of a tensor the boxes that are needed of it, each the first row, column … and the one after the last.
Selection = dict[str, list[list[list[int]]]]

#: How often it is seen whether the other workers have said what they read.
LOOK_S = 0.02


class Reading:
    """What this process reads of a model, and what the other processes of the host said."""

    def __init__(
        self, directory: Path, model_id: str, selection: Selection, worker: int, workers: int
    ) -> None:
        self.selection = selection
        #: A slice that was found to have all of it.
        self._covered: bytes | None = None
        self._directory, self._prefix = directory, f".reads-{model_id}-"
        self._model_id, self._workers = model_id, workers
        # Workers of one engine are children of one process.
        self._engine = os.getppid()
        self._path = directory / f"{self._prefix}{worker}-{os.getpid()}"
        draft = directory / f".draft{self._path.name}"
        said = {"engine": self._engine, "model": model_id, "selection": selection}
        # A process of this number may have been killed here.
        draft.unlink(missing_ok=True)
        self._file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with open(self._file, "w", closefd=False) as file:
                json.dump(said, file)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            os.rename(draft, self._path)
        except BaseException:
            draft.unlink(missing_ok=True)
            os.close(self._file)
            raise

    def covered_by(self, held: Held) -> bool:
        """Whether an image has all that this process reads."""
        kept = held.slice
        if kept is None or kept == self._covered:
            return True
        if held.lacks(json.dumps(self.selection)):
            return False
        self._covered = kept
        return True

    def of_all(self, until: float, stopped: threading.Event) -> Selection:
        """What any of them reads, once all workers of this engine on this host have said it."""
        while True:
            said = self._said()
            own = sum(engine == self._engine for engine, _ in said)
            if own >= self._workers:
                return merged([selection for _, selection in said])
            if time.monotonic() > until:
                raise WindlassTimeout(
                    f"{own} of the engine's {self._workers} workers on this host said in time what they read",
                    "see the logs of the other workers",
                )
            if stopped.wait(LOOK_S):
                raise WindlassCancelled("the pull was called off: another trainer publishes now")

    def _said(self) -> list[tuple[int, Selection]]:
        """Of each process that lives, its engine and what it reads."""
        out: list[tuple[int, Selection]] = []
        for path in sorted(self._directory.glob(f"{self._prefix}*")):
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            try:
                if path != self._path and not _is_locked(file):
                    # Its process is gone.
                    path.unlink(missing_ok=True)
                    continue
                with open(file, closefd=False) as text:
                    said = json.load(text)
                # The name of another model may begin like this one's.
                if said["model"] == self._model_id:
                    out.append((said["engine"], said["selection"]))
            finally:
                os.close(file)
        return out

    def close(self) -> None:
        """This process reads nothing more."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def merged(selections: Sequence[Selection]) -> Selection:
    """What any of them names."""
    out: Selection = {}
    for selection in selections:
        for name, boxes in selection.items():
            out[name] = distinct([*out.get(name, []), *boxes])
    return out


def distinct(boxes: list[list[list[int]]]) -> list[list[list[int]]]:
    """Each box once, without those that lie in another."""
    kept: list[list[list[int]]] = []
    for box in sorted(boxes, key=lambda b: [first - last for first, last in b]):
        if not any(_within(box, other) for other in kept):
            kept.append(box)
    return sorted(kept)


def _within(box: list[list[int]], other: list[list[int]]) -> bool:
    return all(o[0] <= b[0] and b[1] <= o[1] for b, o in zip(box, other, strict=True))
