"""`octavo.AsyncClient`: the public API for asyncio. `octavo.client` is its twin for plain Python.

Only what waits is here; requests and results are made in `octavo.messages`, connections in `octavo.client_channel`,
what is sent again is decided in `octavo.retry`, and how a broken answer goes on in `octavo.answer`.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc

from octavo import messages
from octavo.answer import Answer
from octavo.client import DEFAULT_ADDRESS, DEFAULT_RETRY
from octavo.client_channel import Connection, Security, cancelled, error_from
from octavo.errors import OctavoError
from octavo.options import GenerateOptions, Messages, Prompt
from octavo.results import Delta, Event, Generation, ModelInfo, ModelLoad, ServerInfo
from octavo.retry import Attempts, RetryPolicy
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc


class AsyncClient:
    """A connection to one or more routers, made in the running event loop and bound to it.

    Args:
        address: `host:port`, `dns:///name:port` (balanced over all its addresses), or `unix:/path`.
        timeout_s: deadline of each call that sets none, over all its attempts; None: none.
        retry: what is sent again, and for how long; None: nothing is.
        security: TLS and token, see `octavo.client_channel.Security`.

    Raises ValueError where those cannot be used. Every call raises OctavoError with the server's code, reason and field
    violations.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float | None = None,
        retry: RetryPolicy | None = DEFAULT_RETRY,
        **security: Unpack[Security],
    ) -> None:
        connection = Connection(address, security)
        self._target, self._metadata = connection.target, connection.metadata
        self._timeout_s = timeout_s
        self._retry = retry
        options, credentials = connection.options, connection.credentials
        self._channel = (
            grpc.aio.insecure_channel(self._target, options=options)
            if credentials is None
            else grpc.aio.secure_channel(self._target, credentials, options=options)
        )
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection, and with it every call that still runs."""
        await self._channel.close()

    # ------------------------------------------------------------------------------------------------------ generation

    async def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """The whole answer to a text, token ids, or the messages of a chat.

        It comes as a stream too, so that what was computed is not lost with a connection.
        """
        async with self.stream(prompt, timeout_s=timeout_s, **options) as stream:
            return await stream.result()

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> "AsyncGenerationStream":
        """The same answer as events while it is made."""
        request = messages.generate_request(prompt, options)
        return AsyncGenerationStream(self._open_stream, request, self._attempts(timeout_s), self._target)

    async def chat(
        self, chat: Messages, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """The whole answer to a chat; a plain string is what the user says."""
        return await self.generate(messages.messages_of(chat), timeout_s=timeout_s, **options)

    def stream_chat(
        self, chat: Messages, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> "AsyncGenerationStream":
        """The answer to a chat as events."""
        return self.stream(messages.messages_of(chat), timeout_s=timeout_s, **options)

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """End a live request, whoever sent it; False when there was none."""
        request = pb.CancelRequest(request_id=request_id)
        return bool((await self._ask(self._stub.Cancel, request, timeout_s)).was_live)

    # ---------------------------------------------------------------------------------------------------- text, server

    async def tokenize(
        self,
        text: Prompt,
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """Token ids of a text or of a chat, as `generate` would compute them."""
        request = messages.tokenize_request(text, model, add_special_tokens)
        return list((await self._ask(self._stub.Tokenize, request, timeout_s)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """The text of token ids."""
        request = messages.detokenize_request(token_ids, model, skip_special_tokens)
        return str((await self._ask(self._stub.Detokenize, request, timeout_s)).text)

    async def models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        """The models that are served."""
        return messages.models_of(await self._ask(self._stub.ListModels, pb.ListModelsRequest(), timeout_s))

    async def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Version, identity and limits of the router that answers."""
        return messages.server_info_of(await self._ask(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout_s))

    async def load(self, *, timeout_s: float | None = None) -> list[ModelLoad]:
        """How busy each model is."""
        return messages.load_of(await self._ask(self._stub.GetLoad, pb.GetLoadRequest(), timeout_s))

    # ----------------------------------------------------------------------------------------------------------- calls

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._retry, self._timeout_s if timeout_s is None else timeout_s, time.monotonic())

    def _open_stream(self, request: pb.GenerateStreamRequest, timeout_s: float | None) -> Any:
        try:
            return self._stub.GenerateStream(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.UsageError as error:
            raise cancelled(f"the client is closed: {error}") from None

    async def _ask(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
        """The one answer to a call that may be sent twice."""
        attempts = self._attempts(timeout_s)
        while True:
            try:
                return await method(request, timeout=attempts.timeout_s(time.monotonic()), metadata=self._metadata)
            except grpc.RpcError as error:
                failure = error_from(self._target, error)
                pause_s = attempts.pause_after(failure, time.monotonic(), random.random())
            await asyncio.sleep(pause_s)


class AsyncGenerationStream:
    """The events of one answer, in order, up to `Completed`. In `async with`, it ends the request when left.

    Where the connection breaks, it comes back with the tokens that it has: no event is missing, and none comes twice.

    Attributes:
        request_id: the request's own, or the one that it was given.
    """

    def __init__(
        self,
        open_call: Callable[[pb.GenerateStreamRequest, float | None], Any],
        request: pb.GenerateStreamRequest,
        attempts: Attempts,
        target: str,
    ) -> None:
        self.request_id = request.request_id
        self._open_call, self._target = open_call, target
        self._answer = Answer(request, attempts)
        self._closed = asyncio.Event()
        self._call = self._send()

    @property
    def num_calls(self) -> int:
        """That the answer took so far."""
        return self._answer.num_calls

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            for event in self._answer.fresh():
                yield event
            try:
                response = await self._call.read()
            except asyncio.CancelledError:
                if self._closed.is_set() and not _is_cancelled():
                    raise cancelled("the stream was closed") from None
                raise
            except grpc.RpcError as error:
                if self._answer.is_complete:
                    return
                await self._come_back(error_from(self._target, error))
                continue
            if response is grpc.aio.EOF:  # type: ignore[attr-defined] # the stubs lack it
                return
            try:
                self._answer.take(response)
            except OctavoError:
                self._end()
                raise

    async def texts(self) -> AsyncIterator[str]:
        """The text alone, piece by piece; of all choices, so of use for one."""
        async for event in self:
            if isinstance(event, Delta):
                yield event.text

    async def result(self) -> Generation:
        """The whole answer; reads what was not read yet."""
        async for _ in self:
            pass
        return self._answer.build()

    async def close(self) -> None:
        """Ends the request; nothing happens when it has ended."""
        self._end()

    def _end(self) -> None:
        self._closed.set()
        self._call.cancel()

    def _send(self) -> Any:
        if self._closed.is_set():
            raise cancelled("the stream was closed")
        return self._open_call(*self._answer.next_call(time.monotonic()))

    async def _come_back(self, failure: OctavoError) -> None:
        """After a pause, call again for what is missing. Raises OctavoError where that is not to be done."""
        pause_s = self._answer.pause_after(failure, time.monotonic(), random.random())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._closed.wait()
        self._call = self._send()

    async def __aenter__(self) -> "AsyncGenerationStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _is_cancelled() -> bool:
    """Whether the running task itself is to end, and not only a call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
