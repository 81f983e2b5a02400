"""OpenTelemetry spans of versions, from the trainer's step to the engine's load.

Owns: :func:`record`, which the package calls, and :func:`context`, for spans of a program's own. The trace of a version has an id that
is computed from its model, incarnation and number, so trainers, engines and the services in Rust write into one trace without telling each
other. Must not:
import OpenTelemetry, or do anything in a process that has not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.identity import Identity

__all__ = ["context", "ids", "record"]


def ids(identity: Identity) -> tuple[int, int]:
    """The ids of a version's trace and of the parent of its spans, which agents and receivers compute as well."""
    import hashlib

    hashed = hashlib.sha256(str(identity).encode()).digest()
    return int.from_bytes(hashed[:16], "big"), int.from_bytes(hashed[16:24], "big")


def context(identity: Identity) -> Any:
    """The OpenTelemetry context of a version: a span that is started in it belongs to the version's trace.

    >>> from windlass.identity import Identity                                                # doctest: +SKIP
    >>> version = Identity("policy", image.incarnation, image.version)                        # doctest: +SKIP
    >>> with tracer.start_as_current_span("rollout", context=context(version)):               # doctest: +SKIP
    ...     ...
    """
    from opentelemetry import trace

    trace_id, span_id = ids(identity)
    # No process records this span: it is the common parent, which each of them can name.
    parent = trace.SpanContext(
        trace_id=trace_id,
        span_id=span_id,
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(parent))


def record(
    name: str,
    identity: Identity,
    seconds: float,
    attributes: Mapping[str, str | float],
    error: BaseException | None = None,
) -> None:
    """A span of a version that took ``seconds`` and ends now. Nothing in a process that does not use OpenTelemetry.

    It links to the span that is current, such as a trainer's step or an engine's request.
    """
    if "opentelemetry.trace" not in sys.modules:
        return
    from opentelemetry import trace

    ended = time.time_ns()
    current = trace.get_current_span().get_span_context()
    own = {
        "windlass.model_id": identity.model_id,
        # A number of 64 bits does not fit into an attribute's integer.
        "windlass.incarnation": f"{identity.incarnation:016x}",
        "windlass.version": identity.version,
    }
    span = trace.get_tracer("windlass").start_span(
        name,
        context=context(identity),
        attributes={**own, **attributes},
        links=[trace.Link(current)] if current.is_valid else [],
        start_time=ended - int(seconds * 1e9),
    )
    if error is not None:
        span.record_exception(error)
        span.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
    span.end(ended)
