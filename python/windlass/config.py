"""Configuration, checked when it is made.

Every class is a frozen dataclass of keyword arguments. A bad value is refused on creation with the field, the value
and what was expected; :meth:`Config.from_dict` refuses keys that it does not know and says which one was meant.
:meth:`Config.to_dict` gives plain data, so that a configuration can be printed, logged and sent.

>>> config = WeightManagerConfig(model_id="actor", engine=TransferEngineConfig(streams=8))
>>> WeightManagerConfig.from_dict(config.to_dict()) == config
True
>>> WeightManagerConfig.from_dict({"model": "actor"})
Traceback (most recent call last):
windlass.errors.WindlassInvalid: WeightManagerConfig has no field 'model'; did you mean 'model_id'?
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal, TypeVar

from windlass import _windlass
from windlass.errors import WindlassInvalid
from windlass.identity import Identity
from windlass.names.dtypes import canonical_dtype
from windlass.names.quantised import SCHEMES
from windlass.plain import Plain

__all__ = [
    "Config",
    "Known",
    "ReceiverAgentConfig",
    "ReceiverInfo",
    "SenderAgentConfig",
    "StoreConfig",
    "TransferEngineConfig",
    "TransferStatus",
    "WeightManagerConfig",
]

C = TypeVar("C", bound="Config")


class Config:
    """A dataclass that goes through plain data and back."""

    #: Fields that are dataclasses themselves.
    _parts: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}

    def to_dict(self) -> Plain:
        """Every field as plain data, defaults included."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls: type[C], data: Mapping[str, object]) -> C:
        """Made of plain data; what is left out has its default."""
        if not isinstance(data, Mapping):
            raise WindlassInvalid(f"{cls.__name__} is {data!r}: expected a dictionary of its fields")
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for key in data:
            if key not in known:
                raise WindlassInvalid(f"{cls.__name__} has no field {key!r}; {cls._hint(str(key), known)}")
        try:
            return cls(**{key: cls._made(key, value) for key, value in data.items()})
        except TypeError as e:
            raise WindlassInvalid(f"{cls.__name__} cannot be made of {sorted(data)}: {e}") from e

    @classmethod
    def _hint(cls, key: str, known: Sequence[str]) -> str:
        return _nearest(key, known)

    @classmethod
    def _made(cls, key: str, value: Any) -> Any:
        """A field that is a dataclass itself, of plain data; anything else is as it is."""
        return cls._parts[key](value) if key in cls._parts and isinstance(value, Mapping) else value

    def _bad(self, name: str, expected: str) -> WindlassInvalid:
        return WindlassInvalid(
            f"{type(self).__name__}.{name} is {getattr(self, name)!r}: expected {expected}", name="bad_value"
        )

    def _flag(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self, name), bool):
                raise self._bad(name, "True or False")

    def _count(self, name: str, least: int, most: int, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._bad(name, f"an integer from {least} to {most}" + (" or None" if optional else ""))

    def _seconds(self, *names: str) -> None:
        self._above_zero("seconds", *names)

    def _above_zero(self, what: str, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value <= 0:
                raise self._bad(name, f"{what}, more than 0")

    def _text(self, *names: str, optional: bool = False) -> None:
        for name in names:
            value = getattr(self, name)
            if (optional and value is None) or (isinstance(value, str) and value and "\0" not in value):
                continue
            raise self._bad(name, "text that is not empty" + (" or None" if optional else ""))

    def _choice(self, name: str, *choices: str) -> None:
        if getattr(self, name) not in choices:
            raise self._bad(name, "one of " + ", ".join(map(repr, choices)))

    def _carries(self, what: str, links: Sequence[str], codecs: Sequence[str], remedy: str) -> None:
        """A link and a codec, where they are named, are what this does anyway."""
        for name, can in (("link", links), ("codec", codecs)):
            value = getattr(self, name)
            if value is not None and value not in can:
                raise WindlassInvalid(
                    f"{type(self).__name__}.{name} is {value!r}: {what} {' or '.join(map(repr, can))}", remedy
                )

    def _texts(self, *names: str) -> None:
        """Several texts; one text alone is not taken for its letters."""
        for name in names:
            value = getattr(self, name)
            if (
                isinstance(value, (str, bytes))
                or not isinstance(value, Sequence)
                or not all(isinstance(item, str) for item in value)
            ):
                raise self._bad(name, "a list of texts")
            object.__setattr__(self, name, tuple(value))

    def _by_core(self, name: str, check: Callable[[str], object]) -> None:
        """A rule of the Rust core, which knows what is wrong but not whose it is."""
        value = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, str):
            raise self._bad(name, "text")
        try:
            check(value)
        except WindlassInvalid as e:
            raise WindlassInvalid(f"{type(self).__name__}.{name}: {e}", e.advice, e.name) from e

    def _ports(self, name: str) -> None:
        value = getattr(self, name)
        first, dash, last = value.partition("-") if isinstance(value, str) else ("", "", "")
        ends = [first, last] if dash else [first, first]
        if all(end.isascii() and end.isdigit() and int(end) < 65536 for end in ends):
            low, high = map(int, ends)
            if low <= high and (low == 0) == (high == 0):
                return
        raise self._bad(name, "a port such as '18100', a range such as '18100-18110', or '0' for any")

    def _part(self, name: str, kind: type) -> None:
        object.__setattr__(self, name, self._made(name, getattr(self, name)))
        if not isinstance(getattr(self, name), kind):
            raise self._bad(name, f"a {kind.__name__}, or a dictionary of its fields")


@dataclass(frozen=True, kw_only=True)
class TransferEngineConfig(Config):
    """How bytes move between an agent and a receiver: streams, the deadline of a transfer, and what to ask for."""

    streams: int = 6
    timeout: float = 600.0
    mode: Literal["auto", "full", "delta"] = "auto"

    def __post_init__(self) -> None:
        self._count("streams", 1, 64)
        self._seconds("timeout")
        self._choice("mode", "auto", "full", "delta")


def unfit_nixl_params(params: object, nixl: str) -> str | None:
    """What is expected instead of these parameters of NIXL, which is "off", "auto" or "on"; ``None`` if they will do."""
    pairs = list(params.items()) if isinstance(params, Mapping) else [(None, None)]
    texts = all(isinstance(text, str) and text and "\0" not in text for pair in pairs for text in pair)
    if not texts or any("=" in str(name) for name, _ in pairs):
        return "texts by their names, which have no '=' in them, as in {'engine_config': 'TLS=tcp'}"
    if pairs and nixl == "off":
        return "none while nixl is 'off'; set it to 'auto' or 'on'"
    return None


@dataclass(frozen=True, kw_only=True)
class SenderAgentConfig(Config):
    """The agent that serves a trainer's region. ``ports`` is "0" for any, one port, or a range "18100-18110" of which the agent
    takes the first free one. ``data_ports`` is the same for data; without it the agent uses the range of ``ports``, or any port
    if that is no range.

    ``history`` and ``history_bytes`` bound the deltas kept for receivers that are behind; of the versions that are
    handed out by delta, the bytes of the first and of every ``check_every``-th are summed (0 for none); receivers pass
    deltas on to each other once there are ``relay_from`` of them that can, and full images always (0 disables relay); ``threads`` is
    the number of cores if not given. Without ``advertise_host``, receivers are told the address of ``bind``. With ``nixl`` "auto" or
    "on", receivers may read full images from the agent's memory (``docs/nixl.md``), by the library at ``nixl_library``,
    with ``nixl_params`` for NIXL's UCX plugin, such as ``{"engine_config": "TLS=tcp"}``.
    """

    enabled: bool = True
    bind: str = "127.0.0.1"
    advertise_host: str | None = None
    ports: str = "0"
    data_ports: str | None = None
    token_file: str | None = None
    history: int = 16
    history_bytes: int = 4 << 30
    check_every: int = 16
    relay_from: int = 3
    nixl: str = "off"
    nixl_library: str | None = None
    nixl_params: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    log: str | None = None

    def __post_init__(self) -> None:
        self._flag("enabled")
        try:
            ipaddress.ip_address(self.bind)
        except ValueError:
            raise self._bad("bind", "an IP address such as '10.0.0.5', or '0.0.0.0' for all") from None
        self._by_core("advertise_host", _windlass.check_host)
        self._ports("ports")
        if self.data_ports is not None:
            self._ports("data_ports")
        self._text("token_file", "log", "nixl_library", optional=True)
        self._choice("nixl", "off", "auto", "on")
        if unfit := unfit_nixl_params(self.nixl_params, self.nixl):
            raise self._bad("nixl_params", unfit)
        self._count("history", 1, 4096)
        self._count("history_bytes", 0, 1 << 62)
        self._count("check_every", 0, 1 << 32)
        self._count("relay_from", 0, 1 << 32)
        self._count("threads", 1, 4096, optional=True)


@dataclass(frozen=True, kw_only=True)
class StoreConfig(Config):
    """Where the agent uploads versions: ``s3://BUCKET/RUN``, ``gs://``, ``az://`` or ``file:///DIRECTORY`` (docs/store.md).

    An anchor is written after ``anchor_every`` versions at the latest. The oldest versions beyond ``keep`` of them, ``keep_hours`` of age
    or ``keep_bytes`` in all are removed; what is not given does not limit. ``bandwidth`` bounds the bytes uploaded per second.
    Memory is bounded by ``streams`` parts of ``part_bytes`` at once. Credentials come from the environment.
    """

    url: str
    anchor_every: int = 64
    keep: int | None = None
    keep_hours: float | None = None
    keep_bytes: int | None = None
    bandwidth: int | None = None
    part_bytes: int = 32 << 20
    streams: int = 4

    def __post_init__(self) -> None:
        self._by_core("url", _windlass.check_store_url)
        self._count("anchor_every", 1, 2048)
        self._count("keep", 1, 1 << 62, optional=True)
        if self.keep_hours is not None:
            self._above_zero("hours", "keep_hours")
            if self.keep_hours >= 1e6:
                raise self._bad("keep_hours", "hours, less than a million, or None")
        self._count("keep_bytes", 1, 1 << 62, optional=True)
        self._count("bandwidth", 1, 1 << 62, optional=True)
        self._count("part_bytes", 5 << 20, 128 << 20)
        self._count("streams", 1, 64)


@dataclass(frozen=True, kw_only=True)
class ReceiverAgentConfig(Config):
    """A receiver: which agent it follows, and where it keeps its image."""

    endpoint: str
    token_file: str | None = None
    tls_ca: str | None = None
    image_dir: str = "/dev/shm"
    name: str | None = None
    group: bool = False
    threads: int | None = None
    engine: TransferEngineConfig = field(default_factory=TransferEngineConfig)

    _parts: ClassVar = {"engine": TransferEngineConfig.from_dict}

    def __post_init__(self) -> None:
        self._text("endpoint", "image_dir")
        self._by_core("endpoint", _windlass.check_endpoint)
        self._text("token_file", "tls_ca", "name", optional=True)
        self._flag("group")
        self._count("threads", 1, 4096, optional=True)
        self._part("engine", TransferEngineConfig)


@dataclass(frozen=True, kw_only=True)
class WeightManagerConfig(Config):
    """How a trainer publishes.

    ``generator_dtype`` is what floating-point weights are cast to; ``dtypes`` gives a dtype to names by pattern
    (``{"*.gate.weight": "float32"}``, the first that fits), or has weights published quantised (``{"*.weight":
    "fp8_block128"}``, also "fp8_channel" and "int8_channel": docs/trainers.md), and ``checkpoint`` is a directory or file
    whose dtypes are followed, tensor by tensor. The order is: ``dtypes``, then ``checkpoint``, then ``generator_dtype``, then the
    weight's own. ``include`` and ``exclude`` are patterns of image names; nothing given means all, and none.
    ``extras`` says what to do with weights that the checkpoint does not have, or, where none is known, that have the
    usual name of a value head; one that is trained and has no such name is always an error. ``lora`` says what a model with
    LoRA adapters is published as: "merged", the weights with the adapters merged into them; "adapter", the adapters alone
    and under the names of an adapter file; "base", the weights without the adapters. ``buffers`` publishes all persistent
    buffers of a model, not only those that its checkpoint has. ``timeout`` bounds one offload. ``controller`` is the URL that
    :meth:`notify_version` tells and :meth:`gate` asks: ``None`` says that there is none, and both return at once; if nothing is
    said, they are errors. ``controller_token_file`` is the file with its token (without one, that of ``WINDLASS_TOKEN``).
    ``offload_mode`` says how a version after the first leaves this process: "copy" writes it into its slot while the
    trainer waits; "delta" hands out what changed, and its slot follows in the background (docs/trainers.md); "auto" is
    "delta" where a GPU can tell what changed sooner than it is copied, and "copy" elsewhere. The same on all ranks.
    ``baseline`` says where a GPU keeps what it compares with: "auto" takes GPU memory as long as some is left for the trainer and
    page-locked host memory for the rest, "device" and "host" take one of them, and a number is the most bytes of GPU memory
    (docs/gpu.md).
    ``slices`` is the largest number of tensor-parallel ranks that keep only their share of the model (docs/slices.md): columns
    of matrices are cut into so many equal parts. The same on all ranks.
    ``strict`` refuses parameters that can only be gathered. ``group_readable`` lets the owner's group read the region,
    and ``memfd`` says what to do where ``region_dir`` is too small: anonymous memory, or an error.

    ``tls_cert`` and ``tls_key`` are PEM files: the certificate that the agent shows (with its chain), for the host that
    it advertises, and its key. Requests and data are then inside TLS. ``tls_ca`` is a PEM file with those to trust: the
    controller, and agents on other hosts (without it, the file that ``WINDLASS_TLS_CA`` names, or the system's).

    ``store`` is where the agent uploads each version: a URL such as "s3://bucket/run", or a :class:`StoreConfig` (docs/store.md).
    """

    model_id: str = "policy"
    region_dir: str = "/dev/shm"
    generator_dtype: str | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    checkpoint: str | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    extras: Literal["error", "ignore"] = "ignore"
    lora: Literal["merged", "adapter", "base"] = "merged"
    buffers: bool = False
    timeout: float = 120.0
    offload_mode: Literal["copy", "delta", "auto"] = "auto"
    baseline: Literal["auto", "device", "host"] | int = "auto"
    slices: int = 1
    controller: str | None = ""
    controller_token_file: str | None = None
    strict: bool = False
    group_readable: bool = False
    memfd: Literal["auto", "never", "always"] = "auto"
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    store: StoreConfig | str | None = None
    agent: SenderAgentConfig = field(default_factory=SenderAgentConfig)
    engine: TransferEngineConfig = field(default_factory=TransferEngineConfig)

    _parts: ClassVar = {
        "agent": SenderAgentConfig.from_dict,
        "engine": TransferEngineConfig.from_dict,
        "store": StoreConfig.from_dict,
    }

    def __post_init__(self) -> None:
        self._text("model_id", "region_dir")
        self._model_id()
        if self.generator_dtype is not None:
            object.__setattr__(self, "generator_dtype", self._dtype("generator_dtype", self.generator_dtype))
        self._dtypes()
        self._text("checkpoint", optional=True)
        self._texts("include", "exclude")
        self._choice("extras", "error", "ignore")
        self._choice("lora", "merged", "adapter", "base")
        self._flag("buffers", "strict", "group_readable")
        self._seconds("timeout")
        self._choice("offload_mode", "copy", "delta", "auto")
        if isinstance(self.baseline, int) and not isinstance(self.baseline, bool):
            fits = 0 <= self.baseline < 1 << 62
        else:
            fits = self.baseline in ("auto", "device", "host")
        if not fits:
            raise self._bad("baseline", "'auto', 'device', 'host', or the most bytes of GPU memory")
        self._count("slices", 1, 4096)
        if self.controller != "":
            self._by_core("controller", _windlass.check_endpoint)
        self._text("controller_token_file", optional=True)
        self._choice("memfd", "auto", "never", "always")
        self._text("tls_cert", "tls_key", "tls_ca", optional=True)
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise self._bad(missing, "a file, since a certificate and its key go together")
        self._part("agent", SenderAgentConfig)
        self._part("engine", TransferEngineConfig)
        if isinstance(self.store, str):
            object.__setattr__(self, "store", StoreConfig(url=self.store))
        elif self.store is not None:
            self._part("store", StoreConfig)
        if self.store is not None and not self.agent.enabled:
            raise self._bad("store", "None, since agent.enabled is False and the agent is what uploads")

    def _model_id(self) -> None:
        try:
            self._by_core("model_id", _windlass.check_model_id)
        except WindlassInvalid as e:
            # It is part of paths and addresses, so it is not changed behind anybody's back: all sides must say the same.
            safe = re.sub(r"[^A-Za-z0-9._-]+", "--", self.model_id).lstrip(".-")[:128]
            hint = f"; use {safe!r}" if safe else ""
            raise WindlassInvalid(
                f"{e}{hint}", f"set model_id to {safe!r}" if safe else e.advice, e.name
            ) from e

    def _dtype(self, name: str, value: Any) -> str:
        if not isinstance(value, str) and type(value).__module__ != "torch":
            raise WindlassInvalid(
                f"{type(self).__name__}.{name} is {value!r}: expected a dtype such as 'bfloat16', 'bf16' or torch.bfloat16"
            )
        try:
            return canonical_dtype(value)
        except WindlassInvalid as e:
            raise WindlassInvalid(f"{type(self).__name__}.{name}: {e}", e.advice, e.name) from e

    def _dtypes(self) -> None:
        if not isinstance(self.dtypes, Mapping):
            raise self._bad("dtypes", "a dictionary of name patterns and dtypes")
        canonical = {}
        for pattern, dtype in self.dtypes.items():
            if not isinstance(pattern, str):
                raise self._bad("dtypes", "a dictionary of name patterns and dtypes")
            canonical[pattern] = dtype if dtype in SCHEMES else self._dtype(f"dtypes[{pattern!r}]", dtype)
        object.__setattr__(self, "dtypes", canonical)


@dataclass(frozen=True, kw_only=True)
class Known(Config):
    """A version with the digest of its state."""

    identity: Identity
    digest: str

    _parts: ClassVar = {"identity": lambda value: Identity(**value)}


def _identity(value: Any) -> Identity | None:
    return None if value is None else Identity(**value)


def _known(value: Any) -> Known | None:
    return None if value is None else Known.from_dict(value)


@dataclass(frozen=True, kw_only=True)
class TransferStatus(Config):
    """Where a receiver stands: what it is doing, what it has, and how far the transfer is."""

    stage: Literal["idle", "asking", "pulling", "opening", "applying", "finishing"] = "idle"
    #: Who was asked last: an agent, or a store.
    publisher: str | None = None
    target: Identity | None = None
    image: Known | None = None
    mode: Literal["full", "delta"] | None = None
    bytes: int = 0
    bytes_done: int = 0
    #: Who brought how much of them, where other receivers take part: ``by`` (absent for the publisher), ``bytes``, ``rate``.
    brought: list[Mapping[str, Any]] = field(default_factory=list)
    synced: int = 0
    error: str | None = None

    _parts: ClassVar = {"target": _identity, "image": _known}


@dataclass(frozen=True, kw_only=True)
class ReceiverInfo(Config):
    """What an agent knows of a receiver: who it is, the version that it got last, and when it was heard of."""

    instance_id: str
    name: str | None = None
    version: int | None = None
    heard_seconds: float = 0.0
    transfers: int = 0


def _nearest(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(known)


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
