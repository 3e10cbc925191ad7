"""The trace of a request: whose part it is, what is in it, and that nothing of it can disturb the request."""

import asyncio
import itertools
import logging
import re
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from octavo.errors import Code
from octavo.otel import OtelTracing
from octavo.v1 import inference_pb2
from router.servicer import traces
from tests.fakes import saying
from tests.spans import CALLER_ID, METADATA, NOT_SAMPLED, TRACE_ID, Spans, ids_of
from tests.stacks import Stack, request, running_stack, until

SECRET = "what nobody may read"


async def generate(stack: Stack, prompt: str = "hi?", **fields: Any) -> inference_pb2.GenerateResponse:
    return await stack.stub.Generate(request(prompt, **fields), metadata=METADATA, timeout=60)


async def test_a_request_is_a_part_of_its_callers_trace_in_every_process(source: str) -> None:
    spans = Spans()
    async with running_stack(source, saying("yes"), tracing=spans.tracing) as stack:
        answer = await generate(stack, f"{SECRET}?", request_id="mine", stopping={"max_tokens": 9})
        [started] = [row for step in stack.executor.steps for row in step.started_rows]
    call = spans.one("text_completion")
    trace_id, call_id, parent = ids_of(call)
    assert (trace_id, parent) == (TRACE_ID, CALLER_ID)
    assert {ids_of(span)[0] for span in spans.all()} == {TRACE_ID}
    for name in ("queue", "prefill", "decode", "allocate"):
        assert ids_of(spans.one(name))[2] == call_id, name
    assert started.request.request_id == "mine"
    assert started.request.traceparent == f"00-{TRACE_ID}-{call_id}-01"
    assert started.request.tracestate == "vendor=1"

    usage, told = answer.usage, call.attributes
    assert told["gen_ai.usage.input_tokens"] == usage.prompt_tokens
    assert told["gen_ai.usage.output_tokens"] == usage.generated_tokens == 4
    assert told["gen_ai.response.finish_reasons"] == ("eos",)
    assert told["gen_ai.response.id"] == "mine"
    assert told["gen_ai.response.model"] == "scripted"
    assert call.kind.name == "SERVER"
    parts = [spans.one(name) for name in ("queue", "prefill", "decode")]
    assert call.start_time <= parts[0].start_time + 10**9  # of two clocks
    assert all(one.end_time == next_one.start_time for one, next_one in itertools.pairwise(parts))
    assert SECRET not in "".join(span.to_json() for span in spans.all())


def test_names_of_attributes_are_those_of_the_conventions() -> None:
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    used = set(re.findall(r'"(gen_ai\.[a-z_.]+)"', Path(traces.__file__).read_text("utf-8")))
    assert len(used) > 10
    assert used <= known


async def test_a_trace_that_nobody_keeps_is_passed_on_and_not_made(source: str) -> None:
    spans = Spans()
    async with running_stack(source, tracing=spans.tracing) as stack:
        await stack.stub.Generate(request(stopping={"max_tokens": 2}), metadata=NOT_SAMPLED, timeout=60)
        [started] = [row for step in stack.executor.steps for row in step.started_rows]
    assert spans.all() == []
    assert started.request.traceparent.startswith(f"00-{TRACE_ID}-")
    assert started.request.traceparent.endswith("-00")


async def test_what_ends_a_call_is_in_its_span(source: str) -> None:
    spans = Spans()
    async with running_stack(source, tracing=spans.tracing) as stack:
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(stack, stopping={"max_tokens": 0})
        stack.executor.hooks.is_open.clear()
        call = stack.stub.Generate(request(), metadata=METADATA, timeout=60)
        assert await until(lambda: stack.engine.roster.running)
        call.cancel()
        assert await until(lambda: len(spans.all("text_completion")) == 2)
        stack.executor.hooks.is_open.set()
        await stack.settle()
    refused, left = spans.all("text_completion")
    assert refused.attributes["error.type"] == "INVALID_FIELD"
    assert refused.status.status_code.name == left.status.status_code.name == "ERROR"
    assert left.attributes["error.type"] == "cancelled"


async def test_a_header_that_cannot_be_read_begins_a_new_trace(source: str) -> None:
    spans = Spans()
    async with running_stack(source, tracing=spans.tracing) as stack:
        for bad in ("junk", "00-zz-yy-01", "0" * 5000):
            call = stack.stub.Generate(
                request(stopping={"max_tokens": 1}), metadata=(("traceparent", bad),), timeout=60
            )
            await call
    assert len(spans.all("text_completion")) == 3
    assert all(span.parent is None for span in spans.all("text_completion"))


class BrokenExporter(SpanExporter):
    """Of a collector that hangs, then of one that breaks."""

    def __init__(self) -> None:
        self.num_tries = 0

    def export(self, spans: Any) -> SpanExportResult:
        self.num_tries += 1
        if self.num_tries == 1:
            time.sleep(0.3)
        raise RuntimeError("no collector")

    def shutdown(self) -> None: ...


async def test_a_collector_that_is_gone_costs_spans_and_nothing_else(
    source: str, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = BrokenExporter()
    processor = BatchSpanProcessor(exporter, max_queue_size=4, max_export_batch_size=1, schedule_delay_millis=1)
    async with running_stack(source, tracing=OtelTracing("router", processor)) as stack:
        answers = await asyncio.gather(*[generate(stack, stopping={"max_tokens": 3}) for _ in range(8)])
        assert all(answer.usage.generated_tokens == 3 for answer in answers)
        assert await until(lambda: exporter.num_tries > 1)
        assert (await generate(stack, stopping={"max_tokens": 3})).usage.generated_tokens == 3
        await stack.settle()


async def test_off_no_process_is_told_of_a_trace(source: str) -> None:
    async with running_stack(source) as stack:
        await generate(stack, stopping={"max_tokens": 1}, request_id="mine")
        [started] = [row for step in stack.executor.steps for row in step.started_rows]
    assert started.request.request_id == "mine", "logs name it all the same"
    assert started.request.traceparent == ""


async def test_a_fault_in_counting_hides_nothing_of_what_ended_the_call(
    source: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*about: object) -> None:
        raise RuntimeError("a metric is broken")

    async with running_stack(source) as stack:
        monkeypatch.setattr(stack.router._gate.metrics, "on_used", broken)
        with caplog.at_level(logging.ERROR):
            assert (await generate(stack, stopping={"max_tokens": 2})).usage.generated_tokens == 2
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await generate(stack, "?" * 10_000)
        assert refused.value.code().value[0] == Code.FAILED_PRECONDITION.value
        assert "is not counted" in caplog.text
        await stack.settle()
