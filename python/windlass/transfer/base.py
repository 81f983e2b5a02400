"""The four roles, and the factory that pairs a sender with a receiver.

::

    trainer                                                                engine
    WeightExtractor ─► WeightTransferSender ═══ requests, bytes ═══► WeightTransferReceiver ─► WeightLoader

Each role can be used and tested alone. A :class:`WeightTransferStrategy` is a light factory: both sides build it from
the same plain configuration, and nothing but plain data crosses between them.

1. The trainer's rank 0 builds the strategy and has it make the sync info: plain data that says what there is to join.
2. Whoever orchestrates carries the info to every engine. Each builds the same strategy there.
3. Both sides join concurrently: :meth:`~WeightTransferStrategy.create_sender` here and
   :meth:`~WeightTransferStrategy.create_receiver` there return when their end is ready. Each end owns its process
   group or connection, and closes it.
4. For each chunk the sender announces a request *before* the bytes move, and engines receive concurrently.

Strategies come from outside as well: :func:`register_strategy`, or an entry point in the group
``windlass.transfer`` of an installed package.

The longer calls of the interface design work on every strategy, plain or awaited: ``create_sync_info(cfg, client)``,
``create_sender(cfg, client, sync_info)`` and ``create_receiver(cfg, sync_info, rank_offset)``. ``cfg`` configures a strategy
that was made without a configuration, and must not contradict one that has one. ``rank_offset`` is the engine's; the rank
of this process among the engine's own, as torch knows it, is added.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

from windlass import _windlass
from windlass.errors import WindlassInvalid, WindlassNotFound, WindlassUnsupported
from windlass.plain import Plain, text_of
from windlass.transfer.request import WeightUpdateRequest
from windlass.transfer.sync_info import WeightSyncInfo

if TYPE_CHECKING:
    import torch

    from windlass.extract.chunk import WeightChunk

__all__ = [
    "ENTRY_POINTS",
    "InferenceClient",
    "NamedTensors",
    "WeightLoader",
    "WeightTransferReceiver",
    "WeightTransferSender",
    "WeightTransferStrategy",
    "choose",
    "each_tensor",
    "register_strategy",
    "strategy_class",
    "strategy_from_config",
    "strategy_names",
]

log = logging.getLogger("windlass")

#: The group in which an installed package names its strategies.
ENTRY_POINTS = "windlass.strategies"

#: What a loader is given: a mapping, or names and tensors one by one.
NamedTensors: TypeAlias = (
    Mapping[str, "torch.Tensor"]
    | Iterable[tuple[str, "torch.Tensor"]]
    | AsyncIterable[tuple[str, "torch.Tensor"]]
)

S = TypeVar("S", bound="WeightTransferSender")
V = TypeVar("V", bound="WeightTransferReceiver")
T = TypeVar("T", bound="WeightTransferStrategy")


class InferenceClient(Protocol):
    """What the trainer's side needs of the engines: a way to tell all of them something."""

    async def init_weight_transfer(self, sync_info: WeightSyncInfo) -> object:
        """Hands the sync info to every engine, and returns when each has made its receiver."""

    async def update_weights(self, request: WeightUpdateRequest) -> object:
        """Hands a request to every engine, and returns when each has received and loaded it."""


async def each_tensor(named_tensors: NamedTensors) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """Names and tensors one by one, whatever form they came in.

    >>> import asyncio
    >>> async def names(tensors):
    ...     return [name async for name, _ in each_tensor(tensors)]
    >>> asyncio.run(names({"a": 1, "b": 2})), asyncio.run(names([("a", 1)]))
    (['a', 'b'], ['a'])
    """
    if isinstance(named_tensors, AsyncIterable):
        async for pair in named_tensors:
            yield pair
        return
    for pair in named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors:
        yield pair


class WeightLoader(ABC):
    """Puts received weights into an engine."""

    @abstractmethod
    async def load_weights(self, named_tensors: NamedTensors) -> None:
        """Loads the tensors of one request together. They are valid until this returns (see :func:`each_tensor`)."""


class WeightTransferSender(ABC):
    """The trainer's end. Ready when created; owns its process group or connection."""

    @abstractmethod
    async def send_chunks(
        self, chunks: Iterable[WeightChunk] | AsyncIterable[WeightChunk], inference_client: InferenceClient
    ) -> None:
        """Sends chunk by chunk without collecting them. Each is announced before its bytes move."""

    def create_request(self, chunk: WeightChunk) -> WeightUpdateRequest:
        """The announcement of one chunk, for callers that do themselves what :meth:`send_chunks` does.

        Every training rank calls it. What it refers to stays as it is until the request after the next one is made.
        """
        raise WindlassUnsupported(
            f"{type(self).__name__} announces whole versions, and one chunk is none",
            "give all chunks to send_chunks(chunks, inference_client)",
        )

    def close(self) -> None:
        """Leaves the group or closes the connection. More than once is the same as once."""

    def __await__(self: S) -> Generator[Any, None, S]:
        # Ready when created: there is nothing to wait for.
        return self
        yield

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class WeightTransferReceiver(ABC):
    """The engine's end. Ready when created; owns its process group or connection."""

    #: The requests that it takes.
    request_type: ClassVar[type[WeightUpdateRequest]] = WeightUpdateRequest

    def parse_request(self, request_dict: Mapping[str, object] | str | bytes) -> WeightUpdateRequest:
        """Reads a request as it came, typed or as a legacy dictionary; one of another strategy is refused."""
        return self.request_type._parse(request_dict)

    @abstractmethod
    def receive_weights(self, request: WeightUpdateRequest) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The tensors of one request as they come. Each is valid until the next one is asked for, and the last one
        until the iterator ends, unless the receiver says more."""

    async def receive_and_load_weights(self, request: WeightUpdateRequest, loader: WeightLoader) -> None:
        """Receives one request and hands it to the loader as a whole, tensor by tensor."""
        await loader.load_weights(self.receive_weights(request))

    def close(self) -> None:
        """Leaves the group or closes the connection. More than once is the same as once."""

    def __await__(self: V) -> Generator[Any, None, V]:
        return self
        yield

    def __enter__(self: V) -> V:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class WeightTransferStrategy(ABC):
    """Makes the two ends of one way to move weights, from plain configuration.

    The configuration is all that a strategy is: a copy in another process is built from it, and so is one that comes
    out of a pickle. Whatever else a subclass keeps (a bound port, a store) stays behind.
    """

    def __init__(self, config: Mapping[str, object] | None = None) -> None:
        # Through JSON and back: what a worker on another host would read.
        self._config: Plain = json.loads(
            text_of(dict(config or {}), f"configuration of {type(self).__name__}")
        )

    def __init_subclass__(cls, **how: Any) -> None:
        super().__init_subclass__(**how)
        for name, longer in _LONGER.items():
            method = vars(cls).get(name)
            # One that is declared with the longer form already does as it likes.
            if method is not None and _begins_with(method, longer.begins):
                setattr(cls, name, _also(method, longer.form, longer.call))

    @classmethod
    def from_config(cls: type[T], config: object, facts: Mapping[str, object] | None = None) -> T:
        """This strategy as a configuration has it, which is a trainer's document or settings of the strategy's own.

        On :class:`WeightTransferStrategy` itself, the strategy that the configuration means (:func:`strategy_from_config`).

        >>> from windlass.transfer import CudaIpcTransferStrategy
        >>> CudaIpcTransferStrategy.from_config({"weight_transfer_threshold_cuda_ipc_GB": 0.5}).config
        {'weight_transfer_threshold_cuda_ipc_GB': 0.5}
        """
        if inspect.isabstract(cls):
            return strategy_from_config(config, facts)  # type: ignore[return-value]
        return cls(_settings(cls, config, facts))

    def _configure(self, cfg: Any, client: Any = None) -> None:
        """Takes ``cfg`` for the configuration where there is none; one that contradicts it is an error."""
        if cfg is None:
            return
        meant = _settings(type(self), cfg, None, client)
        if not self._config:
            # As if it had been made of it.
            self.__init__(meant)  # type: ignore[misc]
            return
        if _name_of(type(self)) is None:
            # Only the strategy itself knows what its own configuration and a trainer's have in common.
            return
        # Only what is said counts, not what a document without a word about it would mean too.
        default = _settings(type(self), {"generator": {}}, None, client)
        said = {key: value for key, value in meant.items() if key not in default or default[key] != value}
        other = sorted(key for key, value in said.items() if self._config.get(key) != value)
        if other:
            raise WindlassInvalid(
                f"cfg and the configuration that this {type(self).__name__} was made of differ in {', '.join(other)}",
                "make the strategy of the same cfg (from_config), or without one",
            )

    def _begin_sender(self, sync_info: WeightSyncInfo) -> WeightTransferSender:
        """:meth:`create_sender` where nobody may wait for engines yet, because they are told afterwards."""
        return self.create_sender(sync_info)

    @property
    def config(self) -> Plain:
        """A copy of the configuration."""
        copy: Plain = json.loads(json.dumps(self._config))
        return copy

    def __reduce__(self) -> tuple[type[WeightTransferStrategy], tuple[Plain]]:
        return (type(self), (self._config,))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._config == other._config

    def __hash__(self) -> int:
        return hash((type(self), json.dumps(self._config, sort_keys=True)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._config!r})"

    @abstractmethod
    def create_sync_info(self) -> WeightSyncInfo:
        """What engines need to join. Called once, on the trainer's rank 0."""

    def create_init_info(self, *given: object, **named: Any) -> WeightSyncInfo:
        """Another name of :meth:`create_sync_info`."""
        make: Callable[..., WeightSyncInfo] = self.create_sync_info
        return make(*given, **named)

    @abstractmethod
    def create_sender(self, sync_info: WeightSyncInfo) -> WeightTransferSender:
        """The trainer's end, ready for use. Joins while the engines join."""

    @abstractmethod
    def create_receiver(self, sync_info: WeightSyncInfo, *, rank: int = 1) -> WeightTransferReceiver:
        """The engine's end, ready for use. ``rank`` is its rank in the update group, for strategies that have one
        (see :func:`windlass.transfer.sync_info.engine_rank`)."""

    @abstractmethod
    def get_request_type(self) -> type[WeightUpdateRequest]:
        """The class of the requests that announce its chunks."""


def _long_sync_info(self: Any, cfg: Any, inference_client: Any = None) -> WeightSyncInfo:
    self._configure(cfg, inference_client)
    made: WeightSyncInfo = self.create_sync_info()
    return made


def _long_sender(self: Any, cfg: Any, inference_client: Any, sync_info: WeightSyncInfo) -> Any:
    self._configure(cfg, inference_client)
    return self._begin_sender(sync_info)


def _long_receiver(self: Any, cfg: Any, sync_info: WeightSyncInfo, rank_offset: int = 1) -> Any:
    self._configure(cfg)
    return self.create_receiver(sync_info, rank=rank_offset + _local_rank())


class _Long(NamedTuple):
    """A longer call: what the short one begins with, and what carries it out."""

    begins: list[str]
    call: Callable[..., Any]

    @property
    def form(self) -> inspect.Signature:
        return inspect.signature(self.call)


#: The calls of the interface design beside ours.
_LONGER = {
    "create_sync_info": _Long([], _long_sync_info),
    "create_sender": _Long(["sync_info"], _long_sender),
    "create_receiver": _Long(["sync_info", "rank"], _long_receiver),
}


def _begins_with(method: Any, names: list[str]) -> bool:
    return callable(method) and list(inspect.signature(method).parameters)[1:] == names


def _also(method: Callable[..., Any], form: inspect.Signature, longer: Callable[..., Any]) -> Any:
    """The method, which takes the longer form too."""
    short = inspect.signature(method)

    @functools.wraps(method)
    def either(self: Any, *given: Any, **named: Any) -> Any:
        try:
            short.bind(self, *given, **named)
        except TypeError as e:
            # As the migration plan has it: without cfg.
            if given and isinstance(given[0], WeightSyncInfo):
                given = (None, *given)
            elif not given and "cfg" not in named:
                named["cfg"] = None
            try:
                bound = form.bind(self, *given, **named)
            except TypeError:
                raise TypeError(
                    f"{type(self).__name__}.{method.__name__}: {e}; it takes {_words(short)}, or {_words(form)}"
                ) from None
            return longer(*bound.args, **bound.kwargs)
        return method(self, *given, **named)

    return either


def _words(form: inspect.Signature) -> str:
    return "(" + ", ".join(str(p) for p in list(form.parameters.values())[1:]).replace("'", "") + ")"


def _local_rank() -> int:
    """The rank of this process among those of its engine."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _name_of(kind: type[WeightTransferStrategy]) -> str | None:
    """The name of a strategy of ours, or of the one that this is derived from."""
    from windlass.transfer import OWN

    names = {place: name for name, place in OWN.items()}
    return next(
        (names[at] for base in kind.__mro__ if (at := (base.__module__, base.__name__)) in names), None
    )


def _settings(
    kind: type[WeightTransferStrategy], config: Any, facts: Mapping[str, Any] | None, client: Any = None
) -> Plain:
    """The settings of a strategy that a configuration means for it."""
    from windlass.document import Document, is_document, plain, section, settings_for

    given = section(config)
    if given is None:
        raise WindlassInvalid(
            f"the configuration is a {type(config).__name__}: expected a mapping, such as a trainer's document"
        )
    name = _name_of(kind)
    if name is None or not is_document(given):
        own: Plain = plain(given)
        named = own.pop("strategy", None) if name is not None else None
        if named not in (None, name):
            raise WindlassInvalid(f"the configuration names the strategy {named!r}, and this is {name!r}")
        return own
    document = Document.read(given)
    shapes = getattr(client, "shapes", None)
    if shapes is not None and not document.names_engines:
        document = document.with_engines(shapes)
    # The class says it all: which strategy, and whether parameters are packed.
    document = document.demanding(name)
    choice = choose(document.facts(facts), document.overrides())
    return settings_for(name, document, choice)


#: Those that were registered. Installed packages are asked when a name is not here.
_registered: dict[str, type[WeightTransferStrategy]] = {}


def register_strategy(
    name: str, strategy: type[WeightTransferStrategy], *, replace: bool = False
) -> type[WeightTransferStrategy]:
    """Makes a strategy known under a name in this process. A name that is taken is refused unless ``replace``."""
    if not isinstance(name, str) or not name or not name.replace("_", "").replace("-", "").isalnum():
        raise WindlassInvalid(f"{name!r} is not a name for a strategy: expected letters, digits, '_' and '-'")
    if not (isinstance(strategy, type) and issubclass(strategy, WeightTransferStrategy)):
        raise WindlassInvalid(f"{strategy!r} is not a class derived from WeightTransferStrategy")
    taken = _registered.get(name)
    if taken not in (None, strategy) and not replace:
        raise WindlassInvalid(
            f"the name {name!r} is taken by {taken!r}: choose another one, or say replace=True to put "
            f"{strategy!r} in its place"
        )
    _registered[name] = strategy
    return strategy


def strategy_names() -> list[str]:
    """The names of all strategies that are known here."""
    from windlass.transfer import OWN

    return sorted({*_registered, *OWN, *(point.name for point in _points())})


def strategy_class(name: str) -> type[WeightTransferStrategy]:
    """A strategy by its name. One that was registered comes before ours, and ours before those of other packages."""
    from windlass.transfer import OWN

    if name in _registered:
        return _registered[name]
    if name in OWN:
        from importlib import import_module

        module, kind = OWN[name]
        own: type[WeightTransferStrategy] = getattr(import_module(module), kind)
        return own
    for point in _points():
        if point.name == name:
            return register_strategy(name, point.load())
    known = strategy_names()
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
    raise WindlassNotFound(
        f"there is no strategy {name!r}; {hint}",
        f"import the module that registers it, or install the package that names it in {ENTRY_POINTS!r}",
    )


def _points() -> list[Any]:
    # Searching the installed packages takes a while: not before somebody asks.
    from importlib.metadata import entry_points

    return list(entry_points(group=ENTRY_POINTS))


def choose(facts: Mapping[str, object], config: Mapping[str, object] | None = None) -> Plain:
    """Which strategy, link and codec fit what is known about the run, how trainers offload, and why.

    ``facts`` and ``config`` have the keys of ``Facts`` and ``Overrides`` in the Rust core; the overrides may carry the
    prefix ``generator.``. :func:`windlass.transfer.facts.facts_between` makes the facts about GPUs. What was not taken stands under
    ``considered``, with the reason.

    >>> choose({"placement": "same_host"}, {"strategy": "tcp"})["link"]
    'shm'
    """
    choice: Plain = json.loads(
        _windlass.choose(text_of(facts, "facts"), text_of(config or {}, "configuration"))
    )
    return choice


def strategy_from_config(config: object, facts: Mapping[str, object] | None = None) -> WeightTransferStrategy:
    """The strategy that a configuration names under ``strategy``; the other keys are its own.

    Every worker calls this with the same configuration. Where ``strategy`` is "auto" or absent, ``facts`` decide
    (:func:`choose`), with ``overrides`` among the keys; the decision and its reason are logged.

    A configuration may also be a trainer's own document, whole, nested or dotted, a dictionary or OmegaConf's, with the
    keys that weight sync has there (``generator.weight_sync_backend``, ``trainer.placement.colocate_all``, ...; all of
    them in :data:`windlass.document.KEYS`). What it says is then among the facts; the trainer's other keys
    are left alone.

    >>> strategy_from_config({"generator": {"weight_sync_backend": "gloo", "num_inference_engines": 2}}).settings.engines
    (EngineShape(tp=1, pp=1, dp=1), EngineShape(tp=1, pp=1, dp=1))
    """
    from windlass.document import codec_of, is_document, offloading, section

    given = section(config)
    if given is None:
        raise WindlassInvalid(f"the configuration is a {type(config).__name__}: expected a mapping")
    if is_document(given):
        return _from_document(given, facts)
    own = dict(given)
    name = own.pop("strategy", None) or "auto"
    if name == "auto":
        if facts is None:
            raise WindlassInvalid(
                "the configuration names no strategy and there are no facts to choose by: set 'strategy' to one of "
                f"{strategy_names()}, or pass facts"
            )
        overrides = own.pop("overrides", None) or {}
        choice = choose(facts, overrides)
        name = choice["strategy"]
        log.info("strategy %s over %s, %s: %s", name, choice["link"], choice["codec"], choice["why"])
        manager = {**offloading(choice, overrides).get("manager", {}), **own.pop("manager", {})}
        own = {
            **own,
            "link": choice["link"],
            "codec": codec_of(choice, overrides),
            **({"manager": manager} if manager else {}),
        }
    return strategy_class(name)(own)


def _from_document(config: Mapping[str, Any], known: Mapping[str, Any] | None) -> WeightTransferStrategy:
    from windlass.document import Document, settings_for

    document = Document.read(config)
    choice = choose(document.facts(known), document.overrides())
    name = choice["strategy"]
    assumed = f" (assumed: {'; '.join(document.assumed)})" if document.assumed else ""
    log.info("strategy %s over %s, %s: %s%s", name, choice["link"], choice["codec"], choice["why"], assumed)
    return strategy_class(name)(settings_for(name, document, choice))
