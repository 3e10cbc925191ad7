"""Whose rows the rows of a session are: names for the log, and spans for the traces of requests.

A row has one span, from its start to its leaving, that counts its steps; a step has one only where it computes a prompt
that is traced. So a trace costs a few spans for each request, and none for each token. Seen from the edge, in messages
and outcomes: nothing here decides anything.
"""

import logging
import time
from collections import deque
from dataclasses import dataclass

from executor.step import StepFailed, StepOutcome, StepResult
from octavo.tracing import NO_CONTEXT, Span, TraceContext, Tracing
from octavo.v1 import executor_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Row:
    request_id: str
    span: Span
    num_steps: int = 0
    num_tokens: int = 0
    execute_microseconds: int = 0


@dataclass(frozen=True, slots=True)
class _Step:
    """A step without an outcome yet; `computing`: traced rows whose prompt it computes."""

    rows: tuple[_Row | None, ...]  # in the step's order
    num_tokens: tuple[int, ...]  # of each
    computing: tuple[_Row, ...]


class SessionRequests:
    """The requests of one session, told of each step that comes and each outcome that goes, both in order."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._rows: dict[int, _Row] = {}  # slot -> row
        self._in_flight: deque[_Step] = deque()

    def take(self, step: pb.Step) -> None:
        """A step came."""
        for slot in step.retired_slots:
            self._leave(slot)
        for start in step.started_rows:
            self._leave(start.slot)
            self._rows[start.slot] = self._begin(start)
        rows = tuple(self._rows.get(slot) for slot in step.slots)
        computing: tuple[_Row, ...] = ()
        if self._tracing.is_on:
            fresh = {start.slot for start in step.started_rows}
            computing = tuple(
                row
                for slot, row, count in zip(step.slots, rows, step.num_tokens, strict=False)
                if row is not None and row.span.is_recording and (count > 1 or slot in fresh)
            )
        self._in_flight.append(_Step(rows, tuple(step.num_tokens), computing))

    def answer(self, outcome: StepOutcome) -> None:
        """The outcome of the oldest step goes."""
        step = self._in_flight.popleft()
        if isinstance(outcome, StepResult):
            self._count(step, outcome)
        elif isinstance(outcome, StepFailed):
            names = ", ".join(row.request_id for row in step.rows if row is not None)
            log.error(
                "step %d of requests %s failed with %s: %s", outcome.step_id, names, outcome.reason, outcome.message
            )
            for row in filter(None, step.rows):
                row.span.add_event("step failed", {"error.type": outcome.reason})

    def end(self) -> None:
        """The connection is over."""
        for slot in list(self._rows):
            self._leave(slot)

    def _begin(self, start: pb.RowStart) -> _Row:
        request = start.request
        log.debug("request %s runs in slot %d", request.request_id, start.slot)
        context = TraceContext(request.traceparent, request.tracestate) if request.traceparent else NO_CONTEXT
        about = {"octavo.history_tokens": len(start.token_ids), "octavo.kept_tokens": start.num_computed_tokens}
        return _Row(request.request_id, self._tracing.begin("compute", context, about))

    def _leave(self, slot: int) -> None:
        row = self._rows.pop(slot, None)
        if row is not None and row.span.is_recording:
            about = {"octavo.steps": row.num_steps, "octavo.computed_tokens": row.num_tokens}
            row.span.set({**about, "octavo.execute_seconds": row.execute_microseconds / 1e6})
            row.span.end()

    def _count(self, step: _Step, result: StepResult) -> None:
        for failure in result.failures:
            failed = step.rows[failure.row]
            name = failed.request_id if failed is not None else "unknown"
            log.warning("request %s fails with %s: %s", name, failure.reason, failure.message)
        if not self._tracing.is_on:
            return
        for row, num_tokens in zip(step.rows, step.num_tokens, strict=False):
            if row is not None:
                row.num_steps += 1
                row.num_tokens += num_tokens
                row.execute_microseconds += result.execute_microseconds
        if step.computing:
            self._trace(step, result)

    def _trace(self, step: _Step, result: StepResult) -> None:
        """A part of the first request in it; the others are linked."""
        first, *others = (row.span.context for row in step.computing)
        began_ns = result.began_unix_microseconds * 1000 or time.time_ns()
        about = {"octavo.step": result.step_id, "octavo.rows": len(step.rows), "octavo.tokens": sum(step.num_tokens)}
        span = self._tracing.begin("step", first, about, at_ns=began_ns, links=others)
        span.end(began_ns + result.execute_microseconds * 1000)
