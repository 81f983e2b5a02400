"""OpenTelemetry spans: the trainer's and the engine's are in the trace of their version."""

from __future__ import annotations

import contextlib
import http.server
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from children import environment
from windlass import Receiver, WeightManager, WindlassInvalid, trace
from windlass.identity import Identity
from windlass.load import Live, ModelSession
from windlass.load.order import LoadOrder

needs_sdk = pytest.mark.skipif(
    not find_spec("opentelemetry.sdk") if find_spec("opentelemetry") else True,
    reason="NOT TESTED: the spans of versions, because opentelemetry-sdk is missing",
)


@pytest.fixture
def spans() -> Iterator[Any]:
    """What is exported. The provider is the process's, and can be set once."""
    from opentelemetry import trace as api
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = api.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        api.set_tracer_provider(provider)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield exporter
    exporter.shutdown()


@needs_sdk
def test_spans_of_a_version_are_in_one_trace_from_the_step_to_the_load(spans: Any) -> None:
    from opentelemetry import trace as api

    model, engine = nn.Linear(4, 3), nn.Linear(4, 3)
    live = Live(ModelSession(engine))
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as home,
        WeightManager(model_id="policy", region_dir=home, timeout=20.0) as wm,
    ):
        receiver = None
        for version in (1, 2):
            with torch.no_grad():
                model.weight.mul_(1.5)
            with api.get_tracer("test").start_as_current_span(f"step {version}"):
                wm.offload(model, version)
            if receiver is None:
                receiver = Receiver(f"{home}/images", region=wm.region, relay=False)
            receiver.wait(version)
            with receiver.hold() as image:
                live.load(LoadOrder.of(image))
        assert receiver is not None
        receiver.close()
        incarnation = wm.incarnation
    assert incarnation is not None and torch.equal(engine.weight, model.weight)
    every = spans.get_finished_spans()
    steps = {span.name: span for span in every if span.name.startswith("step")}
    traces = set()
    for version in (1, 2):
        ours = {span.name: span for span in every if span.attributes.get("windlass.version") == version}
        assert list(ours) == ["windlass.publish", "windlass.receive", "windlass.load"]
        wanted = api.get_current_span(trace.context(Identity("policy", incarnation, version)))
        known = wanted.get_span_context()
        for span in ours.values():
            assert span.context.trace_id == known.trace_id and span.parent.span_id == known.span_id
            assert span.attributes["windlass.model_id"] == "policy"
            assert span.attributes["windlass.incarnation"] == f"{incarnation:016x}"
            assert span.start_time <= span.end_time and span.attributes["windlass.bytes"] > 0
        publish = ours["windlass.publish"]
        assert publish.attributes["windlass.copy_s"] > 0
        assert [link.context for link in publish.links] == [steps[f"step {version}"].context]
        assert publish.start_time < ours["windlass.receive"].end_time < ours["windlass.load"].end_time
        traces.add(known.trace_id)
    assert len(traces) == 2


@needs_sdk
def test_the_span_of_an_offload_that_failed_has_its_error(spans: Any) -> None:
    model = nn.Linear(4, 3)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as home,
        WeightManager(model_id="policy", region_dir=home, agent={"enabled": False}) as wm,
    ):
        wm.offload(model, 1)
        with pytest.raises(WindlassInvalid):
            wm.offload(nn.Linear(4, 2), 2)
    good, bad = spans.get_finished_spans()
    assert good.status.is_ok or good.status.status_code.name == "UNSET"
    assert bad.attributes["windlass.version"] == 2 and bad.status.status_code.name == "ERROR"
    assert bad.events[0].name == "exception"


class Collector:
    """Takes spans over HTTP as an OpenTelemetry collector does, after it has said once that it is busy."""

    def __init__(self) -> None:
        self.spans: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self.asked: list[dict[str, str]] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                collector.asked.append(dict(self.headers))
                busy = len(collector.asked) == 1
                self.send_response(503 if busy else 200)
                self.send_header("content-length", "0")
                self.end_headers()
                if busy:
                    return
                assert self.path == "/v1/traces"
                for group in body["resourceSpans"]:
                    (name,) = group["resource"]["attributes"]
                    assert name["key"] == "service.name"
                    for scope in group["scopeSpans"]:
                        assert scope["scope"]["name"] == "windlass"
                        for span in scope["spans"]:
                            collector.spans.put((name["value"]["stringValue"], span))

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_agents_and_receivers_send_their_spans_into_the_trace_of_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(400, 300)
    with contextlib.closing(Collector()) as collector, tempfile.TemporaryDirectory(dir="/dev/shm") as home:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a%20secret")
        with WeightManager(
            model_id="policy", region_dir=home, timeout=60.0, store=f"file://{home}/store"
        ) as wm:
            for version in (1, 2):
                with torch.no_grad():
                    model.weight[version] += 1.0
                wm.offload(model, version)
                wm.wait_delta_ready(version, timeout=60.0)
            wm.wait_stored(2, timeout=60.0)
            words = ["receive", f"--region={wm.region}", f"--dir={home}/images", "--until=2"]
            command = [sys.executable, "-m", "windlass", *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment())
            assert done.returncode == 0, done.stderr
            incarnation = wm.incarnation
        assert incarnation is not None
        # The agent has ended, and has sent what was left.
        told = [collector.spans.get(timeout=30.0) for _ in range(collector.spans.qsize())]
    assert all(asked["x-key"] == "a secret" for asked in collector.asked)
    named = {(service, span["name"]) for service, span in told}
    assert named == {
        ("windlass-agent", "windlass.seal"),
        ("windlass-agent", "windlass.store"),
        ("windlass-receive", "windlass.receive"),
    }
    for _, span in told:
        values = {entry["key"]: entry["value"] for entry in span["attributes"]}
        version = int(values["windlass.version"]["intValue"])
        assert values["windlass.incarnation"]["stringValue"] == f"{incarnation:016x}"
        trace_id, parent = trace.ids(Identity("policy", incarnation, version))
        assert (span["traceId"], span["parentSpanId"]) == (f"{trace_id:032x}", f"{parent:016x}")
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"]) and "status" not in span
    sealed = [span for _, span in told if span["name"] == "windlass.seal"]
    assert len(sealed) == 2 and any(e["key"] == "windlass.bytes" for e in sealed[1]["attributes"])


def test_the_ids_of_a_trace_are_those_that_the_services_compute() -> None:
    wanted = "bd4d3ade307eded8e039a62950f61e292dcb4086ca520fc1"
    trace_id, parent = trace.ids(Identity("policy", 0x18E98E48, 7))
    assert f"{trace_id:032x}{parent:016x}" == wanted


ALONE = """
import sys
from windlass import trace
from windlass.identity import Identity
trace.record("windlass.publish", Identity("policy", 1, 2), 0.1, {})
assert not any(name.partition(".")[0] == "opentelemetry" for name in sys.modules)
"""


def test_a_process_without_opentelemetry_records_nothing_and_imports_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60, env=environment()
    )
    assert done.returncode == 0, done.stderr
