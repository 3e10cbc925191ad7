"""InferenceService: each call is read, checked, handed to the backend, and answered from its events."""

import importlib.metadata
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc

from octavo.errors import Code, FieldViolation, OctavoError, invalid_argument
from octavo.rpc import MAX_MESSAGE_BYTES
from octavo.v1 import inference_pb2, inference_pb2_grpc
from router import validation
from router.backend import Backend
from router.config import RouterConfig
from router.live import LiveRequest
from router.observer import Observer
from router.servicer import reading, writing
from router.validation import RequestLimits, check_count, check_model, check_token_ids, validate

SERVICE_NAME: str = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
RETRY_AFTER_S = 1.0


class Serving(Protocol):
    """What is behind the servicer now.

    Attributes:
        backend: None until a model is served.
        is_ready: whether new requests are taken.
    """

    @property
    def backend(self) -> Backend | None: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_draining(self) -> bool: ...

    @property
    def router_id(self) -> str: ...

    @property
    def router_epoch(self) -> int: ...


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """The public API of one router."""

    def __init__(self, serving: Serving, config: RouterConfig, observer: Observer) -> None:
        self._serving = serving
        self._config = config
        self._observer = observer
        self._limits = RequestLimits(
            config.max_stop_strings, config.max_stop_string_bytes, config.max_stop_token_ids, config.max_choices
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service with a server that has not started."""
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server)

    async def Generate(self, request: Any, context: grpc.aio.ServicerContext) -> inference_pb2.GenerateResponse:
        """The whole answer."""
        async with self._live(request, context) as (backend, live):
            with_ids = reading.wants_token_ids(request.output)
            answer = writing.UnaryAnswer(backend.model.name, live.checked.sampling.n, with_token_ids=with_ids)
            async for event in live.stream:
                answer.add(event)
            return answer.message()

    async def GenerateStream(
        self, request: Any, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
        """The answer as events."""
        async with self._live(request, context) as (backend, live):
            with_ids = reading.wants_token_ids(request.output)
            async for event in live.stream:
                response = writing.stream_response(event, backend.model.name, with_token_ids=with_ids)
                if response is not None:
                    yield response

    @asynccontextmanager
    async def _live(
        self, request: Any, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[tuple[Backend, LiveRequest]]:
        """A request that lives as long as its call: whatever ends the call, nothing of it stays behind."""
        try:
            backend = self._backend_for_new()
            _check_deadline(context)
            raw = reading.read_request(request)
            checked = validate(raw, backend.model, self._limits, uuid.uuid4().hex)
            live = backend.engine.reserve(checked)
        except OctavoError as error:
            self._observer.on_rejected(error.reason.lower())
            raise
        try:
            await self._start(backend, live)
            yield backend, live
        finally:
            backend.engine.leave(live)

    async def _start(self, backend: Backend, live: LiveRequest) -> None:
        try:
            await backend.start(live)
        except OctavoError as error:
            self._observer.on_rejected(error.reason.lower())
            raise

    async def Cancel(self, request: Any, context: grpc.aio.ServicerContext) -> inference_pb2.CancelResponse:
        """Idempotent: an unknown id is no error."""
        backend = self._serving.backend
        was_live = backend is not None and backend.engine.cancel(request.request_id)
        return inference_pb2.CancelResponse(was_live=was_live)

    async def Tokenize(self, request: Any, context: grpc.aio.ServicerContext) -> inference_pb2.TokenizeResponse:
        """The ids that Generate would see."""
        backend = self._backend()
        check_model(request.model, backend.model)
        kind = request.WhichOneof("input")
        if kind is None:
            raise _unset("input", "set text or chat")
        prompt = request.text if kind == "text" else reading.read_chat(request.chat)
        adds = request.add_special_tokens if request.HasField("add_special_tokens") else True
        return inference_pb2.TokenizeResponse(token_ids=await backend.encode_prompt(prompt, add_special_tokens=adds))

    async def Detokenize(self, request: Any, context: grpc.aio.ServicerContext) -> inference_pb2.DetokenizeResponse:
        """Text of any ids of the vocabulary, as many as a context holds."""
        backend = self._backend()
        check_model(request.model, backend.model)
        check_count("token_ids", len(request.token_ids), backend.model.max_context_tokens)
        check_token_ids("token_ids", request.token_ids, backend.model.vocabulary_size)
        skips = reading.wants_special_tokens_skipped(request)
        text = await backend.decode(tuple(request.token_ids), skip_special_tokens=skips)
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(self, request: Any, context: grpc.aio.ServicerContext) -> inference_pb2.ListModelsResponse:
        """Empty until a model is served."""
        backend = self._serving.backend
        models = [] if backend is None else [writing.model_message(backend.model)]
        return inference_pb2.ListModelsResponse(models=models)

    async def GetServerInfo(
        self, request: Any, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GetServerInfoResponse:
        """Version and limits."""
        config, backend = self._config, self._serving.backend
        limits = None if backend is None else backend.engine.limits
        return inference_pb2.GetServerInfoResponse(
            version=importlib.metadata.version("octavo"),
            router_id=self._serving.router_id,
            router_epoch=self._serving.router_epoch,
            limits=inference_pb2.Limits(
                max_queued_requests=config.max_queued_requests,
                max_running_requests=limits.max_running_requests if limits else config.max_running_requests,
                max_tokens_per_step=limits.max_tokens_per_step if limits else config.max_tokens_per_step,
                max_message_bytes=MAX_MESSAGE_BYTES,
                max_stop_strings=config.max_stop_strings,
                max_stop_string_bytes=config.max_stop_string_bytes,
                max_stop_token_ids=config.max_stop_token_ids,
                max_top_logprobs=validation.MAX_TOP_LOGPROBS,
                max_logit_biases=validation.MAX_LOGIT_BIASES,
                max_bad_words=validation.MAX_BAD_WORDS,
                max_bad_word_bytes=validation.MAX_BAD_WORD_BYTES,
                max_choices=config.max_choices,
            ),
        )

    async def GetLoad(self, request: Any, context: grpc.aio.ServicerContext) -> inference_pb2.GetLoadResponse:
        """Queue and pool, as this router knows them."""
        backend = self._serving.backend
        if backend is None:
            return inference_pb2.GetLoadResponse()
        load = backend.engine.load()
        model = inference_pb2.ModelLoad(
            name=backend.model.name,
            running_requests=load.num_running,
            waiting_requests=load.num_waiting,
            kv_cache_usage_ratio=load.kv_usage_ratio,
        )
        return inference_pb2.GetLoadResponse(models=[model])

    def _backend(self) -> Backend:
        backend = self._serving.backend
        if backend is None:
            raise _unavailable("NO_EXECUTOR", "no model is served yet; the executor is still loading or not reached")
        return backend

    def _backend_for_new(self) -> Backend:
        if self._serving.is_draining:
            raise _unavailable("DRAINING", "this router is going away; send to another one")
        backend = self._backend()
        if not self._serving.is_ready:
            raise _unavailable("NO_EXECUTOR", "the executor or the cache service is not reached; try again")
        return backend


def _check_deadline(context: grpc.aio.ServicerContext) -> None:
    remaining_s = context.time_remaining()
    if remaining_s is not None and remaining_s <= 0:
        raise OctavoError(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the deadline was past when the call arrived")


def _unavailable(reason: str, message: str) -> OctavoError:
    return OctavoError(Code.UNAVAILABLE, reason, message, retry_after_s=RETRY_AFTER_S)


def _unset(field: str, description: str) -> OctavoError:
    return invalid_argument(FieldViolation(field, f"is unset; {description}"))
