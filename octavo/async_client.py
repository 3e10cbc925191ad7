"""`octavo.AsyncClient`: the public API for asyncio. `octavo.client` is its twin for plain Python.

Only what waits is here; requests and results are made in `octavo.messages`, connections in `octavo.client_channel`.
"""

import contextlib
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc

from octavo import messages
from octavo.client_channel import MAX_RETRIES, Connection, Security, translated
from octavo.options import GenerateOptions, Messages, Prompt
from octavo.results import Delta, Event, Generation, GenerationBuilder, ModelInfo, ModelLoad, ServerInfo
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:7700"


class AsyncClient:
    """A connection to one or more routers, made in the running event loop and bound to it.

    Args:
        address: `host:port`, `dns:///name:port` (balanced over all its addresses), or `unix:/path`.
        timeout_s: deadline of each call that sets none; None: none.
        retries: times that a refused call is sent again; see `octavo.client_channel`.
        security: TLS and token, see `octavo.client_channel.Security`.

    Raises ValueError where those cannot be used. Every call raises OctavoError with the server's code, reason and field
    violations.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float | None = None,
        retries: int = MAX_RETRIES,
        **security: Unpack[Security],
    ) -> None:
        connection = Connection(address, security)
        self._target, self._metadata = connection.target, connection.metadata
        self._timeout_s = timeout_s
        options, credentials = connection.options(retries), connection.credentials
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
        """The whole answer to a text, token ids, or the messages of a chat."""
        request = messages.generate_request(pb.GenerateRequest, prompt, options)
        with self._errors():
            return messages.generation_of(await self._stub.Generate(request, **self._call(timeout_s)))

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> "AsyncGenerationStream":
        """The same answer as events while it is made."""
        request = messages.generate_request(pb.GenerateStreamRequest, prompt, options)
        call = self._stub.GenerateStream(request, **self._call(timeout_s))
        return AsyncGenerationStream(call, self._target, request.request_id)

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
        with self._errors():
            return bool((await self._stub.Cancel(request, **self._call(timeout_s))).was_live)

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
        with self._errors():
            return list((await self._stub.Tokenize(request, **self._call(timeout_s))).token_ids)

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
        with self._errors():
            return str((await self._stub.Detokenize(request, **self._call(timeout_s))).text)

    async def models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        """The models that are served."""
        with self._errors():
            response = await self._stub.ListModels(pb.ListModelsRequest(), **self._call(timeout_s))
        return messages.models_of(response)

    async def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Version, identity and limits of the router that answers."""
        with self._errors():
            response = await self._stub.GetServerInfo(pb.GetServerInfoRequest(), **self._call(timeout_s))
        return messages.server_info_of(response)

    async def load(self, *, timeout_s: float | None = None) -> list[ModelLoad]:
        """How busy each model is."""
        with self._errors():
            response = await self._stub.GetLoad(pb.GetLoadRequest(), **self._call(timeout_s))
        return messages.load_of(response)

    def _call(self, timeout_s: float | None) -> dict[str, Any]:
        """What goes with every call."""
        return {"timeout": self._timeout_s if timeout_s is None else timeout_s, "metadata": self._metadata}

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return translated(self._target)


class AsyncGenerationStream:
    """The events of one answer, in order, up to `Completed`. In `async with`, it ends the request when left."""

    def __init__(self, call: grpc.aio.UnaryStreamCall, target: str, request_id: str) -> None:
        self.request_id = request_id
        self._call = call
        self._target = target
        self._builder = GenerationBuilder()

    async def __aiter__(self) -> AsyncIterator[Event]:
        with translated(self._target):
            async for response in self._call:
                event = messages.event_of(response)
                if event is not None:
                    self._builder.add(event)
                    yield event

    async def texts(self) -> AsyncIterator[str]:
        """The text alone, piece by piece; of all choices, so of use for one."""
        async for event in self:
            if isinstance(event, Delta):
                yield event.text

    async def result(self) -> Generation:
        """The whole answer; reads what was not read yet."""
        async for _ in self:
            pass
        return self._builder.build()

    async def close(self) -> None:
        """Ends the request; nothing happens when it has ended."""
        self._call.cancel()

    async def __aenter__(self) -> "AsyncGenerationStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
