"""The trainer's side in one call.

Owns: :class:`WeightManager`, which publishes a model's weights version by version: it agrees with the other ranks
once (:mod:`windlass.publish.division`), makes the region, keeps an agent running beside it, and writes this rank's share of each
version. Called by training loops. Must not: know how an engine loads.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass import trace
from windlass._windlass import Layout, Publisher
from windlass.config import WeightManagerConfig
from windlass.controller import Notified, Served
from windlass.errors import (
    WindlassError,
    WindlassInvalid,
    WindlassNotFound,
    WindlassStale,
    WindlassTimeout,
    WindlassUnsupported,
)
from windlass.exchange import agree_on_all_ranks, exchange_for
from windlass.identity import Identity
from windlass.names import SCHEMES, SourceMap, quantization_config
from windlass.publish.agent import about_agent, check_reachable, start_agent
from windlass.publish.announce import ASK_S, AgentClient, Announcer
from windlass.publish.derived import derive
from windlass.publish.gpu import OnGpu, can_compare, find
from windlass.publish.inputs import Inputs, Weights, WeightSource, stream_sources
from windlass.publish.merged import Merged, merge
from windlass.publish.offloading import Offloaded, Opened, SameBytes, left
from windlass.publish.plan import Plan, make_plan
from windlass.publish.sources import Naming, Source, describe_sources
from windlass.publish.teardown import end, kept, ports_of, remove, restore

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Self

    from windlass._windlass import Gpu
    from windlass.publish.supervise import AgentSupervisor

__all__ = ["Offloaded", "WeightManager", "WeightSource"]

log = logging.getLogger("windlass")

#: How long the first rank waits at the end for the others to leave the region.
LEAVE_S = 5.0
#: How long to wait for a dead trainer's region to be released.
TAKE_S = 10.0


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
        self._inputs = Inputs(config, names)
        self._group = group
        self._node = node or socket.gethostname()
        self._pid = os.getpid()
        self._open: Opened | None = None
        #: The empty region that :meth:`listen` made.
        self._empty: Publisher | None = None
        self._rank: tuple[int, int] | None = None
        self._agent: AgentSupervisor | None = None
        #: What the next agent takes over: its ports, and the region's token.
        self._ports: tuple[str, str] | None = None
        self._token: tuple[bytes, int] | None = None
        self._complaint: object = None
        self._same = SameBytes(config.model_id)
        self._announcer = Announcer(config, controller_token)
        self._closed = False
        self._end: weakref.finalize[Any, Any] | None = None

    # The one call.

    def offload(
        self,
        weights: Weights,
        version: int,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        timeout: float | None = None,
    ) -> Offloaded:
        """Publishes the weights as ``version``: returns when all ranks have written their share.

        With ``offload_mode="delta"`` it returns when this rank's share is taken, after the first version: what changed is
        handed out and the slot written in the background. An error of that is raised by the next call.

        ``weights`` is a model, an iterable of (name, tensor), a mapping, or a :class:`WeightSource`. Of a model with
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
            self._open, stream = self._prepare(weights, rank, world_size, until)
            return self._publish(self._open, None, stream, version, until)
        given, stream = self._inputs.pairs(weights, self._open.merging)
        return self._publish(self._open, given, stream, version, until)

    def prepare(self, weights: Weights, rank: int | None = None, world_size: int | None = None) -> None:
        """Agrees with the other ranks, makes the region and starts the agent, without publishing anything yet."""
        rank, world_size = self._who(rank, world_size)
        if self._open is None:
            until = time.monotonic() + self.config.timeout
            self._open, _ = self._prepare(weights, rank, world_size, until)

    def listen(self) -> str | None:
        """Starts the agent before anything is known of the weights, and returns its endpoint, which stays the same; its token is in
        :attr:`token_file`. For the first rank of a trainer that must name an address first.

        Until the first version the agent answers that there is none yet, and receivers wait for it.
        """
        self._check_usable()
        if self._open is None and self._empty is None and self.config.agent.enabled:
            self._empty = Publisher.create(
                self._directory,
                self.config.model_id,
                Layout([]),
                ranks=1,
                group=self.config.group_readable,
                timeout=TAKE_S,
            )
            self._serve(self._empty, [])
        return self.endpoint

    # What follows a version.

    def wait_delta_ready(self, version: int | None = None, timeout: float | None = None) -> str:
        """Waits until the agent has sealed ``version`` (the newest if not given), and returns its digest.

        Where several hosts publish, the digest is that of this host's part.
        """
        publisher = self._published("wait for")
        until = time.monotonic() + self._seconds(timeout)
        publisher.settle(left(until))
        newest = publisher.newest()
        if version is None:
            if newest is None:
                raise WindlassNotFound("nothing was offloaded yet")
            version = newest[0]
        return self._wait_sealed(publisher, version, left(until))

    def wait_stored(self, version: int | None = None, timeout: float | None = None) -> int:
        """Waits until the agent has uploaded ``version`` (the newest if not given) to the store, or a later one, and returns which
        one it is: if the trainer is faster than the upload, versions in between are left out."""
        publisher = self._published("wait for")
        if self.config.store is None:
            raise WindlassInvalid("there is no store to wait for", "name one: WeightManager(store=...)")
        until = time.monotonic() + self._seconds(timeout)
        publisher.settle(left(until))
        newest = publisher.newest_number if version is None else version
        if newest is None:
            raise WindlassNotFound("nothing was offloaded yet")
        agent, token_file = self._agent, self.token_file
        if agent is None or token_file is None:
            raise WindlassUnsupported("the agent that uploads is another rank's", "ask the first rank")
        ask = AgentClient(agent.endpoint(left(until)), token_file, self.config.tls_ca)
        return ask.wait_stored(newest, until)

    def notify_version(
        self,
        version: int | None = None,
        *,
        sync: bool = False,
        eval: object = None,
        timeout: float | None = None,
    ) -> Notified | None:
        """Tells the controller that ``version`` (the newest if not given) is there, and returns its answer.

        With :attr:`~windlass.controller.Notified.wait` in the answer the trainer is too far ahead of what is served and
        should wait at the gate (:func:`windlass.gate`) before it publishes more. Waits until the agent hands the version out,
        and with ``sync`` until it is served. With ``eval``, plain data for the process that runs evals
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
        eval: object = None,
        timeout: float | None = None,
    ) -> Future[Notified | None]:
        """:meth:`notify_version` in the background. The future carries the answer or the error."""
        return self._announcer.in_background(self._announcement(version, timeout, sync, eval))

    def gate(self, version: int, *, timeout: float | None = None) -> Served | None:
        """Waits until at least ``version`` of this incarnation of the trainer is served, and returns what is served.

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
        publisher = self._empty if self._open is None else self._open.publisher
        return None if publisher is None else str(publisher.dir)

    @property
    def incarnation(self) -> int | None:
        """The incarnation of the publisher, once it has begun; before, that of :meth:`listen`, which is lower."""
        publisher = self._empty if self._open is None else self._open.publisher
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
        """Begins a new incarnation: the next version may be older than the last one, and receivers follow it.

        For a trainer that goes back to an older checkpoint without being restarted. All ranks call it.
        """
        self._check_usable()
        self._inputs = Inputs(self.config, self._names)
        self._same = SameBytes(self.config.model_id)
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

    def _prepare(
        self, weights: Weights, rank: int, world_size: int, until: float
    ) -> tuple[Opened, WeightSource | None]:
        exchange = exchange_for(rank, world_size, self._group)
        sources: list[Source] | Exception
        naming, stream, gpu, deltas = Naming(SourceMap(), frozenset, _own), None, None, False
        try:
            given, stream = self._inputs.pairs(weights, None)
            sources = stream_sources(stream) if stream is not None else describe_sources(given or ())
            naming = self._inputs.naming(sources)
            gpu = find(sources)
        except Exception as e:
            # The others are told before it is raised here.
            sources = e
        ordinal, merging = None if gpu is None else gpu.ordinal, None
        if self.config.lora == "merged" and stream is None:
            sources, naming, merging = merge(sources, naming, self._inputs.adapted, exchange, left(until))
        if not SCHEMES.keys().isdisjoint(self.config.dtypes.values()):
            sources, naming = derive(sources, naming, exchange, ordinal, left(until))
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
        plan = make_plan(
            sources,
            naming,
            rank=rank,
            node=self._node,
            exchange=exchange,
            timeout=left(until),
            by_rank=deltas,
            slices=self.config.slices,
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
        opened = Opened(
            self.config.model_id,
            self.config.timeout,
            plan,
            None,
            None,
            place,
            threads,
            exchange,
            everyone=sum(map(len, plan.hosts)) == world_size,
            exported=stream is not None,
            merging=merging,
        )
        try:
            self._join(opened, gpu, until)
        except BaseException:
            # The next call begins anew, on all ranks.
            self._abandon(opened)
            raise
        return opened, stream

    def _beyond(self) -> str | None:
        """The incarnation after the newest that the controller and its receivers know, if the clock is behind that.

        The clock numbers incarnations, and so does the region of the one before. If the region is gone and the clock has gone
        back, no receiver would follow an incarnation that is older than its own.
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

    def _join(self, opened: Opened, gpu: Gpu | None, until: float) -> None:
        """The region of this host: made by its first writer, joined by the others. All ranks or none.

        On several hosts the first writer of all goes first: the others need its incarnation and its secret, and its
        agent must know where theirs are.
        """
        plan, place, exchange = opened.plan, opened.place, opened.exchange
        directory = self._directory
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
                timeout=min(TAKE_S, left(until)),
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
            if self._empty is not None and not first:
                raise WindlassUnsupported(
                    f"listen() was called on a rank whose agent receivers are not to ask: rank {plan.hosts[0][0]} is the first",
                    "call listen() there",
                )
            if first:
                if self._empty is not None:
                    self._end_agent(self._empty)
                    remove(self._empty, LEAVE_S)
                    self._empty = None
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
                    timeout=left(until),
                )
            if opened.publisher is not None:
                opened.copies = opened.publisher.plan(plan.copies)
                if plan.device is not None and gpu is not None:
                    opened.gpu = OnGpu(gpu, plan, opened.publisher)
                if plan.blocks is not None and self._can_compare(opened):
                    opened.publisher.deltas(plan.layout, plan.blocks, opened.threads)
                    opened.deltas = True

        said = agree_on_all_ranks(exchange, begin, "make the region", left(until))
        begun = said[plan.hosts[0][0]]
        if several:
            check_reachable(self.config, {words["host"] for words in said})
            there = agree_on_all_ranks(exchange, follow, "make the region of its host", left(until))
            if first and opened.publisher is not None:
                self._serve(opened.publisher, [endpoint for endpoint in there if endpoint])
        agree_on_all_ranks(exchange, enter, "join the region", left(until))

    def _can_compare(self, opened: Opened) -> bool:
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
        """Warns once if the agent does not run: training goes on, and receivers get nothing."""
        status = {} if self._agent is None else self._agent.status()
        error = None if status.get("running") else status.get("last_error")
        if error and error != self._complaint:
            log.warning(
                "%s: the agent does not run, and receivers get nothing until it does: %s",
                self.config.model_id,
                error,
            )
            self._complaint = error

    def _serve(self, publisher: Publisher, peers: list[str]) -> None:
        """Starts the agent of this host's region, and sees to its end."""
        agent = start_agent(self.config, str(publisher.dir), peers, self._ports)
        if agent is not None:
            self._agent = agent
        self._end = weakref.finalize(self, end, publisher, self._agent, os.getpid())

    def _publish(
        self,
        opened: Opened,
        given: Iterable[tuple[str, Any]] | None,
        stream: WeightSource | None,
        version: int,
        until: float,
    ) -> Offloaded:
        """``given`` is ``None`` right after the plan was made of it, and for a stream."""
        publisher = opened.publisher
        if opened.exported != (stream is not None):
            raise WindlassInvalid(
                "the first version came from a WeightSource and this one does not, or the other way round; "
                "call resume() to change how weights are given"
            )
        if publisher is None:
            return opened.help(given, stream, version, until)
        start = time.monotonic()
        # The version before may still be under way; its error is raised here.
        publisher.settle(left(until))
        newest = publisher.newest()
        if newest is not None and version <= newest[0]:
            return opened.again(given, stream, version, newest[0], until)
        base = None if newest is None else newest[0]
        if base is not None:
            # Without waiting for it: a version that is not sealed yet is noted by the call that waits for it.
            with contextlib.suppress(WindlassError):
                self._same.note(base, publisher.wait_sealed(base, 0.0))
        identity = Identity(self.config.model_id, int(publisher.incarnation, 16), version)
        try:
            done = opened.publish(given, stream, version, base, start, until)
        except BaseException as e:
            trace.record("windlass.publish", identity, time.monotonic() - start, {}, e)
            raise
        trace.record("windlass.publish", identity, time.monotonic() - start, done.attributes())
        self._announcer.offloaded(version, start, time.monotonic(), done.bytes)
        self._check_agent()
        return done

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

    def _wait_sealed(self, publisher: Publisher, version: int, seconds: float) -> str:
        try:
            digest = publisher.wait_sealed(version, seconds)
        except WindlassTimeout as e:
            raise WindlassTimeout(f"{e}: {about_agent(self.config, self._agent)}", e.advice) from e
        self._announcer.sealed(version)
        self._same.note(version, digest)
        return digest

    def _announcement(
        self, version: int | None, timeout: float | None, sync: bool, eval: object
    ) -> Callable[[], Notified] | None:
        """What tells the controller, if this rank is to tell it anything.

        Once the version is sealed: before that no receiver can have it.
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
                    raise WindlassTimeout(
                        f"version {named} is not served yet: {about_agent(self.config, self._agent)}"
                    )
                self._announcer.sealed(named)
            else:
                # One that was overtaken meanwhile is in the agent's history.
                with contextlib.suppress(WindlassStale):
                    self._wait_sealed(publisher, named, left(until))
            where = functools.partial(agent.endpoint, ASK_S)
            size = plan.layout.data_bytes
            return self._announcer.tell(identity, ask, where, size, sync=sync, eval=eval, until=until)

        return speak

    @property
    def _directory(self) -> Path:
        return Path(self.config.region_dir) / f"windlass-{self.config.model_id}"

    def _end_agent(self, publisher: Publisher | None) -> None:
        """Ends the agent of a region. The next one is found where it was: receivers that follow know its address and secret."""
        if self._end is not None:
            self._end.detach()
        agent, self._agent = self._agent, None
        if agent is not None:
            self._ports = ports_of(agent.status()) or self._ports
            if publisher is not None:
                self._token = kept(Path(publisher.dir) / "token") or self._token
            agent.stop()

    def _leave(self) -> None:
        opened, self._open = self._open, None
        self._announcer.leave()
        if opened is not None and opened.publisher is not None and opened.deltas:
            # The last version is given the time that others need to leave.
            try:
                opened.publisher.settle(LEAVE_S)
            except WindlassError as e:
                log.warning("%s: the last version was not committed: %s", self.config.model_id, e)
        publisher = self._empty if opened is None else opened.publisher
        try:
            self._end_agent(publisher)
        finally:
            self._empty = None
            if publisher is not None:
                if opened is None or opened.place == 0:
                    remove(publisher, LEAVE_S)
                else:
                    publisher.close()

    def _abandon(self, opened: Opened) -> None:
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


def _own(name: str, dtype: str) -> str:
    return dtype
