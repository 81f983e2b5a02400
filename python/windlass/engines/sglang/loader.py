"""Weights into a running SGLang engine.

Owns: :class:`SGLangWeightLoader`, the order of calls by which weights come into one engine: look, check, pause, load,
flush, label, continue. Called by drivers on the engine's host, and by strategies whose receiver hands tensors to a loader.
Must not: fetch weights, or touch an engine before everything that can be checked was found right.

Three ways lead in; all of them end with the same weights:

| way | what crosses | needs | |
|---|---|---|---|
| ``custom`` | an order of a few hundred bytes; workers map the image | ``--custom-weight-loader windlass.sglang.custom.load`` | fastest |
| ``disk`` | the path of a directory that links the image | nothing | the engine's ``model_path`` becomes that directory |
| ``tensors`` | the weights, by value, once per TP rank | nothing | for engines on other hosts, and small models |

:meth:`~SGLangWeightLoader.load_image` takes the first of them that can be used; ``way`` names one instead.
:meth:`~SGLangWeightLoader.load_weights` always uses ``tensors``.

A failure before the first write lets the engine go on with the weights it had. After it the engine stays paused and the
loader is ``dirty`` until a whole load succeeds: generating from two versions would be worse than waiting. SGLang itself
ends when a tensor does not fit; that is why names, shapes and dtypes are compared with its checkpoint first
(:mod:`windlass.engines.sglang.served`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from windlass import _windlass
from windlass.engines.sglang import payload
from windlass.engines.sglang.custom import PATH, check_identity, shapes_of
from windlass.engines.sglang.engine import Facts, connect
from windlass.engines.sglang.gate import SHORT, Gate, Passage, Pause, left, must, short
from windlass.engines.sglang.reports import raise_worst, read_reports, reports_in, silence
from windlass.engines.sglang.served import Fit, Rules, Served, Shape
from windlass.errors import (
    WindlassCorrupt,
    WindlassError,
    WindlassInvalid,
    WindlassPeerLost,
    WindlassStale,
    WindlassUnsupported,
)
from windlass.load.order import LoadOrder, Report
from windlass.transfer.base import NamedTensors, WeightLoader, each_tensor

if TYPE_CHECKING:
    import torch

    from windlass._windlass import Held
    from windlass.transfer.request import BroadcastWeightUpdateRequest
    from windlass.transfer.sync_info import TorchDistributedWeightSyncInfo

__all__ = ["Loaded", "SGLangWeightLoader", "Way"]

log = logging.getLogger("windlass")

Way = Literal["custom", "disk", "tensors"]


@dataclass(frozen=True)
class Loaded:
    """One load that succeeded."""

    way: Way
    #: The label that the engine shows now.
    label: str | None
    #: How long the engine stood still, and how much of that the load itself took.
    pause_ms: float
    load_ms: float
    #: Names that the engine has no place for.
    extras: list[str] = field(default_factory=list)
    #: What the workers said of themselves (``custom`` only).
    reports: list[Report] = field(default_factory=list)


@dataclass
class _Part:
    """A version that is loaded in parts."""

    facts: Facts
    served: Served
    passage: Passage
    loaded: set[str] = field(default_factory=set)


class SGLangWeightLoader(WeightLoader):
    """Loads weights into one SGLang engine: a server by its URL, or an ``sglang.Engine`` in this process.

    >>> loader = SGLangWeightLoader("http://127.0.0.1:30000", api_key="...")               # doctest: +SKIP
    >>> loaded = await loader.load_image("/dev/shm/images/policy")                         # doctest: +SKIP
    >>> loaded.way, loaded.label                                                           # doctest: +SKIP
    ('custom', 'windlass:0000000000000001:7')

    - ``pause``: what happens to requests in flight. ``retract`` computes what they have so far anew and goes on with the
      new weights; ``abort`` ends them; ``in_place`` goes on with the cache they have, which then must be kept;
      ``wait`` lets them end first (way ``disk`` only).
    - ``cache``: whether the prefix cache is flushed (``reset``) or kept. A flush that is refused is an error.
    - ``extras``, ``optional``, ``cast``: see :class:`~windlass.engines.sglang.served.Rules`.
    - ``checkpoint``: what the engine was started from, where this host knows it by another path than the engine.
    - ``links``: where the directory for the way ``disk`` is made; beside the image if not given.
    - ``dir``: where the lock and the journal of the engine are; programs that load one engine must name the same.
    - ``timeout``: of a whole load. Every request has a deadline.

    Methods are coroutines whose work goes on in a thread; one load runs at a time.
    """

    def __init__(
        self,
        engine: object,
        *,
        name: str | None = None,
        api_key: str | None = None,
        checkpoint: str | Path | None = None,
        way: Literal["auto", "custom", "disk", "tensors"] = "auto",
        pause: Pause = "retract",
        cache: Literal["reset", "keep"] = "reset",
        extras: Literal["ignore", "error"] = "ignore",
        optional: Sequence[str] = (),
        cast: bool = False,
        links: str | Path | None = None,
        bucket_bytes: int = 256 << 20,
        timeout: float = 300.0,
        dir: str | Path | None = None,
    ) -> None:
        _choice("way", way, "auto", "custom", "disk", "tensors")
        _choice("pause", pause, "retract", "abort", "in_place", "wait")
        _choice("cache", cache, "reset", "keep")
        if pause == "in_place" and cache == "reset":
            raise WindlassInvalid(
                "pause='in_place' keeps requests in flight with the cache they have, so it cannot be flushed",
                "use pause='retract', or cache='keep' if stale prefixes are acceptable",
            )
        if pause == "wait" and way not in ("auto", "disk"):
            raise WindlassInvalid(
                f"pause='wait' goes with way='disk' only, not {way!r}: in between the calls of the other ways the "
                "engine would serve",
                "use pause='retract' or 'abort'",
            )
        if not timeout > 0 or bucket_bytes < 1:
            raise WindlassInvalid(f"timeout {timeout!r} and bucket_bytes {bucket_bytes!r} must be above zero")
        self._engine = connect(engine, name=name, api_key=api_key)
        self.gate = Gate(self._engine, pause, cache, timeout=timeout, dir=None if dir is None else Path(dir))
        self._checkpoint = None if checkpoint is None else str(checkpoint)
        self._way = way
        self._rules = Rules(extras, list(optional), cast)
        self._links = None if links is None else Path(links)
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._known: dict[str, Served] = {}
        self._listed: set[str] = set()
        self._part: _Part | None = None

    # What is known.

    @property
    def name(self) -> str:
        """What messages call the engine."""
        return self._engine.name

    @property
    def dirty(self) -> bool:
        """A load began and did not finish: the engine is paused until one does."""
        return self.gate.dirty

    async def weight_version(self) -> str | None:
        """The label of the weights that the engine serves."""
        return await asyncio.to_thread(self._engine.weight_version, timeout=SHORT)

    async def digests(self) -> list[dict[str, Any]]:
        """Sums of the weights that each worker holds, by tensor and box of the image, for those that are kept as they were
        loaded; the engine stands still meanwhile. ``windlass._windlass.combine_digests`` makes one digest of their
        ``parts``. Needs the loader in the workers."""
        return await asyncio.to_thread(self._digests)

    # Whole versions.

    async def load_image(
        self, order: Mapping[str, object] | LoadOrder | str | Path, *, way: str | None = None
    ) -> Loaded:
        """Loads the version that an order names from the image that it names, in place; or whatever version is in the
        image of that directory."""
        if isinstance(order, (str, Path)):
            return await asyncio.to_thread(self._load_image, str(order), None, way or self._way)
        read = order if isinstance(order, LoadOrder) else LoadOrder.from_dict(order)
        return await asyncio.to_thread(self._load_image, read.image, read, way or self._way)

    async def load_weights(self, named_tensors: NamedTensors) -> None:
        """Loads tensors by value. By itself this is a whole version: it is checked, the engine is paused, everything is
        loaded and the engine goes on. Inside :meth:`update` it is a part of one."""
        tensors = {
            name: tensor.detach().to("cpu", copy=True) async for name, tensor in each_tensor(named_tensors)
        }
        if self._part is not None:
            await asyncio.to_thread(self._load_part, self._part, tensors)
            return
        await asyncio.to_thread(self._load_tensors, tensors)

    @contextlib.asynccontextmanager
    async def update(
        self, *, weight_version: str | None = None, whole: bool = True
    ) -> AsyncIterator[SGLangWeightLoader]:
        """A version in parts: paused and open for :meth:`load_weights` and :meth:`receive_broadcast` inside the block.

        At its end every tensor of the checkpoint must have been loaded, unless ``whole`` is false. An error inside
        before the first part lets the engine go on with what it had; after it, the engine stays paused and ``dirty``.
        """
        if self.gate.pause == "wait":
            raise WindlassInvalid("pause='wait' cannot hold an engine for several parts; use another mode")
        until = time.monotonic() + self._timeout
        await asyncio.to_thread(self.gate.enter, until)
        try:
            part = await asyncio.to_thread(self._open, weight_version, until)
            self._part = part
            try:
                yield self
                if whole:
                    self._check_complete(part)
                await asyncio.to_thread(self.gate.end, until)
            except BaseException as e:
                self._part = None
                await asyncio.shield(asyncio.to_thread(self._abandon, part, e))
                raise
            self._part = None
            await asyncio.shield(asyncio.to_thread(self._pass, part))
        finally:
            self.gate.leave()

    # The way of a process group.

    async def join_group(
        self, info: TorchDistributedWeightSyncInfo, rank_offset: int, *, override: bool = False
    ) -> None:
        """Has the engine join an update group, while the sender joins; its ranks follow ``rank_offset``.

        With ``override`` a group of that name is left first: an engine stays in one whose trainer is gone.
        """
        if override:
            with contextlib.suppress(WindlassInvalid):
                await self.leave_group(info.group_name)
        body, route = info.joined_at(rank_offset), "init_weights_update_group"
        await asyncio.to_thread(must, self._engine, route, body, "join a group", self._timeout)

    async def leave_group(self, group_name: str) -> None:
        """Has the engine leave an update group."""
        body, route = {"group_name": group_name}, "destroy_weights_update_group"
        await asyncio.to_thread(must, self._engine, route, body, "leave a group", SHORT)

    async def receive_broadcast(
        self,
        request: BroadcastWeightUpdateRequest,
        *,
        group_name: str = "weight_update_group",
        packed: bool = False,
    ) -> None:
        """Has the engine receive what a request announces, and returns when it is loaded; inside :meth:`update`.

        The sender broadcasts meanwhile from rank 0: tensor by tensor, or all of them as one tensor of bytes if
        ``packed``. What does not fit the engine is refused before it listens.
        """
        part = self._part
        if part is None:
            raise WindlassInvalid(
                "a broadcast is received inside update(): the engine must be paused and open"
            )
        await asyncio.to_thread(self._receive, part, request, group_name, packed)

    # The work, in a thread.

    def _load_image(self, image: str, order: LoadOrder | None, way: str) -> Loaded:
        _choice("way", way, "auto", "custom", "disk", "tensors")
        timeout = self._timeout if order is None else order.timeout
        until = time.monotonic() + timeout
        with self.gate.alone(until):
            facts = self.facts(until)
            held = _windlass.open_image(image, timeout + SHORT, left(until))
            try:
                order = order or _order_of(image, held, timeout)
                check_identity(order, held)
                chosen, fit, why = self._choose(facts, order, held, way)
                self._list_extras(fit.extras)
                log.info("%s: %s by way of %s: %s", self.name, order.label, chosen, why)
                pause_ms, load_ms, reports = self._by(chosen, facts, order, held, fit, until)
            finally:
                # Whether it was taken back was asked before the engine went on.
                with contextlib.suppress(WindlassError):
                    held.finish()
            return Loaded(chosen, order.label, pause_ms, load_ms, fit.extras, reports)

    def _still_held(self, held: Held, order: LoadOrder) -> None:
        """What was read until now is one version; otherwise the engine must not go on."""
        try:
            held.renew(SHORT)
        except WindlassError as e:
            raise WindlassStale(
                f"{self.name}: the image was taken back while {order.label} was loaded from it: {e}",
                "load again, with more time (timeout in the order)",
            ) from e

    def _choose(self, facts: Facts, order: LoadOrder, held: Held, way: str) -> tuple[Way, Fit, str]:
        """Which way, what is loaded by it, and why that way. Everything is checked here."""
        served = self._served(facts)
        fit = served.check(shapes_of(held), self._rules, what=order.label)
        stored = {row[0] for row in held.layout().tensors()}
        # The file cannot leave anything out, and has tied tensors under one name only.
        surplus = sorted(stored - set(fit.take)) + sorted(
            name for name in set(fit.take) - stored if not (served.tied and name == "lm_head.weight")
        )
        able = facts.dp == 1 and self.gate.pause != "wait"
        if way in ("custom", "tensors") and not able:
            _check_replicas(self.name, facts)
            raise WindlassInvalid(f"pause='wait' goes with way='disk' only, not {way!r}")
        if way in ("custom", "auto") and PATH in facts.loaders and able:
            return "custom", fit, "the server has the loader"
        if way == "custom":
            raise WindlassUnsupported(
                f"{self.name} was started without --custom-weight-loader {PATH}",
                "start it with that flag, or use way='disk'",
            )
        if way == "tensors" or (way == "auto" and surplus and able):
            return "tensors", fit, f"the file cannot leave out {surplus[0]}" if surplus else "asked for"
        if surplus:
            raise WindlassUnsupported(
                f"{self.name}: {order.label} has {surplus[0]}, which the engine does not; reading the file it would "
                "meet it",
                f"start the server with --custom-weight-loader {PATH}, or leave the tensor out when publishing",
                "extra_tensor",
            )
        return "disk", fit, "asked for" if way == "disk" else "the server was started without the loader"

    def _by(
        self, way: Way, facts: Facts, order: LoadOrder, held: Held, fit: Fit, until: float
    ) -> tuple[float, float, list[Report]]:
        """How many milliseconds the engine stood still, how many of them the load took, and what the workers said."""
        if way == "disk":
            return *self._by_disk(facts, order, held, until), []
        begun = time.monotonic()
        if way == "tensors":
            from windlass.receive.receiver import Tensors

            tensors = Tensors(held)

            def each() -> Iterator[tuple[str, torch.Tensor]]:
                for name in fit.take:
                    yield name, tensors[name]
                self._still_held(held, order)

            self._by_value(facts, each(), order.label, until)
            took, reports = time.monotonic() - begun, list[Report]()
        else:
            # Workers hold the image themselves, and say if it was taken back.
            took, reports = self._by_order(facts, order, until)
        return (time.monotonic() - begun) * 1e3, took * 1e3, reports

    def _by_disk(self, facts: Facts, order: LoadOrder, held: Held, until: float) -> tuple[float, float]:
        directory = self._links or Path(order.image).with_name(Path(order.image).name + ".sglang")
        directory, checkpoint = directory.resolve(), Path(self._checkpoint or facts.checkpoint)
        model = checkpoint if checkpoint.is_dir() else None
        if self.gate.driver is not None and not self.gate.released:
            return self.gate.load(
                order.image, directory, label=order.label, model_dir=model, timeout=left(until)
            )
        # An engine in this process, or one that sleeps and is paused already.
        _windlass.link_model(directory, held.path, model)
        body = {
            "model_path": str(directory),
            "load_format": "safetensors",
            "flush_cache": False,
            "weight_version": order.label,
        }
        begun = time.monotonic()
        with self.gate.stopped(order.label, until) as passage:
            passage.touched()
            must(self._engine, "update_weights_from_disk", body, "load", left(until))
            self._still_held(held, order)
        paused = (time.monotonic() - begun) * 1e3
        return paused, paused

    def _by_order(self, facts: Facts, order: LoadOrder, until: float) -> tuple[float, list[Report]]:
        served = {**self._rules.to_dict(), "checkpoint": self._checkpoint}
        with (
            reports_in(Path(order.image).parent) as own,
            self.gate.stopped(order.label, until) as passage,
        ):
            # A directory of this order only: what is not there afterwards was not written.
            plain = {**order.to_dict(), "reports": own, "timeout": max(1.0, left(until) - 1.0)}
            if self.gate.dirty or self.gate.released:
                # Memory that was given up is other memory now: nothing of what it held is relied upon.
                plain["how"] = "session"
            begin = time.monotonic()
            with self.gate.open_for_weights(until):
                passage.touched()
                self._send_order({"order": plain, "served": served}, facts, until)
                took = time.monotonic() - begin
                reports = self._read_reports(own, facts.tp * facts.pp, order, passage)
        if order.reports is not None:
            for report in reports:
                report.write(order.reports)
        return took, reports

    def _digests(self) -> list[dict[str, Any]]:
        until = time.monotonic() + self._timeout
        with self.gate.alone(until), tempfile.TemporaryDirectory(prefix=".windlass-sums-") as own:
            facts = self.facts(until)
            _check_replicas(self.name, facts)
            if PATH not in facts.loaders:
                raise WindlassUnsupported(
                    f"{self.name} was started without --custom-weight-loader {PATH}",
                    "start it with that flag",
                )
            if self.dirty:
                # It would go on afterwards.
                raise WindlassInvalid(
                    f"{self.name} has weights of no version: a load began and did not finish",
                    "load a whole version first",
                )
            with self.gate.stopped(None, until, flush=False), self.gate.open_for_weights(until):
                self._send_order({"prove": own}, facts, until)
            found = [Path(own) / f"{rank}.json" for rank in range(facts.tp * facts.pp)]
            silent = [file.stem for file in found if not file.is_file()]
            if silent:
                raise WindlassPeerLost(
                    f"{self.name}: rank {silent[0]} wrote no sums",
                    "see the log of the engine; it must run on this host",
                )
            return [json.loads(file.read_text()) for file in found]

    def _send_order(self, told: Mapping[str, Any], facts: Facts, until: float) -> None:
        """One call of the loader in the workers."""
        text = payload.order({**told, "ends": self.gate.ends})
        body = {
            "serialized_named_tensors": self._engine.payloads(text, facts.tp),
            "load_format": PATH,
            "flush_cache": False,
            "selector": "target",
        }
        reply = self._engine.ask("update_weights_from_tensor", body, stage="load", timeout=left(until))
        if not reply.ok:
            raise WindlassCorrupt(f"{self.name}: its workers were not given the order: {reply.message}")

    def _read_reports(self, own: str, ranks: int, order: LoadOrder, passage: Passage) -> list[Report]:
        found, silent = read_reports(own, ranks)
        # Workers agree before they write: if none of them is dirty or at the new version, nothing was written.
        passage.touched(
            bool(silent) or any(report.state == "dirty" or report.error is None for report in found)
        )
        if silent:
            raise silence(self.name, silent[0], order.label)
        raise_worst(self.name, found)
        return found

    def _load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        until = time.monotonic() + self._timeout
        with self.gate.alone(until):
            facts = self.facts(until)
            offered = _offered(tensors)
            fit = self._served(facts).check(offered, self._rules, what=f"what {self.name} is given")
            self._list_extras(fit.extras)
            self._by_value(facts, ((name, tensors[name]) for name in fit.take), None, until)

    def _by_value(
        self,
        facts: Facts,
        tensors: Iterable[tuple[str, torch.Tensor]],
        label: str | None,
        until: float,
    ) -> None:
        if self.gate.pause == "wait":
            raise WindlassInvalid("pause='wait' cannot be used for weights by value; use another mode")
        _check_replicas(self.name, facts)
        with self.gate.stopped(label, until) as passage, self.gate.open_for_weights(until):
            self._send(passage, facts, tensors)

    def _send(self, passage: Passage, facts: Facts, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for group in payload.buckets(tensors, self._bucket_bytes):
            body = {
                "serialized_named_tensors": self._engine.payloads(payload.bucket(group), facts.tp),
                "load_format": payload.BUCKET,
                "flush_cache": False,
                "selector": "target",
            }
            passage.touched()
            reply = self._engine.ask(
                "update_weights_from_tensor", body, stage="load", timeout=left(passage.until)
            )
            if not reply.ok:
                raise WindlassCorrupt(f"{self.name}: weights were not loaded: {reply.message}")

    def _load_part(self, part: _Part, tensors: Mapping[str, torch.Tensor]) -> None:
        if not tensors:
            return
        fit = part.served.check(
            _offered(tensors), self._rules, what=f"what {self.name} is given", whole=False
        )
        self._list_extras(fit.extras)
        self._send(part.passage, part.facts, ((name, tensors[name]) for name in fit.take))
        part.loaded.update(fit.take)

    def _receive(
        self, part: _Part, request: BroadcastWeightUpdateRequest, group_name: str, packed: bool
    ) -> None:
        offered = {
            name: (dtype, tuple(shape))
            for name, dtype, shape in zip(request.names, request.dtypes, request.shapes)
        }
        fit = part.served.check(
            offered, Rules("error", [], self._rules.cast), what=f"what {self.name} is sent", whole=False
        )
        body = {
            "names": request.names,
            "dtypes": request.dtypes,
            "shapes": request.shapes,
            "group_name": group_name,
            "flush_cache": False,
            "selector": "target",
        }
        if packed:
            body["load_format"] = payload.BUCKET
        part.passage.touched()
        reply = self._engine.ask(
            "update_weights_from_distributed", body, stage="receive", timeout=left(part.passage.until)
        )
        if not reply.ok:
            raise WindlassCorrupt(f"{self.name}: the broadcast was not received: {reply.message}")
        part.loaded.update(fit.take)

    # Small things.

    def facts(self, until: float) -> Facts:
        """What the server says of itself."""
        return self._engine.facts(timeout=short(until))

    def _served(self, facts: Facts) -> Served:
        path = self._checkpoint or facts.checkpoint
        if path not in self._known:
            self._known[path] = Served.from_checkpoint(path)
        return self._known[path]

    def _open(self, label: str | None, until: float) -> _Part:
        facts = self.facts(until)
        _check_replicas(self.name, facts)
        served = self._served(facts)
        part = _Part(facts, served, self.gate.halt(label, until))
        try:
            self.gate.begin(until)
        except BaseException as e:
            self.gate.failed(part.passage, e)
            raise
        return part

    def _pass(self, part: _Part) -> None:
        try:
            self.gate.passed(part.passage)
        except BaseException as e:
            self.gate.failed(part.passage, e)
            raise

    def _abandon(self, part: _Part, error: BaseException) -> None:
        self.gate.give_up()
        self.gate.failed(part.passage, error)

    def _check_complete(self, part: _Part) -> None:
        missing = part.served.missing(part.loaded, self._rules)
        if missing:
            raise WindlassInvalid(
                f"{self.name} was not given {missing[0]}, and {len(missing) - 1} others of its checkpoint",
                "load a whole version again, or say whole=False if only a part changes",
                "missing_tensor",
            )

    def _list_extras(self, extras: Iterable[str]) -> None:
        new = sorted(set(extras) - self._listed)
        if new:
            self._listed.update(new)
            log.warning(
                "%s has no place for %d tensors, which are left out: %s",
                self.name,
                len(new),
                ", ".join(new[:20]),
            )


def _order_of(image: str, held: Held, timeout: float) -> LoadOrder:
    """The order to load what an image holds."""
    return LoadOrder(
        image=image,
        model_id=held.model_id,
        incarnation=int(held.incarnation, 16),
        version=held.version,
        digest=held.digest or "",
        timeout=timeout,
    )


def _offered(tensors: Mapping[str, torch.Tensor]) -> dict[str, Shape]:
    return {
        name: (_windlass.dtype_name(str(tensor.dtype)), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def _check_replicas(name: str, facts: Facts) -> None:
    if facts.dp > 1:
        # SGLang would answer with a failed assertion.
        raise WindlassUnsupported(
            f"{name} has {facts.dp} data-parallel replicas, which SGLang loads from disk only",
            "use way='disk'",
        )


def _choice(name: str, value: object, *allowed: str) -> None:
    if value not in allowed:
        raise WindlassInvalid(f"{name} is {value!r}: expected one of {', '.join(map(repr, allowed))}")
