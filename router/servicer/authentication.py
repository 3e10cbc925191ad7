"""Who calls: an interceptor that lets nobody in whom it does not know, and tells the servicer who it is.

Everything but health and reflection goes through it, so that a new method is closed until somebody opens it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any

import grpc

from octavo.errors import OctavoError
from octavo.rpc import abort
from octavo.tokens import METADATA_KEY, token_in
from router.tenants.tenant import Tenant

OPEN = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")

_caller: ContextVar[Tenant] = ContextVar("caller")


def caller() -> Tenant:
    """The tenant whose call this is. Raises LookupError outside of a call."""
    return _caller.get()


class AuthenticationInterceptor(grpc.aio.ServerInterceptor):
    """Outside of the servicer, inside of what counts calls.

    Args:
        identify: whose token it is, None where there is none; raises OctavoError.
    """

    def __init__(self, identify: Callable[[str | None], Tenant]) -> None:
        self._identify = identify

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None or details.method.startswith(OPEN):
            return handler
        try:
            # The handler runs in the task that this runs in: what is set here is what it sees.
            _caller.set(self._identify(_token_of(details.invocation_metadata)))
        except OctavoError as error:
            return _refusing(error)
        return handler


def _token_of(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """None where there is none, or where it is not clear which."""
    values = [value for key, value in metadata if key == METADATA_KEY]
    token = token_in(values[0]) if len(values) == 1 and isinstance(values[0], str) else None
    return token or None


def _refusing(error: OctavoError) -> grpc.RpcMethodHandler:
    """A method that reads no request, whichever it stands for: gRPC receives the message of a unary one before it calls
    its handler, and one of a stream when it is asked for. So a stranger's message is not held."""

    async def refuse(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        await abort(context, error)
        yield  # never: it makes a generator of this

    return grpc.stream_stream_rpc_method_handler(refuse)
