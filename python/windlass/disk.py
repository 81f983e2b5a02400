"""The trainer's end of the disk bridge, for programs that pass weights on as directories of checkpoints.

Owns: :func:`finished`, which says to ``windlass publish --follow`` that a checkpoint is whole and waits until every receiver has
it, and :func:`published`, which is the same as slime and miles call it. Must not: read or write weights.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from windlass.atomic import replacing
from windlass.controller import Controller
from windlass.errors import WindlassInvalid, WindlassTimeout
from windlass.exchange import agree_on_all_ranks, exchange_for
from windlass.identity import Identity

__all__ = ["MARKER", "finished", "published"]

#: What :func:`finished` writes: the default of ``windlass publish --marker``.
MARKER = ".windlass-ready"
#: What the publisher writes in answer.
ANSWER = ".windlass-published"
#: Seconds that receivers have, if ``WINDLASS_DISK_TIMEOUT`` does not say.
TIMEOUT_S = 600.0
#: How long other ranks wait for what the first one says at its deadline.
GRACE_S = 30.0
LOOK_S = 0.05


def finished(
    checkpoint: str | os.PathLike[str],
    *,
    controller: Controller | str | None = None,
    timeout: float | None = None,
) -> Identity:
    """Says that a checkpoint is whole, and waits until every receiver has it. Returns the version that it became.

    With a process group every rank calls it, after it has written its part. ``controller`` is a
    :class:`windlass.Controller` or its address; that of ``WINDLASS_CONTROLLER`` if not given. After ``timeout`` seconds (those of
    ``WINDLASS_DISK_TIMEOUT``, or ten minutes) an error says who is missing; all ranks get one.
    """
    seconds = _timeout() if timeout is None else timeout
    if not seconds > 0:
        raise WindlassInvalid(f"a timeout of {seconds!r} seconds leaves no time")
    until = time.monotonic() + seconds
    path = Path(checkpoint)
    rank, ranks = _rank()
    exchange = exchange_for(rank, ranks, None)

    def look() -> None:
        if not path.is_dir():
            raise WindlassInvalid(f"{str(path)!r} is not a directory", "give the directory of the checkpoint")

    def publish() -> list[str | int]:
        if rank:
            return []
        there = controller if isinstance(controller, Controller) else Controller(controller)
        (path / ANSWER).unlink(missing_ok=True)
        with replacing(path / MARKER) as draft:
            draft.touch()
        found = _answer(path, until)
        _wait_for_all(there, found, until)
        return [found.model_id, found.incarnation, found.version]

    left = max(0.0, until - time.monotonic())
    # No rank still writes when the first one says that all is written.
    agree_on_all_ranks(exchange, look, "find the checkpoint", left)
    model_id, incarnation, version = agree_on_all_ranks(
        exchange, publish, "publish the checkpoint", left + GRACE_S
    )[0]
    return Identity(str(model_id), int(incarnation), int(version))


def published(args: object, version_dir: str, rollout_engines: object = None) -> None:
    """:func:`finished`, for ``--custom-update-weight-post-write-path windlass.disk.published`` of slime and miles."""
    finished(version_dir)


def _timeout() -> float:
    text = os.environ.get("WINDLASS_DISK_TIMEOUT", str(TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise WindlassInvalid(f"WINDLASS_DISK_TIMEOUT is {text!r}: expected a number of seconds")
    return seconds


def _rank() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _wait_for_all(there: Controller, wanted: Identity, until: float) -> None:
    """Waits until the version is served and every receiver of the model has it: also one that failed to put it up, which the
    controller serves without."""
    opened: WindlassTimeout | None = None
    try:
        left = max(0.0, until - time.monotonic())
        there.gate(wanted.version, model_id=wanted.model_id, incarnation=wanted.incarnation, timeout=left)
    except WindlassTimeout as e:
        opened = e
    while missing := _without(there.status(), wanted):
        if time.monotonic() >= until:
            named = ", ".join(f"{name} ({why})" if why else name for name, why in missing.items())
            raise WindlassTimeout(
                f"version {wanted.version} of {wanted.model_id} is not on {len(missing)} of the receivers: {named}",
                "see their logs; `windlass top` shows what they do",
            ) from opened
        time.sleep(2 * LOOK_S)
    if opened is not None:
        raise opened


def _without(status: dict[str, Any], wanted: Identity) -> dict[str, str]:
    """The receivers that have an older version than this or none, and why."""
    missing: dict[str, str] = {}
    for receiver in status["receivers"]:
        for held in receiver["models"]:
            has = held["loaded"] or {"incarnation": 0, "version": 0}
            is_older = (has["incarnation"], has["version"]) < (wanted.incarnation, wanted.version)
            if held["model_id"] == wanted.model_id and (is_older or not held["loaded"]):
                missing[receiver["receiver"]] = next(filter(None, (p["why"] for p in receiver["places"])), "")
    return missing


def _answer(path: Path, until: float) -> Identity:
    """What the publisher made of a checkpoint."""
    while True:
        try:
            said = json.loads((path / ANSWER).read_text())
        except FileNotFoundError:
            said = {}
        if "identity" in said:
            return Identity(**said["identity"])
        if "error" in said:
            raise WindlassInvalid(f"{str(path)!r} is not published: {said['error']}")
        if time.monotonic() >= until:
            if "waiting" in said:
                raise WindlassTimeout(f"{str(path)!r} is not published yet: {said['waiting']}")
            raise WindlassTimeout(
                f"{str(path)!r} is finished, and no publisher took it",
                f"run `windlass publish --follow` on this host, with the pattern of {path.name!r} and --marker {MARKER}",
            )
        time.sleep(LOOK_S)
