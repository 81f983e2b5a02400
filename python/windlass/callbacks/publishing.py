"""The steps of a training loop as versions.

Owns: :class:`Publishing`, which decides after which steps a version is published, numbers it, and ends with the training. Called by
the callbacks, on every rank. Must not: know a training library.

The number of a version is the number of optimizer steps before it. A training that goes back, to a checkpoint or to its beginning,
publishes under a new incarnation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import TYPE_CHECKING, Any

from windlass.errors import WindlassError, WindlassInvalid, WindlassNotFound
from windlass.publish.announce import AgentClient
from windlass.publish.manager import WeightManager

if TYPE_CHECKING:
    import torch

    from windlass.publish.manager import Offloaded

__all__ = ["DRAIN_S", "Publishing", "missing"]

log = logging.getLogger("windlass")

#: How long receivers may take at the end to fetch the last version.
DRAIN_S = 10.0


class Publishing:
    """Publishes every ``every``-th step. ``options`` are those of :class:`windlass.WeightManager`, or ``manager`` is one that the
    caller closes. ``drain`` is how many seconds receivers have at the end to fetch the last version."""

    def __init__(
        self, every: int, manager: WeightManager | None, drain: float, options: Mapping[str, Any]
    ) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise WindlassInvalid(f"every is {every!r}: expected a number of optimizer steps, 1 or more")
        if isinstance(drain, bool) or not isinstance(drain, (int, float)) or not drain >= 0:
            raise WindlassInvalid(f"drain is {drain!r}: expected seconds, 0 or more")
        if manager is None:
            # Refuses options that are wrong now, and not after the first step. The one that publishes is made by the process that
            # trains, which may be a child of this one.
            WeightManager(**options)
        elif options:
            raise WindlassInvalid(f"give a manager or its options ({', '.join(sorted(options))}), not both")
        self.manager = manager
        self._every, self._drain, self._options = every, drain, dict(options)
        self._owned = manager is None
        #: The steps so far, the one that was published last, and whether weights may have changed since.
        self._step = 0
        self._last = None if manager is None else manager.version
        self._changed = False
        self._announced: Future[Any] | None = None

    def begin(self, step: int) -> None:
        """A training begins, or goes on, after ``step`` steps."""
        if self.manager is None:
            self.manager = WeightManager(**self._options)
        if self._last is not None and step < self._last:
            self._go_back(step)
        self._step, self._changed = step, False

    def stepped(
        self, model: torch.nn.Module, step: int, *, changed: bool = True, last: bool = False
    ) -> Offloaded | None:
        """The training has made ``step`` steps. ``changed`` is whether the newest one changed weights, ``last`` whether it is known
        to be the last. What was published, if it was the turn of a version."""
        due = last or step // self._every > self._step // self._every
        self._changed |= changed and step > self._step
        self._step = step
        return self._publish(model) if due and self._changed else None

    def finish(self, model: torch.nn.Module | None) -> Offloaded | None:
        """The training has ended well: publishes what ``model`` has become since the last version, waits until receivers have it,
        and closes the manager."""
        if self.manager is None:
            return None
        done = None
        if model is not None and self._changed:
            done = self._publish(model)
        try:
            self._flush(self.manager)
        except (WindlassError, OSError) as e:
            # What was trained is still to be saved by the program.
            log.warning("the last version may not have reached its receivers: %s", e)
        self.close()
        return done

    def close(self) -> None:
        """Closes the manager, unless it is the caller's. Again is nothing."""
        manager, self._changed, self._announced = self.manager, False, None
        if self._owned and manager is not None:
            self.manager = self._last = None
            manager.close()

    def _publish(self, model: torch.nn.Module) -> Offloaded:
        manager, version = self.manager, self._step
        if manager is None:
            raise WindlassInvalid(
                f"step {version} cannot be published: the callback was closed, or did not see the training begin",
                "add the callback before the training begins",
            )
        if self._last is not None and version <= self._last:
            self._go_back(version)
        try:
            done = manager.offload(model, version)
            if manager.config.controller:
                self._announced = manager.notify_version_async(version)
                self._announced.add_done_callback(_heard)
        except BaseException:
            self.close()
            raise
        self._last, self._changed = version, False
        return done

    def _go_back(self, step: int) -> None:
        assert self.manager is not None
        log.info(
            "%s: the training is at step %d and version %s was published: a new incarnation begins",
            self.manager.config.model_id,
            step,
            self._last,
        )
        self.manager.resume()
        self._last = None

    def _flush(self, manager: WeightManager) -> None:
        """The last version is complete; if the manager ends now, receivers are given time to fetch it."""
        version = manager.version
        if version is None or not manager.config.agent.enabled:
            return
        manager.wait_delta_ready(version)
        if self._announced is not None:
            wait_for([self._announced], timeout=manager.config.timeout)
        endpoint, token_file = manager.endpoint, manager.token_file
        if self._owned and self._drain and endpoint is not None and token_file is not None:
            agent = AgentClient(endpoint, token_file, manager.config.tls_ca)
            if not agent.wait_fetched(version, time.monotonic() + self._drain):
                log.warning(
                    "%s: not every receiver has fetched version %d, and the agent ends now; to serve on, give the callback a "
                    "manager of your own",
                    manager.config.model_id,
                    version,
                )


def missing(package: str, error: ImportError) -> WindlassNotFound:
    """The error of a class whose library is not there."""
    return WindlassNotFound(
        f"{package} cannot be imported: {error}", f"install it: pip install {package}", name="not_installed"
    )


def _heard(announced: Future[Any]) -> None:
    if not announced.cancelled() and (error := announced.exception()) is not None:
        log.warning("the controller was not told of a version: %s", error)
