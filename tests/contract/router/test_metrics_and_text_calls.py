"""Tokenize, Detokenize, and what a scrape says after known requests."""

import asyncio
import urllib.request

import grpc
import pytest
from prometheus_client import generate_latest

from octavo.errors import Code
from octavo.rpc import error_of_call
from octavo.v1 import inference_pb2
from tests.fakes import saying
from tests.stacks import running_stack, until


async def test_tokenize_and_detokenize(source: str) -> None:
    async with running_stack(source) as stack:
        ids = (await stack.stub.Tokenize(inference_pb2.TokenizeRequest(text="é<eos>"))).token_ids
        assert list(ids) == [0xC3, 0xA9, 256]
        shown = await stack.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids))
        assert shown.text == "é"
        message = inference_pb2.DetokenizeRequest(token_ids=ids, skip_special_tokens=False)
        assert (await stack.stub.Detokenize(message)).text == "é<eos>"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.stub.Tokenize(inference_pb2.TokenizeRequest())
        assert error_of_call(caught.value).violations[0].field == "input"
        robot = {"messages": [{"role": "robot", "content": "beep"}]}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.stub.Tokenize(inference_pb2.TokenizeRequest(chat=robot))
        error = error_of_call(caught.value)
        assert (error.code, error.violations[0].field) == (Code.INVALID_ARGUMENT, "chat.messages")


async def test_counters_that_alerts_watch_begin_at_zero(source: str) -> None:
    """A series that appears with its first event has not grown, so nobody would hear of that event."""
    async with running_stack(source) as stack:
        lines = generate_latest(stack.router.metrics.registry).decode().splitlines()
        for series in (
            'octavo_router_faults_total{engine="engine-0"} 0.0',
            'octavo_num_preemptions_total{cause="pool",engine="engine-0",model_name="scripted"} 0.0',
            'octavo_takeover_time_seconds_count{engine="engine-0",model_name="scripted"} 0.0',
            'octavo_grpc_requests_total{grpc_code="UNAVAILABLE",method="Generate"} 0.0',
            'octavo_grpc_requests_total{grpc_code="INTERNAL",method="GenerateStream"} 0.0',
        ):
            assert series in lines


async def test_a_scrape_after_known_requests(source: str) -> None:
    async with running_stack(source, saying("four"), config={"metrics_listen": "127.0.0.1:0"}) as stack:
        for _ in range(3):
            await stack.generate("a long prompt?")
        await stack.stream("a long prompt?", stopping={"max_tokens": 2})
        counts = {
            "prompt_tokens_total": 4 * 14,
            "generation_tokens_total": 3 * 5 + 2,
            "prefix_cache_queries_total": 4 * 14,
            "prefix_cache_hits_total": 3 * 12,
            "time_to_first_token_seconds_count": 4,
            "inter_token_latency_seconds_count": 3 * 4 + 1,
            "request_time_per_output_token_seconds_count": 4,
            "e2e_request_latency_seconds_count": 4,
            "request_queue_time_seconds_count": 4,
            "request_prefill_time_seconds_count": 4,
            "request_decode_time_seconds_count": 4,
            "request_inference_time_seconds_count": 4,
            "request_prompt_tokens_sum": 4 * 14,
            "request_generation_tokens_sum": 17,
            "num_requests_running": 0,
            "num_requests_waiting": 0,
        }
        for name, value in counts.items():
            assert stack.metric(f"octavo_{name}", model_name="scripted") == value, name
        assert stack.metric("octavo_request_success_total", finished_reason="eos") == 3
        assert stack.metric("octavo_request_success_total", finished_reason="max_tokens") == 1
        for method, count in (("Generate", 3), ("GenerateStream", 1)):
            labels = {"method": method, "grpc_code": "OK"}
            assert await until(lambda: stack.metric("octavo_grpc_requests_total", **labels) == count)  # noqa: B023
        assert stack.metric("octavo_step_time_seconds_count", part="plan") >= 17
        assert stack.metric("octavo_step_time_seconds_count", part="deliver") >= 17
        # At depth two an end of sequence is seen when the next step is on its way.
        num_discarded = 3
        assert await until(
            lambda: stack.metric("octavo_iteration_tokens_sum") == 4 * 14 - 36 + 3 * 4 + 1 + num_discarded
        )
        url = f"http://127.0.0.1:{stack.router.metrics_port}/metrics"
        text = urllib.request.urlopen(url).read().decode()  # noqa: ASYNC210 (served by a thread of its own)
        assert 'octavo_kv_cache_usage_ratio{engine="' in text


async def test_fifty_cancelled_and_the_gauges_are_zero(source: str) -> None:
    """Field failure 34: gauges are read from the state, so they cannot freeze."""
    async with running_stack(source, max_rows=50, num_blocks=200) as stack:
        stack.executor.hooks.is_open.clear()
        message = inference_pb2.GenerateStreamRequest(text="hi?", stopping={"max_tokens": 100})
        calls = [stack.stub.GenerateStream(message) for _ in range(50)]
        assert await until(lambda: stack.metric("octavo_num_requests_running") == 50)
        assert stack.metric("octavo_kv_cache_usage_ratio") > 0.2
        for call in calls:
            call.cancel()
        stack.executor.hooks.is_open.set()
        await stack.settle()


async def test_an_executor_died_and_the_gauges_are_zero(source: str) -> None:
    """Field failure 34: nobody takes its place in time, so its requests end, and nothing is left of them."""
    async with running_stack(source, max_rows=8, config={"recovery_grace_s": 0.5}) as stack:
        stack.executor.hooks.is_open.clear()
        calls = [asyncio.create_task(stack.generate(stopping={"max_tokens": 100})) for _ in range(10)]
        assert await until(lambda: stack.metric("octavo_num_requests_running") == 8)
        assert await until(lambda: stack.metric("octavo_num_requests_waiting") == 2)
        await stack.executor.stop()
        stack.process.die()
        assert await until(lambda: stack.metric("octavo_engine_up") == 0)
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(error, grpc.aio.AioRpcError) for error in errors), errors
        requests = ("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason")
        for gauge in (*requests, "kv_cache_usage_ratio", "engine_up", "spare_executors_ready"):
            assert await until(lambda: stack.metric(f"octavo_{gauge}") == 0, 1), gauge  # noqa: B023
        assert stack.metric("octavo_request_success_total", finished_reason="error") == 10

        async def is_free() -> bool:
            return not (await stack.arena()).used_blocks

        assert await until(is_free, 30), "its lease ends by itself"
