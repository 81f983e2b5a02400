"""What trainers, data loaders and eval runners say to the controller.

Owns: :class:`Controller`, one method for each thing that can be said, and what the answers mean; :func:`gate` and
:func:`serve_evals` for programs that say only one. :meth:`windlass.WeightManager.notify_version` speaks through it.
Must not: know torch, or keep anything between two calls: a controller may be restarted at any time.

- Every call has a deadline. Those that wait for something (a gate, a synchronous notify, an eval to run) are one request
  each, and are asked again until their time is over if the controller goes away meanwhile: it forgets who waited.
- What the controller refuses is raised as the exception of its kind: :class:`~windlass.WindlassTimeout` says what it was
  waiting for, :class:`~windlass.WindlassStale` that a newer incarnation has superseded whoever asks,
  :class:`~windlass.WindlassDenied` that the token is wrong.
- The URL is that of ``WINDLASS_CONTROLLER`` if none is given, the token that of ``WINDLASS_TOKEN``.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from windlass import _windlass
from windlass.errors import (
    WindlassError,
    WindlassExhausted,
    WindlassInvalid,
    WindlassNotFound,
    WindlassPeerLost,
    WindlassStale,
    WindlassTimeout,
)
from windlass.http import HttpClient, trusted
from windlass.identity import Identity

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Controller", "EvalTask", "Notified", "Served", "Span", "gate", "serve_evals"]

log = logging.getLogger("windlass")

T = TypeVar("T")

#: The environment variables that say where the controller is, and what it wants to hear.
URL_VARIABLE, TOKEN_VARIABLE = "WINDLASS_CONTROLLER", "WINDLASS_TOKEN"
#: What a call may take on top of what it asks the controller to wait.
GRACE_S = 10.0
#: The longest that one request asks the controller to wait. The next one goes on where it ended.
ROUND_S = 300.0
#: The first and the longest pause before a controller that is away is asked again.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
#: How long :func:`serve_evals` waits for an eval at a time; within it, a request to stop is heard.
EVAL_POLL_S = 2.0
#: How often a trainer repeats what it announced last.
REMIND_S = 5.0
#: The longest answer that is read.
MAX_ANSWER = 16 << 20


@dataclass(frozen=True)
class Span:
    """Something that took time: when it began and ended, on this process's :func:`time.monotonic` clock."""

    lane: Literal["trainer", "agent", "wire", "engine"]
    what: str
    began: float
    ended: float
    bytes: int | None = None

    def words(self, now: float) -> dict[str, Any]:
        """As it travels: how long ago."""
        words: dict[str, Any] = {
            "lane": self.lane,
            "what": self.what,
            "began_ms_ago": max(0.0, (now - self.began) * 1e3),
            "ended_ms_ago": max(0.0, (now - self.ended) * 1e3),
        }
        if self.bytes is not None:
            words["bytes"] = self.bytes
        return words


@dataclass(frozen=True)
class Served:
    """What a set serves: the version that all its models have reached, and each model's own."""

    version: int
    identities: tuple[Identity, ...] = ()

    @classmethod
    def of(cls, words: Any, what: str) -> Served | None:
        """From an answer; ``None`` if nothing is served."""
        if words is None:
            return None
        try:
            return cls(int(words["version"]), tuple(_identity(i) for i in words.get("identities", ())))
        except (TypeError, KeyError, ValueError, AttributeError) as e:
            raise _senseless(what, words) from e


@dataclass(frozen=True)
class Notified:
    """The controller's answer to a notify."""

    #: The trainer is too far ahead of what is served and should wait at the gate before it publishes more.
    wait: bool
    #: How many announced versions are not served yet.
    ahead: int
    #: The set of the model.
    set: str
    #: What the set serves now.
    served: Served | None = None
    #: What the eval returned, if one was asked for.
    eval: Any = None
    #: Why it returned nothing, if it failed; the version is served all the same.
    eval_error: str | None = None


@dataclass(frozen=True)
class EvalTask:
    """An eval to be run now, on what is served."""

    id: int
    served: Served
    #: The trainer's words, as it gave them to ``notify_version(eval=...)``.
    eval: Any


class Stopper(Protocol):
    """What tells :func:`serve_evals` to end, such as a :class:`threading.Event`."""

    def is_set(self) -> bool:
        """Whether to end."""
        ...

    def wait(self, timeout: float | None = None, /) -> bool:
        """Waits for it."""
        ...


class Controller:
    """Speaks to one controller.

    >>> controller = Controller("http://10.0.0.5:7000", token_file="/etc/windlass/token")    # doctest: +SKIP
    >>> controller.gate(7, timeout=600)                                                      # doctest: +SKIP
    Served(version=7, identities=(...))

    ``url`` and ``token`` are those of the environment if they are not given. ``tls_ca`` is a PEM file with those to trust
    where the URL begins with ``https://``; without it, the one that ``WINDLASS_TLS_CA`` names, or those of the system.
    ``timeout`` bounds calls that are answered at once. Holds no connection, so it may be shared by threads and given to other processes.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        tls_ca: str | os.PathLike[str] | None = None,
        timeout: float = 30.0,
    ) -> None:
        url = os.environ.get(URL_VARIABLE) if url is None else url
        if not url:
            raise WindlassInvalid(
                f"no controller is named: give its URL (controller=), or set {URL_VARIABLE}",
                "start one with `windlass controller`",
                "no_controller",
            )
        if token is not None and token_file is not None:
            raise WindlassInvalid("give a token or the file that holds it, not both")
        if token_file is not None:
            token = _windlass.read_token(Path(token_file))
        if token is None:
            token = os.environ.get(TOKEN_VARIABLE)
        _windlass.check_endpoint(url)
        url = url if "://" in url else f"http://{url}"
        self._http = HttpClient(
            url, name="the controller", token=token, timeout=timeout, tls_ca=trusted(tls_ca)
        )

    def __repr__(self) -> str:
        return f"Controller({self._http.url!r})"

    @property
    def url(self) -> str:
        """Where it is."""
        return self._http.url

    # Trainers.

    def notify_version(
        self,
        identity: Identity,
        sender_endpoint: str,
        *,
        sync: bool = False,
        eval: object = None,
        timeout: float | None = None,
        spans: Sequence[Span] = (),
        delta_sparsity: float | None = None,
        delta_ratio: float | None = None,
    ) -> Notified:
        """Says that a version is published, and served by the agent at ``sender_endpoint``.

        Returns at once, or with ``sync`` when the version is served, within ``timeout`` seconds (without one, as long as
        the controller lets anybody wait). With ``eval``, plain data for whoever runs evals (:func:`serve_evals`), an eval
        is run on it then, and its result returned; ``timeout`` is for both. Repeating a notify is harmless.
        """
        sync = sync or eval is not None
        words: dict[str, Any] = {
            "model_id": identity.model_id,
            "incarnation": _number(identity.incarnation),
            "version": identity.version,
            "sender_endpoint": sender_endpoint,
            "sync": sync,
        }
        more = {"eval": eval, "delta_sparsity": delta_sparsity, "delta_ratio": delta_ratio}
        words.update({name: value for name, value in more.items() if value is not None})
        what = f"announce version {identity.version} of {identity.model_id!r}"

        def ask(left: float | None) -> Notified:
            now = time.monotonic()
            body = {**words, "spans": [span.words(now) for span in spans]}
            if sync and left is not None:
                body["timeout_ms"] = _millis(left)
            seconds = _timeout_for(left) if sync else self._http.timeout if left is None else left
            return _notified(self._post("/notify_version", body, what, seconds), what)

        return self._patiently(ask, timeout) if sync else ask(timeout)

    def trainer_left(self, identity: Identity) -> None:
        """Says that the trainer of this life of a model has ended, as it should: its silence is no fault.

        What it published goes on being served. The next notify takes it back. :meth:`windlass.WeightManager.close` says it.
        """
        body = {"model_id": identity.model_id, "incarnation": _number(identity.incarnation)}
        self._post(
            "/trainer_left", body, f"take leave as the trainer of {identity.model_id!r}", self._http.timeout
        )

    # Data loaders.

    def service_version(self, set: str | None = None, *, model_id: str | None = None) -> Served | None:
        """What a set serves now; ``None`` before its first load and after an incarnation change."""
        what = "ask what is served"
        query = {name: value for name, value in (("set", set), ("model_id", model_id)) if value is not None}
        answer = self._http.get("/service_version", stage=what, query=query, limit=MAX_ANSWER)
        return Served.of(answer.object().get("served"), what)

    def gate(
        self,
        version: int,
        *,
        set: str | None = None,
        model_id: str | None = None,
        incarnation: str | int | None = None,
        timeout: float | None = 600.0,
    ) -> Served:
        """Waits until a set serves at least ``version``, and returns what it serves.

        ``set`` may be left out where there is only one, or where ``model_id`` says whose version it is. With
        ``model_id`` and ``incarnation`` the wait is on behalf of that life of a trainer: versions of an earlier one never
        open the gate, and a newer one ends the wait (:class:`~windlass.WindlassStale`). A ``timeout`` of ``None`` waits
        for ever. While the controller is away the wait goes on.
        """
        if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version < 1 << 64:
            raise WindlassInvalid(f"version {version!r} is not an integer from 0 to 2**64 - 1")
        what = f"wait until version {version} is served"
        named = {"set": set, "model_id": model_id}
        query: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        query["at_least"] = version
        query["who"] = f"{socket.gethostname()}:{os.getpid()}"
        if incarnation is not None:
            query["incarnation"] = _number(incarnation)

        def ask(left: float | None) -> Served:
            wait = ROUND_S if left is None else min(left, ROUND_S)
            answer = self._http.get(
                "/service_version",
                stage=what,
                query={**query, "timeout_ms": _millis(wait)},
                timeout=_timeout_for(wait),
                idempotent=False,
                limit=MAX_ANSWER,
            )
            served = Served.of(answer.object().get("served"), what)
            if served is None:
                raise _senseless(what, answer.text)
            return served

        return self._patiently(ask, timeout, again=True)

    # Eval runners.

    def take_eval(self, set: str | None = None, timeout: float = 30.0) -> EvalTask | None:
        """Waits for an eval to run; ``None`` if there is none within ``timeout``. Whoever takes it answers it."""
        what = "take an eval"
        body: dict[str, Any] = {"timeout_ms": _millis(timeout)}
        if set is not None:
            body["set"] = set
        words = self._post("/take_eval", body, what, _timeout_for(timeout))
        if words.get("id") is None:
            return None
        served = Served.of(words.get("served"), what)
        if served is None:
            raise _senseless(what, words)
        return EvalTask(int(words["id"]), served, words.get("eval"))

    def eval_done(self, task: EvalTask, result: object = None, *, error: str | None = None) -> None:
        """Answers an eval: with its result, which must be plain data, or with why there is none."""
        body = {"id": task.id, **({"result": result} if error is None else {"error": error})}
        self._post("/eval_done", body, f"answer eval {task.id}", self._http.timeout)

    def serve_evals(
        self,
        callback: Callable[[EvalTask], object],
        *,
        set: str | None = None,
        stop: Stopper | None = None,
        evals: int | None = None,
    ) -> int:
        """Runs ``callback(task)`` for every eval that trainers ask for, until ``stop`` is set or ``evals`` were run.

        What it returns goes to the trainer, and must be plain data. What it raises goes there as text, and is logged;
        the next eval is served all the same. A controller that is away is waited for. Returns how many were run.
        """
        done, pause = 0, FIRST_PAUSE_S
        while (evals is None or done < evals) and not (stop is not None and stop.is_set()):
            try:
                task = self.take_eval(set, EVAL_POLL_S)
                pause = FIRST_PAUSE_S
            except (WindlassPeerLost, WindlassTimeout, WindlassExhausted) as e:
                if pause == FIRST_PAUSE_S:
                    log.warning("evals wait for the controller: %s", e)
                _sleep(pause, stop)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                continue
            if task is not None:
                self._run_eval(task, callback)
                done += 1
        return done

    def _run_eval(self, task: EvalTask, callback: Callable[[EvalTask], object]) -> None:
        try:
            result, error = callback(task), None
            json.dumps(result, allow_nan=False)
        except Exception as e:
            log.exception("eval %d on version %d failed", task.id, task.served.version)
            result, error = None, f"{type(e).__name__}: {e}"
        try:
            self.eval_done(task, result, error=error)
        except (WindlassStale, WindlassNotFound) as e:
            log.warning("the result of eval %d came too late: %s", task.id, e)

    # People.

    def status(self) -> dict[str, Any]:
        """Everything there is to see, as the live page shows it."""
        return self._http.get("/status", stage="see how it is", limit=256 << 20).object()

    # How it is done.

    def _post(self, path: str, body: Mapping[str, Any], what: str, seconds: float) -> dict[str, Any]:
        return self._http.post(path, body, stage=what, timeout=seconds, limit=MAX_ANSWER).object()

    def _patiently(
        self,
        ask: Callable[[float | None], T],
        timeout: float | None,
        *,
        again: bool = False,
    ) -> T:
        """Asks until there is an answer or the time is over. A controller that went away has forgotten who waited.

        With ``again`` a request that ran into its own deadline is repeated, too: it asked for less than there is.
        """
        if timeout is not None and (isinstance(timeout, bool) or not timeout >= 0):
            raise WindlassInvalid(f"a timeout of {timeout!r} makes no sense; give seconds, 0 or more")
        until = None if timeout is None else time.monotonic() + timeout
        pause, said = FIRST_PAUSE_S, False
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                return ask(left)
            except (WindlassPeerLost, WindlassExhausted) as e:
                now = time.monotonic()
                if until is not None and now >= until:
                    raise
                if not said:
                    log.warning("%s; it is asked again", e)
                    said = True
                time.sleep(pause if until is None else min(pause, until - now))
                pause = min(2 * pause, LONGEST_PAUSE_S)
            except WindlassTimeout:
                if not again or (until is not None and time.monotonic() >= until):
                    raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class Reminder:
    """Repeats what a trainer announced last, in a thread, until it is closed.

    A controller that was restarted knows nothing, and a trainer that waits, for a batch or at the gate, would not speak
    again before the controller does.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._last: tuple[Identity, Callable[[], str]] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def remember(self, identity: Identity, endpoint: Callable[[], str]) -> None:
        """This was announced; ``endpoint`` says where the agent is by then."""
        self._last = (identity, endpoint)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="windlass-remind", daemon=True)
            self._thread.start()

    def forget(self) -> None:
        """There is nothing to repeat until something is announced again."""
        self._last = None

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(REMIND_S):
            last = self._last
            if last is None:
                continue
            try:
                self._controller.notify_version(last[0], last[1](), timeout=REMIND_S)
            except WindlassStale:
                # Somebody else publishes the model now.
                if self._last is last:
                    self._last = None
            except WindlassError as e:
                log.debug("version %d was not announced again: %s", last[0].version, e)


def gate(
    version: int,
    *,
    controller: Controller | str | None = None,
    token: str | None = None,
    set: str | None = None,
    model_id: str | None = None,
    incarnation: str | int | None = None,
    timeout: float | None = 600.0,
) -> Served:
    """Waits until at least ``version`` is served: the line before a batch is taken.

    >>> for step in range(1000):                                             # doctest: +SKIP
    ...     windlass.gate(step - 1)      # rollouts of at most one version ago
    ...     train(next(batches))

    See :meth:`Controller.gate`. ``controller`` is a :class:`Controller`, a URL, or that of ``WINDLASS_CONTROLLER``.
    """
    there = controller if isinstance(controller, Controller) else Controller(controller, token=token)
    return there.gate(version, set=set, model_id=model_id, incarnation=incarnation, timeout=timeout)


def serve_evals(
    callback: Callable[[EvalTask], object],
    *,
    controller: Controller | str | None = None,
    token: str | None = None,
    set: str | None = None,
    stop: Stopper | None = None,
    evals: int | None = None,
) -> int:
    """Runs evals that trainers ask for with ``notify_version(eval=...)``.

    >>> def evaluate(task):                                                  # doctest: +SKIP
    ...     return {"accuracy": run(task.eval["suite"]), "version": task.served.version}
    >>> windlass.serve_evals(evaluate)                                       # doctest: +SKIP

    See :meth:`Controller.serve_evals`. Several processes may serve; each eval is given to one of them.
    """
    there = controller if isinstance(controller, Controller) else Controller(controller, token=token)
    return there.serve_evals(callback, set=set, stop=stop, evals=evals)


def _notified(words: Mapping[str, Any], what: str) -> Notified:
    try:
        return Notified(
            wait=bool(words["wait"]),
            ahead=int(words["ahead"]),
            set=str(words["set"]),
            served=Served.of(words.get("served"), what),
            eval=words.get("eval"),
            eval_error=words.get("eval_error"),
        )
    except (KeyError, TypeError, ValueError) as e:
        raise _senseless(what, words) from e


def _senseless(what: str, words: object) -> WindlassError:
    return WindlassInvalid(
        f"the controller's answer to the request to {what} makes no sense: {str(words)[:80]}",
        "see what listens there",
    )


def _identity(words: Mapping[str, Any]) -> Identity:
    return Identity(str(words["model_id"]), int(words["incarnation"]), int(words["version"]))


def _number(incarnation: str | int) -> int:
    """An incarnation as it travels in JSON. Managers and images name theirs in hexadecimal text."""
    try:
        number = int(incarnation, 16) if isinstance(incarnation, str) else int(incarnation)
    except ValueError as e:
        raise WindlassInvalid(f"incarnation {incarnation!r} is not a hexadecimal number") from e
    if not 0 <= number < 1 << 64:
        raise WindlassInvalid(f"incarnation {incarnation!r} is not a number of 64 bits")
    return number


def _millis(seconds: float) -> int:
    return max(0, int(seconds * 1e3))


def _timeout_for(left: float | None) -> float:
    """How long a request may take that asks the controller to wait."""
    # Longer than any controller lets anybody wait.
    return 2 * 86_400.0 if left is None else left + GRACE_S


def _sleep(seconds: float, stop: Stopper | None) -> None:
    if stop is None:
        time.sleep(seconds)
    else:
        stop.wait(seconds)
