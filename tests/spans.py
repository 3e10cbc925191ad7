"""Spans that stay in the process, for tests of traces."""

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from octavo.otel import OtelTracing

TRACE_ID, CALLER_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
METADATA = (("traceparent", f"00-{TRACE_ID}-{CALLER_ID}-01"), ("tracestate", "vendor=1"))
NOT_SAMPLED = (("traceparent", f"00-{TRACE_ID}-{CALLER_ID}-00"),)


class Spans:
    """Tracing of one process, and what came of it."""

    def __init__(self, process: str = "test") -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = OtelTracing(process, SimpleSpanProcessor(self._exporter))

    def all(self, name: str | None = None) -> Sequence[ReadableSpan]:
        """Those that ended, in that order."""
        return [span for span in self._exporter.get_finished_spans() if name in (None, span.name)]

    def one(self, name: str) -> ReadableSpan:
        [span] = self.all(name)
        return span


def ids_of(span: ReadableSpan) -> tuple[str, str, str]:
    """Trace, span and parent, as the headers write them."""
    parent = f"{span.parent.span_id:016x}" if span.parent else ""
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}", parent
