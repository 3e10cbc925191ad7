"""`octavo.Client`: the public API as plain Python calls. `octavo.async_client` is its twin for asyncio.

Only what waits is here; requests and results are made in `octavo.messages`, connections in `octavo.client_channel`,
what is sent again is decided in `octavo.retry`, and how a broken answer goes on in `octavo.answer`.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc

from octavo import messages
from octavo.answer import Answer
from octavo.client_channel import Connection, Security, cancelled, error_from
from octavo.errors import OctavoError
from octavo.options import GenerateOptions, Messages, Prompt
from octavo.results import Delta, Event, Generation, ModelInfo, ModelLoad, ServerInfo
from octavo.retry import Attempts, RetryPolicy
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:7700"
DEFAULT_RETRY = RetryPolicy()


class Client:
    """A connection to one or more routers; may be shared by threads.

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
            grpc.insecure_channel(self._target, options=options)
            if credentials is None
            else grpc.secure_channel(self._target, credentials, options=options)
        )
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and with it every call that still runs."""
        self._channel.close()

    # ------------------------------------------------------------------------------------------------------ generation

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """The whole answer to a text, token ids, or the messages of a chat.

        It comes as a stream too, so that what was computed is not lost with a connection.
        """
        with self.stream(prompt, timeout_s=timeout_s, **options) as stream:
            return stream.result()

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> "GenerationStream":
        """The same answer as events while it is made."""
        request = messages.generate_request(prompt, options)
        return GenerationStream(self._open_stream, request, self._attempts(timeout_s), self._target)

    def chat(self, chat: Messages, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]) -> Generation:
        """The whole answer to a chat; a plain string is what the user says."""
        return self.generate(messages.messages_of(chat), timeout_s=timeout_s, **options)

    def stream_chat(
        self, chat: Messages, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> "GenerationStream":
        """The answer to a chat as events."""
        return self.stream(messages.messages_of(chat), timeout_s=timeout_s, **options)

    def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """End a live request, whoever sent it; False when there was none."""
        request = pb.CancelRequest(request_id=request_id)
        return bool(self._ask(self._stub.Cancel, request, timeout_s).was_live)

    # ---------------------------------------------------------------------------------------------------- text, server

    def tokenize(
        self,
        text: Prompt,
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """Token ids of a text or of a chat, as `generate` would compute them."""
        request = messages.tokenize_request(text, model, add_special_tokens)
        return list(self._ask(self._stub.Tokenize, request, timeout_s).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """The text of token ids."""
        request = messages.detokenize_request(token_ids, model, skip_special_tokens)
        return str(self._ask(self._stub.Detokenize, request, timeout_s).text)

    def models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        """The models that are served."""
        return messages.models_of(self._ask(self._stub.ListModels, pb.ListModelsRequest(), timeout_s))

    def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Version, identity and limits of the router that answers."""
        return messages.server_info_of(self._ask(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout_s))

    def load(self, *, timeout_s: float | None = None) -> list[ModelLoad]:
        """How busy each model is."""
        return messages.load_of(self._ask(self._stub.GetLoad, pb.GetLoadRequest(), timeout_s))

    # ----------------------------------------------------------------------------------------------------------- calls

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._retry, self._timeout_s if timeout_s is None else timeout_s, time.monotonic())

    def _open_stream(self, request: pb.GenerateStreamRequest, timeout_s: float | None) -> Any:
        try:
            return self._stub.GenerateStream(request, timeout=timeout_s, metadata=self._metadata)
        except ValueError as error:  # all that gRPC says
            raise cancelled(f"the client is closed: {error}") from None

    def _ask(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
        """The one answer to a call that may be sent twice."""
        attempts = self._attempts(timeout_s)
        while True:
            try:
                return method(request, timeout=attempts.timeout_s(time.monotonic()), metadata=self._metadata)
            except grpc.RpcError as error:
                failure = error_from(self._target, error)
                time.sleep(attempts.pause_after(failure, time.monotonic(), random.random()))


class GenerationStream:
    """The events of one answer, in order, up to `Completed`. Used in a `with` block, it ends the request when left.

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
        self._lock = threading.Lock()  # of the call and its end: `close` may come from another thread
        self._closed = threading.Event()
        self._call = self._send()

    @property
    def num_calls(self) -> int:
        """That the answer took so far."""
        return self._answer.num_calls

    def __iter__(self) -> Iterator[Event]:
        while True:
            yield from self._answer.fresh()
            try:
                response = next(self._call, None)
            except grpc.RpcError as error:
                if self._answer.is_complete:
                    return
                self._come_back(error_from(self._target, error))
                continue
            if response is None:
                return
            try:
                self._answer.take(response)
            except OctavoError:
                self.close()
                raise

    def texts(self) -> Iterator[str]:
        """The text alone, piece by piece; of all choices, so of use for one."""
        return (event.text for event in self if isinstance(event, Delta))

    def result(self) -> Generation:
        """The whole answer; reads what was not read yet."""
        for _ in self:
            pass
        return self._answer.build()

    def close(self) -> None:
        """Ends the request; nothing happens when it has ended."""
        with self._lock:
            self._closed.set()
            self._call.cancel()

    def _send(self) -> Any:
        with self._lock:
            if self._closed.is_set():
                raise cancelled("the stream was closed")
            return self._open_call(*self._answer.next_call(time.monotonic()))

    def _come_back(self, failure: OctavoError) -> None:
        """After a pause, call again for what is missing. Raises OctavoError where that is not to be done."""
        self._closed.wait(self._answer.pause_after(failure, time.monotonic(), random.random()))
        self._call = self._send()

    def __enter__(self) -> "GenerationStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
