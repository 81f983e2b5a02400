"""What is known about GPUs, as plain data: for :func:`windlass.choose`, and for people.

Owns: asking this process's driver, and putting the answers of trainers and engines together. Every side calls
:func:`gpu_facts` for itself; the answers travel as JSON; :func:`facts_between` makes the facts of them. Nothing here
decides anything, and nothing fails because there is no GPU: the answer says so.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from windlass import _windlass
from windlass.errors import WindlassInvalid
from windlass.plain import Plain

__all__ = ["facts_between", "gpu_facts"]

#: The arena of packed IPC where nobody says how large buckets are (``weight_transfer_threshold_cuda_ipc_GB``).
ARENA = 2 * 1024**3


def gpu_facts(devices: Sequence[int] | None = None) -> Plain:
    """What the driver and the GPUs of this process are: all that it sees, or those of these numbers.

    - ``host``: which boot of which machine, the same in all of its containers;
    - ``gpus``: UUIDs;
    - ``cuda``: what :func:`windlass.choose` wants to know of a side (``unusable`` says why there is nothing to use);
    - ``reach``: for each device the UUIDs of those whose memory it can access;
    - ``peer``: what this process decodes, as of an engine's side;
    - ``survey``: everything as ``windlass doctor --json`` has it under ``gpu``.

    Opens each device for a moment, which takes some hundred MiB of it unless torch has opened it before.

    >>> facts = gpu_facts()
    >>> sorted(facts)
    ['cuda', 'gpus', 'host', 'peer', 'reach', 'survey']
    """
    if devices is not None and not (
        isinstance(devices, Sequence)
        and not isinstance(devices, str)
        and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in devices)
    ):
        raise WindlassInvalid(f"devices is {devices!r}: expected the numbers of GPUs, as in [0, 1], or None")
    survey: Plain = json.loads(_windlass.gpu_survey())
    found: list[Plain] = survey["devices"]
    if devices is not None:
        known = {device["ordinal"] for device in found}
        if found and not set(devices) <= known:
            raise WindlassInvalid(
                f"there is no GPU {sorted(set(devices) - known)}: visible are {sorted(known)}"
            )
        chosen = [device for device in found if device["ordinal"] in set(devices)]
    else:
        chosen = found
    broken = [f"GPU {d['ordinal']}: {d['error']}" for d in chosen if d["error"]]
    uuids = {device["ordinal"]: device["uuid"] for device in found}
    reach = {
        device["uuid"]: [uuids[n] for n, can in enumerate(survey["reach"][device["ordinal"]]) if can]
        for device in chosen
    }
    return {
        "host": _text("/proc/sys/kernel/random/boot_id"),
        "gpus": [device["uuid"] for device in chosen],
        "cuda": {
            "unusable": survey["driver"]["error"] or next(iter(broken), None),
            "driver": survey["driver"]["cuda"],
            "capability": min((d["capability"] for d in chosen), default=None),
            "free_bytes": _least(chosen, "free"),
            "expandable_segments": survey["expandable_segments"] or _has_expandable_segments(),
            "exports_handles": _all(chosen, "exports_handles"),
            "exports_descriptors": survey["shared_segments"] and _all(chosen, "exports_descriptors"),
            "ipc_namespace": _link("/proc/self/ns/ipc"),
            "pid_namespace": _link("/proc/self/ns/pid"),
        },
        "reach": reach,
        "peer": {"delta": True},
        "survey": survey,
    }


def facts_between(
    trainers: Mapping[str, object] | Sequence[Mapping[str, object]],
    engines: Mapping[str, object] | Sequence[Mapping[str, object]],
    **known: Any,
) -> Plain:
    """The facts for :func:`windlass.choose` from what :func:`gpu_facts` answered on both sides, by one process or by
    several. Of several the worst counts. ``known`` are further facts (``elastic``, ``model_bytes``, ``baseline_bytes``, ...),
    and come before what follows from the answers. ``arena_bytes`` are two buckets of the usual size unless they are among
    them; a tensor that is larger than a bucket makes it as large.

    >>> from windlass import choose
    >>> one = {"host": "a", "gpus": ["GPU-1"], "cuda": {"free_bytes": 10**10}, "reach": {}}
    >>> choose(facts_between(one, one))["strategy"]
    'packed_cuda_ipc'
    """
    ours, theirs = _worst(trainers), _worst(engines)
    hosts = ours["hosts"] | theirs["hosts"]
    near = len(hosts) == 1 and None not in hosts
    # On every host of the engines there are trainers on the same GPUs.
    shared = bool(theirs["places"]) and theirs["places"] <= ours["places"]
    seen = [set(theirs["reach"][gpu]) for gpu in theirs["gpus"] if gpu in theirs["reach"]]
    reached = [set(ours["gpus"]) <= each for each in seen]
    return {
        "placement": "same_gpu" if shared else "same_host" if near else "remote",
        "several_hosts": len(hosts) > 1,
        "trainer_gpus": ours["gpus"],
        "engine_gpus": theirs["gpus"],
        "trainer_cuda": ours["cuda"],
        "engine_cuda": theirs["cuda"],
        # An engine that does not see the trainers' GPUs cannot say.
        "peer_access": all(reached) if near and reached and _visible(theirs, ours) else None,
        "peer": theirs["peer"],
        "arena_bytes": ARENA,
        **known,
    }


def _visible(theirs: Plain, ours: Plain) -> bool:
    survey = {device["uuid"] for device in (theirs.get("survey") or {}).get("devices", [])}
    return set(ours["gpus"]) <= survey | set(theirs["reach"])


def _worst(answers: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Plain:
    all_of = [answers] if isinstance(answers, Mapping) else list(answers)
    if not all_of:
        raise WindlassInvalid("no answers of gpu_facts(): every side needs at least one process")
    cudas = [answer["cuda"] for answer in all_of]

    def known(key: str) -> list[Any]:
        return [cuda[key] for cuda in cudas if cuda.get(key) is not None]

    cuda = {
        "unusable": next(iter(known("unusable")), None),
        **{key: min(known(key), default=None) for key in ("driver", "capability", "free_bytes")},
        "expandable_segments": any(known("expandable_segments")) if known("expandable_segments") else None,
        **{
            key: all(known(key)) if known(key) else None for key in ("exports_handles", "exports_descriptors")
        },
        # Several of one side that differ are no namespace of the other.
        **{
            key: " ".join(sorted(set(known(key)))) if known(key) else None
            for key in ("ipc_namespace", "pid_namespace")
        },
    }
    gpus = dict.fromkeys(gpu for answer in all_of for gpu in answer["gpus"])
    return {
        "hosts": {answer["host"] for answer in all_of},
        # A UUID means something on its host only.
        "places": {(answer["host"], gpu) for answer in all_of for gpu in answer["gpus"] if answer["host"]},
        "peer": {"delta": all((answer.get("peer") or {}).get("delta", False) for answer in all_of)},
        "gpus": list(gpus),
        "cuda": cuda,
        "reach": {gpu: to for answer in all_of for gpu, to in answer["reach"].items()},
        "survey": all_of[0].get("survey") if len(all_of) == 1 else None,
    }


def _least(devices: list[Plain], key: str) -> int | None:
    return min((device[key] for device in devices if device[key] is not None), default=None)


def _all(devices: list[Plain], key: str) -> bool | None:
    known = [device[key] for device in devices if device[key] is not None]
    return all(known) if known else None


def _has_expandable_segments() -> bool:
    # They can be switched on at run time as well; whoever has no torch has none.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    return any(segment.get("is_expandable", False) for segment in torch.cuda.memory_snapshot())


def _text(path: str) -> str | None:
    try:
        return pathlib.Path(path).read_text().strip()
    except OSError:
        return None


def _link(path: str) -> str | None:
    try:
        return str(pathlib.Path(path).readlink())
    except OSError:
        return None
