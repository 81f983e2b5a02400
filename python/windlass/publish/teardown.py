"""The end of a publisher, and what its successor takes over.

Owns: how a region is left and removed, also by the interpreter's end, and what the next agent needs to be found where this
one was. Called by :class:`windlass.WeightManager`. Must not: wait longer than it is told.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.errors import WindlassNotFound

if TYPE_CHECKING:
    from windlass._windlass import Publisher
    from windlass.publish.supervise import AgentSupervisor

__all__ = ["end", "kept", "ports_of", "remove", "restore"]

log = logging.getLogger("windlass")


def remove(publisher: Publisher, timeout: float) -> None:
    """Leaves the region and removes it, once the other ranks and the agent have left."""
    publisher.close()
    until = time.monotonic() + timeout
    while not _gone(publisher):
        if time.monotonic() >= until:
            log.info(
                "the region %s is still open elsewhere and stays; `windlass gc` removes it later",
                publisher.dir,
            )
            return
        time.sleep(0.02)


def _gone(publisher: Publisher) -> bool:
    try:
        return publisher.discard()
    except WindlassNotFound:
        # Another process has removed it.
        return True


def end(publisher: Publisher, agent: AgentSupervisor | None, pid: int) -> None:
    """For a manager that was never closed. A forked child ends nothing of its parent's."""
    if os.getpid() != pid:
        return
    if agent is not None:
        agent.stop()
    remove(publisher, 1.0)


def ports_of(status: dict[str, object]) -> tuple[str, str] | None:
    """The ports of an agent that listened: the next one should be found in the same place."""
    endpoint, data = status.get("endpoint"), status.get("data_port")
    if not isinstance(endpoint, str) or not data:
        return None
    return endpoint.rpartition(":")[2], str(data)


def kept(file: Path) -> tuple[bytes, int] | None:
    """A file's bytes and mode, if it is there."""
    try:
        return file.read_bytes(), file.stat().st_mode & 0o777
    except OSError:
        return None


def restore(file: Path, kept: tuple[bytes, int] | None) -> None:
    if kept is not None:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, kept[1]), "wb") as out:
            out.write(kept[0])
