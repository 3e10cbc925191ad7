"""Requests that end before their time: field failures 17, 18, 19, 11, and clients that do not read."""

import asyncio
import gc
import signal
import sys
import time
from typing import Any

import grpc
import pytest

from octavo.errors import Code
from octavo.rpc import error_of_call
from octavo.v1 import inference_pb2, inference_pb2_grpc
from tests.stacks import Stack, request, running_stack, until

Reason = inference_pb2.FinishReason
LONG = {"max_tokens": 200, "ignore_eos": True}
SETTLE_BOUND_S = 2.0


def open_stream(stack: Stack, prompt: str = "hi?", **fields: Any) -> Any:
    fields.setdefault("stopping", LONG)
    return stack.stub.GenerateStream(request(prompt, kind=inference_pb2.GenerateStreamRequest, **fields))


async def slow(_: Any) -> None:
    await asyncio.sleep(0.005)


async def cancel(stack: Stack, request_id: str) -> bool:
    response = await stack.stub.Cancel(inference_pb2.CancelRequest(request_id=request_id))
    return response.was_live


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
async def test_one_more_than_the_slots_all_cancelled_by_their_clients(source: str, max_steps_in_flight: int) -> None:
    """Field failure 17: in queue, prefill and decode; everything is free within the bound, and a new one is served."""
    config = {"max_tokens_per_step": 6, "max_steps_in_flight": max_steps_in_flight}
    async with running_stack(source, max_rows=3, config=config) as stack:
        stack.executor.hooks.before_step = slow
        stack.executor.hooks.is_open.clear()  # nobody is preempted or ends before all four are there
        calls = [open_stream(stack, letter * 40) for letter in "abcd"]
        assert await until(lambda: len(stack.engine.roster.running) == 3 and len(stack.engine.roster) == 4)
        stack.executor.hooks.is_open.set()
        # They arrive in any order, so the one that waits for a slot may be any of them: read what speaks first.
        reads = [asyncio.ensure_future(call.read()) for call in calls]
        await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        for call in calls:
            call.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        began = time.monotonic()
        await stack.settle()
        assert time.monotonic() - began < SETTLE_BOUND_S
        assert (await stack.generate(stopping={"max_tokens": 3})).usage.generated_tokens == 3
        assert stack.metric("octavo_request_success_total", finished_reason="abort") == 4


CLIENT = """
import sys, time, grpc
from octavo.v1 import inference_pb2 as pb, inference_pb2_grpc
stub = inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel(sys.argv[1]))
stopping = pb.Stopping(max_tokens=200, ignore_eos=True)
calls = [stub.GenerateStream(pb.GenerateStreamRequest(text="hi?", stopping=stopping)) for _ in range(3)]
for call in calls:
    next(call)
print("streaming", flush=True)
time.sleep(60)
"""


async def test_a_client_that_is_killed(source: str) -> None:
    """Field failure 17: the process of the client dies under running streams."""
    async with running_stack(source) as stack:
        stack.executor.hooks.before_step = slow
        address = f"127.0.0.1:{stack.router.port}"
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, address, stdout=asyncio.subprocess.PIPE
        )
        assert client.stdout is not None
        assert await client.stdout.readline() == b"streaming\n"
        num_steps = len(stack.executor.steps)
        client.kill()
        await client.wait()
        await stack.settle()
        assert len(stack.executor.steps) < num_steps + 100
        assert stack.metric("octavo_request_success_total", finished_reason="abort") == 3
        await stack.generate(stopping={"max_tokens": 3})


async def test_a_client_that_stops_answering(source: str) -> None:
    """Field failure 17: its process stands still and its connection stays; pings find out, and its requests end."""
    async with running_stack(source, config={"keepalive_s": 3.0}) as stack:
        stack.executor.hooks.is_open.clear()
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, f"127.0.0.1:{stack.router.port}", stdout=asyncio.subprocess.PIPE
        )
        try:
            assert client.stdout is not None
            assert await client.stdout.readline() == b"streaming\n"
            client.send_signal(signal.SIGSTOP)
            assert len(stack.engine.roster) == 3
            assert await until(lambda: len(stack.engine.roster) == 0, within_s=15)
            stack.executor.hooks.is_open.set()
            await stack.settle()
            assert stack.metric("octavo_request_success_total", finished_reason="abort") == 3
        finally:
            client.kill()
            await client.wait()


async def test_a_client_that_does_not_read_stalls_nobody(source: str) -> None:
    """Field failure 17: its answer grows to its own size and no further; others stream on."""
    async with running_stack(source) as stack:
        unread = open_stream(stack, "never read?", request_id="unread")
        response = await stack.generate("read?", stopping=LONG)
        assert response.usage.generated_tokens == 200
        assert await until(lambda: len(stack.engine.roster) == 0), "the unread answer does not hold its blocks"
        await stack.settle()
        events = [event async for event in unread]
        assert events[-1].completed.usage.generated_tokens == 200
        tokens = [token for event in events for token in event.delta.token_ids]
        assert len(tokens) == 200


@pytest.mark.parametrize("deadline_s", [None, 2.0])
async def test_a_call_that_ends_while_a_message_is_being_sent(source: str, deadline_s: float | None) -> None:
    """Field failure 17: gRPC then ends the call outside of the servicer's generator, which needs no garbage collector.

    The client reads nothing and takes little in advance, so the router is in the middle of a message by then.
    """
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
    async with running_stack(source, num_blocks=500) as stack:

        async def stop_after_a_while(_: Any) -> None:
            if len(stack.executor.steps) >= 60:
                stack.executor.hooks.is_open.clear()
            await stack.executor.hooks.is_open.wait()

        stack.executor.hooks.before_step = stop_after_a_while
        fields = {"sampling": {"n": 8}, "output": {"logprobs": True, "top_logprobs": 20}, "stopping": LONG}
        message = request(kind=inference_pb2.GenerateStreamRequest, **fields)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.router.port}", options=options) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).GenerateStream(message, timeout=deadline_s)
            assert await until(lambda: not stack.executor.hooks.is_open.is_set(), within_s=30)
            (live,) = stack.engine.roster
            num_waiting = sum(len(channel.token_ids) for channel in live.stream._channels)
            assert num_waiting > 8 * 40, "the router is not held up"
            gc.disable()
            try:
                if deadline_s is None:
                    call.cancel()
                assert await until(lambda: not len(stack.engine.roster))
            finally:
                gc.enable()
            stack.executor.hooks.before_step = None
            stack.executor.hooks.is_open.set()
            await stack.settle()
            code = "CANCELLED" if deadline_s is None else "DEADLINE_EXCEEDED"
            assert stack.metric("octavo_grpc_requests_total", method="GenerateStream", grpc_code=code) == 1


async def test_cancel_rpc_ends_a_stream_in_order(source: str) -> None:
    async with running_stack(source) as stack:
        stack.executor.hooks.before_step = slow
        call = open_stream(stack, request_id="target")
        events = []
        async for event in call:
            events.append(event)
            if len(events) == 2:
                assert await cancel(stack, "target")
        assert await call.code() is grpc.StatusCode.OK
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[-2:] == ["finished", "completed"]
        assert kinds.count("finished") == kinds.count("completed") == kinds.count("started") == 1
        assert events[-2].finished.reason == Reason.FINISH_REASON_CANCELLED
        carried = sum(len(event.delta.token_ids) for event in events)
        assert events[-1].completed.usage.generated_tokens == carried
        await stack.settle()


async def test_cancel_rpc_ends_a_unary_call_with_what_there_is(source: str) -> None:
    async with running_stack(source) as stack:
        stack.executor.hooks.before_step = slow
        call = asyncio.create_task(stack.generate(stopping=LONG, request_id="target"))
        assert await until(lambda: stack.metric("octavo_generation_tokens_total") > 3)
        assert await cancel(stack, "target")
        response = await call
        assert response.choices[0].finish_reason == Reason.FINISH_REASON_CANCELLED
        assert len(response.choices[0].token_ids) == response.usage.generated_tokens > 3
        await stack.settle()


async def test_cancel_at_odd_moments_is_idempotent(source: str) -> None:
    """Field failure 11: queued, unknown, twice, after the end, between allocation and first step."""
    async with running_stack(source, max_rows=1) as stack:
        assert not await cancel(stack, "unknown")
        stack.executor.hooks.is_open.clear()
        running = open_stream(stack, request_id="running")
        assert await until(lambda: len(stack.engine.roster.running) == 1)
        queued = open_stream(stack, request_id="queued")
        assert await until(lambda: len(stack.engine.roster.waiting) == 1)
        assert await cancel(stack, "queued")
        assert not await cancel(stack, "queued")
        events = [event async for event in queued]
        assert [event.WhichOneof("event") for event in events] == ["started", "finished", "completed"]
        assert await cancel(stack, "running")
        assert [event async for event in running][-1].completed.usage.generated_tokens == 0
        stack.executor.hooks.is_open.set()
        await stack.settle()
        await stack.generate(request_id="done", stopping={"max_tokens": 1})
        assert not await cancel(stack, "done")


async def test_the_same_id_live_twice(source: str) -> None:
    """Field failure 18: the second is refused, the first does not notice."""
    async with running_stack(source) as stack:
        stack.executor.hooks.before_step = slow
        first = asyncio.create_task(stack.generate(request_id="same", stopping={"max_tokens": 30}))
        assert await until(lambda: stack.engine.roster.find("same") is not None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.generate("other?", request_id="same")
        error = error_of_call(caught.value)
        assert (error.code, error.reason) == (Code.ALREADY_EXISTS, "REQUEST_ID_LIVE")
        assert error.metadata["request_id"] == "same"
        assert (await first).usage.generated_tokens == 30


async def test_cancel_and_resend_two_hundred_times(source: str) -> None:
    """Field failure 18: the end of the old request never touches the new one of the same id."""
    async with running_stack(source) as stack:
        for number in range(200):
            call = open_stream(stack, request_id="again")
            if number % 2:
                await call.read()
            else:
                await until(lambda: stack.engine.roster.find("again") is not None)
            assert await cancel(stack, "again"), number
            resent = stack.generate(request_id="again", stopping={"max_tokens": 2})
            assert (await resent).usage.generated_tokens == 2
            if number % 3 == 0:
                call.cancel()
        await stack.settle()


async def test_a_deadline_that_is_past(source: str) -> None:
    """Field failure 19: DEADLINE_EXCEEDED, and no step was run."""
    async with running_stack(source) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.stub.Generate(request(stopping=LONG), timeout=0)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await stack.settle()
        assert not stack.executor.steps


async def test_a_deadline_in_the_middle_of_a_long_prefill(source: str) -> None:
    """Field failure 19: no further steps, blocks free."""
    async with running_stack(source, config={"max_tokens_per_step": 2}) as stack:
        stack.executor.hooks.before_step = slow
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.stub.Generate(request("x" * 200, stopping={"max_tokens": 2}), timeout=0.1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await stack.settle()
        num_steps = len(stack.executor.steps)
        assert 0 < sum(sum(step.num_tokens) for step in stack.executor.steps) < 200
        await asyncio.sleep(0.1)
        assert len(stack.executor.steps) == num_steps
        late = {"grpc_code": "DEADLINE_EXCEEDED", "method": "Generate"}
        assert await until(lambda: stack.metric("octavo_grpc_requests_total", **late) == 1)
