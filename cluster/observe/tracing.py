"""OpenTelemetry traces of requests, if OTEL_EXPORTER_OTLP_ENDPOINT is set: queue, prefill and decode of each answer.

The spans are made when an answer ends, from the times that its metrics use, so a running request pays nothing. They
belong to the trace that the client's `traceparent` header names, or begin one. OpenTelemetry's own environment
variables apply: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS and others.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.observe.metrics import RequestTimes
from secateur.install import install_command

logger = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@dataclass(frozen=True, slots=True)
class Trace:
    """Where the spans of one HTTP request belong."""

    _tracer: Any
    _parent: Any

    def record(self, reason: str, times: RequestTimes, attributes: Mapping[str, str | int]) -> None:
        """Export the spans of one answer that has just ended for `reason`."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        arrival_ns = time.time_ns() - round(1e9 * times.end)

        def at(seconds: float) -> int:
            return arrival_ns + round(1e9 * seconds)

        root = self._tracer.start_span(
            "llm_request", self._parent, kind=SpanKind.SERVER, attributes={**attributes}, start_time=at(0)
        )
        root.set_attribute("gen_ai.response.finish_reasons", [reason])
        if reason == "error":
            root.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(root)
        # A request that ended early has only the phases that it entered.
        steps = [
            ("queue", times.submitted, times.scheduled),
            ("prefill", times.scheduled, times.first_token),
            ("decode", times.first_token, times.last_token),
        ]
        for name, begin, end in steps:
            if begin is not None:
                span = self._tracer.start_span(name, inside, start_time=at(begin))
                span.end(at(times.end if end is None else end))
        root.end(at(times.end))


class Tracing:
    """Makes the traces of a service; None in place of one if nobody collects them."""

    def __init__(self, provider: Any = None) -> None:
        self._tracer = None if provider is None else provider.get_tracer("secateur")

    @classmethod
    def from_environment(cls) -> Tracing:
        """Export to the endpoint that the environment names. Without one, or without the packages, trace nothing."""
        if not any(os.environ.get(name) for name in ENDPOINTS):
            return cls()
        protocol = next((os.environ[name] for name in PROTOCOLS if os.environ.get(name)), "http/protobuf")
        if protocol != "http/protobuf":
            logger.warning("no traces: OTEL_EXPORTER_OTLP_PROTOCOL is %r; set http/protobuf", protocol)
            return cls()
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            command = install_command("tracing")
            logger.warning("no traces: they take %r, which is not installed: %s", error.name, command)
            return cls()
        # Resource prefers what it is given to the environment.
        name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "secateur"}
        provider = TracerProvider(resource=Resource.create(name))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def of(self, headers: Mapping[str, str]) -> Trace | None:
        """Return the trace of a request with these headers."""
        if self._tracer is None:
            return None
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        return Trace(self._tracer, TraceContextTextMapPropagator().extract(carrier))
