"""What can go wrong.

Every exception of this package is a :class:`WindlassError` and also the builtin that fits, so that code which knows
nothing of Windlass catches it as well:

>>> from windlass import WindlassError, WindlassTimeout
>>> issubclass(WindlassTimeout, TimeoutError) and issubclass(WindlassTimeout, WindlassError)
True
"""

from __future__ import annotations

import sys

__all__ = [
    "WindlassBug",
    "WindlassCancelled",
    "WindlassCorrupt",
    "WindlassDenied",
    "WindlassError",
    "WindlassExhausted",
    "WindlassInvalid",
    "WindlassNotFound",
    "WindlassPeerLost",
    "WindlassStale",
    "WindlassTimeout",
    "WindlassUnsupported",
]


class WindlassError(Exception):
    """A failure: what happened, what to do next (:attr:`advice`), and its name where it has one (:attr:`name`)."""

    def __init__(self, message: str = "", advice: str = "", name: str = "") -> None:
        super().__init__(message)
        if advice and sys.version_info >= (3, 11):
            # Shown below the message in a traceback.
            self.add_note(advice)
        #: What to do next where the message does not say.
        self.advice = advice
        #: The stable name of the failure, the same in every language ("missing_field"); empty where it has none.
        self.name = name

    def __reduce__(self) -> tuple[type[WindlassError], tuple[str, str, str]]:
        return (type(self), (str(self.args[0]), self.advice, self.name))


class WindlassInvalid(WindlassError, ValueError):
    """The input is malformed or contradicts itself."""


class WindlassNotFound(WindlassError, LookupError):
    """The named thing does not exist."""


class WindlassStale(WindlassError, RuntimeError):
    """The input is out of date: an older version, an earlier incarnation, a base that has changed."""


class WindlassCorrupt(WindlassError, RuntimeError):
    """Bytes do not match their hash."""


class WindlassTimeout(WindlassError, TimeoutError):
    """A deadline passed."""


class WindlassPeerLost(WindlassError, ConnectionError):
    """The peer disconnected or died."""


class WindlassExhausted(WindlassError, OSError):
    """Memory, disk, connections or a configured limit ran out."""

    def __init__(self, message: str = "", advice: str = "", name: str = "") -> None:
        # OSError reads two arguments as an error number and its text.
        WindlassError.__init__(self, message, advice, name)

    def __new__(cls, message: str = "", advice: str = "", name: str = "") -> WindlassExhausted:
        return super().__new__(cls, message)


class WindlassUnsupported(WindlassError, NotImplementedError):
    """This build, machine or peer cannot do it."""


class WindlassDenied(WindlassError, PermissionError):
    """Not authenticated or not allowed."""

    def __init__(self, message: str = "", advice: str = "", name: str = "") -> None:
        WindlassError.__init__(self, message, advice, name)

    def __new__(cls, message: str = "", advice: str = "", name: str = "") -> WindlassDenied:
        return super().__new__(cls, message)


class WindlassCancelled(WindlassError, RuntimeError):
    """Cancelled by the caller."""


class WindlassBug(WindlassError, RuntimeError):
    """A defect in Windlass."""


#: The HTTP status of an answer that carries an error, by its kind. The same as in ``crates/windlass-core/src/error.rs``.
HTTP_STATUS = {
    "invalid": 400,
    "not_found": 404,
    "stale": 409,
    "corrupt": 422,
    "timeout": 504,
    "peer_lost": 502,
    "exhausted": 507,
    "unsupported": 501,
    "denied": 403,
    "cancelled": 499,
    "bug": 500,
}
