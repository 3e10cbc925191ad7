"""Counts every call of the public API by method and status, whatever ends it. An interceptor, outermost."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from octavo.errors import Code

SERVICE_PREFIX = "/octavo.v1.InferenceService/"


class AccountingInterceptor(grpc.aio.ServerInterceptor):
    """Reports (method, status name) when a call is over.

    Args:
        on_call: what hears of it.
    """

    def __init__(self, on_call: Callable[[str, str], None]) -> None:
        self._on_call = on_call

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(SERVICE_PREFIX):
            return handler
        method = details.method.removeprefix(SERVICE_PREFIX)
        # The stubs know only synchronous handlers.
        inner: Any = handler.stream_stream
        if inner is not None:  # none of the methods is one: a call that is refused before its request is read
            return grpc.stream_stream_rpc_method_handler(self._count_stream(method, inner))
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._count_stream(method, inner),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._count_unary(method, inner), handler.request_deserializer, handler.response_serializer
        )

    def _count_unary(self, method: str, inner: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def counted(request: Any, context: grpc.aio.ServicerContext) -> Any:
            try:
                response = await inner(request, context)
            except BaseException as error:
                self._on_call(method, _code_of(error, context))
                raise
            self._on_call(method, "OK")
            return response

        return counted

    def _count_stream(self, method: str, inner: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        async def counted(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            try:
                async for response in inner(request, context):
                    yield response
            except BaseException as error:
                self._on_call(method, _code_of(error, context))
                raise
            self._on_call(method, "OK")

        return counted


def _code_of(error: BaseException, context: grpc.aio.ServicerContext) -> str:
    """A client's own cancel and its deadline both cancel the handler: the clock tells them apart."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        remaining_s = context.time_remaining()
        return "DEADLINE_EXCEEDED" if remaining_s is not None and remaining_s <= 0 else "CANCELLED"
    code = context.code()
    number = code.value[0] if isinstance(code, grpc.StatusCode) else code
    return Code(number).name if number else "INTERNAL"
