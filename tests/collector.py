"""A collector of OpenTelemetry traces that keeps what it is sent."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Attributes: address: `host:port`."""

    address: str = ""
    _spans: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def variables(self) -> dict[str, str]:
        """Of the environment of a process that shall send its traces here, and soon."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{self.address}", "OTEL_BSP_SCHEDULE_DELAY": "100"}

    def spans(self, trace_id: str) -> list[tuple[str, Any]]:
        """Of one trace: name of the service, span."""
        return [(service, span) for service, span in list(self._spans) if span.trace_id.hex() == trace_id]

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        for of_resource in request.resource_spans:
            about = {one.key: one.value.string_value for one in of_resource.resource.attributes}
            for scope in of_resource.scope_spans:
                self._spans += [(about["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def running_collector() -> Iterator[Collector]:
    """On a port of its own, until the context ends."""
    server = grpc.server(ThreadPoolExecutor(2))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
