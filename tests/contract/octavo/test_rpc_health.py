"""Health of a server made by `octavo.rpc`, as probes, balancers and the launcher ask for it."""

import asyncio

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.rpc import is_serving, open_channel, start_server

NAME = "octavo.v1.InferenceService"


@pytest.fixture
async def parts():
    parts = await start_server("127.0.0.1:0", [(NAME, lambda server: None)])
    yield parts
    await parts.server.stop(None)


async def test_watch_sees_every_change(parts):
    """Clients that balance hold a Watch open; it is a coroutine that writes, not a generator."""
    async with open_channel(f"127.0.0.1:{parts.port}") as channel, asyncio.timeout(10):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
        seen = [(await watch.read()).status]
        for serving in (True, False):
            await parts.set_serving(serving)
            seen.append((await watch.read()).status)
    status = health_pb2.HealthCheckResponse
    assert seen == [status.NOT_SERVING, status.SERVING, status.NOT_SERVING]


async def test_one_question(parts):
    address = f"127.0.0.1:{parts.port}"
    assert not await is_serving(address, NAME)
    await parts.set_serving(True)
    assert await is_serving(address, NAME)
    assert not await is_serving(address, "octavo.v1.Unknown")
    assert not await is_serving("127.0.0.1:1", NAME)
