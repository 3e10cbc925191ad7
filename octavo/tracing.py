"""Traces of requests as a process sees them: spans to begin and end, and the context that travels between processes.

Off, all of it is `NO_TRACING`, which costs a call that does nothing. What sends spans is `octavo.otel`, which alone
imports OpenTelemetry and is only loaded when traces are asked for. Not here: what any span is about.
"""

import importlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]

_MAX_HEADER_BYTES = 512


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Whose part a span is, as the headers of W3C Trace Context say it; empty: nobody's."""

    traceparent: str = ""
    tracestate: str = ""


NO_CONTEXT = TraceContext()


def context_of(metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext:
    """What a caller sent with a call. Headers that are too long are no headers."""
    found = {key: value for key, value in metadata if key in ("traceparent", "tracestate")}
    kept = {key: value for key, value in found.items() if isinstance(value, str) and len(value) <= _MAX_HEADER_BYTES}
    return TraceContext(**kept) if kept else NO_CONTEXT


@dataclass(frozen=True, slots=True)
class RequestTag:
    """A request for other processes: what to call it in logs, and whose part their spans are."""

    request_id: str = ""
    context: TraceContext = NO_CONTEXT


NO_TAG = RequestTag()


class Span(Protocol):
    """One piece of work. Moments are nanoseconds since 1970. Nothing here raises or waits."""

    @property
    def is_recording(self) -> bool:
        """Whether anybody will see it: attributes of other spans need not be gathered."""

    @property
    def context(self) -> TraceContext:
        """For spans of other processes that are parts of this one."""

    def set(self, attributes: Attributes) -> None: ...

    def add_event(self, name: str, attributes: Attributes, at_ns: int | None = None) -> None: ...

    def fail(self, error_type: str, description: str = "") -> None:
        """It ends in an error."""

    def end(self, at_ns: int | None = None) -> None: ...


class Tracing(Protocol):
    """Where a process begins its spans."""

    @property
    def is_on(self) -> bool: ...

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
        """A span; without a parent it begins a trace.

        Args:
            links: spans that it belongs to as well.
            is_server: it answers a call of another process.
        """

    def close(self) -> None:
        """Send what waits, for a short time at most. Blocks."""


class _NoSpan:
    is_recording = False
    context = NO_CONTEXT

    def set(self, attributes: Attributes) -> None: ...

    def add_event(self, name: str, attributes: Attributes, at_ns: int | None = None) -> None: ...

    def fail(self, error_type: str, description: str = "") -> None: ...

    def end(self, at_ns: int | None = None) -> None: ...


class _NoTracing:
    is_on = False

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
        return NO_SPAN

    def close(self) -> None: ...


NO_SPAN: Span = _NoSpan()
NO_TRACING: Tracing = _NoTracing()


def start_tracing(process: str, is_on: bool) -> Tracing:
    """Tracing of this process: by OpenTelemetry as the variables OTEL_* say, or none.

    Args:
        process: the last part of the service's name, `router`.

    Raises:
        ValueError: traces are asked for, and the packages for them are not installed or the variables are wrong.
    """
    if not is_on:
        return NO_TRACING
    if importlib.util.find_spec("opentelemetry") is None:
        raise ValueError("--otel-traces needs the packages of OpenTelemetry: pip install 'octavo[otel]'")
    tracing: Tracing = importlib.import_module("octavo.otel").start(process)
    return tracing
