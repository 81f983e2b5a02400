"""An agent that lives as long as its trainer.

The agent serves a region to receivers. It is a process of its own, so that it neither slows the trainer nor dies with
a stuck thread of it; :class:`AgentSupervisor` starts it, starts it again when it dies, and ends it.
"""

from __future__ import annotations

import json
import os
import site
import sys
import sysconfig
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from windlass._windlass import Supervisor
from windlass.errors import WindlassInvalid

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AgentSupervisor", "own_environment", "own_program"]


class AgentSupervisor:
    """Keeps one ``windlass agent`` running for a region.

    The first rank on a host makes one after it has made the region; the others need none. A killed agent comes back on
    the ports it had. However this process ends, the agent ends too: it waits for the end of a pipe that only this
    process holds. Children made by :func:`os.fork` close their copy of that pipe at once, and get an error from every
    method but :meth:`__exit__`, which does nothing there.

    Arguments that are ``None`` are left to the agent; ``windlass agent --help`` tells what they mean. ``program`` are
    the words that start the ``windlass`` command, by default this interpreter with this package; ``options`` are further
    arguments; ``log`` is the file for what the agent says, by default one in the directory for temporary files that
    :meth:`status` names.

    >>> with AgentSupervisor("/dev/shm/policy") as agent:  # doctest: +SKIP
    ...     agent.endpoint()
    'http://127.0.0.1:37561'
    """

    def __init__(
        self,
        region: str | os.PathLike[str],
        *,
        bind: str | None = None,
        advertise_host: str | None = None,
        ports: str | None = None,
        data_ports: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        tls_cert: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        tls_ca: str | os.PathLike[str] | None = None,
        history: int | None = None,
        history_bytes: int | None = None,
        check_every: int | None = None,
        relay_from: int | None = None,
        nixl: str | None = None,
        nixl_library: str | os.PathLike[str] | None = None,
        nixl_params: Mapping[str, str] | None = None,
        threads: int | None = None,
        streams: int | None = None,
        timeout: float | None = None,
        peers: Sequence[str] = (),
        log: str | os.PathLike[str] | None = None,
        program: Sequence[str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        values: dict[str, str | None] = {
            "--bind": bind,
            "--advertise-host": advertise_host,
            "--ports": ports,
            "--data-ports": data_ports,
            # The agent keeps the directory it was started in, but a reader of its command line may not know it.
            "--token-file": None if token_file is None else os.path.abspath(token_file),
            "--tls-cert": None if tls_cert is None else os.path.abspath(tls_cert),
            "--tls-key": None if tls_key is None else os.path.abspath(tls_key),
            "--tls-ca": None if tls_ca is None else os.path.abspath(tls_ca),
            "--history": None if history is None else str(history),
            "--history-bytes": None if history_bytes is None else str(history_bytes),
            "--check-every": None if check_every is None else str(check_every),
            "--relay-from": None if relay_from is None else str(relay_from),
            "--nixl": None if nixl == "off" else nixl,
            "--nixl-library": None if nixl_library is None else os.path.abspath(nixl_library),
            "--threads": None if threads is None else str(threads),
            "--streams": None if streams is None else str(streams),
            # In whole seconds, and never none.
            "--timeout": None if timeout is None else str(max(1, round(timeout))),
        }
        given = [f"{name}={value}" for name, value in values.items() if value is not None]
        given += [f"--peer={peer}" for peer in peers]
        given += [f"--nixl-param={name}={value}" for name, value in (nixl_params or {}).items()]
        self._pid = os.getpid()
        self._kept = Supervisor(
            os.fspath(region),
            program=own_program() if program is None else list(program),
            options=[*given, *options],
            environment=own_environment() if program is None else [],
            log=None if log is None else os.fspath(log),
        )
        # An agent with a store first uploads the version that was sealed last, for up to 10 seconds.
        self._ends_in = 15.0 if any(option.startswith("--store=") for option in options) else 5.0
        _forks.watch(self)

    def endpoint(self, timeout: float = 60.0) -> str:
        """Where receivers find the agent. Waits until it listens; the error says what keeps it from doing so."""
        return self._kept.endpoint(timeout)

    def status(self) -> dict[str, object]:
        """How the agent is: ``running``, ``pid``, ``endpoint``, ``data_port``, ``token_file``, ``restarts``,
        ``last_error`` and ``log``."""
        told: dict[str, object] = json.loads(self._kept.status())
        return told

    def stop(self, timeout: float | None = None) -> None:
        """Ends the agent: it has ``timeout`` seconds to end transfers, then it is killed. By default 5, and 15 with a store. Again
        is nothing."""
        self._kept.stop(self._ends_in if timeout is None else timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() == self._pid:
            self.stop()

    def __repr__(self) -> str:
        if os.getpid() != self._pid:
            return f"<AgentSupervisor of process {self._pid}>"
        status = self.status()
        return f"<AgentSupervisor pid={status['pid']} endpoint={status['endpoint']}>"


class _Forks:
    """Closes the pipes of all supervisors in forked children. One for the process: a hook cannot be taken back."""

    def __init__(self) -> None:
        self._supervisors: weakref.WeakSet[AgentSupervisor] = weakref.WeakSet()
        self._hooked = False

    def watch(self, supervisor: AgentSupervisor) -> None:
        self._supervisors.add(supervisor)
        if not self._hooked:
            self._hooked = True
            os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        for supervisor in list(self._supervisors):
            supervisor._kept.close_in_child()


_forks = _Forks()


def own_program() -> list[str]:
    """How this package starts its own command."""
    if not sys.executable:
        raise WindlassInvalid(
            "this interpreter does not know its own executable: say with program how the windlass command is started"
        )
    return [sys.executable, "-m", "windlass"]


def own_environment() -> list[tuple[str, str | None]]:
    """What the interpreter of :func:`own_program` needs to find this package and nothing else by accident."""
    changes: list[tuple[str, str | None]] = [
        # Would keep it at a prompt after its end.
        ("PYTHONINSPECT", None),
        # Files in the trainer's directory must not stand in for modules (Python 3.11 and later).
        ("PYTHONSAFEPATH", "1"),
    ]
    here = str(Path(__file__).resolve().parents[2])
    found = [*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if here not in (os.path.realpath(path) for path in found):
        # Found by sys.path or a link alone; last, so that nothing beside the package hides anything else.
        path = os.environ.get("PYTHONPATH")
        changes.append(("PYTHONPATH", f"{path}{os.pathsep}{here}" if path else here))
    return changes
