"""Parts that die under running requests, and come back: streams go on where they can, and say so where they cannot."""

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.errors import Code, OctavoError
from octavo.rpc import error_of_call, open_channel
from octavo.v1 import cache_pb2, inference_pb2
from router.app import Router
from router.clients import cache as cache_client
from router.config import RouterConfig
from tests.fakes import FINGERPRINT, Hooks
from tests.stacks import Stack, running_stack, until

TOKENS = {"max_tokens": 60, "ignore_eos": True}
SERVICE = "octavo.v1.InferenceService"
depths = pytest.mark.parametrize("max_steps_in_flight", [1, 2])


async def slow(_: Any) -> None:
    await asyncio.sleep(0.003)


async def health(stack: Stack) -> Any:
    stub = health_pb2_grpc.HealthStub(stack.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE))).status


async def wait_for_tokens(stack: Stack, count: int) -> None:
    assert await until(lambda: stack.metric("octavo_generation_tokens_total") >= count)


@depths
async def test_streams_go_on_when_a_session_breaks(source: str, max_steps_in_flight: int) -> None:
    """All rows are sent again with tables and computed length: nothing acknowledged is computed twice."""
    async with running_stack(source, config={"max_steps_in_flight": max_steps_in_flight}) as stack:
        whole = [await stack.generate(letter * 9, stopping=TOKENS, cache={"bypass": True}) for letter in "abc"]
        before = stack.metric("octavo_generation_tokens_total")
        stack.executor.hooks.before_step = slow
        calls = [
            asyncio.create_task(stack.generate(letter * 9, stopping=TOKENS, cache={"bypass": True})) for letter in "abc"
        ]
        await wait_for_tokens(stack, before + 30)
        num_steps = len(stack.executor.steps)
        stack.executor.hooks.breaks_next = True
        for call, expected in zip(calls, whole, strict=True):
            assert (await call).choices[0].text == expected.choices[0].text
        resent = [start for step in stack.executor.steps[num_steps:] for start in step.started_rows]
        assert len(resent) == 3
        assert all(start.num_computed_tokens >= 9 for start in resent)
        assert all(len(start.token_ids) - start.num_computed_tokens == 1 for start in resent)
        assert stack.metric("octavo_generation_tokens_total") == before + 180
        await stack.settle()


@depths
async def test_streams_go_on_with_the_replacement_of_a_dead_executor(source: str, max_steps_in_flight: int) -> None:
    async with running_stack(source, config={"max_steps_in_flight": max_steps_in_flight}) as stack:
        whole = await stack.generate("x" * 9, stopping=TOKENS, cache={"bypass": True})
        stack.executor.hooks.before_step = slow
        call = asyncio.create_task(stack.generate("x" * 9, stopping=TOKENS, cache={"bypass": True}))
        await wait_for_tokens(stack, 60 + 20)
        dead = stack.executor
        await dead.stop()
        assert await until(lambda: not stack.link.is_ready)
        assert await health(stack) == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.generate()
        assert error_of_call(caught.value).reason == "NO_EXECUTOR"
        stack.process.die()
        stack.process.is_dead = False  # the next process of this id
        stack.executor = replace(dead, listen=dead.address, hooks=Hooks(), steps=[], rows={})
        await stack.executor.start()
        assert (await call).choices[0].text == whole.choices[0].text
        assert stack.executor.steps[0].started_rows[0].num_computed_tokens >= 9 + 18
        assert await health(stack) == health_pb2.HealthCheckResponse.SERVING
        await stack.settle()


async def test_requests_fail_when_the_executor_stays_away(source: str) -> None:
    async with running_stack(source, config={"recovery_grace_s": 0.2}) as stack:
        stack.executor.hooks.before_step = slow
        call = asyncio.create_task(stack.generate(stopping=TOKENS))
        await wait_for_tokens(stack, 5)
        await stack.executor.stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        error = error_of_call(caught.value)
        assert (error.code, error.reason, error.retry_after_s) == (Code.UNAVAILABLE, "ENGINE_LOST", 1.0)


@depths
async def test_what_ran_on_a_lost_lease_is_computed_again_on_the_next(source: str, max_steps_in_flight: int) -> None:
    """Its blocks are gone, its tokens are not: the streams go on, whatever was running, waiting or forking."""
    async with running_stack(source, config={"max_steps_in_flight": max_steps_in_flight}, num_blocks=100) as stack:
        options = {"stopping": TOKENS, "cache": {"bypass": True}, "sampling": {"n": 2}}
        whole = [await stack.generate(letter * 9, **options) for letter in "abc"]
        before = stack.metric("octavo_generation_tokens_total")
        stack.executor.hooks.before_step = slow
        epoch = stack.link.router_epoch
        calls = [asyncio.create_task(stack.generate(letter * 9, **options)) for letter in "abc"]
        await wait_for_tokens(stack, before + 30)
        # Somebody else opens a lease in this router's name: a replacement of it.
        await stack.cache.OpenLease(cache_pb2.OpenLeaseRequest(client_id=stack.link.client_id))
        for call, expected in zip(calls, whole, strict=True):
            assert (await call).choices == expected.choices
        assert stack.link.router_epoch > epoch
        assert stack.metric("octavo_generation_tokens_total") == before + 360
        assert stack.metric("octavo_recomputed_tokens_total", cause="cache_service_lost") > 0
        stack.executor.hooks.before_step = None
        await stack.settle()


async def test_requests_of_a_lost_lease_fail_when_there_is_no_next_one(source: str) -> None:
    async with running_stack(source, config={"recovery_grace_s": 0.5}) as stack:
        stack.executor.hooks.before_step = slow
        call = asyncio.create_task(stack.generate(stopping={"max_tokens": 200, "ignore_eos": True}))
        await wait_for_tokens(stack, 5)
        await stack.executor.stop()
        await stack.cache.OpenLease(cache_pb2.OpenLeaseRequest(client_id=stack.link.client_id))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        error = error_of_call(caught.value)
        assert (error.code, error.reason, error.retry_after_s) == (Code.UNAVAILABLE, "ENGINE_LOST", 1.0)


async def test_requests_fail_when_the_cache_service_stays_away(source: str) -> None:
    """They run on while their blocks last, and do not hang when those are full; new ones are refused."""
    async with running_stack(source, config={"recovery_grace_s": 0.3}) as stack:
        stack.executor.hooks.before_step = slow
        calls = [asyncio.create_task(stack.generate(letter * 5, stopping=TOKENS)) for letter in "abc"]
        await wait_for_tokens(stack, 6)
        await stack.cache_app.server.server.stop(0)
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            error = error_of_call(caught.value)
            assert (error.code, error.reason, error.retry_after_s) == (Code.UNAVAILABLE, "ENGINE_LOST", 1.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.generate()
        assert error_of_call(caught.value).reason == "NO_EXECUTOR"


@pytest.mark.parametrize("call", ["AllocateSequences", "ExtendSequences", "CommitBlocks", "ReleaseSequences"])
async def test_a_lost_reply_of_the_cache_service_is_asked_for_again(
    source: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change was made; the same number again gets the stored answer, and nothing is done twice."""
    async with running_stack(source) as stack:
        whole = await stack.generate("x" * 9, stopping=TOKENS, cache={"salt": "1"})
        await stack.settle()
        lost: list[Any] = []
        answered = cache_client._call

        async def lossy(method: Any, request: Any) -> Any:
            response = await answered(method, request)
            if type(request).__name__ == f"{call}Request" and len(lost) < 2:
                lost.append(request)
                raise OctavoError(Code.UNAVAILABLE, "UNAVAILABLE", "the connection broke")
            return response

        monkeypatch.setattr(cache_client, "_call", lossy)
        again = await stack.generate("x" * 9, stopping=TOKENS, cache={"salt": "2"})
        assert again.choices[0].text == whole.choices[0].text
        await stack.settle()
        assert await until(lambda: len(lost) == 2)
        assert lost[0] == lost[1]


async def test_what_is_not_there_yet_is_said_once(source: str, caplog: pytest.LogCaptureFixture) -> None:
    """An executor loads for minutes; the log must not fill with that, and it is no warning."""
    caplog.set_level(logging.INFO, "router")
    config = {"executor": "127.0.0.1:1", "cache_service": "127.0.0.1:1", "metrics_listen": ""}
    router = Router(RouterConfig(listen="127.0.0.1:0", **config))
    await router.start()
    await asyncio.sleep(1.0)  # tries at 0, 0.1, 0.3, 0.7 s
    await router.close()
    said = [record for record in caplog.records if "not serving" in record.message]
    assert [record.levelname for record in said] == ["INFO"]


async def test_a_lease_outlives_idle_time(source: str) -> None:
    """Kept alive in the background; the answer after it comes from the same lease."""
    async with running_stack(source, config={"lease_ttl_s": 1.0}) as stack:
        epoch = stack.link.router_epoch
        await asyncio.sleep(2.5)
        assert (await stack.generate(stopping={"max_tokens": 3})).usage.generated_tokens == 3
        assert stack.link.router_epoch == epoch


async def test_cancelled_blocks_come_free_at_the_acknowledgement(source: str) -> None:
    """Field failure 10: fenced while the step is in flight, free as soon as its result is here."""
    async with running_stack(source, config={"lease_ttl_s": 60}) as stack:
        stack.executor.hooks.is_open.clear()
        call = asyncio.create_task(stack.generate(request_id="target", stopping=TOKENS))
        assert await until(lambda: bool(stack.engine.roster.running))
        await asyncio.sleep(0.05)
        await stack.stub.Cancel(inference_pb2.CancelRequest(request_id="target"))
        await call

        async def is_fenced() -> bool:
            return (await stack.arena()).fenced_blocks > 0

        assert await until(is_fenced)
        stack.executor.hooks.is_open.set()
        began = time.monotonic()
        await stack.settle()
        assert time.monotonic() - began < 1.0, "the acknowledgement did not wait for the next keep-alive"


@depths
async def test_a_fence_stands_until_the_last_step_sent_has_ended(source: str, max_steps_in_flight: int) -> None:
    """Field failure 10: results of earlier steps arrive, but one that may still write is on its way."""
    may_run = asyncio.Semaphore(0)

    async def gated(_: Any) -> None:
        await may_run.acquire()

    async with running_stack(source, config={"max_steps_in_flight": max_steps_in_flight}) as stack:
        stack.executor.hooks.before_step = gated
        call = asyncio.create_task(stack.generate(request_id="target", stopping=TOKENS))
        assert await until(lambda: sum(stack.engine.sent_steps().values()) == max_steps_in_flight)
        await stack.stub.Cancel(inference_pb2.CancelRequest(request_id="target"))
        await call
        for _ in range(max_steps_in_flight - 1):
            may_run.release()
        await asyncio.sleep(0.2)  # an acknowledgement that lifts fences is told at once
        assert (await stack.arena()).fenced_blocks > 0
        stack.executor.hooks.before_step = None
        may_run.release()
        await stack.settle()


@depths
async def test_blocks_are_findable_only_when_their_step_has_ended(source: str, max_steps_in_flight: int) -> None:
    """Field failure 2, the router's part: a commit says what results said, not what was sent."""
    may_run = asyncio.Semaphore(0)

    async def gated(_: Any) -> None:
        await may_run.acquire()

    config = {"max_steps_in_flight": max_steps_in_flight, "max_tokens_per_step": 8}
    async with running_stack(source, config=config) as stack:
        stack.executor.hooks.before_step = gated
        call = asyncio.create_task(stack.generate("x" * 40, stopping={"max_tokens": 1}))
        extras = cache_pb2.KeyExtras(model="scripted", revision=FINGERPRINT, kv_dtype="float32")
        lookup = cache_pb2.MatchPrefixRequest(arena_id="cpu", token_ids=b"x" * 40, extras=extras)

        async def num_findable() -> int:
            return (await stack.cache.MatchPrefix(lookup)).num_cached_tokens

        for num_ended in (1, 2, 3):
            may_run.release()
            num_sent = num_ended + max_steps_in_flight
            assert await until(lambda wanted=num_sent: sum(stack.engine.sent_steps().values()) == wanted)
            await asyncio.sleep(0.1)
            assert await num_findable() == 8 * num_ended
        stack.executor.hooks.before_step = None
        may_run.release()
        await call


async def test_a_second_router_serves_the_same_executor_address_book(source: str) -> None:
    """GetServerInfo tells routers apart; health and reflection names are there."""
    async with running_stack(source) as stack, open_channel(f"127.0.0.1:{stack.router.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        info = await stack.stub.GetServerInfo(inference_pb2.GetServerInfoRequest())
        assert info.router_id == "router-under-test"
        serving, epoch = inference_pb2.ENGINE_STATE_SERVING, stack.link.router_epoch
        engine = inference_pb2.EngineInfo(name="engine-0", model="scripted", state=serving, router_epoch=epoch)
        assert list(info.engines) == [engine]
        assert info.limits.max_running_requests == 16, "the executor's rows, not the option"
        assert info.limits.max_tokens_per_step == 64
        models = (await stack.stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert [(model.name, model.block_size, model.num_blocks) for model in models] == [("scripted", 4, 64)]
