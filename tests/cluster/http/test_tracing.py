"""Traces of requests, exported by OpenTelemetry's own exporter to a collector that this test runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from gzip import decompress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cluster.observe.tracing import ENDPOINTS, PROTOCOLS, Tracing
from tests.support.fake_service import FakeService, wait_for

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receive)
        self.spans: list[Any] = []
        self.services: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


class Receive(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = decompress(body)
        assert self.path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.services |= {a.value.string_value for a in resource.resource.attributes
                                     if a.key == "service.name"}  # fmt: skip
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with collecting() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield running


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}


def test_an_answer_s_phases_are_spans_of_the_client_s_trace(
    own: Callable[..., FakeService], collector: Collector
) -> None:
    running = own(script=lambda submit: [[5, 6], [7], [8]], engine={"step_s": 0.05})
    with running.http() as http:
        body = {"prompt": "a", "max_tokens": 4}
        headers = {"traceparent": PARENT, "X-Request-ID": "mine"}
        assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
    wait_for(lambda: len(collector.spans) == 4)
    [root] = collector.named("llm_request")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == tuple(PARENT.split("-")[1:3])
    assert collector.services == {"secateur"}
    assert attributes(root) | {"gen_ai.response.finish_reasons": None} == {
        "gen_ai.request.id": "mine",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.usage.input_tokens": 1,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": None,
    }
    phases = [collector.named(name)[0] for name in ("queue", "prefill", "decode")]
    assert {span.parent_span_id for span in phases} == {root.span_id}
    assert {span.trace_id for span in phases} == {root.trace_id}
    times = [root.start_time_unix_nano]
    for span in phases:
        assert times[-1] <= span.start_time_unix_nano <= span.end_time_unix_nano
        times.append(span.end_time_unix_nano)
    assert times[-1] <= root.end_time_unix_nano
    assert phases[2].end_time_unix_nano > phases[2].start_time_unix_nano


def test_every_choice_has_its_spans_and_streams_have_them_too(
    own: Callable[..., FakeService], collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    with own().http() as http:
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, "n": 2, "stream": True})
    wait_for(lambda: len(collector.spans) == 8)
    assert len({span.trace_id for span in collector.named("llm_request")}) == 2, "without a parent, traces of their own"
    assert collector.services == {"ours"}


def test_a_request_that_is_aborted_in_the_queue_has_no_later_phase(
    own: Callable[..., FakeService], collector: Collector
) -> None:
    running = own()
    running.engine.hold.set()
    running.leave("/v1/completions", {"prompt": "a"})
    wait_for(lambda: len(collector.spans) == 2)
    assert {span.name for span in collector.spans} == {"llm_request", "queue"}


def test_the_sampler_of_the_environment_applies(
    own: Callable[..., FakeService], collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with own().http() as http:
        for headers in ({}, {"traceparent": PARENT}):
            http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4}, headers=headers)
    wait_for(lambda: len(collector.spans) == 4)
    assert {span.trace_id.hex() for span in collector.spans} == {PARENT.split("-")[1]}


def test_a_collector_that_is_gone_disturbs_no_request(
    own: Callable[..., FakeService], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with own().http() as http:
        assert {http.post("/v1/completions", json={"prompt": "a"}).status_code for _ in range(5)} == {200}


# Without a collector


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*ENDPOINTS, *PROTOCOLS):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_nothing_is_traced_unless_the_environment_asks(clean: pytest.MonkeyPatch) -> None:
    assert Tracing.from_environment().of({"traceparent": PARENT}) is None


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    clean: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, endpoint: str
) -> None:
    clean.setenv(endpoint, "http://127.0.0.1:4318")
    clean.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert Tracing.from_environment().of({}) is None
    assert "no traces: they take" in caplog.text and "[tracing]'" in caplog.text


def test_another_protocol_is_named(clean: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clean.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    clean.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert Tracing.from_environment().of({}) is None
    assert "is 'grpc'; set http/protobuf" in caplog.text
