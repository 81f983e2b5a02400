"""The trainer's side in one call.

Owns: :class:`WeightManager`, which publishes a model's weights version by version: it agrees with the other ranks
once (:mod:`windlass.plan`), makes the region, keeps an agent running beside it, and writes this rank's share of each
version. Called by training loops. Must not: know how an engine loads.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from windlass import placement
from windlass import plan as planning
from windlass._windlass import Copies, Publisher
from windlass.announce import ASK_S, AgentClient, Announcer
from windlass.config import WeightManagerConfig
from windlass.controller import Notified, Served
from windlass.derived import derive, refresh
from windlass.errors import (
    WindlassError,
    WindlassInvalid,
    WindlassNotFound,
    WindlassStale,
    WindlassTimeout,
    WindlassUnsupported,
)
from windlass.exchange import Alone, Exchange, exchange_for, together
from windlass.given import (
    WeightSource,
    buffers_of,
    copy,
    everything,
    is_same,
    names_of,
    pieces,
    stream_sources,
)
from windlass.leave import end, kept, nothing, ports_of, remove, restore
from windlass.memory import flat
from windlass.merged import Adapted, Merged, Merging, adapters_of, is_trained, merge
from windlass.names import (
    SCHEMES,
    AsTheyAre,
    DtypeRules,
    Selection,
    SourceMap,
    checkpoint_layout,
    quantization_config,
)
from windlass.names.quantised import scales_among
from windlass.on_gpu import OnGpu, can_compare, find
from windlass.plain import numbers
from windlass.plan import Naming, Plan, Source
from windlass.request import Identity

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Self

    from windlass._windlass import Gpu, Held
    from windlass.supervise import AgentSupervisor

__all__ = ["Offloaded", "WeightManager", "WeightSource"]

log = logging.getLogger("windlass")

#: How long the first rank waits at the end for the others to leave the region.
LEAVE_S = 5.0
#: How many versions in a row may have the same bytes before it is said.
SAME = 3
#: How long another rank's region may take to be let go of by a trainer that has just died.
TAKE_S = 10.0


@dataclass(frozen=True)
class Offloaded:
    """A committed version, and what this rank did for it."""

    version: int
    #: Which life of the publisher; 0 on a rank that only takes part in the gathering.
    incarnation: int
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
    #: "copy" if the version is committed; "delta" if it is handed out, and its slot follows in the background.
    mode: str = "copy"

    def metrics(self, prefix: str = "windlass/offload_") -> dict[str, float]:
        """What a logger such as wandb or TensorBoard plots: numbers by flat names.

        >>> Offloaded(7, 1, 2048, 0.5, 3.0, 0.25).metrics()["windlass/offload_copy_ms"]
        3.0
        """
        return numbers(prefix, self, ("version", "bytes", "wait_ms", "copy_ms", "commit_ms"))


@dataclass
class _Open:
    """Everything that exists once the first version is under way."""

    plan: Plan
    publisher: Publisher | None
    copies: Copies | None
    place: int
    threads: int
    exchange: Exchange
    #: Whether it was made for a :class:`WeightSource`.
    exported: bool
    #: What is on a GPU.
    gpu: OnGpu | None = None
    #: Whether versions may be handed out by delta.
    deltas: bool = False
    #: Adapters that are merged into what is published.
    merging: Merging | None = None


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
    name will not do. ``controller_token`` is the secret of the configured controller, if that is in no file.
    """

    def __init__(
        self,
        config: WeightManagerConfig | None = None,
        *,
        names: SourceMap | None = None,
        group: dist.ProcessGroup | None = None,
        node: str | None = None,
        controller_token: str | None = None,
        **fields: Any,
    ) -> None:
        if config is None:
            config = WeightManagerConfig.from_dict(fields)
        elif fields:
            raise WindlassInvalid(f"give a config or its fields ({', '.join(fields)}), not both")
        elif isinstance(config, Mapping):
            config = WeightManagerConfig.from_dict(config)
        elif not isinstance(config, WeightManagerConfig):
            raise WindlassInvalid(
                f"config is {config!r}: expected a WeightManagerConfig; a model's name is model_id={config!r}"
            )
        if names is not None and not (hasattr(names, "views") and hasattr(names, "written")):
            raise WindlassInvalid(
                f"names is {names!r}: expected a SourceMap, such as SourceMap.from_model(model) or "
                'SourceMap().rename(r"^actor\\.", "")'
            )
        if isinstance(group, (bool, str, int)):
            raise WindlassInvalid(
                f"group is {group!r}: expected a process group of torch, or None for the default one"
            )
        self.config = config
        self._names = names
        #: From the model, where no names were given; and its buffers that belong to the image.
        self._found: SourceMap | AsTheyAre | None = None
        self._buffers: frozenset[str] = frozenset()
        self._adapted: Adapted | None = None
        self._group = group
        self._node = node or socket.gethostname()
        self._pid = os.getpid()
        self._open: _Open | None = None
        self._rank: tuple[int, int] | None = None
        self._agent: AgentSupervisor | None = None
        #: What the next agent takes over: its ports, and the region's token.
        self._ports: tuple[str, str] | None = None
        self._token: tuple[bytes, int] | None = None
        self._complaint: object = None
        #: The digests of the last versions that were seen sealed, and whether it was said that they are the same.
        self._digests: dict[int, str] = {}
        self._warned = False
        self._announcer = Announcer(config, controller_token)
        self._closed = False
        self._end: weakref.finalize[Any, Any] = weakref.finalize(self, nothing)

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

        With ``offload_mode="delta"`` it returns when this rank's share is taken, after the first version: what changed is
        handed out and the slot written in the background. An error of that is raised by the next call.

        ``named_parameters`` is a model, an iterable of (name, tensor), a mapping, or a :class:`WeightSource`. Of a model with
        LoRA adapters, the merged weights are published, and the model stays as it is; see ``lora`` of the config. Weights
        must not change until the call returns. Versions only grow; offloading the newest one again with the same
        bytes does nothing, and with others is an error. If any rank fails or dies, all of them get an error within
        ``timeout`` (by default the config's), and the version before goes on being served.
        """
        timeout = self._seconds(timeout)
        if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version < 1 << 64:
            raise WindlassInvalid(f"version {version!r} is not an integer from 0 to 2**64 - 1")
        until = time.monotonic() + timeout
        rank, world_size = self._who(rank, world_size)
        if self._open is None:
            self._open, stream = self._prepare(named_parameters, rank, world_size, until)
            return self._publish(self._open, None, stream, version, until)
        given, stream = self._given(named_parameters)
        return self._publish(self._open, given, stream, version, until)

    def prepare(self, named_parameters: Any, rank: int | None = None, world_size: int | None = None) -> None:
        """Agrees with the other ranks, makes the region and starts the agent, without publishing anything yet."""
        rank, world_size = self._who(rank, world_size)
        if self._open is None:
            until = time.monotonic() + self.config.timeout
            self._open, _ = self._prepare(named_parameters, rank, world_size, until)

    # What follows a version.

    def wait_delta_ready(self, version: int | None = None, timeout: float | None = None) -> str:
        """Waits until the agent has sealed ``version`` (the newest if not given), and returns its digest.

        Where several hosts publish, the digest is that of this host's part.
        """
        publisher = self._published("wait for")
        until = time.monotonic() + self._seconds(timeout)
        publisher.settle(_left(until))
        newest = publisher.newest()
        if version is None:
            if newest is None:
                raise WindlassNotFound("nothing was offloaded yet")
            version = newest[0]
        return self._wait_sealed(publisher, version, _left(until))

    def notify_version(
        self,
        version: int | None = None,
        *,
        sync: bool = False,
        eval: Any = None,
        timeout: float | None = None,
    ) -> Notified | None:
        """Tells the controller that ``version`` (the newest if not given) is there, and returns its answer.

        With :attr:`~windlass.controller.Notified.wait` in the answer the trainer is too far ahead of what is served and
        should wait at the gate (:func:`windlass.gate`) before it publishes more. Waits until the agent hands the version out,
        and with ``sync`` until it is served. With ``eval``, plain data for whoever runs evals
        (:func:`windlass.serve_evals`), an eval is run on it then, and its result is in the answer.

        Only the first rank speaks; the others return ``None`` at once. So do all with ``controller=None`` in the
        configuration, where receivers ask the agent themselves; if nothing is said there, it is an error. ``timeout`` is
        the config's if not given, and for everything: give a synchronous notify the time that the load and the eval need.
        """
        speak = self._announcement(version, timeout, sync, eval)
        return None if speak is None else speak()

    def notify_version_async(
        self,
        version: int | None = None,
        *,
        sync: bool = False,
        eval: Any = None,
        timeout: float | None = None,
    ) -> Future[Notified | None]:
        """:meth:`notify_version` in the background. The future carries the answer or the error."""
        return self._announcer.in_background(self._announcement(version, timeout, sync, eval))

    def gate(self, version: int, *, timeout: float | None = None) -> Served | None:
        """Waits until at least ``version`` of this life of the trainer is served, and returns what is served.

        Any rank may call it. With ``controller=None`` in the configuration there is nothing to wait for, and it returns
        ``None``; if nothing is said there, it is an error. ``timeout`` is the config's if not given. See
        :meth:`windlass.Controller.gate`.
        """
        self._check_usable()
        seconds, there = self._seconds(timeout), self._announcer.controller()
        if there is None:
            return None
        model_id = self.config.model_id
        return there.gate(version, model_id=model_id, incarnation=self.incarnation, timeout=seconds)

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
    def incarnation(self) -> int | None:
        """Which life of the publisher this is, once it has begun."""
        publisher = None if self._open is None else self._open.publisher
        return None if publisher is None else int(publisher.incarnation, 16)

    @property
    def version(self) -> int | None:
        """The newest version that was committed, or handed out by delta."""
        publisher = None if self._open is None else self._open.publisher
        return None if publisher is None else publisher.newest_number

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
            "deltas": self._open is not None and self._open.deltas,
            "baseline": None if self._open is None or self._open.gpu is None else self._open.gpu.place(),
            "ways": None if self._open is None else dict(self._open.plan.reasons),
        }

    def quantization_config(self) -> dict[str, Any] | None:
        """The ``quantization_config`` that the ``config.json`` of an engine needs for what is published, once
        :meth:`prepare` or :meth:`offload` was called; ``None`` if nothing is quantised."""
        self._check_usable()
        if self._open is None:
            raise WindlassNotFound("what is published is not known yet: call prepare() or offload() first")
        table = self._open.plan.table
        return quantization_config({name: (dtype, shape) for name, (dtype, shape, _, _) in table.items()})

    # The end.

    def resume(self) -> None:
        """Begins a new life: the next version may be older than the last one, and receivers follow it.

        For a trainer that goes back to an older checkpoint without being restarted. All ranks call it.
        """
        self._check_usable()
        self._found, self._buffers, self._adapted = None, frozenset(), None
        self._digests, self._warned = {}, False
        self._announcer.forget()
        self._leave()

    def close(self) -> None:
        """Ends the agent, leaves the region, and removes it once all ranks have left."""
        if self._closed:
            return
        self._check_usable()
        self._closed = True
        self._announcer.close()
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        # In a forked child there is nothing to end.
        if os.getpid() == self._pid:
            self.close()

    # How it is done.

    def _who(self, rank: int | None, world_size: int | None) -> tuple[int, int]:
        """Which rank of how many; from the process group or torchrun's environment if not given."""
        self._check_usable()
        if rank is None or world_size is None:
            import torch.distributed as dist

            if dist.is_available() and dist.is_initialized():
                known = dist.get_rank(self._group), dist.get_world_size(self._group)
            else:
                known = _number("RANK", 0), _number("WORLD_SIZE", 1)
            rank = known[0] if rank is None else rank
            world_size = known[1] if world_size is None else world_size
        if (
            not isinstance(rank, int)
            or not isinstance(world_size, int)
            or not 0 <= rank < world_size < 1 << 16
        ):
            raise WindlassInvalid(
                f"there is no rank {rank!r} among {world_size!r}; ranks are integers below 65535 and count from 0"
            )
        if self._rank is not None and self._rank != (rank, world_size):
            raise WindlassInvalid(
                f"this was rank {self._rank[0]} of {self._rank[1]} and is now rank {rank} of {world_size}"
            )
        self._rank = (rank, world_size)
        return rank, world_size

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise WindlassUnsupported(
                f"this WeightManager belongs to process {self._pid}, and this is its forked child {os.getpid()}",
                'make a new one here, or start the child with the "spawn" method',
            )
        if self._closed:
            raise WindlassInvalid("this WeightManager is closed; make another one")

    def _seconds(self, timeout: float | None) -> float:
        """The configured deadline, unless another one is given."""
        if timeout is None:
            return self.config.timeout
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
            raise WindlassInvalid(f"a timeout of {timeout!r} makes no sense; give seconds, 0 or more")
        return timeout

    def _given(self, given: Any) -> tuple[Iterable[tuple[str, Any]] | None, WeightSource | None]:
        """What was given as pairs, or as a source that is asked for them."""
        if self.config.lora == "adapter":
            return self._adapter(given), None
        if isinstance(given, torch.nn.Module):
            if self._found is None:
                found = self._names or names_of(given)
                if self.config.lora == "merged":
                    self._adapted = adapters_of(given)
                    if self._adapted.saved is not None and hasattr(found, "with_saved_modules"):
                        found = found.with_saved_modules(self._adapted.saved)
                self._buffers = buffers_of(given, found, self.config.buffers)
                self._found = found
            elif self._open is not None and self._open.merging is not None:
                self._open.merging.follow(given)
            return placement.named_of(given, self._buffers), None
        if isinstance(given, Mapping):
            return given.items(), None
        if hasattr(given, "metadata") and hasattr(given, "__iter__"):
            return None, given
        if isinstance(given, (torch.Tensor, str, bytes)) or not hasattr(given, "__iter__"):
            raise planning.not_pairs(given)
        return given, None

    def _adapter(self, given: Any) -> Iterable[tuple[str, Any]]:
        """The adapter of a model, as a file of PEFT's has it; whole on every rank."""
        from windlass.lora import collect_lora

        if not isinstance(given, torch.nn.Module):
            raise WindlassInvalid(
                f'lora="adapter" is set, and offload() was given a {type(given).__name__}',
                "give offload() the model itself, which knows what belongs to its adapter",
            )
        tensors = collect_lora(given).tensors
        self._found = AsTheyAre({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        return tensors.items()

    def _prepare(
        self, named: Any, rank: int, world_size: int, until: float
    ) -> tuple[_Open, WeightSource | None]:
        exchange = exchange_for(rank, world_size, self._group)
        sources: list[Source] | Exception
        naming, stream, gpu, deltas = Naming(SourceMap(), frozenset, _own), None, None, False
        try:
            given, stream = self._given(named)
            sources = stream_sources(stream) if stream is not None else planning.describe_sources(given or ())
            naming = self._naming(sources)
            gpu = find(sources)
        except Exception as e:
            # The others are told before it is raised here.
            sources = e
        ordinal, merging = None if gpu is None else gpu.ordinal, None
        if self.config.lora == "merged" and stream is None:
            sources, naming, merging = merge(sources, naming, self._adapted, exchange, _left(until))
        if not SCHEMES.keys().isdisjoint(self.config.dtypes.values()):
            sources, naming = derive(sources, naming, exchange, ordinal, _left(until))
        try:
            mode, where = self.config.offload_mode, self.config.baseline
            if not isinstance(sources, Exception):
                deltas = mode == "delta" or (
                    mode == "auto" and can_compare(sources, gpu, naming.dtype, where)
                )
                for source in sources:
                    if deltas and isinstance(source.derived, Merged) and not source.spent:
                        source.derived.keep(ordinal)
        except Exception as e:
            sources = e
        plan = planning.make_plan(
            sources,
            naming,
            rank=rank,
            node=self._node,
            exchange=exchange,
            timeout=_left(until),
            by_rank=deltas,
            gpu=ordinal,
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
        cores = len(os.sched_getaffinity(0))
        threads = max(1, cores // max(1, len(here)))
        opened = _Open(plan, None, None, place, threads, exchange, stream is not None, merging=merging)
        try:
            self._join(opened, gpu, until)
        except BaseException:
            # The next call begins anew, on all ranks.
            self._abandon(opened)
            raise
        return opened, stream

    def _naming(self, sources: list[Source]) -> Naming:
        config = self.config
        stored = None if config.checkpoint is None else checkpoint_layout(config.checkpoint)
        dtypes = None if stored is None else {name: dtype for name, (dtype, _) in stored.items()}
        rules = DtypeRules(config.generator_dtype, config.dtypes, dtypes)
        selection = Selection(config.include, config.exclude, config.extras)

        names = self._found or self._names or SourceMap()
        known: Collection[str] | None = names.written() if stored is None else stored
        if rules.schemes and known is not None:
            # Scales come and go with their weights.
            known = frozenset(known) - scales_among(known)

        trained = {
            view.name
            for source in sources
            for index, share in enumerate(source.shares)
            if is_trained(source, index)
            for view in names.views(share.name, share.shape)
        }

        def keep(every: Iterable[str]) -> frozenset[str]:
            return frozenset(selection.choose(every, known, trained).kept)

        return Naming(names, keep, rules.dtype_of, rules)

    def _beyond(self) -> str | None:
        """The incarnation after the newest that the controller and its receivers know, if the clock is behind that.

        Lives are numbered by the clock, and by the region of the life before. Where the region is gone and the clock has
        gone back, nobody would follow a life that is older than what they have.
        """
        there = self._announcer.controller() if self.config.controller else None
        if there is None:
            return None
        try:
            status = there.status()
        except WindlassError as e:
            log.debug("%s: the controller does not say which lives it knows: %s", self.config.model_id, e)
            return None
        mine = self.config.model_id
        known = [t["incarnation"] for t in status["trainers"] if t["model_id"] == mine]
        held = [m for r in status["receivers"] for m in r["models"] if m["model_id"] == mine]
        known += [m["loaded"]["incarnation"] for m in held if m["loaded"] is not None]
        newest = max(known, default=0)
        return f"{newest + 1:x}" if newest >= time.time_ns() else None

    def _join(self, opened: _Open, gpu: Gpu | None, until: float) -> None:
        """The region of this host: made by its first writer, joined by the others. All ranks or none.

        On several hosts the first writer of all goes first: the others need its incarnation and its secret, and its
        agent must know where theirs are.
        """
        plan, place, exchange = opened.plan, opened.place, opened.exchange
        directory = Path(self.config.region_dir) / f"windlass-{self.config.model_id}"
        first, several = place == 0 and plan.host == 0, len(plan.hosts) > 1

        def make(incarnation: str | None) -> Publisher:
            opened.publisher = Publisher.create(
                directory,
                self.config.model_id,
                plan.layout,
                ranks=len(plan.hosts[plan.host or 0]),
                part=plan.part,
                incarnation=incarnation,
                group=self.config.group_readable,
                memfd=self.config.memfd,
                extra_bytes=self._room(plan),
                timeout=min(TAKE_S, _left(until)),
            )
            if opened.publisher.is_memfd:
                log.warning(
                    "%s: %s is too small for the region, which is in anonymous memory of this process instead (%s)",
                    self.config.model_id,
                    self.config.region_dir,
                    opened.publisher.report(),
                )
            return opened.publisher

        def begin() -> dict[str, str]:
            words = {"host": socket.gethostname()}
            if first:
                publisher = make(self._beyond())
                restore(Path(publisher.dir) / "token", self._token)
                words["incarnation"] = publisher.incarnation
                if several:
                    words["token"] = publisher.token()
                else:
                    self._serve(publisher, [])
            return words

        def follow() -> str | None:
            if place != 0 or first:
                return None
            publisher = make(begun["incarnation"])
            publisher.set_token(begun["token"])
            self._serve(publisher, [])
            return self.endpoint

        def enter() -> None:
            if place > 0:
                # Without a group the others find the region by its name and its layout.
                opened.publisher = Publisher.open(
                    directory,
                    plan.layout,
                    rank=place,
                    incarnation=begun.get("incarnation"),
                    timeout=_left(until),
                )
            if opened.publisher is not None:
                opened.copies = opened.publisher.plan(plan.copies)
                if plan.device is not None and gpu is not None:
                    opened.gpu = OnGpu(gpu, plan, opened.publisher)
                if plan.blocks is not None and self._can_compare(opened):
                    opened.publisher.deltas(plan.layout, plan.blocks, opened.threads)
                    opened.deltas = True

        said = together(exchange, begin, "make the region", _left(until))
        begun = said[plan.hosts[0][0]]
        if several:
            self._check_reachable({words["host"] for words in said})
            there = together(exchange, follow, "make the region of its host", _left(until))
            if first and opened.publisher is not None:
                self._serve(opened.publisher, [endpoint for endpoint in there if endpoint])
        together(exchange, enter, "join the region", _left(until))

    def _can_compare(self, opened: _Open) -> bool:
        """Whether this rank can tell what changed; says why not."""
        plan, gpu = opened.plan, opened.gpu
        if gpu is None:
            return True
        if plan.copies or plan.casts or plan.gathered:
            others = len(plan.copies) + len(plan.casts) + len(plan.gathered)
            why: str | None = f"{others} of its pieces are not on the GPU, or in no dtype that it can compare"
        else:
            demanded = self.config.offload_mode == "delta"
            why = gpu.keep(self.config.baseline, demanded=demanded, ranks=len(plan.hosts[plan.host or 0]))
        if why is None:
            return True
        if self.config.strict and self.config.offload_mode == "delta":
            raise WindlassUnsupported(
                f'strict and offload_mode="delta" are set, and this rank has to copy: {why}'
            )
        log.warning("%s: this rank publishes by copies: %s", self.config.model_id, why)
        return False

    def _room(self, plan: Plan) -> int:
        """What is kept free for deltas: no more of them than a whole image, which is as good."""
        if not self.config.agent.enabled:
            return 0
        return min(self.config.agent.history_bytes, plan.layout.data_bytes)

    def _check_agent(self) -> None:
        """Says once what keeps the agent from running: training goes on, and nobody would be served."""
        status = {} if self._agent is None else self._agent.status()
        error = None if status.get("running") else status.get("last_error")
        if error and error != self._complaint:
            log.warning(
                "%s: the agent does not run, and receivers get nothing until it does: %s",
                self.config.model_id,
                error,
            )
            self._complaint = error

    def _check_reachable(self, hosts: set[str]) -> None:
        if len(hosts) > 1 and self.config.agent.enabled and _is_loopback(self.config.agent.bind):
            raise WindlassInvalid(
                f"the weights are on {len(hosts)} hosts ({', '.join(sorted(hosts))}), and agents bound to "
                f"{self.config.agent.bind} cannot reach each other",
                'set agent.bind to an address of this host, or to "0.0.0.0"',
            )

    def _serve(self, publisher: Publisher, peers: list[str]) -> None:
        """Starts the agent of this host's region, and sees to its end."""
        self._start_agent(str(publisher.dir), peers)
        self._end = weakref.finalize(self, end, publisher, self._agent, os.getpid())

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
            tls_cert=self.config.tls_cert,
            tls_key=self.config.tls_key,
            tls_ca=self.config.tls_ca,
            history=agent.history,
            history_bytes=agent.history_bytes,
            check_every=agent.check_every,
            threads=agent.threads,
            streams=self.config.engine.streams,
            timeout=self.config.engine.timeout,
            peers=peers,
            log=agent.log,
        )

    def _publish(
        self,
        opened: _Open,
        given: Iterable[tuple[str, Any]] | None,
        stream: WeightSource | None,
        version: int,
        until: float,
    ) -> Offloaded:
        """``given`` is ``None`` right after the plan was made of it, and for a stream."""
        plan, publisher = opened.plan, opened.publisher
        if opened.exported != (stream is not None):
            raise WindlassInvalid(
                "the first version came from a WeightSource and this one does not, or the other way round; "
                "call resume() to change how weights are given"
            )
        if publisher is None:
            # Another host publishes; this rank only takes part in what is gathered.
            begun = time.monotonic()
            self._follow(opened, given, until)
            for _ in pieces(plan, stream):
                pass
            taken = (time.monotonic() - begun) * 1e3
            return Offloaded(version, 0, 0, 0.0, taken, 0.0)
        start = time.monotonic()
        # The version before may still be under way; its error is raised here.
        publisher.settle(_left(until))
        newest = publisher.newest()
        if newest is not None and version <= newest[0]:
            return self._again(opened, given, stream, version, newest[0], until)
        base = None if newest is None else newest[0]
        if base is not None:
            # Without waiting for it: a version that is not sealed yet is looked at by whoever waits for it.
            with contextlib.suppress(WindlassError):
                self._note(base, publisher.wait_sealed(base, 0.0))
        delta = opened.deltas and self._is_delta(opened, base, version, until)
        if not delta:
            publisher.begin(version, _left(until))
        elif opened.gpu is None:
            publisher.stage(version)
        try:
            # Whatever is wrong from here on ends the attempt, so that the other ranks need not wait.
            begun, size = time.monotonic(), plan.bytes
            self._follow(opened, given, until)
            addresses = planning.addresses(plan)
            if delta and opened.gpu is not None and base is not None:
                work = self.config.timeout
                size = opened.gpu.compare(plan, publisher, base, version, _left(until), work)
                copied = time.monotonic()
            else:
                if addresses and opened.copies is not None:
                    publisher.copy(opened.copies, addresses, opened.threads, _left(until))
                if opened.gpu is not None:
                    opened.gpu.copy(plan, publisher, version, _left(until))
                if plan.casts or plan.gathered:
                    self._write(plan, stream, publisher)
                copied = time.monotonic()
                if delta:
                    publisher.publish(self.config.timeout)
                else:
                    publisher.commit(_left(until), None if opened.gpu is None else opened.gpu.baseline)
        except BaseException:
            publisher.abort()
            raise
        ended = time.monotonic()
        self._announcer.offloaded(version, start, ended, size)
        self._check_agent()
        return Offloaded(
            version,
            int(publisher.incarnation, 16),
            size,
            (begun - start) * 1e3,
            (copied - begun) * 1e3,
            (ended - copied) * 1e3,
            mode="delta" if delta else "copy",
        )

    def _follow(self, opened: _Open, given: Iterable[tuple[str, Any]] | None, until: float) -> None:
        """The parameters of this call, and what is made of them."""
        plan = opened.plan
        if given is not None:
            planning.follow(plan, given)
        if opened.merging is not None:
            opened.merging.refresh(opened.exchange, _left(until))
        if plan.given < len(plan.sources):
            refresh(plan, opened.exchange, _left(until))

    def _is_delta(self, opened: _Open, base: int | None, version: int, until: float) -> bool:
        """Whether a version is handed out by what changed since the newest; says why not."""
        assert opened.publisher is not None
        why = opened.publisher.needs_copy(version, _left(until))
        if why is None and opened.gpu is not None:
            why = "nothing was published yet" if base is None else opened.gpu.why_copy(base)
        if why is not None:
            log.info("%s: version %d is copied: %s", self.config.model_id, version, why)
        return why is None

    def _write(self, plan: Plan, stream: WeightSource | None, publisher: Publisher) -> None:
        """What torch copies: casts, other devices, gathered tensors."""
        data = flat(publisher.slot())
        devices: set[torch.device] = set()
        try:
            for target, values in pieces(plan, stream):
                into = planning.placed(plan, data, target)
                if values.device.type != "cpu" and values.dtype != into.dtype:
                    # On the device, where it is cheap, and so that less crosses the bus.
                    values = values.to(into.dtype)
                if values.device.type != "cpu":
                    devices.add(values.device)
                copy(into, values)
        except RuntimeError as e:
            if isinstance(e, WindlassError):
                raise
            raise planning.lost("gathering or casting failed", e) from e
        for device in devices:
            torch.accelerator.synchronize(device)

    def _again(
        self,
        opened: _Open,
        given: Iterable[tuple[str, Any]] | None,
        stream: WeightSource | None,
        version: int,
        newest: int,
        until: float,
    ) -> Offloaded:
        """A version that is not newer: fine if it is the newest and the same."""
        publisher, plan = opened.publisher, opened.plan
        assert publisher is not None
        if version < newest:
            raise WindlassStale(
                f"version {version} is older than {newest}, which was published before: versions only grow",
                "call resume() first if the trainer went back to an older checkpoint",
            )

        def compare() -> bool:
            self._follow(opened, given, until)
            planning.addresses(plan)
            held: Held = publisher.hold(self.config.timeout)
            try:
                data = flat(held.memory())
                # All of it, also after a difference: other ranks may wait for what is gathered.
                same = [
                    is_same(planning.placed(plan, data, target), values)
                    for target, values in everything(plan, stream)
                ]
            finally:
                held.finish()
            return all(same)

        # Hosts that only help do not know that there is anything to compare.
        assert self._rank is not None
        everyone = sum(map(len, plan.hosts)) == self._rank[1]
        exchange = opened.exchange if everyone else Alone(1)
        same = together(exchange, compare, f"compare version {version}", _left(until))
        if not all(same):
            raise WindlassStale(
                f"version {version} was published before with other bytes; nothing was changed",
                "give the next version another number",
            )
        return Offloaded(version, int(publisher.incarnation, 16), 0, 0.0, 0.0, 0.0, new=False)

    def _published(self, what: str) -> Publisher:
        self._check_usable()
        if self._open is None:
            raise WindlassNotFound(f"there is nothing to {what}: call offload() first")
        if self._open.publisher is None:
            raise WindlassUnsupported(
                f"there is nothing to {what} on this host: rank {self._open.plan.hosts[0][0]} publishes on another one",
                "ask that rank",
            )
        return self._open.publisher

    def _about_agent(self) -> str:
        if self._agent is not None:
            status = self._agent.status()
            state = f"runs as pid {status['pid']}" if status["running"] else "does not run"
            said = f", last error: {status['last_error']}" if status["last_error"] else ""
            return f"the agent {state} after {status['restarts']} restarts{said}; its log is {status['log']}"
        if not self.config.agent.enabled:
            return "no agent was started, since agent.enabled is False; run `windlass agent` for the region"
        return "rank 0 has the agent and knows more"

    def _wait_sealed(self, publisher: Publisher, version: int, seconds: float) -> str:
        try:
            digest = publisher.wait_sealed(version, seconds)
        except WindlassTimeout as e:
            raise WindlassTimeout(f"{e}: {self._about_agent()}", e.advice) from e
        self._announcer.sealed(version)
        self._note(version, digest)
        return digest

    def _note(self, version: int, digest: str) -> None:
        """Warns when versions stay the same: what is trained may not be what is published."""
        if version in self._digests:
            return
        self._digests[version] = digest
        last = dict(sorted(self._digests.items())[-SAME:])
        self._digests = last
        if len(last) < SAME or len(set(last.values())) > 1:
            self._warned = False
        elif not self._warned:
            self._warned = True
            log.warning(
                "%s: versions %s have the same bytes: see whether the optimizer steps, and whether the model that is "
                "offloaded is the one that is trained",
                self.config.model_id,
                ", ".join(map(str, last)),
            )

    def _announcement(
        self, version: int | None, timeout: float | None, sync: bool, eval: Any
    ) -> Callable[[], Notified] | None:
        """What tells the controller, if this rank is to tell it anything.

        Once the version is sealed: before that nobody can have it.
        """
        self._check_usable()
        agent, opened, token_file = self._agent, self._open, self.token_file
        if opened is not None:
            if self._announcer.controller() is None or opened.plan.host != 0 or opened.place != 0:
                return None
            if agent is None:
                raise WindlassUnsupported(
                    "there is a controller and no agent that receivers could be sent to, since agent.enabled is False",
                    "enable the agent, or tell the controller where it is with Controller.notify_version()",
                )
        publisher, newest = self._published("announce"), self.version
        if newest is None:
            raise WindlassNotFound("there is nothing to announce: nothing was offloaded yet")
        version = newest if version is None else version
        if version > newest:
            # Engines would wait for it, and nothing older would be served.
            raise WindlassInvalid(f"version {version} was not offloaded; the newest is {newest}")
        assert agent is not None and opened is not None and token_file is not None
        seconds, named, plan = self._seconds(timeout), version, opened.plan
        identity = Identity(self.config.model_id, int(publisher.incarnation, 16), named)

        def speak() -> Notified:
            until = time.monotonic() + seconds
            ask = AgentClient(agent.endpoint(seconds), token_file, self.config.tls_ca)
            if opened.deltas:
                if not ask.wait_served(named, until):
                    raise WindlassTimeout(f"version {named} is not served yet: {self._about_agent()}")
                self._announcer.sealed(named)
            else:
                # One that was overtaken meanwhile is in the agent's history.
                with contextlib.suppress(WindlassStale):
                    self._wait_sealed(publisher, named, _left(until))
            where = functools.partial(agent.endpoint, ASK_S)
            size = plan.layout.data_bytes
            return self._announcer.tell(identity, ask, where, size, sync=sync, eval=eval, until=until)

        return speak

    def _leave(self) -> None:
        opened, self._open = self._open, None
        self._announcer.leave()
        self._end.detach()
        agent, self._agent = self._agent, None
        if opened is not None and opened.publisher is not None and opened.deltas:
            # The last version is given the time that others need to leave.
            try:
                opened.publisher.settle(LEAVE_S)
            except WindlassError as e:
                log.warning("%s: the last version was not committed: %s", self.config.model_id, e)
        try:
            if agent is not None:
                # Receivers that follow know this address and this secret.
                self._ports = ports_of(agent.status()) or self._ports
                if opened is not None and opened.publisher is not None:
                    self._token = kept(Path(opened.publisher.dir) / "token") or self._token
                agent.stop()
        finally:
            if opened is not None and opened.publisher is not None:
                if opened.place == 0:
                    remove(opened.publisher, LEAVE_S)
                else:
                    opened.publisher.close()

    def _abandon(self, opened: _Open) -> None:
        """Undoes what was opened before it failed."""
        self._open = opened
        try:
            self._leave()
        except WindlassError as e:
            log.warning("%s: what was opened could not be closed: %s", self.config.model_id, e)


def _number(variable: str, default: int) -> int:
    """A number of torchrun's environment."""
    text = os.environ.get(variable, str(default))
    try:
        return int(text)
    except ValueError:
        raise WindlassInvalid(f"the environment has {variable}={text!r}, which is no number") from None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _is_any(address: str) -> bool:
    return ipaddress.ip_address(address).is_unspecified


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _own(name: str, dtype: str) -> str:
    return dtype
