"""gRPC at the edge, the same for every process: channels, servers, and errors as rich statuses.

Here and in the servicers and clients only does `grpc` appear. What belongs here: options of channels and servers,
`OctavoError` <-> status, health, reflection, drain. What does not: anything that knows a message of ours.
"""

import asyncio
import functools
import inspect
import logging
import os
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
from octavo.secure_channel import SecureChannel
from octavo.tls import TlsMaterial, TlsSource

log = logging.getLogger(__name__)

ERROR_DOMAIN = "octavo"
MIB = 1024 * 1024
MAX_MESSAGE_BYTES = 32 * MIB
PUSHBACK_KEY = "grpc-retry-pushback-ms"
# A health name that is SERVING as long as the event loop answers, drain or not: "restart it" and "send it no calls" are
# two things to say.
LIVENESS = "liveness"
# Health name of an executor that holds no session: it may end, and nobody's steps with it.
IDLE = "idle"

# Servers take a ping every 10 s, also between calls: the default punishes more than one in 300 s with GOAWAY.
SERVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 20_000),  # of a client that connects and says nothing; the default is 120 s
)

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # the default of 60 s would override the line above
    ("grpc.max_reconnect_backoff_ms", 250),  # streams wait for who comes back, and a try costs next to nothing
    ("grpc.initial_reconnect_backoff_ms", 100),
)


# ------------------------------------------------------------------------------------------------- errors and statuses


def duration_message(seconds: float) -> Duration:
    """To the wire."""
    message = Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message


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
        delay = duration_message(error.retry_after_s)
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


def is_unix(address: str) -> bool:
    """Whether an address is a Unix socket, which file permissions protect, and TLS does not."""
    return address.startswith("unix:")


def open_channel(address: str, tls: TlsSource | None = None, server_name: str = "") -> grpc.aio.Channel:
    """A channel to `host:port`, `unix:/path` or `dns:///name:port`, with the options all of Octavo uses.

    Args:
        tls: certificates, followed when they change; not used on a Unix socket.
        server_name: what the server's certificate must be for; empty: the host of the address.
    """
    if tls is None or is_unix(address):
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    override = (("grpc.ssl_target_name_override", server_name),) if server_name else ()

    def make(credentials: grpc.ChannelCredentials) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, credentials, options=(*CHANNEL_OPTIONS, *override))

    return SecureChannel(tls, make)


async def is_serving(address: str, service_name: str, timeout_s: float = 2.0) -> bool:
    """Ask the health of a service once, on a connection of its own; False also when nobody answers."""
    try:
        status = await _ask_health(address, service_name, timeout_s)
    except grpc.aio.AioRpcError:
        return False
    return bool(status == health_pb2.HealthCheckResponse.SERVING)


async def answers(address: str, service_name: str, timeout_s: float = 5.0) -> bool:
    """Whether the process behind an address answers its health at all, whatever it says. A stopped one does not."""
    try:
        await _ask_health(address, service_name, timeout_s)
    except grpc.aio.AioRpcError as error:
        return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return True


async def _ask_health(address: str, service_name: str, timeout_s: float) -> int:
    async with open_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service_name)
        return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)).status


@dataclass(frozen=True)
class ServerParts:
    """A running server and its health servicer."""

    server: grpc.aio.Server
    health: health.aio.HealthServicer
    service_names: tuple[str, ...]
    port: int  # bound TCP port; 0 for a Unix socket
    health_server: grpc.aio.Server | None = None
    health_port: int = 0  # as `port`, of the address that answers for health alone

    async def set_serving(self, serving: bool) -> None:
        """Health of every service and of the whole server ("")."""
        for name in (*self.service_names, ""):
            await self.set_health(name, serving)

    async def set_health(self, name: str, serving: bool) -> None:
        """Of a name that is no service's."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self.health.set(name, status)

    async def drain(self, accept_window_s: float, grace_s: float) -> None:
        """NOT_SERVING at once; new calls are accepted for the window (balancers need it); then finish within grace."""
        await self.set_serving(False)
        await asyncio.sleep(accept_window_s)
        await self.stop(grace_s)

    async def take_no_more(self, grace_s: float) -> None:
        """Until cancelled, or the grace is over and every call is ended: connections are told to go (GOAWAY), so that
        clients and proxies open others, elsewhere; what runs goes on."""
        await self.server.stop(grace_s)

    async def stop(self, grace_s: float | None) -> None:
        """End every call within grace, then the answers about health."""
        await self.server.stop(grace_s)
        if self.health_server is not None:
            await self.health_server.stop(None)


async def start_server(
    listen: str,
    services: Sequence[tuple[str, Callable[[grpc.aio.Server], None]]],
    *,
    enable_reflection: bool = True,
    extra_options: Sequence[tuple[str, Any]] = (),
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    tls: TlsSource | None = None,
    health_listen: str = "",
    max_concurrent_calls: int | None = None,
) -> ServerParts:
    """Bind, register, start. Health is NOT_SERVING until the caller says otherwise, but for `LIVENESS`.

    Args:
        listen: `host:port` (port 0: any) or `unix:/path`.
        services: (full service name, a function that adds its servicer to a server).
        extra_options: gRPC server options of this server alone, instead of those of all.
        interceptors: run outside of the error interceptor.
        tls: certificates, followed when they change; not used on a Unix socket.
        health_listen: where health, and nothing else, is answered without TLS and to everybody; empty: nowhere. Probes
            of Kubernetes speak no TLS.
        max_concurrent_calls: more are refused with RESOURCE_EXHAUSTED; None: no limit.

    Raises:
        OSError: an address is taken or not ours.
    """
    server = grpc.aio.server(
        options=tuple((dict(SERVER_OPTIONS) | dict(extra_options)).items()),  # of two of a name gRPC takes the first
        interceptors=(*interceptors, ErrorInterceptor()),
        maximum_concurrent_rpcs=max_concurrent_calls,
    )
    names = tuple(name for name, _ in services)
    for _, register in services:
        register(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    if enable_reflection:
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = _bind(server, listen, tls)
    health_server, health_port = None, 0
    if health_listen:
        health_server = grpc.aio.server(options=SERVER_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, health_server)
        health_port = _bind(health_server, health_listen, None)
    parts = ServerParts(server, health_servicer, names, port, health_server, health_port)
    await parts.set_serving(False)
    await health_servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    if health_server is not None:
        await health_server.start()
    return parts


def _bind(server: grpc.aio.Server, listen: str, tls: TlsSource | None) -> int:
    """The TCP port; 0 for a Unix socket, which no other user can connect to."""
    try:
        if is_unix(listen):
            _bind_private(server, listen)
            return 0
        if tls is None:
            return server.add_insecure_port(listen)
        return server.add_secure_port(listen, _server_credentials(tls))
    except (RuntimeError, OSError) as error:
        raise OSError(f"cannot listen on {listen}: {error}") from error


def _bind_private(server: grpc.aio.Server, listen: str) -> None:
    # gRPC makes the socket with the umask of the process: never, not even for a moment, may others connect.
    before = os.umask(0o077)
    try:
        server.add_insecure_port(listen)
    finally:
        os.umask(before)
    os.chmod(listen.removeprefix("unix:"), 0o600)


def _server_credentials(tls: TlsSource) -> grpc.ServerCredentials:
    """gRPC asks before each handshake whether there are others by now."""

    shown = tls.latest()

    def renewed() -> Any:
        nonlocal shown
        before, shown = shown, tls.latest()
        return None if shown is before else _configuration(shown)  # None: go on with those of before

    return grpc.dynamic_ssl_server_credentials(
        _configuration(shown), renewed, require_client_authentication=tls.asks_for_certificates
    )


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    pair: Any = (material.key, material.certificate)  # a server has both
    return grpc.ssl_server_certificate_configuration([pair], material.ca)
