"""What a driver tells a worker, and what the worker says of itself.

Owns: :class:`LoadOrder` and :class:`Report`, plain JSON that any driver can carry: the endpoint plugin, the native
routes of an engine, Ray, an in-process call. Called by :mod:`windlass.load.live` and by everything that drives it.
Must not: know an engine, or import torch.

A driver that only has routes without answers gives a directory: each worker then writes its report there, to
``<reports>/<rank>.json``, whole or not at all, after each order and also when it fails.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from windlass.atomic import replacing
from windlass.config import Config
from windlass.errors import WindlassError, WindlassInvalid
from windlass.plain import Plain

if TYPE_CHECKING:
    from windlass.receive.receiver import Image

__all__ = [
    "DeltaFiles",
    "Failure",
    "Last",
    "LiveVersion",
    "LoadOrder",
    "PlanSummary",
    "Report",
    "kind_of",
    "label",
    "version_of",
]

#: How many module reasons and names of extra tensors a report carries.
REASONS, EXTRAS = 20, 100


def label(incarnation: int, version: int) -> str:
    """The version as engines show it.

    >>> label(255, 7)
    'windlass:00000000000000ff:7'
    """
    return f"windlass:{incarnation:016x}:{version}"


def version_of(text: str) -> tuple[int, int] | None:
    """(incarnation, version) of a label, or ``None`` if it is none of ours.

    >>> version_of("windlass:00000000000000ff:7"), version_of("default")
    ((255, 7), None)
    """
    parts = text.split(":")
    if len(parts) != 3 or parts[0] != "windlass" or not parts[2].isdigit():
        return None
    try:
        return int(parts[1], 16), int(parts[2])
    except ValueError:
        return None


@dataclass(frozen=True, kw_only=True)
class DeltaFiles(Config):
    """A delta that a receiver of this host has fetched and its image does not hold yet: the version of the order's
    incarnation that it begins from, and its parts, each a file and how many bytes of it.

    >>> DeltaFiles.from_dict({"base": 6, "files": [["/dev/shm/images/policy.engines/incoming/1.delta", 4096]]}).files
    (('/dev/shm/images/policy.engines/incoming/1.delta', 4096),)
    """

    base: int
    files: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        self._count("base", 0, 2**64 - 1)
        rows = self.files
        if not isinstance(rows, (list, tuple)) or not rows:
            raise self._bad("files", "at least one pair of a path and a length")
        for row in rows:
            if (
                not isinstance(row, (list, tuple))
                or len(row) != 2
                or not isinstance(row[0], str)
                or not row[0]
                or not isinstance(row[1], int)
                or isinstance(row[1], bool)
                or not 0 < row[1] < 2**63
            ):
                raise self._bad("files", "pairs of a path and a length in bytes")
        object.__setattr__(self, "files", tuple((path, size) for path, size in rows))


@dataclass(frozen=True, kw_only=True)
class LoadOrder(Config):
    """Which version to load from which image. With ``delta``, from that delta, before the image holds the version.

    >>> LoadOrder.from_dict({"image": "/dev/shm/w/policy", "model_id": "policy", "incarnation": 1, "version": 3})
    ... # doctest: +ELLIPSIS
    LoadOrder(image='/dev/shm/w/policy', model_id='policy', incarnation=1, version=3, ...)
    """

    image: str
    model_id: str
    incarnation: int
    version: int
    #: The state digest that the image must have, in hex; empty if the driver does not know it.
    digest: str = ""
    how: Literal["auto", "dense", "session"] = "auto"
    #: A directory for reports.
    reports: str | None = None
    timeout: float = 300.0
    delta: DeltaFiles | None = None

    _parts = {"delta": DeltaFiles.from_dict}

    def __post_init__(self) -> None:
        self._text("image", "model_id")
        self._text("reports", optional=True)
        self._count("incarnation", 0, 2**64 - 1)
        self._count("version", 0, 2**64 - 1)
        self._choice("how", "auto", "dense", "session")
        self._seconds("timeout")
        if not isinstance(self.digest, str) or any(c not in "0123456789abcdef" for c in self.digest):
            raise self._bad("digest", "hexadecimal digits")

    @classmethod
    def of(cls, image: Image) -> LoadOrder:
        """The order for an image that this process holds. Its directory is above that of the slot's file."""
        for folder in image.path.parents:
            if (folder / "state.json").is_file():
                return cls(
                    image=str(folder),
                    model_id=folder.name,
                    incarnation=image.incarnation,
                    version=image.version,
                    digest=image.digest or "",
                )
        raise WindlassInvalid(f"{str(image.path)!r} lies in no image of a receiver")

    @property
    def identity(self) -> LiveVersion:
        """What is to be loaded."""
        return LiveVersion(model_id=self.model_id, incarnation=self.incarnation, version=self.version)

    @property
    def label(self) -> str:
        """The version as engines show it."""
        return label(self.incarnation, self.version)


@dataclass(frozen=True, kw_only=True)
class LiveVersion(Config):
    """The version that an engine's weights are."""

    model_id: str
    incarnation: int
    version: int


@dataclass(frozen=True, kw_only=True)
class PlanSummary(Config):
    """What of a model is replayed and what goes through the engine's own loader, and why."""

    key: str
    replayed: int
    session: int
    why: Mapping[str, str] = field(default_factory=dict)
    #: Whether a delta can be loaded before the image holds the version: on a GPU, if all modules are replayed.
    ahead: bool = False


@dataclass(frozen=True, kw_only=True)
class Last(Config):
    """How the last order was carried out."""

    how: Literal["sparse", "dense", "session", "skipped"]
    ms: float
    bytes: int = 0
    elements: int = 0
    #: Why the engine's own loader wrote what a plan was expected to write; empty if it did not, and for the first load
    #: of a layout, which is its reference.
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Failure(Config):
    """An error as plain data."""

    kind: str
    text: str
    advice: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The plain form of any exception."""
        text = str(error) or type(error).__name__
        if not isinstance(error, WindlassError):
            text = f"{type(error).__name__}: {text}"
        return cls(kind=kind_of(error), text=text, advice=getattr(error, "advice", ""))

    def error(self) -> WindlassError:
        """The exception that this was."""
        import windlass.errors as errors

        for cls in WindlassError.__subclasses__():
            if cls.__module__ == errors.__name__ and kind_of(cls()) == self.kind:
                return cls(self.text, self.advice)
        return WindlassError(self.text, self.advice)


def kind_of(error: BaseException) -> str:
    """The kind of an error by the core's names; anything foreign is a ``bug``.

    >>> from windlass import WindlassTimeout
    >>> kind_of(WindlassTimeout("late")), kind_of(KeyError("x"))
    ('timeout', 'bug')
    """
    from windlass import _windlass

    by_class = {name: kind for kind, name, _builtin, _meaning in _windlass.kinds()}
    for cls in type(error).__mro__:
        if cls.__name__ in by_class:
            return by_class[cls.__name__]
    return "timeout" if isinstance(error, TimeoutError) else "bug"


@dataclass(frozen=True, kw_only=True)
class Report(Config):
    """What a worker says of itself.

    ``dirty`` means that a write began and did not finish: the worker must not generate until a whole load succeeds.
    """

    rank: int
    #: Minted once per worker process: an engine that was restarted is another worker.
    worker: str
    engine: str
    live: LiveVersion | None = None
    state: Literal["clean", "dirty"] = "clean"
    plan: PlanSummary | None = None
    last: Last | None = None
    extras: tuple[str, ...] = ()
    error: Failure | None = None
    #: Orders that were carried out, by how, and as ``unplanned`` those with a :attr:`Last.why`.
    loads: Mapping[str, int] = field(default_factory=dict)

    _parts = {
        "live": LiveVersion.from_dict,
        "plan": PlanSummary.from_dict,
        "last": Last.from_dict,
        "error": Failure.from_dict,
    }

    def write(self, directory: str) -> None:
        """Puts the report into ``directory``, whole or not at all."""
        final = Path(directory) / f"{self.rank}.json"
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            with replacing(final) as draft:
                draft.write_text(json.dumps(self.to_dict()))
                # Whatever the umask is: the process that gave the order may be another user's. The directory keeps others out.
                draft.chmod(0o644)
        except OSError as e:
            raise WindlassInvalid(f"the report cannot be written to {str(final)!r}: {e.strerror or e}") from e

    @classmethod
    def read(cls, directory: str, rank: int) -> Report | None:
        """The report of a rank, if there is one."""
        try:
            data: Plain = json.loads((Path(directory) / f"{rank}.json").read_text())
        except FileNotFoundError:
            return None
        return cls.from_dict(data)
