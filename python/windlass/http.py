"""JSON over HTTP to engines and services, with a deadline on everything.

Owns: :class:`HttpClient`, for whatever in this package talks HTTP to something that is not Windlass's own. Each call
opens one connection and closes it, so a client may be shared by threads and holds nothing between calls. Must not:
know any engine's routes; retry what the server may already have done.

- The deadline is of the whole call: all attempts, connecting, sending, waiting and reading. A server that trickles its
  answer does not stretch it.
- Only calls said to be ``idempotent`` are tried again: when the connection fails, or on 429, 502, 503 and 504.
- An answer of 400 or more becomes the exception of its status, with the ``name`` "http_404" and the like. The message
  names the peer, the stage, the call and the beginning of the body. Where the body is the error of a Windlass service,
  its kind and advice are taken over.
- Proxies of the environment are not used: engines are addressed directly.
- An ``https://`` address is reached through TLS or not at all: the certificate must be for its host and be issued by
  somebody who is trusted, or :class:`~windlass.WindlassDenied` says why it is not accepted (``name``
  "untrusted_certificate").
"""

from __future__ import annotations

import functools
import http.client
import io
import json
import os
import socket
import ssl
import time
import urllib.parse
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass import errors
from windlass.errors import (
    WindlassBug,
    WindlassDenied,
    WindlassError,
    WindlassExhausted,
    WindlassInvalid,
    WindlassNotFound,
    WindlassPeerLost,
    WindlassStale,
    WindlassTimeout,
    WindlassUnsupported,
)
from windlass.plain import text_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["TLS_CA_VARIABLE", "Answer", "HttpClient", "trusted"]

#: The environment variable that names a file with those to trust, for Windlass's own services.
TLS_CA_VARIABLE = "WINDLASS_TLS_CA"

#: The longest answer that is read, unless a call says otherwise.
MAX_ANSWER = 64 << 20
#: How much of an answer is quoted in a message.
QUOTED = 600
#: The first pause before another attempt, and how long one gets at most.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
#: What says that the server did not get to it.
_AGAIN = frozenset({429, 502, 503, 504})


@dataclass(frozen=True)
class Answer:
    """What the server said."""

    status: int
    body: bytes
    #: The call that it answers, for messages.
    what: str = ""

    def json(self) -> Any:
        """The body as JSON; an empty one is an empty object."""
        try:
            return json.loads(self.body or b"{}")
        except ValueError as e:
            raise WindlassInvalid(f"{self.what}: the answer is not JSON: {self.body[:80]!r}") from e

    def object(self) -> dict[str, Any]:
        """The body as a JSON object."""
        value = self.json()
        if not isinstance(value, dict):
            raise WindlassInvalid(f"{self.what}: the answer is not a JSON object: {self.body[:80]!r}")
        return value

    @property
    def text(self) -> str:
        """The beginning of the body, on one line."""
        return " ".join(self.body[: 4 * QUOTED].decode(errors="replace").split())[:QUOTED]


class HttpClient:
    """Calls one server.

    >>> engine = HttpClient("http://127.0.0.1:30000", name="engine 0", token="secret")
    >>> engine.call("GET", "/model_info", stage="look").object()           # doctest: +SKIP
    {'weight_version': '7', ...}

    ``name`` is what messages call it, ``token`` goes into every request as ``Authorization: Bearer``. ``timeout`` is
    the deadline of a call that names none, ``attempts`` how often an idempotent one is tried. ``tls_ca`` is a PEM file
    with those to trust, and nobody else; without it, those whom the system trusts are.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        token: str | None = None,
        timeout: float = 30.0,
        attempts: int = 3,
        headers: Mapping[str, str] | None = None,
        tls_ca: str | None = None,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        try:
            port = parts.port
        except ValueError as e:
            raise WindlassInvalid(f"{url!r} is not the address of a server: {e}") from e
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise WindlassInvalid(
                f"{url!r} is not the address of a server: expected http://HOST:PORT or https://HOST:PORT"
            )
        if parts.username is not None or parts.password is not None:
            raise WindlassInvalid("the address of a server contains a user or a password: give a token")
        if not timeout > 0 or attempts < 1:
            raise WindlassInvalid(f"timeout {timeout!r} and attempts {attempts!r} must be above zero")
        self._tls = parts.scheme == "https"
        self._tls_ca = tls_ca
        if self._tls:
            # Now rather than with the first call. It is not kept, so that clients can be given to other processes.
            _context(tls_ca)
        self._host, self._port = parts.hostname, port
        self._prefix = parts.path.rstrip("/")
        #: The address, without a slash at its end.
        self.url = f"{parts.scheme}://{parts.netloc}{self._prefix}"
        #: What messages call it.
        self.name = f"{name} at {self.url}" if name else self.url
        self.timeout = timeout
        self.attempts = attempts
        #: What it sends as ``Authorization: Bearer``.
        self.token = token
        self._headers = {"accept": "application/json", **(headers or {})}
        if token is not None:
            if any(ord(c) < 33 or ord(c) > 126 for c in token):
                raise WindlassInvalid("a token contains something else than visible ASCII characters")
            self._headers["authorization"] = f"Bearer {token}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        stage: str,
        query: Mapping[str, object] | None = None,
        timeout: float | None = None,
        idempotent: bool | None = None,
        accept: Collection[int] = (),
        headers: Mapping[str, str] | None = None,
        limit: int = MAX_ANSWER,
    ) -> Answer:
        """One call; ``stage`` says what it is for, in words that fit behind "while".

        ``body`` is sent as JSON, bytes as they are. Without a word about it, a GET is ``idempotent`` and nothing else
        is. Statuses of 400 and more that the caller can deal with are named in ``accept``.
        """
        what = f"{self.name}: {method} {path} ({stage})"
        wanted = self.timeout if timeout is None else timeout
        until = time.monotonic() + wanted
        payload, kind = _payload(body, what)
        own = {**self._headers, **kind, **(headers or {})}
        target = self._prefix + path
        if query:
            pairs = {
                key: str(value).lower() if isinstance(value, bool) else value for key, value in query.items()
            }
            target += "?" + urllib.parse.urlencode(pairs)
        tries = self.attempts if (method == "GET" if idempotent is None else idempotent) else 1
        pause = FIRST_PAUSE
        while True:
            tries -= 1
            try:
                status, said = self._once(method, target, payload, own, until, limit)
            except WindlassError:
                # Some of our own are OSErrors.
                raise
            except ssl.SSLCertVerificationError as e:
                raise WindlassDenied(
                    f"{what}: the certificate is not accepted: {e.verify_message}",
                    "see whether this is the server that is meant, and whether tls_ca names a file with its issuer",
                    "untrusted_certificate",
                ) from e
            except TimeoutError as e:
                raise WindlassTimeout(
                    f"{what}: no answer within {wanted:g} s",
                    "see whether the server is alive and busy, or raise the deadline",
                ) from e
            except (OSError, http.client.HTTPException) as e:
                if isinstance(e, ssl.SSLError) and e.reason in _NOT_TLS:
                    raise WindlassInvalid(
                        f"{what}: it does not speak TLS: {e}",
                        "if it is meant not to, address it with http://",
                    ) from e
                if tries > 0 and time.monotonic() + pause < until:
                    time.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
                    continue
                raise WindlassPeerLost(
                    f"{what}: {e or type(e).__name__}", "see whether the server runs and is reachable"
                ) from e
            answer = Answer(status, said, what)
            if status < 400 or status in accept:
                return answer
            if status in _AGAIN and tries > 0 and time.monotonic() + pause < until:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            raise _error_of(answer)

    def get(self, path: str, *, stage: str, **options: Any) -> Answer:
        """A GET; see :meth:`call`."""
        return self.call("GET", path, stage=stage, **options)

    def post(self, path: str, body: object = None, *, stage: str, **options: Any) -> Answer:
        """A POST; see :meth:`call`."""
        return self.call("POST", path, body, stage=stage, **options)

    def _once(
        self,
        method: str,
        target: str,
        payload: Buffer | None,
        headers: Mapping[str, str],
        until: float,
        limit: int,
    ) -> tuple[int, bytes]:
        connection = _connection(self._tls, self._tls_ca, self._host, self._port, _left(until))
        connection.response_class = _timely(until)
        try:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Of a whole `sendall`, so it bounds the body too.
            connection.sock.settimeout(_left(until))
            connection.request(method, target, payload, dict(headers))
            answer = connection.getresponse()
            said = answer.read(limit + 1)
            if len(said) > limit:
                raise WindlassExhausted(
                    f"{self.name}: the answer to {method} {target} is above {limit} bytes"
                )
            return answer.status, said
        finally:
            connection.close()


#: What the first bytes of something else look like.
_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE"})


def trusted(tls_ca: str | os.PathLike[str] | None) -> str | None:
    """The file with those to trust among Windlass's own services: the given one, or that of the environment."""
    if tls_ca is None:
        return os.environ.get(TLS_CA_VARIABLE) or None
    return os.fspath(tls_ca)


@functools.lru_cache(maxsize=16)
def _context(tls_ca: str | None) -> ssl.SSLContext:
    """Checks certificates and the names in them, against those in a file or those whom the system trusts."""
    try:
        return ssl.create_default_context(cafile=tls_ca)
    except ssl.SSLError as e:
        raise WindlassInvalid(
            f"there are no certificates in {tls_ca!r}: {e}",
            "give a file in PEM, which begins with -----BEGIN",
        ) from e
    except OSError as e:
        raise WindlassNotFound(f"the certificates in {tls_ca!r} cannot be read: {e.strerror}") from e


def _connection(
    tls: bool, tls_ca: str | None, host: str, port: int | None, timeout: float
) -> http.client.HTTPConnection:
    if tls:
        return http.client.HTTPSConnection(host, port, timeout=timeout, context=_context(tls_ca))
    return http.client.HTTPConnection(host, port, timeout=timeout)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline passed")
    return left


class _Read(io.RawIOBase):
    """Reads a socket until a deadline, however little comes each time."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._sock, self._until = sock, until
        # Keeps the descriptor open when the connection object lets go of it first.
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int | None:
        self._sock.settimeout(_left(self._until))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


class _Timely:
    """What an HTTP response asks of a socket: a file to read from."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._sock, self._until = sock, until

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Read(self._sock, self._until))


def _timely(until: float) -> Any:
    def response(sock: socket.socket, *args: Any, **more: Any) -> http.client.HTTPResponse:
        return http.client.HTTPResponse(_Timely(sock, until), *args, **more)  # type: ignore[arg-type]

    return response


def _payload(body: object, what: str) -> tuple[Buffer | None, dict[str, str]]:
    if body is None:
        return None, {}
    if isinstance(body, (bytes, bytearray, memoryview)):
        return body, {"content-type": "application/octet-stream"}
    return text_of(body, f"body of {what}").encode(), {"content-type": "application/json"}


#: The exception of a status; other ones from 400 are WindlassInvalid, from 500 WindlassPeerLost.
_KINDS: dict[int, type[WindlassError]] = {
    401: WindlassDenied,
    403: WindlassDenied,
    404: WindlassNotFound,
    405: WindlassUnsupported,
    408: WindlassTimeout,
    409: WindlassStale,
    413: WindlassExhausted,
    429: WindlassExhausted,
    501: WindlassUnsupported,
    504: WindlassTimeout,
    507: WindlassExhausted,
}

_ADVICE = {
    401: "give the token (the engine's API key) that the server was started with",
    403: "give the token (the engine's API key) that the server was started with",
    404: "this server or its version has no such route: see the versions in the guide of the engine",
    405: "this server or its version has no such route: see the versions in the guide of the engine",
    413: "send less at once, or raise the limit of the server",
}


def _error_of(answer: Answer) -> WindlassError:
    kind = _KINDS.get(answer.status, WindlassInvalid if answer.status < 500 else WindlassPeerLost)
    advice = _ADVICE.get(answer.status, "see the log of the server for the cause")
    text = answer.text or "nothing"
    told = _told(answer)
    if told is not None:
        kind, text, advice = told[0], told[1], told[2] or advice
    return kind(f"{answer.what}: answered {answer.status}: {text}", advice, f"http_{answer.status}")


def _told(answer: Answer) -> tuple[type[WindlassError], str, str] | None:
    """Kind, text and advice of an error that a Windlass service wrote."""
    try:
        told = json.loads(answer.body)["error"]
        name = "Windlass" + "".join(part.capitalize() for part in str(told["kind"]).split("_"))
        text, advice = str(told.get("text") or told["message"]), str(told.get("advice") or "")
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    kind = getattr(errors, name, WindlassBug)
    return (kind, text, advice) if name in errors.__all__ else None
