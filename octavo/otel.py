"""Spans by OpenTelemetry's SDK, sent by OTLP over gRPC. Nothing else imports OpenTelemetry.

Where spans go, which traces are kept and how they are batched is said by the SDK's own variables, OTEL_*. Spans wait in
a bounded queue and are sent by a thread: a collector that is slow, gone or wrong costs spans, never a request.
"""

import importlib.metadata
import logging
import os
import socket
import threading
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from octavo.tracing import NO_CONTEXT, Attributes, Span, TraceContext, Tracing

log = logging.getLogger(__name__)

CLOSE_S = 3.0
_PROPAGATOR = TraceContextTextMapPropagator()


def start(process: str) -> Tracing:
    """Spans of this process go where the variables say.

    Raises:
        ValueError: variables that cannot be used.
    """
    try:
        return OtelTracing(process, BatchSpanProcessor(OTLPSpanExporter()))
    except Exception as error:  # of many kinds, by the variable
        raise ValueError(f"traces cannot be sent as the variables OTEL_* say: {error}") from error


class OtelTracing:
    """A `Tracing` whose ended spans go to a processor."""

    is_on = True

    def __init__(self, process: str, processor: SpanProcessor) -> None:
        version = importlib.metadata.version("octavo")
        self._provider = TracerProvider(resource=_resource(process, version), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("octavo", version)

    def begin(
        self,
        name: str,
        parent: TraceContext,
        attributes: Attributes,
        *,
        at_ns: int | None = None,
        links: Sequence[TraceContext] = (),
        is_server: bool = False,
    ) -> Span:
        return OtelSpan(
            self._tracer.start_span(
                name,
                context=_extracted(parent),  # never what is current in this task
                kind=trace.SpanKind.SERVER if is_server else trace.SpanKind.INTERNAL,
                attributes=attributes,
                links=[trace.Link(trace.get_current_span(_extracted(link)).get_span_context()) for link in links],
                start_time=at_ns,
            )
        )

    def close(self) -> None:
        # A thread, because an exporter whose collector is gone tries again for longer than a process may take to end.
        closing = threading.Thread(target=self._provider.shutdown, name="otel-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            log.warning("the last traces were not taken within %g s and are lost", CLOSE_S)


class OtelSpan:
    """A `Span`."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def is_recording(self) -> bool:
        return self._span.is_recording()

    @property
    def context(self) -> TraceContext:
        headers: dict[str, str] = {}
        _PROPAGATOR.inject(headers, trace.set_span_in_context(self._span, Context()))
        return TraceContext(**headers) if headers else NO_CONTEXT

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def add_event(self, name: str, attributes: Attributes, at_ns: int | None = None) -> None:
        self._span.add_event(name, attributes, at_ns)

    def fail(self, error_type: str, description: str = "") -> None:
        self._span.set_attribute("error.type", error_type)
        self._span.set_status(trace.StatusCode.ERROR, description)

    def end(self, at_ns: int | None = None) -> None:
        self._span.end(at_ns)


def _extracted(context: TraceContext) -> Context:
    """What cannot be read as a context is none."""
    headers = {"traceparent": context.traceparent, "tracestate": context.tracestate}
    return _PROPAGATOR.extract({name: value for name, value in headers.items() if value}, Context())


def _resource(process: str, version: str) -> Resource:
    """What the variables say of this service, and what they do not."""
    known = {
        "service.name": f"octavo-{process}",
        "service.version": version,
        "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
    }
    return Resource(known).merge(OTELResourceDetector().detect())
