"""Every status of the public API that applies, with its details."""

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import pytest

import octavo
from octavo.errors import Code, OctavoError
from octavo.rpc import MAX_MESSAGE_BYTES, PUSHBACK_KEY, error_of_call, open_channel
from octavo.v1 import executor_pb2, inference_pb2, inference_pb2_grpc
from router.app import Router
from router.config import RouterConfig
from tests.fakes import StepRefusedError
from tests.stacks import Stack, request, running_stack, until

LONG = {"max_tokens": 100, "ignore_eos": True}


async def failed_call(stack: Stack, prompt: str = "hi?", **fields: Any) -> tuple[OctavoError, dict[str, Any]]:
    """The error of a call and its trailers; the stream of the same request must fail alike."""
    with pytest.raises(grpc.aio.AioRpcError) as streamed:
        await stack.stream(prompt, **fields)
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await stack.generate(prompt, **fields)
    error = error_of_call(unary.value)
    assert repr(error) == repr(error_of_call(streamed.value))
    return error, dict(list(unary.value.trailing_metadata()))


async def test_invalid_argument_has_the_violations(source: str) -> None:
    async with running_stack(source) as stack:
        error, _ = await failed_call(stack, sampling={"top_p": 2.0})
        assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
        assert error.violations[0].field == "sampling.top_p"
        assert "(0, 1]" in error.violations[0].description
        assert stack.metric("octavo_admission_rejections_total", reason="invalid_field") == 2
        assert await until(lambda: stack.metric("octavo_grpc_requests_total", grpc_code="INVALID_ARGUMENT") == 2)


async def test_not_found_names_what_is_served(source: str) -> None:
    async with running_stack(source) as stack:
        error, _ = await failed_call(stack, model="gpt-17")
        assert (error.code, error.reason, error.metadata) == (Code.NOT_FOUND, "MODEL_NOT_FOUND", {"served": "scripted"})
        assert (await stack.generate(model="scripted", stopping={"max_tokens": 1})).model == "scripted"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.stub.Tokenize(inference_pb2.TokenizeRequest(model="gpt-17", text="x"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_resource_exhausted_says_when_to_come_back(source: str) -> None:
    async with running_stack(source, max_rows=1, config={"max_queued_requests": 1}) as stack:
        stack.executor.hooks.is_open.clear()
        running = asyncio.create_task(stack.generate(stopping=LONG))
        assert await until(lambda: len(stack.engine.roster.running) == 1)
        queued = asyncio.create_task(stack.generate(stopping=LONG))
        assert await until(lambda: len(stack.engine.roster.waiting) == 1)
        error, trailers = await failed_call(stack)
        assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert error.retry_after_s == 1.0
        assert trailers[PUSHBACK_KEY] == "1000"
        assert error.metadata == {"queued": "1", "max_queued_requests": "1"}
        load = (await stack.stub.GetLoad(inference_pb2.GetLoadRequest())).models[0]
        assert (load.running_requests, load.waiting_requests) == (1, 1)
        assert stack.metric("octavo_num_requests_waiting_by_reason", reason="capacity") == 1
        stack.executor.hooks.is_open.set()
        await asyncio.gather(running, queued)
        await stack.settle()


async def test_a_message_over_the_limit_is_resource_exhausted_and_the_router_lives_on(source: str) -> None:
    """gRPC itself refuses it, before any handler: bare, without details. A client of ours does not send it again."""
    async with running_stack(source) as stack:
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.router.port}", options=options) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(request("x" * (MAX_MESSAGE_BYTES + 1)))
        assert error_of_call(caught.value).code is Code.RESOURCE_EXHAUSTED
        async with octavo.AsyncClient(f"127.0.0.1:{stack.router.port}") as client:
            with pytest.raises(OctavoError) as refused:
                await client.generate("x" * (MAX_MESSAGE_BYTES + 1))
        assert refused.value.code is Code.RESOURCE_EXHAUSTED
        assert (await stack.generate(stopping={"max_tokens": 3})).usage.generated_tokens == 3
        await stack.settle()


async def test_failed_precondition_has_the_numbers(source: str) -> None:
    async with running_stack(source, max_context_tokens=50) as stack:
        error, _ = await failed_call(stack, "x" * 40, stopping={"max_tokens": 11})
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "NEVER_FITS")
        assert (error.metadata["prompt_tokens"], error.metadata["max_context_tokens"]) == ("40", "50")
        error, _ = await failed_call(stack, "x" * 40, stopping={"min_tokens": 11})
        assert error.metadata == {"min_tokens": "11", "room": "10"}
        await stack.generate("x" * 40, stopping={"max_tokens": 10})


async def test_unavailable_before_any_executor(source: str) -> None:
    router = Router(
        RouterConfig(listen="127.0.0.1:0", metrics_listen="", executor="127.0.0.1:1", cache_service="127.0.0.1:1")
    )
    await router.start()
    async with open_channel(f"127.0.0.1:{router.port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request())
        error = error_of_call(caught.value)
        assert (error.code, error.reason, error.retry_after_s) == (Code.UNAVAILABLE, "NO_EXECUTOR", 1.0)
        assert (PUSHBACK_KEY, "1000") in list(caught.value.trailing_metadata())
        assert not (await stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert not (await stub.GetLoad(inference_pb2.GetLoadRequest())).models
        assert (await stub.GetServerInfo(inference_pb2.GetServerInfoRequest())).limits.max_queued_requests == 256
    await router.close()


async def test_unavailable_while_draining_and_live_requests_end(source: str) -> None:
    """Field failure 37: a drain with streams and none; new calls go elsewhere, live ones end whole."""
    async with running_stack(source, config={"drain_accept_window_s": 0}) as stack:
        stack.executor.hooks.is_open.clear()
        live = asyncio.create_task(stack.generate(stopping={"max_tokens": 20}))
        assert await until(lambda: len(stack.engine.roster.running) == 1)
        draining = asyncio.create_task(stack.router.drain())

        async def is_away() -> bool:
            try:
                await stack.stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=5)
            except grpc.aio.AioRpcError as error:
                return error.code() is grpc.StatusCode.UNAVAILABLE  # CANCELLED: it met the GOAWAY on its way
            return False

        assert await until(is_away), "no connection is taken any more"
        assert stack.router.fleet.num_live == 1
        stack.executor.hooks.is_open.set()
        assert (await live).usage.generated_tokens == 20
        await draining
        stats = await stack.arena()
        assert (stats.num_sequences, stats.used_blocks, stats.fenced_blocks) == (0, 0, 0)


async def test_a_drain_that_runs_out_of_grace_ends_with_unavailable(source: str) -> None:
    async with running_stack(source, config={"drain_grace_s": 0.1}) as stack:
        stack.executor.hooks.is_open.clear()
        live = asyncio.create_task(stack.generate(stopping=LONG))
        assert await until(lambda: len(stack.engine.roster.running) == 1)
        draining = asyncio.create_task(stack.router.drain())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await live
        assert error_of_call(caught.value).reason == "DRAINING"
        stack.executor.hooks.is_open.set()
        await draining


@pytest.mark.parametrize("has_time", [True, False])
async def test_a_drain_with_ten_streams_and_one_queued(source: str, has_time: bool) -> None:
    """Field failure 37: who was taken is served to the end, also from the queue; past the grace all hear why."""
    config = {"drain_grace_s": 60 if has_time else 0.1}
    async with running_stack(source, max_rows=10, num_blocks=200, config=config) as stack:
        stack.executor.hooks.is_open.clear()
        streams = [asyncio.create_task(stack.stream(stopping={**LONG, "max_tokens": 20})) for _ in range(10)]
        assert await until(lambda: len(stack.engine.roster.running) == 10)
        queued = asyncio.create_task(stack.stream(stopping={**LONG, "max_tokens": 20}))
        assert await until(lambda: len(stack.engine.roster.waiting) == 1)
        draining = asyncio.create_task(stack.router.drain())
        if has_time:
            stack.executor.hooks.is_open.set()
            for responses in await asyncio.gather(*streams, queued):
                assert responses[-1].completed.usage.generated_tokens == 20
        else:
            for result in await asyncio.gather(*streams, queued, return_exceptions=True):
                assert isinstance(result, grpc.aio.AioRpcError)
                error = error_of_call(result)
                assert (error.code, error.reason) == (Code.UNAVAILABLE, "DRAINING")
                assert error.retry_after_s is not None
            stack.executor.hooks.is_open.set()
        await draining
        stats = await stack.arena()
        assert (stats.num_sequences, stats.used_blocks, stats.fenced_blocks) == (0, 0, 0)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
async def test_a_failed_step_is_internal_for_its_rows_and_the_engine_lives_on(
    source: str, max_steps_in_flight: int
) -> None:
    failures = 0

    async def fail_long_prompts(step: executor_pb2.Step) -> None:
        nonlocal failures
        if any(len(start.token_ids) == 9 for start in step.started_rows):
            failures += 1
            raise StepRefusedError("OUT_OF_MEMORY", "no memory for this step")

    async with running_stack(source, config={"max_steps_in_flight": max_steps_in_flight}) as stack:
        stack.executor.hooks.before_step = fail_long_prompts
        error, _ = await failed_call(stack, "nine long")
        assert (error.code, error.reason, error.metadata) == (Code.INTERNAL, "STEP_FAILED", {"reason": "OUT_OF_MEMORY"})
        assert failures == 2
        assert (await stack.generate("short", stopping={"max_tokens": 30})).usage.generated_tokens == 30
        await stack.settle()
        assert stack.metric("octavo_request_success_total", finished_reason="error") == 2


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
async def test_rows_beside_and_behind_a_failed_step(source: str, max_steps_in_flight: int) -> None:
    """Steps sent behind the failed one are refused as gaps; what they carried goes out again."""
    config = {"max_steps_in_flight": max_steps_in_flight, "max_tokens_per_step": 3}
    async with running_stack(source, config=config) as stack:
        num_seen = 0

        async def fail_one(step: executor_pb2.Step) -> None:
            nonlocal num_seen
            num_seen += 1
            if num_seen == 9:
                raise StepRefusedError("MODEL_ERROR", "no luck")

        stack.executor.hooks.before_step = fail_one
        calls = [stack.generate(letter * 7, stopping={"max_tokens": 12, "ignore_eos": True}) for letter in "abcde"]
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
        assert 1 <= len(errors) <= 3
        assert all(error_of_call(error).metadata == {"reason": "MODEL_ERROR"} for error in errors)
        for letter, result in zip("abcde", results, strict=True):
            if not isinstance(result, BaseException):
                stack.executor.hooks.before_step = None
                again = await stack.generate(letter * 7, stopping={"max_tokens": 12, "ignore_eos": True})
                assert again.choices[0].text == result.choices[0].text
        await stack.settle()


async def test_a_failed_row_fails_alone(source: str) -> None:
    async with running_stack(source) as stack:
        stack.executor.hooks.fail_rows = lambda row: row.tokens[0] == ord("b")
        good, bad = await asyncio.gather(
            stack.generate("good", stopping={"max_tokens": 9}),
            stack.generate("bad", stopping={"max_tokens": 9}),
            return_exceptions=True,
        )
        assert isinstance(good, inference_pb2.GenerateResponse)
        assert isinstance(bad, grpc.aio.AioRpcError)
        error = error_of_call(bad)
        assert (error.code, error.metadata) == (Code.INTERNAL, {"reason": "LOGITS_NOT_FINITE"})
        await stack.settle()


async def test_calls_and_messages_have_a_limit_that_can_be_chosen(source: str) -> None:
    config = {"max_concurrent_calls": 2, "max_message_mib": 1}
    async with running_stack(source, config=config) as stack:
        info = await stack.stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=30)
        assert info.limits.max_message_bytes == 2**20
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stack.generate("x" * 2**20)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        stack.executor.hooks.is_open.clear()
        calls = [asyncio.create_task(stack.generate(stopping={"max_tokens": 2})) for _ in range(2)]
        assert await until(lambda: len(stack.engine.roster) == 2)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stack.generate()
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        stack.executor.hooks.is_open.set()
        assert [answer.usage.generated_tokens for answer in await asyncio.gather(*calls)] == [2, 2]

        async def is_taken() -> bool:
            with suppress(grpc.aio.AioRpcError):  # a call counts until its handler has ended, after its answer
                return bool((await stack.generate(stopping={"max_tokens": 2})).usage.generated_tokens)
            return False

        assert await until(is_taken)
