"""A unix socket at which processes of one host and one user ask another for what only a socket can carry.

Owns: :class:`HandleServer`, the side that answers, and :class:`HandleClient`, the side that asks. Called by
:mod:`windlass.transfer.ipc.device`. Must not: know what is asked for.

The socket is a file of mode 0600 that keeps messages apart (``SOCK_SEQPACKET``). A message is a JSON object, at most
64 KiB; an answer may come with descriptors. Each side looks at the other's credentials as the kernel knows them. A
connection stays open for as long as both sides want something from each other, so that its end is the end of the other
process, however that ended.
"""

from __future__ import annotations

import array
import contextlib
import json
import logging
import os
import select
import selectors
import socket
import struct
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from windlass import errors
from windlass.errors import (
    WindlassBug,
    WindlassDenied,
    WindlassError,
    WindlassInvalid,
    WindlassNotFound,
    WindlassPeerLost,
    WindlassTimeout,
    WindlassUnsupported,
)

__all__ = ["HandleServer", "HandleClient", "HandleSession"]

log = logging.getLogger("windlass")

LIMIT = 1 << 16
MOST_DESCRIPTORS = 250
PREFIX = "windlass-door-"
#: The most bytes in the path of a socket.
LONGEST = 107
#: For a message of the other side, which does nothing else meanwhile.
TIMEOUT_S = 20.0


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end. The process is 0 if it is in a namespace that this one does not see."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def _send(connection: socket.socket, words: dict[str, Any], descriptors: list[int]) -> None:
    text = json.dumps(words).encode()
    if len(text) > LIMIT or len(descriptors) > MOST_DESCRIPTORS:
        raise WindlassBug(f"a message of {len(text)} bytes and {len(descriptors)} descriptors is too long")
    carried = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([text], carried)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A message, and descriptors that are the caller's to close. ``ConnectionError`` at the end."""
    room = socket.CMSG_LEN(MOST_DESCRIPTORS * array.array("i").itemsize)
    text, carried, flags, _ = connection.recvmsg(LIMIT, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in carried:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    try:
        if not text:
            raise ConnectionError("the other side has hung up")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise WindlassInvalid("a message to a handle server is longer than 64 KiB")
        words = json.loads(text)
        if not isinstance(words, dict):
            raise WindlassInvalid("a message to a handle server is no JSON object")
    except ValueError as e:
        _close(list(descriptors))
        raise (
            e if isinstance(e, WindlassInvalid) else WindlassInvalid(f"a message to a handle server: {e}")
        ) from e
    except BaseException:
        _close(list(descriptors))
        raise
    return words, list(descriptors)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


class HandleSession:
    """A connection as the server sees it. ``kept`` belongs to the code that answers."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pid, self.uid = peer_of(connection)
        self.kept: dict[str, Any] = {}


#: Answers a question with words and descriptors, which are closed afterwards.
Answer = Callable[[HandleSession, dict[str, Any]], tuple[dict[str, Any], list[int]]]


class HandleServer:
    """Answers at a socket, in a thread of its own, until it is closed. ``left`` is told of a session that has ended."""

    def __init__(self, folder: Path, answer: Answer, left: Callable[[HandleSession], None]) -> None:
        self._answer, self._left = answer, left
        sweep(folder)
        self.path = folder / f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:16]}"
        if len(os.fsencode(self.path)) > LONGEST:
            raise WindlassInvalid(
                f"a socket at {str(self.path)!r} would have a path of {len(os.fsencode(self.path))} bytes, and the system "
                f"allows {LONGEST}",
                "take a folder with a shorter path",
            )
        self._lock = threading.Lock()
        self._visits: list[HandleSession] = []
        self._wake, self._woken = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._closed = False
        try:
            self._listener.bind(str(self.path))
            # No process can connect before the server listens, whatever the umask of this process.
            self.path.chmod(0o600)
            self._listener.listen(64)
        except BaseException:
            self._shut()
            raise
        self._thread = threading.Thread(target=self._serve, name="windlass-handles", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def sessions(self) -> Iterator[list[tuple[HandleSession, int]]]:
        """Those who are there, each with a descriptor of its connection that stays one until the end."""
        with self._lock:
            held = [(session, os.dup(session.connection.fileno())) for session in self._visits]
        try:
            yield held
        finally:
            _close([descriptor for _, descriptor in held])

    def close(self) -> None:
        """Refuses new connections and ends all sessions."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._wake.send(b"!")
        self._thread.join()
        for session in list(self._visits):
            self._end(session)
        self._shut()

    def _shut(self) -> None:
        self.path.unlink(missing_ok=True)
        for part in (self._listener, self._wake, self._woken):
            part.close()

    def _end(self, session: HandleSession) -> None:
        with self._lock:
            self._visits.remove(session)
            session.connection.close()
        self._left(session)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as looking:
            looking.register(self._woken, selectors.EVENT_READ)
            looking.register(self._listener, selectors.EVENT_READ)
            while not self._closed:
                for key, _ in looking.select():
                    if key.data is not None:
                        if not self._hear(key.data):
                            looking.unregister(key.fileobj)
                            self._end(key.data)
                    elif key.fileobj is self._listener:
                        session = self._let_in()
                        if session is not None:
                            looking.register(session.connection, selectors.EVENT_READ, session)

    def _let_in(self) -> HandleSession | None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return None
        connection.settimeout(TIMEOUT_S)
        session = HandleSession(connection)
        if session.uid != os.geteuid():
            log.warning("user %d asked at %s, which is for user %d", session.uid, self.path, os.geteuid())
            connection.close()
            return None
        with self._lock:
            self._visits.append(session)
        return session

    def _hear(self, session: HandleSession) -> bool:
        """Answers one question; whether there may be another."""
        try:
            words, given = _receive(session.connection)
            _close(given)
        except (OSError, WindlassInvalid):
            return False
        descriptors: list[int] = []
        try:
            answer, descriptors = self._answer(session, words)
        except WindlassError as e:
            answer = {"error": type(e).__name__, "message": str(e)}
        except Exception as e:
            log.exception("a question at %s", self.path)
            answer = {"error": "WindlassBug", "message": f"{type(e).__name__}: {e}"}
        try:
            _send(session.connection, answer, descriptors)
        except (OSError, WindlassError):
            return False
        finally:
            _close(descriptors)
        return True


class HandleClient:
    """A connection to the handle server of another process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(TIMEOUT_S)
        try:
            self._connect()
        except BaseException:
            self._connection.close()
            raise

    def _connect(self) -> None:
        try:
            self._connection.connect(self.path)
        except FileNotFoundError as e:
            raise WindlassNotFound(
                f"there is no handle server {self.path}: the trainer has closed it, or has another /dev/shm",
                "engines in containers need the trainer's /dev/shm (docker: --ipc) and processes (--pid)",
            ) from e
        except ConnectionRefusedError as e:
            raise WindlassPeerLost(
                f"no process answers at {self.path}: the trainer that exported it is gone",
                "sync again when it is back",
            ) from e
        except OSError as e:
            raise WindlassInvalid(
                f"the handle server {self.path} cannot be reached: {e.strerror or e}"
            ) from e
        pid, uid = peer_of(self._connection)
        if uid not in (os.geteuid(), 0):
            raise WindlassDenied(
                f"{self.path} is of user {uid}, and this is user {os.geteuid()}",
                "run trainers and engines as the same user",
            )
        if pid == os.getpid():
            raise WindlassUnsupported(
                f"{self.path} is of this very process, and a process cannot open memory that it exported itself",
                "run trainer and engine in processes of their own, or hand the tensors over",
            )
        self.pid = pid

    def fileno(self) -> int:
        """The connection, which ends with the other process."""
        return self._connection.fileno()

    def is_there(self) -> bool:
        """Whether the other side has not hung up."""
        look = select.poll()
        look.register(self._connection, select.POLLRDHUP)
        return not look.poll(0)

    def ask(self, words: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """The answer, and descriptors that are the caller's to close."""
        try:
            _send(self._connection, words, [])
            answer, descriptors = _receive(self._connection)
        except TimeoutError as e:
            raise WindlassTimeout(
                f"process {self.pid} did not answer at {self.path} for {TIMEOUT_S:.0f} s"
            ) from e
        except OSError as e:
            raise WindlassPeerLost(
                f"process {self.pid}, the trainer at {self.path}, is gone: {e}", "sync again when it is back"
            ) from e
        if "error" in answer:
            _close(descriptors)
            kind = getattr(errors, str(answer["error"]), WindlassInvalid)
            if not (isinstance(kind, type) and issubclass(kind, WindlassError)):
                kind = WindlassInvalid
            raise kind(f"process {self.pid} at {self.path}: {answer.get('message', '')}")
        return answer, descriptors

    def close(self) -> None:
        """Leaves."""
        self._connection.close()


def sweep(folder: Path) -> None:
    """Removes the sockets of processes that were killed."""
    for path in folder.glob(f"{PREFIX}*"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe, contextlib.suppress(OSError):
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                # One that is bound and does not listen yet is a moment old.
                if _is_dead(path):
                    path.unlink()


def _is_dead(path: Path) -> bool:
    """Whether the process in a socket's name is gone."""
    try:
        os.kill(int(path.name[len(PREFIX) :].split("-")[0]), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        return False
    return False
