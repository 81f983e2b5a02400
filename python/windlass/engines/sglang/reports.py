"""What the workers of an engine say, through a directory that they and their driver see.

Owns: directories for reports, and what is raised about those that are missing or say no. SGLang's routes carry no answer
of a loader, and SGLang ends when one raises. Called by drivers, :mod:`windlass.engines.sglang.loader` and
:mod:`windlass.engines.sglang.handles`. Must not: ask an engine.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from windlass.errors import WindlassInvalid, WindlassPeerLost
from windlass.load.order import Report

__all__ = ["raise_worst", "read_reports", "reports_in", "silence"]


@contextlib.contextmanager
def reports_in(folder: Path) -> Iterator[str]:
    """A directory for the reports on one order, in one that the engine sees. What is not there afterwards was not written."""
    try:
        made = tempfile.TemporaryDirectory(prefix=".windlass-reports-", dir=folder)
    except OSError as e:
        raise WindlassInvalid(
            f"there is no room for reports in {folder}: {e.strerror}",
            "the driver must be able to write there; or use way='disk'",
        ) from e
    with made as path:
        # An engine of another user reads the image by its group.
        os.chmod(path, 0o770)
        yield path


def read_reports(directory: str, ranks: int) -> tuple[list[Report], list[int]]:
    """The reports that are there, and the ranks without one."""
    reports = [(rank, Report.read(directory, rank)) for rank in range(ranks)]
    found = [report for _, report in reports if report is not None]
    return found, [rank for rank, report in reports if report is None]


def silence(name: str, rank: int, what: str) -> WindlassPeerLost:
    """The error about a rank that did not report."""
    return WindlassPeerLost(
        f"{name}: rank {rank} did not report on {what}",
        "see the log of the engine; the reports directory must be visible to it",
    )


def raise_worst(name: str, reports: Sequence[Report]) -> None:
    """Raises what a rank says that failed. Of several refusals, the one that others only followed says the least."""
    failed = sorted((r for r in reports if r.error is not None), key=lambda r: r.error.kind == "cancelled")  # type: ignore[union-attr]
    if failed and failed[0].error is not None:
        error = failed[0].error.error()
        raise type(error)(f"{name}, rank {failed[0].rank}: {error}", error.advice, error.name)
