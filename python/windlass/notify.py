"""The trainer's word to the controller."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from windlass.errors import WindlassDenied, WindlassError, WindlassInvalid, WindlassPeerLost, WindlassTimeout

__all__ = ["notify"]

#: The longest answer that is read.
MAX_ANSWER = 1 << 20


def notify(
    controller: str, words: dict[str, Any], timeout: float, token: str | None = None
) -> dict[str, Any]:
    """Posts ``words`` to the controller's ``/notify_version`` and returns what it says."""
    url = controller.rstrip("/") + "/notify_version"
    headers = {"content-type": "application/json"}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, json.dumps(words).encode(), headers, method="POST")
    what = f"version {words.get('version')} of {words.get('model_id')!r} was not announced to {url}"
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read(MAX_ANSWER)
    except urllib.error.HTTPError as e:
        said = e.read(1000).decode(errors="replace").strip()
        kind: type[WindlassError] = WindlassDenied if e.code in (401, 403) else WindlassInvalid
        raise kind(f"{what}: it answered {e.code}: {said}") from e
    except TimeoutError as e:
        raise WindlassTimeout(f"{what} within {timeout:g} s") from e
    except OSError as e:
        reason = getattr(e, "reason", e)
        if isinstance(reason, TimeoutError):
            raise WindlassTimeout(f"{what} within {timeout:g} s") from e
        raise WindlassPeerLost(f"{what}: {reason}", "see whether the controller runs and is reachable") from e
    try:
        answered = json.loads(text or b"{}")
    except ValueError as e:
        raise WindlassInvalid(f"{what}: its answer is not JSON: {text[:80]!r}") from e
    if not isinstance(answered, dict):
        raise WindlassInvalid(f"{what}: its answer is not an object: {text[:80]!r}")
    return answered
