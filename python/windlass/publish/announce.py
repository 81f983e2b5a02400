"""What a trainer tells its controller of a version.

Owns: :class:`Announcer`, what is known of the last version and the one who is told, also in the background and again after
the controller was restarted; and :class:`AgentClient`, the questions that a trainer has for its own agent. Called by
:class:`windlass.WeightManager`. Must not: decide which rank speaks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from windlass import _windlass
from windlass.controller import Controller, Notified, Reminder, Span
from windlass.errors import WindlassDenied, WindlassError, WindlassInvalid, WindlassTimeout
from windlass.http import HttpClient, trusted

if TYPE_CHECKING:
    from windlass.config import WeightManagerConfig
    from windlass.identity import Identity

__all__ = ["ASK_S", "AgentClient", "Announcer"]

log = logging.getLogger("windlass")

#: How long the agent may take to say what its delta is like.
ASK_S = 2.0
#: How often the agent is asked how far it is.
LOOK_S = 0.05
#: A receiver that was not heard of for so long is not waited for: one that follows asks every ten seconds.
HEARD_S = 30.0


class AgentClient:
    """A trainer's questions to its own agent."""

    def __init__(self, endpoint: str, token_file: str, tls_ca: str | None) -> None:
        self.endpoint = endpoint
        self._token_file, self._tls_ca = token_file, tls_ca

    def _http(self) -> HttpClient:
        token = _windlass.read_token(Path(self._token_file))
        return HttpClient(self.endpoint, name="the agent", token=token, tls_ca=trusted(self._tls_ca))

    def wait_served(self, version: int, until: float) -> bool:
        """Waits until ``version`` is served, which may be before its slot is whole; whether it is."""
        query, agent = f"newer_than={version - 1}&" if version > 0 else "", self._http()
        while True:
            wait = min(10.0, max(0.0, until - time.monotonic()))
            path = f"/get_version?{query}timeout_ms={int(wait * 1e3)}"
            said = agent.get(path, stage="wait for the version", timeout=wait + ASK_S).object()
            newest = said.get("version")
            if isinstance(newest, int) and newest >= version:
                return True
            if time.monotonic() >= until:
                return False
            if not query:
                time.sleep(0.01)

    def wait_stored(self, version: int, until: float) -> int:
        """Waits until ``version`` or a later one is in the store; which."""
        agent = self._http()
        while True:
            said = (
                agent.get("/status", stage="ask about the store", timeout=ASK_S).object().get("store") or {}
            )
            newest, failure = said.get("version"), said.get("failure")
            if isinstance(newest, int) and newest >= version:
                return newest
            if said.get("fenced"):
                raise WindlassDenied(f"version {version} does not come to the store: {failure}")
            if time.monotonic() >= until:
                why = f"; the agent says: {failure}" if failure else ""
                raise WindlassTimeout(
                    f"version {version} is not in the store yet, which has {newest}{why}",
                    "give it more time: an upload takes the bytes of the image or of the delta over the bandwidth",
                )
            time.sleep(LOOK_S)

    def wait_fetched(self, version: int, until: float) -> bool:
        """Waits until every receiver that was heard of lately has fetched ``version`` and no transfer is open; whether it is so."""
        agent = self._http()
        while True:
            said = agent.get("/status", stage="ask about receivers", timeout=ASK_S).object()
            here = [r for r in said.get("instances", ()) if r.get("heard_seconds", 0.0) < HEARD_S]
            if not said.get("open_transfers") and all((r.get("version") or 0) >= version for r in here):
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(LOOK_S)

    def delta(self, version: int, image_bytes: int) -> dict[str, float]:
        """How much of the image the delta to a version changes and takes; nothing where the agent cannot say."""
        try:
            said = self._http().get("/get_capabilities", stage="ask about the delta", timeout=ASK_S).object()
        except (WindlassError, OSError) as e:
            log.debug("nothing is known about the delta to version %d: %s", version, e)
            return {}
        if not said.get("delta_ready") or said.get("delta_version") != version:
            return {}
        found = {
            "delta_sparsity": said.get("delta_sparsity"),
            "delta_ratio": (said.get("delta_size_bytes") or 0) / max(1, image_bytes),
        }
        return {name: float(value) for name, value in found.items() if value is not None}


class Announcer:
    """What one trainer tells its controller. ``token`` is the controller's secret, if that is in no file."""

    def __init__(self, config: WeightManagerConfig, token: str | None) -> None:
        self._config, self._token = config, token
        #: The last version that was offloaded here, when that began and ended, and bytes; and when it was seen to be sealed.
        self._offloaded: tuple[int, float, float, int] | None = None
        self._sealed: tuple[int, float] | None = None
        self._background: ThreadPoolExecutor | None = None
        self._reminder: Reminder | None = None
        #: What the controller was told of last.
        self._told: Identity | None = None

    def controller(self, timeout: float = 30.0) -> Controller | None:
        """The configured one."""
        url, file = self._config.controller, self._config.controller_token_file
        if url is None:
            return None
        if not url:
            raise WindlassInvalid(
                f"the trainer of {self._config.model_id!r} has no controller to tell or to ask",
                'give WeightManager(controller="http://host:port"), or controller=None if there is none on purpose',
            )
        file = file if self._token is None else None
        return Controller(
            url, token=self._token, token_file=file, tls_ca=self._config.tls_ca, timeout=timeout
        )

    def offloaded(self, version: int, began: float, ended: float, size: int) -> None:
        """Notes what it took to offload a version."""
        self._offloaded = (version, began, ended, size)

    def sealed(self, version: int) -> None:
        """Notes that a version is sealed, or served, when that is first seen."""
        if self._sealed is None or self._sealed[0] != version:
            self._sealed = (version, time.monotonic())

    def tell(
        self,
        identity: Identity,
        agent: AgentClient,
        where: Callable[[], str],
        image_bytes: int,
        *,
        sync: bool,
        eval: object,
        until: float,
    ) -> Notified:
        """Tells of a version that can be had from ``agent``. ``where`` says where that is by then, if the controller has to be
        told again."""
        there = self.controller()
        assert there is not None
        if self._reminder is None:
            self._reminder = Reminder(there)
        self._reminder.remember(identity, where)
        self._told = identity
        return there.notify_version(
            identity,
            agent.endpoint,
            sync=sync,
            eval=eval,
            timeout=max(0.0, until - time.monotonic()),
            spans=self._spans(identity.version),
            **agent.delta(identity.version, image_bytes),
        )

    def in_background(self, speak: Callable[[], Notified] | None) -> Future[Notified | None]:
        """Has it said by a thread of its own, one after the other."""
        if speak is None:
            done: Future[Notified | None] = Future()
            done.set_result(None)
            return done
        if self._background is None:
            self._background = ThreadPoolExecutor(1, thread_name_prefix="windlass-notify")
        return self._background.submit(speak)

    def leave(self) -> None:
        """What was noted is of a life that is over."""
        self._offloaded = self._sealed = None

    def forget(self) -> None:
        """The controller is not told again of what it was told."""
        if self._reminder is not None:
            self._reminder.forget()

    def close(self) -> None:
        """Ends what goes on in the background, and takes leave of the controller."""
        if self._background is not None:
            self._background.shutdown(wait=True, cancel_futures=True)
        if self._reminder is not None:
            self._reminder.close()
        told, self._told = self._told, None
        if told is None:
            return
        try:
            there = self.controller(timeout=ASK_S)
            if there is not None:
                there.trainer_left(told)
        except WindlassError as e:
            # It sees by itself, later, that nothing is heard from here.
            log.debug("the controller does not know that the trainer of %r has ended: %s", told.model_id, e)

    def _spans(self, version: int) -> list[Span]:
        """What it took to publish a version, as far as this rank knows."""
        if self._offloaded is None or self._offloaded[0] != version:
            return []
        _, began, ended, written = self._offloaded
        spans = [Span("trainer", "offload", began, ended, written)]
        if self._sealed is not None and self._sealed[0] == version:
            spans.append(Span("agent", "seal", ended, max(ended, self._sealed[1])))
        return spans
