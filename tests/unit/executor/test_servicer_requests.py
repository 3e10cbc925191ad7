"""Whose rows a session's are: spans of rows and of steps, and the names of requests in the log."""

import logging

import numpy as np
import pytest

from executor.ids import StepId
from executor.servicer_requests import SessionRequests
from executor.step import RowFailure, StepFailed, StepGap, StepResult
from octavo.tracing import NO_TRACING
from octavo.v1 import cache_pb2
from octavo.v1 import executor_pb2 as pb
from tests.spans import CALLER_ID, TRACE_ID, Spans, ids_of

BEGAN_US = 1_700_000_000_000_000


def step(step_id: int, runs: dict[int, int], started: dict[int, str] | None = None, retired: tuple = ()) -> pb.Step:
    """`runs`: slot -> tokens; `started`: slot -> traceparent."""
    return pb.Step(
        step_id=step_id,
        retired_slots=retired,
        started_rows=[
            pb.RowStart(
                slot=slot,
                token_ids=[1, 2, 3],
                request=cache_pb2.RequestTag(request_id=f"request-{slot}", traceparent=traceparent),
            )
            for slot, traceparent in (started or {}).items()
        ],
        slots=list(runs),
        num_tokens=list(runs.values()),
    )


def result(step_id: int, *failures: RowFailure) -> StepResult:
    none = np.zeros(0, dtype=np.int64)
    return StepResult(StepId(step_id), none, none, failures, 2000, BEGAN_US)


def parent(number: int, flags: str = "01") -> str:
    return f"00-{TRACE_ID}-{number:016x}-{flags}"


def test_a_row_has_one_span_and_its_prompt_one_for_each_step() -> None:
    spans = Spans()
    requests = SessionRequests(spans.tracing)
    requests.take(step(1, {0: 2, 1: 3}, {0: parent(10), 1: parent(11)}))
    requests.take(step(2, {0: 1, 1: 1}))  # behind the first one, as two are in flight
    requests.answer(result(1))
    requests.answer(result(2))
    for number in range(3, 50):
        requests.take(step(number, {0: 1, 1: 1}))
        requests.answer(result(number))
    requests.take(step(50, {1: 1}, retired=(0,)))
    requests.answer(result(50))
    requests.end()

    first, second = spans.all("compute")
    assert [ids_of(span)[2] for span in (first, second)] == [f"{10:016x}", f"{11:016x}"]
    assert first.attributes["octavo.steps"] == 49
    assert first.attributes["octavo.computed_tokens"] == 50
    assert first.attributes["octavo.execute_seconds"] == pytest.approx(49 * 0.002)
    assert second.attributes["octavo.steps"] == 50
    steps = spans.all("step")
    assert [span.attributes["octavo.step"] for span in steps] == [1]
    assert steps[0].end_time - steps[0].start_time == 2_000_000
    assert ids_of(steps[0])[2] == ids_of(first)[1]
    assert [link.context.span_id for link in steps[0].links] == [second.context.span_id]


def test_rows_that_nobody_traces_have_no_spans() -> None:
    spans = Spans()
    requests = SessionRequests(spans.tracing)
    requests.take(step(1, {0: 2}, {0: parent(1, flags="00")}))
    requests.answer(result(1))
    requests.end()
    assert spans.all() == []


@pytest.mark.parametrize("traced", [True, False])
def test_what_fails_is_logged_by_its_request(traced: bool, caplog: pytest.LogCaptureFixture) -> None:
    requests = SessionRequests(Spans().tracing if traced else NO_TRACING)
    with caplog.at_level(logging.WARNING):
        requests.take(step(1, {0: 1, 5: 1}, {0: "", 5: ""}))
        requests.answer(result(1, RowFailure(1, "LOGITS_NOT_FINITE", "NaN")))
        requests.take(step(2, {0: 1}, retired=(5,)))
        requests.answer(StepFailed(StepId(2), "MODEL_ERROR", "it broke"))
        requests.take(step(3, {0: 1}))
        requests.answer(StepGap(StepId(1)))
    assert [record.getMessage() for record in caplog.records] == [
        "request request-5 fails with LOGITS_NOT_FINITE: NaN",
        "step 2 of requests request-0 failed with MODEL_ERROR: it broke",
    ]


def test_a_row_that_came_again_is_another_span() -> None:
    spans = Spans()
    requests = SessionRequests(spans.tracing)
    requests.take(step(1, {0: 3}, {0: f"00-{TRACE_ID}-{CALLER_ID}-01"}))
    requests.answer(StepFailed(StepId(1), "OUT_OF_MEMORY", "no room"))
    requests.take(step(1, {0: 3}, {0: f"00-{TRACE_ID}-{CALLER_ID}-01"}))
    requests.answer(result(1))
    requests.end()
    failed, ran = spans.all("compute")
    assert [event.name for event in failed.events] == ["step failed"]
    assert (failed.attributes["octavo.steps"], ran.attributes["octavo.steps"]) == (0, 1)
