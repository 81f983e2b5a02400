"""The trainer's side in one call.

Owns: :class:`WeightManager`, which publishes a model's weights version by version: it agrees with the other ranks
once (:mod:`windlass.plan`), makes the region, keeps an agent running beside it, and writes this rank's share of each
version. Called by training loops. Must not: know how an engine loads.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import time
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from windlass import placement
from windlass import plan as planning
from windlass._windlass import Copies, Publisher
from windlass.config import WeightManagerConfig
from windlass.dtypes import dtype_name, torch_dtype
from windlass.errors import WindlassError, WindlassInvalid, WindlassNotFound, WindlassStale
from windlass.exchange import Alone, Exchange, exchange_for
from windlass.memory import flat
from windlass.names import DtypeRules, Selection, SourceMap, checkpoint_layout
from windlass.notify import notify
from windlass.plan import Naming, Plan, Source

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Self

    from windlass._windlass import Held
    from windlass.supervise import AgentSupervisor

__all__ = ["Offloaded", "WeightManager", "WeightSource"]

log = logging.getLogger("windlass")

#: How long the first rank waits at the end for the others to leave the region.
LEAVE_S = 5.0
#: How long another rank's region may take to be let go of by a trainer that has just died.
TAKE_S = 10.0


@runtime_checkable
class WeightSource(Protocol):
    """Weights that are only known by exporting them, such as a Megatron bridge's.

    ``metadata()`` lists (name, dtype, shape) of every tensor of the model, the same on all ranks and in the order of
    iteration. Iteration yields (name, tensor), one at a time, or (name, None) for what this rank does not hold.
    ``held_names()`` names what it holds; ``None`` means everything.
    """

    def metadata(self) -> Iterable[tuple[str, Any, Any]]:
        """(name, dtype, shape) of everything."""
        ...

    def __iter__(self) -> Any:
        """A fresh pass over (name, tensor)."""
        ...

    def held_names(self) -> Iterable[str] | None:
        """What this rank holds; all if ``None``."""
        ...


@dataclass(frozen=True)
class Offloaded:
    """A committed version, and what this rank did for it."""

    version: int
    incarnation: str
    #: Bytes that this rank wrote.
    bytes: int
    #: Waiting for the slot and for the other ranks to begin.
    wait_ms: float
    #: Copying, casting and gathering.
    copy_ms: float
    #: Waiting for the other ranks to end.
    commit_ms: float
    #: False if the same version with the same bytes was there already.
    new: bool = True


@dataclass
class _Open:
    """Everything that exists once the first version is under way."""

    plan: Plan
    publisher: Publisher | None
    copies: Copies | None
    place: int
    threads: int


class WeightManager:
    """Publishes a model's weights, one version for each step.

    >>> wm = WeightManager(model_id="policy")                               # doctest: +SKIP
    >>> wm.offload(model.named_parameters(), version=1, rank=0, world_size=1)   # doctest: +SKIP
    >>> wm.close()                                                          # doctest: +SKIP

    Every rank of the trainer makes one and calls :meth:`offload` with the same version. The first rank also keeps an
    agent running, from which receivers pull. ``config`` may be given as a whole or field by field.

    ``names`` says what parameters are called in a checkpoint; without it, :meth:`offload` derives it from a
    transformers model if it is given one, and otherwise takes wrappers and PEFT off the names. ``group`` is the
    process group of the ranks that publish, if that is not the default one. ``node`` names this host where its own
    name will not do.
    """

    def __init__(
        self,
        config: WeightManagerConfig | None = None,
        *,
        names: SourceMap | None = None,
        group: dist.ProcessGroup | None = None,
        node: str | None = None,
        **fields: Any,
    ) -> None:
        if config is None:
            config = WeightManagerConfig.from_dict(fields)
        elif fields:
            raise WindlassInvalid(f"give a config or its fields ({', '.join(fields)}), not both")
        self.config = config
        self._names = names
        self._group = group
        self._node = node or socket.gethostname()
        self._open: _Open | None = None
        self._rank: tuple[int, int] | None = None
        self._agent: AgentSupervisor | None = None
        self._ports: tuple[str, str] | None = None
        self._notifier: ThreadPoolExecutor | None = None
        self._closed = False
        self._end: weakref.finalize[Any, Any] = weakref.finalize(self, _nothing)

    # The one call.

    def offload(
        self,
        named_parameters: Any,
        version: int,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        timeout: float | None = None,
    ) -> Offloaded:
        """Publishes the weights as ``version``: returns when all ranks have written their share.

        ``named_parameters`` is a model, an iterable of (name, tensor), a mapping, or a :class:`WeightSource`. Weights
        must not change until the call returns. Versions only grow; offloading the newest one again with the same
        bytes does nothing, and with others is an error. If any rank fails or dies, all of them get an error within
        ``timeout`` (by default the config's), and the version before goes on being served.
        """
        timeout = self.config.timeout if timeout is None else timeout
        if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version < 1 << 64:
            raise WindlassInvalid(f"version {version!r} is not an integer from 0 to 2**64 - 1")
        until = time.monotonic() + timeout
        rank, world_size = self._who(rank, world_size)
        given: Any = named_parameters
        stream: WeightSource | None = None
        if isinstance(given, torch.nn.Module):
            if self._names is None:
                self._names = _names_of(given)
            given = placement.named_of(given, self.config.buffers)
        elif isinstance(given, Mapping):
            given = given.items()
        elif hasattr(given, "metadata") and hasattr(given, "__iter__"):
            stream = given
        if self._open is None:
            self._open = self._prepare(given, stream, rank, world_size, until)
        elif stream is None:
            _follow(self._open.plan, given)
        return self._publish(self._open, stream, version, until)

    def prepare(self, named_parameters: Any, rank: int | None = None, world_size: int | None = None) -> None:
        """Agrees with the other ranks, makes the region and starts the agent, without publishing anything yet."""
        if self._open is None:
            rank, world_size = self._who(rank, world_size)
            given, stream = named_parameters, None
            if isinstance(given, torch.nn.Module):
                if self._names is None:
                    self._names = _names_of(given)
                given = placement.named_of(given, self.config.buffers)
            elif isinstance(given, Mapping):
                given = given.items()
            elif hasattr(given, "metadata"):
                stream = given
            until = time.monotonic() + self.config.timeout
            self._open = self._prepare(given, stream, rank, world_size, until)

    # What follows a version.

    def wait_delta_ready(self, version: int | None = None, timeout: float | None = None) -> str:
        """Waits until the agent has sealed ``version`` (the newest if not given), and returns its digest.

        Where several hosts publish, the digest is that of this host's part.
        """
        publisher = self._published("wait for")
        newest = publisher.newest()
        if version is None:
            if newest is None:
                raise WindlassNotFound("nothing was offloaded yet")
            version = newest[0]
        seconds = self.config.timeout if timeout is None else timeout
        try:
            return publisher.wait_sealed(version, seconds)
        except WindlassError as e:
            if self._agent is not None and isinstance(e, TimeoutError):
                raise type(e)(f"{e}: {self._agent.status()}", e.advice) from e
            raise

    def notify_version(
        self, version: int | None = None, *, timeout: float | None = None, **more: Any
    ) -> dict[str, Any] | None:
        """Tells the controller that ``version`` (the newest if not given) is there, and returns its answer.

        Only the first rank speaks; the others return ``None`` at once. Without a controller in the configuration
        nothing needs to be told: receivers ask the agent themselves.
        """
        words = self._words(version, more)
        if words is None or self.config.controller is None:
            return None
        return notify(self.config.controller, words, self.config.timeout if timeout is None else timeout)

    def notify_version_async(
        self, version: int | None = None, *, timeout: float | None = None, **more: Any
    ) -> Future[dict[str, Any] | None]:
        """:meth:`notify_version` in the background. The future carries the answer or the error."""
        words = self._words(version, more)
        done: Future[dict[str, Any] | None] = Future()
        if words is None or self.config.controller is None:
            done.set_result(None)
            return done
        if self._notifier is None:
            self._notifier = ThreadPoolExecutor(1, thread_name_prefix="windlass-notify")
        seconds = self.config.timeout if timeout is None else timeout
        return self._notifier.submit(notify, self.config.controller, words, seconds)

    # Where it stands.

    @property
    def endpoint(self) -> str | None:
        """Where receivers reach the agent; waits for it to listen. ``None`` on ranks without one.

        On several hosts each has an agent; receivers need the first rank's, which knows the others.
        """
        return None if self._agent is None else self._agent.endpoint(self.config.timeout)

    @property
    def region(self) -> str | None:
        """The region's directory on this host, once there is one."""
        publisher = None if self._open is None else self._open.publisher
        return None if publisher is None else str(publisher.dir)

    @property
    def incarnation(self) -> str | None:
        """Which life of the publisher this is, once it has begun."""
        publisher = None if self._open is None else self._open.publisher
        return None if publisher is None else publisher.incarnation

    @property
    def version(self) -> int | None:
        """The newest committed version."""
        publisher = None if self._open is None else self._open.publisher
        newest = None if publisher is None else publisher.newest()
        return None if newest is None else newest[0]

    @property
    def token_file(self) -> str | None:
        """The file with the secret that receivers need."""
        if self.config.agent.token_file is not None:
            return self.config.agent.token_file
        return None if self.region is None else str(Path(self.region) / "token")

    def status(self) -> dict[str, Any]:
        """What there is to know, as plain data."""
        agent = None if self._agent is None else self._agent.status()
        return {
            "model_id": self.config.model_id,
            "incarnation": self.incarnation,
            "version": self.version,
            "region": self.region,
            "agent": agent,
            "ways": None if self._open is None else dict(self._open.plan.reasons),
        }

    # The end.

    def resume(self) -> None:
        """Begins a new life: the next version may be older than the last one, and receivers follow it.

        For a trainer that goes back to an older checkpoint without being restarted. All ranks call it.
        """
        self._leave()

    def close(self) -> None:
        """Ends the agent, leaves the region, and removes it once all ranks have left."""
        if self._closed:
            return
        self._closed = True
        if self._notifier is not None:
            self._notifier.shutdown(wait=True, cancel_futures=True)
        self._leave()
        self._end.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # How it is done.

    def _who(self, rank: int | None, world_size: int | None) -> tuple[int, int]:
        """Which rank of how many; from the process group or torchrun's environment if not given."""
        if self._closed:
            raise WindlassInvalid("this WeightManager is closed; make another one")
        if rank is None or world_size is None:
            import torch.distributed as dist

            if dist.is_available() and dist.is_initialized():
                known = dist.get_rank(self._group), dist.get_world_size(self._group)
            else:
                known = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
            rank = known[0] if rank is None else rank
            world_size = known[1] if world_size is None else world_size
        if not 0 <= rank < world_size:
            raise WindlassInvalid(f"there is no rank {rank} among {world_size}; ranks count from 0")
        if self._rank is not None and self._rank != (rank, world_size):
            raise WindlassInvalid(
                f"this was rank {self._rank[0]} of {self._rank[1]} and is now rank {rank} of {world_size}"
            )
        self._rank = (rank, world_size)
        return rank, world_size

    def _prepare(
        self, given: Any, stream: WeightSource | None, rank: int, world_size: int, until: float
    ) -> _Open:
        exchange = exchange_for(rank, world_size, self._group)
        sources: list[Source] | WindlassError
        try:
            sources = _stream_sources(stream) if stream is not None else planning.describe_sources(given)
            naming = self._naming()
        except WindlassError as e:
            # The others are told before it is raised here.
            sources, naming = e, Naming(SourceMap(), frozenset, _own)
        plan = planning.make_plan(
            sources, naming, rank=rank, node=self._node, exchange=exchange, timeout=_left(until)
        )
        here = [] if plan.host is None else plan.hosts[plan.host]
        place = here.index(rank) if here else -1
        ways = ", ".join(f"{count} by {reason}" for reason, count in sorted(plan.reasons.items()))
        log.info(
            "%s: %d tensors, %d bytes; this rank (%d of %d) writes %d of them: %s",
            self.config.model_id,
            len(plan.table),
            plan.layout.data_bytes,
            rank,
            world_size,
            plan.bytes,
            ways,
        )
        if plan.gathered and self.config.strict:
            slow = {c.source for c in plan.gathered}
            names = ", ".join(plan.sources[i].name for i in sorted(slow)[:3])
            raise WindlassInvalid(
                f"strict is set, and {len(slow)} parameters can only be gathered ({names}, ...): "
                f"{plan.sources[min(slow)].shares[0].reason}"
            )
        publisher = self._join(plan, place, exchange, until)
        cores = len(os.sched_getaffinity(0))
        threads = max(1, cores // max(1, len(here)))
        copies = publisher.plan(plan.copies) if publisher is not None else None
        return _Open(plan, publisher, copies, place, threads)

    def _naming(self) -> Naming:
        config = self.config
        stored = None if config.checkpoint is None else checkpoint_layout(config.checkpoint)
        dtypes = None if stored is None else {name: dtype for name, (dtype, _) in stored.items()}
        rules = DtypeRules(config.generator_dtype, config.dtypes, dtypes)
        selection = Selection(config.include, config.exclude, config.extras)

        def keep(names: Iterable[str]) -> frozenset[str]:
            return frozenset(selection.choose(names, stored).kept)

        return Naming(self._names or SourceMap(), keep, rules.dtype_of)

    def _join(self, plan: Plan, place: int, exchange: Exchange, until: float) -> Publisher | None:
        """The region of this host: made by its first writer, joined by the others.

        On several hosts, the first writer of all goes first: the others need its incarnation and its secret.
        """
        directory = Path(self.config.region_dir) / f"windlass-{self.config.model_id}"
        first = plan.hosts[0][0]
        publisher: Publisher | None = None
        lead = place == 0 and plan.host == 0

        def make(incarnation: str | None) -> Publisher:
            return Publisher.create(
                directory,
                self.config.model_id,
                plan.layout,
                ranks=len(plan.hosts[plan.host or 0]),
                part=plan.part,
                incarnation=incarnation,
                group=self.config.group,
                memfd=self.config.memfd,
                extra_bytes=self.config.agent.history_bytes if self.config.agent.enabled else 0,
                timeout=min(TAKE_S, _left(until)),
            )

        def agree(words: dict[str, Any], failure: WindlassError | None) -> list[dict[str, Any]]:
            """Everybody's words; an error of one is an error of all."""
            # Without a group the others find the region by its name and its layout.
            said = [words] if isinstance(exchange, Alone) else exchange.all(words, _left(until))
            if failure is not None:
                raise failure
            for rank, others in enumerate(said):
                if "error" in others:
                    raise WindlassInvalid(f"rank {rank} could not make its region: {others['error']}")
            return said

        words: dict[str, Any] = {"host": socket.gethostname()}
        failure: WindlassError | None = None
        try:
            if lead:
                publisher = make(None)
                words["incarnation"] = publisher.incarnation
                if len(plan.hosts) > 1:
                    words["token"] = publisher.token()
        except WindlassError as e:
            failure, words = e, {"error": str(e)}
        said = agree(words, failure)
        begun = said[0] if isinstance(exchange, Alone) else said[first]
        if len(plan.hosts) > 1:
            self._check_reachable({w["host"] for w in said})
            words, failure = {}, None
            try:
                if place == 0 and not lead:
                    publisher = make(begun["incarnation"])
                    publisher.set_token(begun["token"])
            except WindlassError as e:
                failure, words = e, {"error": str(e)}
            agree(words, failure)
        if place > 0:
            publisher = Publisher.open(
                directory,
                plan.layout,
                rank=place,
                incarnation=begun.get("incarnation"),
                timeout=_left(until),
            )
        peers: list[str] = []
        if len(plan.hosts) > 1 and self.config.agent.enabled:
            # The first agent serves all parts: it must know where the others are.
            words, failure = {}, None
            try:
                if place == 0 and not lead and publisher is not None:
                    self._start_agent(str(publisher.dir), [])
                    words["endpoint"] = self.endpoint
            except WindlassError as e:
                failure, words = e, {"error": str(e)}
            peers = [w["endpoint"] for w in agree(words, failure) if "endpoint" in w]
        if lead and publisher is not None:
            self._start_agent(str(publisher.dir), peers)
        if place == 0 and publisher is not None:
            self._end = weakref.finalize(self, _end, publisher, self._agent)
        return publisher

    def _check_reachable(self, hosts: set[str]) -> None:
        if len(hosts) > 1 and self.config.agent.enabled and _is_loopback(self.config.agent.bind):
            raise WindlassInvalid(
                f"the weights are on {len(hosts)} hosts ({', '.join(sorted(hosts))}), and agents bound to "
                f"{self.config.agent.bind} cannot reach each other",
                'set agent.bind to an address of this host, or to "0.0.0.0"',
            )

    def _start_agent(self, region: str, peers: list[str]) -> None:
        from windlass.supervise import AgentSupervisor

        agent = self.config.agent
        if not agent.enabled:
            return
        self._agent = AgentSupervisor(
            region,
            bind=agent.bind,
            advertise_host=agent.advertise_host or (socket.gethostname() if _is_any(agent.bind) else None),
            ports=self._ports[0] if self._ports else agent.ports,
            data_ports=self._ports[1] if self._ports else agent.data_ports,
            token_file=agent.token_file,
            history=agent.history,
            history_bytes=agent.history_bytes,
            threads=agent.threads,
            streams=self.config.engine.streams,
            timeout=self.config.engine.timeout,
            peers=peers,
            log=agent.log,
        )

    def _publish(self, opened: _Open, stream: WeightSource | None, version: int, until: float) -> Offloaded:
        plan, publisher = opened.plan, opened.publisher
        if publisher is None:
            # Another host publishes; this rank only takes part in what is gathered.
            begun = time.monotonic()
            for _ in _pieces(plan, stream):
                pass
            taken = (time.monotonic() - begun) * 1e3
            return Offloaded(version, "", 0, 0.0, taken, 0.0)
        newest = publisher.newest()
        if newest is not None and version <= newest[0]:
            return self._again(opened, stream, version, newest[0])
        start = time.monotonic()
        publisher.begin(version, _left(until))
        try:
            begun = time.monotonic()
            if opened.copies is not None and len(opened.copies):
                addresses = _addresses(plan)
                publisher.copy(opened.copies, addresses, opened.threads, _left(until))
            if plan.casts or plan.gathered:
                self._write(plan, stream, publisher)
            copied = time.monotonic()
            publisher.commit(_left(until))
        except BaseException:
            publisher.abort()
            raise
        ended = time.monotonic()
        return Offloaded(
            version,
            publisher.incarnation,
            plan.bytes,
            (begun - start) * 1e3,
            (copied - begun) * 1e3,
            (ended - copied) * 1e3,
        )

    def _write(self, plan: Plan, stream: WeightSource | None, publisher: Publisher) -> None:
        """What torch copies: casts, other devices, gathered tensors."""
        data = flat(publisher.slot())
        devices: set[torch.device] = set()
        try:
            for target, values in _pieces(plan, stream):
                into = planning.placed(plan, data, target)
                if values.device.type != "cpu" and values.dtype != into.dtype:
                    # On the device, where it is cheap, and so that less crosses the bus.
                    values = values.to(into.dtype)
                if values.device.type != "cpu":
                    devices.add(values.device)
                _copy(into, values)
        except RuntimeError as e:
            if isinstance(e, WindlassError):
                raise
            raise planning.lost("gathering or casting failed", e) from e
        for device in devices:
            torch.accelerator.synchronize(device)

    def _again(self, opened: _Open, stream: WeightSource | None, version: int, newest: int) -> Offloaded:
        """A version that is not newer: fine if it is the newest and the same."""
        publisher, plan = opened.publisher, opened.plan
        assert publisher is not None
        if version < newest:
            raise WindlassStale(
                f"version {version} is older than {newest}, which was published before: versions only grow",
                "call resume() first if the trainer went back to an older checkpoint",
            )
        held: Held = publisher.hold(self.config.timeout)
        try:
            data = flat(held.memory())
            same = all(
                _same(planning.placed(plan, data, target), values)
                for target, values in _everything(plan, stream)
            )
        finally:
            held.finish()
        if not same:
            raise WindlassStale(
                f"version {version} was published before with other bytes; nothing was changed",
                "give the next version another number",
            )
        return Offloaded(version, publisher.incarnation, 0, 0.0, 0.0, 0.0, new=False)

    def _published(self, what: str) -> Publisher:
        publisher = None if self._open is None else self._open.publisher
        if publisher is None:
            raise WindlassNotFound(f"there is nothing to {what}: call offload() first")
        return publisher

    def _words(self, version: int | None, more: dict[str, Any]) -> dict[str, Any] | None:
        publisher = self._published("announce")
        if version is None:
            version = self.version
        assert self._open is not None
        if self._agent is None or self._open.plan.host != 0:
            return None
        return {
            "model_id": self.config.model_id,
            "incarnation": publisher.incarnation,
            "version": version,
            "sender_endpoint": self._agent.endpoint(self.config.timeout),
            **more,
        }

    def _leave(self) -> None:
        agent, opened = self._agent, self._open
        self._agent, self._open = None, None
        self._end.detach()
        if agent is not None:
            self._ports = _ports_of(agent.status()) or self._ports
            agent.stop()
        if opened is None or opened.publisher is None:
            return
        if opened.place == 0:
            _remove(opened.publisher, LEAVE_S)
        else:
            opened.publisher.close()


def _remove(publisher: Publisher, patience: float) -> None:
    """Leaves the region and removes it, once the other ranks and the agent have left."""
    publisher.close()
    until = time.monotonic() + patience
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
        # Somebody else has removed it.
        return True


def _nothing() -> None:
    """Ends nothing."""


def _end(publisher: Publisher, agent: AgentSupervisor | None) -> None:
    """For a manager that nobody closed."""
    if agent is not None:
        agent.stop()
    _remove(publisher, 1.0)


def _ports_of(status: dict[str, object]) -> tuple[str, str] | None:
    """The ports of an agent that listened: the next one should be found in the same place."""
    endpoint, data = status.get("endpoint"), status.get("data_port")
    if not isinstance(endpoint, str) or not data:
        return None
    return endpoint.rpartition(":")[2], str(data)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _is_any(address: str) -> bool:
    return ipaddress.ip_address(address).is_unspecified


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _own(name: str, dtype: str) -> str:
    return dtype


def _names_of(model: torch.nn.Module) -> SourceMap:
    """From the model's own configuration if transformers made it."""
    if any(hasattr(m, "config") and hasattr(m, "save_pretrained") for m in model.modules()):
        try:
            return SourceMap.from_model(model)
        except ImportError:
            log.warning("transformers cannot be imported; names are taken as they are")
    return SourceMap()


def _stream_sources(stream: WeightSource) -> list[Source]:
    names = stream.held_names() if hasattr(stream, "held_names") else None
    held = None if names is None else set(names)
    out = []
    for name, dtype, shape in stream.metadata():
        kind = dtype if isinstance(dtype, torch.dtype) else torch_dtype(str(dtype).removeprefix("torch."))
        here = held is None or name in held
        share = placement.Share(
            name, tuple(shape), kind, (), placement._itself, gathered=here, reason="exported"
        )
        out.append(Source(name, None, [share]))
    return out


def _pieces(plan: Plan, stream: WeightSource | None) -> Iterable[tuple[planning.Target, torch.Tensor]]:
    """What torch copies: boxes and values, at most one gathered tensor at a time."""
    if stream is None:
        yield from planning.each_cast(plan, plan.casts)
        yield from planning.each_cast(plan, plan.gathered)
        return
    targets: dict[str, list[planning.Target]] = {}
    for cast in plan.gathered:
        targets.setdefault(plan.sources[cast.source].name, []).append(cast.target)
    known = {s.name: s.shares[0] for s in plan.sources}
    seen = set()
    for name, tensor in stream:
        if name not in known:
            raise WindlassInvalid(f"{name!r} was exported and is not in the source's metadata()")
        seen.add(name)
        if tensor is None:
            if known[name].gathered:
                raise WindlassInvalid(f"{name!r} is among held_names() and came without a tensor")
            continue
        share = known[name]
        if tuple(tensor.shape) != share.shape or tensor.dtype != share.dtype:
            raise WindlassInvalid(
                f"{name!r} came as {dtype_name(tensor.dtype)} {list(tensor.shape)}; metadata() said "
                f"{dtype_name(share.dtype)} {list(share.shape)}"
            )
        whole = tensor.detach().contiguous()
        for target in targets.get(name, []):
            if target is not planning._NOTHING:
                yield target, planning.taken(whole, target)
    missing = [name for name, share in known.items() if share.gathered and name not in seen]
    if missing:
        raise WindlassInvalid(f"{len(missing)} tensors of metadata() did not come, first {missing[0]!r}")


def _everything(plan: Plan, stream: WeightSource | None) -> Iterable[tuple[planning.Target, torch.Tensor]]:
    """All that this rank writes, also what Rust copies."""
    if stream is None:
        for source in plan.sources:
            for share, targets in zip(source.shares, source.targets, strict=True):
                if not share.gathered:
                    for target in targets:
                        yield target, planning.taken(share.fetch(source.given), target)
        yield from planning.each_cast(plan, plan.gathered)
    else:
        yield from _pieces(plan, stream)


def _copy(into: torch.Tensor, values: torch.Tensor) -> None:
    try:
        into.copy_(values, non_blocking=True)
    except (NotImplementedError, RuntimeError):
        if into.dtype != values.dtype:
            raise
        # A dtype that torch can hold and not copy.
        into.view(torch.uint8).copy_(values.contiguous().view(torch.uint8))


def _same(there: torch.Tensor, values: torch.Tensor) -> bool:
    """Bit by bit: signed zeros and NaNs are bits like any others."""
    mine = values.to("cpu", there.dtype).contiguous()
    if mine.dim() == 0:
        mine, there = mine.reshape(1), there.reshape(1)
    return torch.equal(mine.view(torch.uint8), there.contiguous().view(torch.uint8))


def _addresses(plan: Plan) -> list[int]:
    """Where the memory of each copy is now."""
    out: list[int] = []
    sources = plan.sources
    for index, offsets in plan.addresses:
        source = sources[index]
        local = source.shares[0].fetch(source.given)
        if (local.shape, local.stride()) != source.form:
            raise WindlassInvalid(
                f"the local memory of {source.name!r} has another shape or other strides than when the first version "
                "was offloaded; call resume() after changing how a model is placed"
            )
        address = local.data_ptr()
        if len(offsets) == 1:
            out.append(address + offsets[0])
        else:
            out.extend(address + offset for offset in offsets)
    return out


def _follow(plan: Plan, given: Iterable[tuple[str, Any]]) -> None:
    """Sees that the same parameters came, and takes new objects where there are new ones."""
    sources = plan.sources
    count = 0
    for index, (name, tensor) in enumerate(given):
        if index >= len(sources):
            raise WindlassInvalid(f"parameter {name!r} was not there when the first version was offloaded")
        source = sources[index]
        if tensor is not source.given or name != source.name:
            planning.rebind(plan, index, name, tensor)
        count += 1
    if count != len(sources):
        raise WindlassInvalid(f"parameter {sources[count].name!r} is missing; it was there before")
