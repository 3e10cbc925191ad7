"""What stays behind when an executor dies and comes back, again and again; and pings that end no connection."""

import asyncio

import grpc
import pytest
from prometheus_client import generate_latest

from octavo.v1 import inference_pb2_grpc
from tests.fleets import FleetStack, running_fleet
from tests.stacks import request, running_stack, until

CYCLES = 20


def series(fleet: FleetStack) -> set[str]:
    """Names and labels of all that the router exports."""
    lines = generate_latest(fleet.router.metrics.registry).decode().splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


@pytest.mark.long
async def test_twenty_deaths_leave_no_series_and_no_block(source: str) -> None:
    async with running_fleet(source, {"only": {}}, config={"recovery_grace_s": 60}) as fleet:
        engine, seen = fleet.engines["only"], []
        for _ in range(CYCLES):
            assert (await fleet.generate(stopping={"max_tokens": 3})).usage.generated_tokens == 3
            await engine.vanish()
            assert await until(lambda: not fleet.is_up("only"), 30)
            await engine.come_back()
            assert await until(lambda: fleet.is_up("only"), 30)
            seen.append(series(fleet))
        assert seen[-1] == seen[0]
        assert fleet.metric("octavo_engine_up") == 1
        await fleet.settle()


async def test_pings_in_a_long_prefill_end_no_connection(source: str) -> None:
    """Field failure 35: a client that pings far more often than every 10 s, while nothing is sent for long."""
    options = [
        *(("grpc.keepalive_time_ms", 50), ("grpc.keepalive_timeout_ms", 5000)),
        *(("grpc.http2.max_pings_without_data", 0), ("grpc.keepalive_permit_without_calls", 1)),
        ("grpc.enable_retries", 0),
    ]
    async with running_stack(source) as stack:
        stack.executor.hooks.is_open.clear()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.router.port}", options=options) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = asyncio.ensure_future(stub.Generate(request(stopping={"max_tokens": 3}), timeout=60))
            await asyncio.sleep(1.5)
            assert not call.done()
            stack.executor.hooks.is_open.set()
            assert (await call).usage.generated_tokens == 3
