"""Two routers on one executor and one cache service, as in a roll-out: each has a lease and a session of its own."""

import asyncio
import json
from contextlib import AsyncExitStack

import grpc
import pytest

from octavo.errors import Code
from octavo.rpc import error_of_call, is_serving
from octavo.v1 import inference_pb2_grpc
from router.app import Router
from tests.engines import RunningEngine, router_in_front_of
from tests.stacks import request, until

MAX_TOKENS = 100
SERVICE = "octavo.v1.InferenceService"
FOLLOWING_HEALTH = json.dumps(
    {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": SERVICE}}
)


async def call(stub: inference_pb2_grpc.InferenceServiceStub, number: int, max_tokens: int) -> tuple[int, ...]:
    stopping = {"max_tokens": max_tokens, "ignore_eos": True}
    asked = request(token_ids={"ids": [1, 20 + number]}, sampling={"temperature": 0}, stopping=stopping)
    return tuple((await stub.Generate(asked, timeout=120)).choices[0].token_ids)


async def test_a_router_is_replaced_under_load_and_no_call_is_lost(llama_engine: RunningEngine) -> None:
    """A client that knows both addresses, as from a headless Service, and follows health; no retry anywhere."""
    options = {"drain_accept_window_s": 0.5, "drain_grace_s": 60.0}
    async with AsyncExitStack() as exits:
        old = await exits.enter_async_context(router_in_front_of(llama_engine, router_id="old", **options))
        new = await exits.enter_async_context(router_in_front_of(llama_engine, router_id="new", **options))
        whole = [await _alone(new, number) for number in range(3)]
        address = f"ipv4:127.0.0.1:{old.port},127.0.0.1:{new.port}"
        channel_options = [("grpc.enable_retries", 0), ("grpc.service_config", FOLLOWING_HEALTH)]
        channel = await exits.enter_async_context(grpc.aio.insecure_channel(address, options=channel_options))
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        is_over = asyncio.Event()

        async def caller(number: int) -> int:
            num_calls = 0
            while not is_over.is_set():
                assert await call(stub, number, MAX_TOKENS) == whole[number], "two routers change no token"
                num_calls += 1
            return num_calls

        callers = [asyncio.create_task(caller(number)) for number in range(3)]
        assert await until(lambda: old.fleet.num_live > 0 < new.fleet.num_live, 30)
        draining = asyncio.create_task(old.drain())
        assert await until(lambda: old._is_ending)
        assert not await is_serving(f"127.0.0.1:{old.port}", SERVICE)
        await draining
        assert await until(lambda: new.fleet.num_live >= 2, 30), "all calls are with the new one"
        is_over.set()
        assert all(num_calls >= 1 for num_calls in await asyncio.gather(*callers))


async def test_what_the_grace_is_too_short_for_is_ended_and_gives_its_blocks_back(llama_engine: RunningEngine) -> None:
    options = {"drain_grace_s": 0.2, "drain_accept_window_s": 0.0}
    async with router_in_front_of(llama_engine, router_id="stays") as stays:
        async with router_in_front_of(llama_engine, router_id="goes", **options) as goes:
            asked = asyncio.create_task(_alone(goes, 0, 480))
            assert await until(lambda: goes.fleet.num_live == 1)
            await goes.drain()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asked
        error = error_of_call(caught.value)
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "DRAINING")
        assert len(await _alone(stays, 1)) == MAX_TOKENS, "the other one's lease and session are untouched"


async def _alone(router: Router, number: int, max_tokens: int = MAX_TOKENS) -> tuple[int, ...]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.port}") as channel:
        return await call(inference_pb2_grpc.InferenceServiceStub(channel), number, max_tokens)
