"""The gRPC edge that every process shares: errors as rich statuses and back, health, drain."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo import rpc
from octavo.errors import Code, FieldViolation, OctavoError, invalid_argument
from octavo.v1 import executor_pb2, executor_pb2_grpc

SERVICE = "octavo.v1.ExecutorService"


class FailingServicer(executor_pb2_grpc.ExecutorServiceServicer):
    """Raises what it was given, before or in the middle of a stream."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def GetExecutorInfo(self, request, context):
        raise self.error

    async def Session(self, requests, context):
        async for _ in requests:
            yield executor_pb2.SessionResponse(gap=executor_pb2.StepGap(last_applied_step=1))
            raise self.error


async def serve(error: Exception) -> tuple[rpc.ServerParts, grpc.aio.Channel]:
    servicer = FailingServicer(error)
    parts = await rpc.start_server(
        "127.0.0.1:0",
        [(SERVICE, lambda server: executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, server))],
    )
    return parts, rpc.open_channel(f"127.0.0.1:{parts.port}")


async def failure_of_unary(error: Exception) -> grpc.aio.AioRpcError:
    parts, channel = await serve(error)
    try:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await executor_pb2_grpc.ExecutorServiceStub(channel).GetExecutorInfo(executor_pb2.GetExecutorInfoRequest())
        return caught.value
    finally:
        await channel.close()
        await parts.server.stop(None)


EVERY_DETAIL = OctavoError(
    Code.RESOURCE_EXHAUSTED,
    "QUEUE_FULL",
    "the queue is full: 8 of 8",
    metadata={"queued": "8"},
    violations=[FieldViolation("sampling.top_p", "must lie in (0, 1]")],
    retry_after_s=1.5,
)


def assert_equal_errors(left: OctavoError, right: OctavoError) -> None:
    assert vars(left) == vars(right)


def test_an_error_survives_the_round_trip_through_a_status():
    assert_equal_errors(rpc.error_of(rpc.status_of(EVERY_DETAIL)), EVERY_DETAIL)


async def test_an_error_arrives_at_the_client_with_every_detail_and_the_pushback_trailer():
    failed = await failure_of_unary(EVERY_DETAIL)
    assert failed.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert_equal_errors(rpc.error_of_call(failed), EVERY_DETAIL)
    assert ("grpc-retry-pushback-ms", "1500") in tuple(failed.trailing_metadata())


async def test_an_unexpected_exception_is_internal_and_leaks_nothing():
    failed = await failure_of_unary(ValueError("a secret prompt"))
    assert failed.code() is grpc.StatusCode.INTERNAL
    assert rpc.error_of_call(failed).reason == "INTERNAL"
    assert "secret" not in failed.details()


@pytest.mark.parametrize("body", [b"\x0a\x02\xff\xfe", b"\xed\xa0\x80", b"\x0a\x7f", b"\x0b", b"\x0a" * 33])
async def test_bytes_that_are_no_message_are_the_callers_mistake(body: bytes, caplog: pytest.LogCaptureFixture):
    parts, channel = await serve(EVERY_DETAIL)
    path = "/grpc.health.v1.Health/"
    for call in (channel.unary_unary(f"{path}Check", bytes)(body), channel.unary_stream(f"{path}Watch", bytes)(body)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call if isinstance(call, grpc.aio.UnaryUnaryCall) else call.read())
        error = rpc.error_of_call(caught.value)
        assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "INVALID_MESSAGE")
    assert not caplog.records
    await channel.close()
    await parts.server.stop(None)


async def test_an_error_in_the_middle_of_a_stream_follows_what_was_sent():
    parts, channel = await serve(EVERY_DETAIL)
    call = executor_pb2_grpc.ExecutorServiceStub(channel).Session()
    await call.write(executor_pb2.SessionRequest(close=executor_pb2.Close()))
    assert (await call.read()).gap.last_applied_step == 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert_equal_errors(rpc.error_of_call(caught.value), EVERY_DETAIL)
    await channel.close()
    await parts.server.stop(None)


async def test_a_broken_connection_is_an_error_without_details():
    channel = rpc.open_channel("127.0.0.1:1")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await executor_pb2_grpc.ExecutorServiceStub(channel).GetExecutorInfo(executor_pb2.GetExecutorInfoRequest())
    error = rpc.error_of_call(caught.value)
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "UNAVAILABLE")
    await channel.close()


async def test_health_follows_set_serving_and_drain_accepts_calls_in_its_window():
    parts, channel = await serve(EVERY_DETAIL)
    stub = health_pb2_grpc.HealthStub(channel)

    async def status(service: str) -> int:
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert [await status(SERVICE), await status("")] == [not_serving, not_serving]
    assert await status(rpc.LIVENESS) == serving, "not to be restarted because it is not ready"
    await parts.set_serving(True)
    assert [await status(SERVICE), await status("")] == [serving, serving]
    drain = asyncio.create_task(parts.drain(accept_window_s=0.5, grace_s=1))
    await asyncio.sleep(0.1)
    assert await status(SERVICE) == not_serving
    assert await status(rpc.LIVENESS) == serving, "not to be restarted because it drains"
    await drain
    with pytest.raises(grpc.aio.AioRpcError):
        await status(SERVICE)
    await channel.close()


async def test_an_address_in_use_is_an_os_error_that_names_it():
    parts, channel = await serve(EVERY_DETAIL)
    with pytest.raises(OSError, match=f"127.0.0.1:{parts.port}"):
        await rpc.start_server(f"127.0.0.1:{parts.port}", [])
    await channel.close()
    await parts.server.stop(None)


def test_invalid_argument_names_the_first_field_and_counts_the_rest():
    error = invalid_argument(FieldViolation("a.b", "must be 1"), FieldViolation("c", "must be 2"))
    assert error.code is Code.INVALID_ARGUMENT
    assert error.message == "a.b: must be 1 (and 1 more)"
    assert [v.field for v in error.violations] == ["a.b", "c"]
