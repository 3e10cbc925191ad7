"""One trace over three processes and a collector, as an operator has it: options, variables, OTLP."""

import asyncio

import pytest

from octavo.rpc import open_channel
from octavo.tracing import start_tracing
from octavo.v1 import inference_pb2_grpc
from tests.collector import Collector
from tests.engines import RunningEngine, router_in_front_of
from tests.spans import CALLER_ID, METADATA, TRACE_ID
from tests.stacks import request, until


async def test_a_request_is_one_trace_over_three_processes(
    llama_engine: RunningEngine, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in collector.variables.items():
        monkeypatch.setenv(name, value)
    tracing = await asyncio.to_thread(start_tracing, "router", True)
    async with (
        router_in_front_of(llama_engine, tracing) as router,
        open_channel(f"127.0.0.1:{router.port}") as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        asked = request(token_ids={"ids": [1, *range(20, 60)]}, stopping={"max_tokens": 5, "ignore_eos": True})
        await stub.Generate(asked, metadata=METADATA, timeout=60)

    def found() -> dict[str, set[str]]:
        spans = collector.spans(TRACE_ID)
        return {service: {span.name for name, span in spans if name == service} for service, _ in spans}

    # The engine's processes send the last span of a request when its row leaves with a later step.
    assert await until(lambda: "compute" in found().get("octavo-executor", ()), 30), found()
    assert await until(lambda: len(found()) == 3, 30), found()
    assert found() == {
        "octavo-router": {"text_completion", "queue", "prefill", "decode"},
        "octavo-cache-service": {"allocate"},
        "octavo-executor": {"compute", "step"},
    }
    spans = {span.name: span for _, span in collector.spans(TRACE_ID)}
    call = spans["text_completion"]
    assert call.parent_span_id.hex() == CALLER_ID
    for name in ("queue", "prefill", "decode", "allocate", "compute"):
        assert spans[name].parent_span_id == call.span_id, name
    assert spans["step"].parent_span_id == spans["compute"].span_id
    steps = {one.key: one.value.int_value for one in spans["compute"].attributes}
    assert steps["octavo.computed_tokens"] >= 41 + 4
    assert spans["prefill"].start_time_unix_nano <= spans["step"].end_time_unix_nano
