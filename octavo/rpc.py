"""gRPC at the edge, the same for every process: channels, servers, and errors as rich statuses.

Here and in the servicers and clients only does `grpc` appear. What belongs here: options of channels and servers,
`OctavoError` <-> status, health, reflection, drain. What does not: anything that knows a message of ours.
"""

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from octavo.errors import Code, FieldViolation, OctavoError

log = logging.getLogger(__name__)

ERROR_DOMAIN = "octavo"
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
PUSHBACK_KEY = "grpc-retry-pushback-ms"

# Servers take a ping every 10 s, also between calls: the default punishes more than one in 300 s with GOAWAY.
SERVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # the default of 60 s would override the line above
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
)


# ------------------------------------------------------------------------------------------------- errors and statuses


def status_of(error: OctavoError) -> status_pb2.Status:
    """The rich status of an error: `ErrorInfo` always, `BadRequest` and `RetryInfo` where they apply."""
    status = status_pb2.Status(code=error.code.value, message=error.message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=error.metadata)
    status.details.add().Pack(info)
    if error.violations:
        bad = error_details_pb2.BadRequest()
        for violation in error.violations:
            bad.field_violations.add(field=violation.field, description=violation.description)
        status.details.add().Pack(bad)
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def error_of(status: status_pb2.Status) -> OctavoError:
    """The error that a rich status says; the inverse of `status_of`. The status must not be OK."""
    info, violations, retry = error_details_pb2.ErrorInfo(), [], None
    for detail in status.details:
        bad, delay = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad):
            violations = [FieldViolation(v.field, v.description) for v in bad.field_violations]
        elif detail.Unpack(delay):
            retry = delay.retry_delay.ToNanoseconds() / 1e9
        else:
            detail.Unpack(info)
    return OctavoError(
        Code(status.code),
        info.reason or code_pb2.Code.Name(status.code),
        status.message,
        metadata=dict(info.metadata),
        violations=violations,
        retry_after_s=retry,
    )


def error_of_call(call: grpc.RpcError) -> OctavoError:
    """The error that a failed call says, rich or bare (a broken connection has only a code and a text)."""
    rich = rpc_status.from_call(call)
    if rich is not None:
        return error_of(rich)
    number = call.code().value[0]
    return error_of(status_pb2.Status(code=number, message=call.details() or ""))


async def abort(context: grpc.aio.ServicerContext, error: OctavoError) -> None:
    """End the call with the error's rich status. Never returns."""
    wire = rpc_status.to_status(status_of(error))
    trailers = list(wire.trailing_metadata)
    if error.retry_after_s is not None:
        trailers.append((PUSHBACK_KEY, str(int(error.retry_after_s * 1000))))
    await context.abort(wire.code, wire.details, tuple(trailers))


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns an `OctavoError` out of a handler into its status, and anything else into INTERNAL, logged, unnamed."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None or (handler.request_streaming and not handler.response_streaming):
            return handler
        if handler.request_streaming:
            make, inner = grpc.stream_stream_rpc_method_handler, handler.stream_stream
        elif handler.response_streaming:
            make, inner = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        else:
            make, inner = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        deserialize = handler.request_deserializer
        if not handler.request_streaming and deserialize is not None:
            deserialize = _reading_or_why_not(deserialize)
        # A stream is a generator, or a coroutine that writes to its context, as the health servicer's.
        if inspect.isasyncgenfunction(inner):
            return make(_guard_stream(inner), deserialize, handler.response_serializer)
        if asyncio.iscoroutinefunction(inner):
            return make(_guard_unary(inner), deserialize, handler.response_serializer)
        return handler  # a foreign synchronous servicer


def _reading_or_why_not(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """A message that cannot be read is UNKNOWN to gRPC, with a traceback in the log: so the guards are told of it."""

    @functools.wraps(deserialize)
    def read(body: bytes) -> Any:
        try:
            return deserialize(body)
        except DecodeError:
            return OctavoError(
                Code.INVALID_ARGUMENT,
                "INVALID_MESSAGE",
                "the request cannot be read: its bytes are no message of this method, or a string is not UTF-8",
            )

    return read


def _raise_if_unreadable(request: Any) -> None:
    if isinstance(request, OctavoError):
        raise request


def _guard_unary(inner: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(inner)
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            _raise_if_unreadable(request)
            return await inner(request, context)
        except OctavoError as error:
            await abort(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:
            log.exception("unexpected error in a call")
            await abort(context, _internal())

    return guarded


def _guard_stream(inner: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    @functools.wraps(inner)
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            _raise_if_unreadable(request)
            async for response in inner(request, context):
                yield response
        except OctavoError as error:
            await abort(context, error)
        except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
            raise
        except Exception:
            log.exception("unexpected error in a stream")
            await abort(context, _internal())

    return guarded


def _internal() -> OctavoError:
    return OctavoError(Code.INTERNAL, "INTERNAL", "an unexpected error; the server's log has it")


# ------------------------------------------------------------------------------------------------ channels and servers


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to `host:port`, `unix:/path` or `dns:///name:port`, with the options all of Octavo uses."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


async def is_serving(address: str, service_name: str, timeout_s: float = 2.0) -> bool:
    """Ask the health of a service once, on a connection of its own; False also when nobody answers."""
    async with open_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service_name)
        try:
            response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


@dataclass(frozen=True)
class ServerParts:
    """A running server and its health servicer."""

    server: grpc.aio.Server
    health: health.aio.HealthServicer
    service_names: tuple[str, ...]
    port: int  # bound TCP port; 0 for a Unix socket

    async def set_serving(self, serving: bool) -> None:
        """Health of every service and of the whole server ("")."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in (*self.service_names, ""):
            await self.health.set(name, status)

    async def drain(self, accept_window_s: float, grace_s: float) -> None:
        """NOT_SERVING at once; new calls are accepted for the window (balancers need it); then finish within grace."""
        await self.set_serving(False)
        await asyncio.sleep(accept_window_s)
        await self.server.stop(grace_s)


async def start_server(
    listen: str,
    services: Sequence[tuple[str, Callable[[grpc.aio.Server], None]]],
    *,
    enable_reflection: bool = True,
    extra_options: Sequence[tuple[str, Any]] = (),
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> ServerParts:
    """Bind, register, start. Health is NOT_SERVING until the caller says otherwise.

    Args:
        listen: `host:port` (port 0: any) or `unix:/path`.
        services: (full service name, a function that adds its servicer to a server).
        extra_options: gRPC server options that this server alone has.
        interceptors: run outside of the error interceptor.

    Raises:
        OSError: the address is taken or not ours.
    """
    server = grpc.aio.server(
        options=(*SERVER_OPTIONS, *extra_options), interceptors=(*interceptors, ErrorInterceptor())
    )
    names = tuple(name for name, _ in services)
    for _, register in services:
        register(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    if enable_reflection:
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {listen}: {error}") from error
    parts = ServerParts(server, health_servicer, names, 0 if listen.startswith("unix:") else port)
    await parts.set_serving(False)
    await server.start()
    return parts
