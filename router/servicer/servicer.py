"""InferenceService: each call is read, checked, handed to an engine, and answered from its events."""

import importlib.metadata
import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, NoReturn, Protocol

import grpc

from octavo.errors import Code, FieldViolation, OctavoError, invalid_argument
from octavo.rpc import MIB
from octavo.v1 import inference_pb2, inference_pb2_grpc
from router import refusals, validation
from router.backend import Backend
from router.config import RouterConfig
from router.dispatch import Dispatcher, Ticket
from router.engine import EngineLimits
from router.fleet import Fleet
from router.link import Link
from router.servicer import reading, writing
from router.servicer.authentication import caller
from router.servicer.traces import RequestTraces
from router.tenants.accounts import TENANT_LIMIT
from router.tenants.gate import Call, Gate
from router.tenants.tenant import Tenant
from router.validation import RequestLimits, check_count, check_token_ids, validate

log = logging.getLogger(__name__)

SERVICE_NAME: str = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name


class Rejections(Protocol):
    """Hears of requests that were refused before they were queued."""

    def on_rejected(self, reason: str, model_name: str = "", engine: str = "") -> None:
        """By what engine, as far as it came."""


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """The public API of one router."""

    def __init__(
        self, fleet: Fleet, config: RouterConfig, rejections: Rejections, gate: Gate, traces: RequestTraces
    ) -> None:
        self._fleet = fleet
        self._gate = gate
        self._traces = traces
        self._dispatcher = Dispatcher(fleet)
        self._config = config
        self._rejections = rejections
        self._limits = RequestLimits(
            config.max_stop_strings, config.max_stop_string_bytes, config.max_stop_token_ids, config.max_choices
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service with a server that has not started."""
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server)

    async def Generate(self, request: Any, context: grpc.aio.ServicerContext) -> inference_pb2.GenerateResponse:
        """The whole answer."""
        async with self._live(request, context, is_stream=False) as ticket:
            with_ids, sampling = reading.wants_token_ids(request.output), ticket.live.checked.sampling
            answer = writing.UnaryAnswer(ticket.backend.model.name, sampling.n, with_token_ids=with_ids)
            async for event in ticket.live.stream:
                answer.add(event)
            return answer.message()

    async def GenerateStream(
        self, request: Any, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
        """The answer as events."""
        async with self._live(request, context, is_stream=True) as ticket:
            with_ids, name = reading.wants_token_ids(request.output), ticket.backend.model.name
            async for event in ticket.live.stream:
                response = writing.stream_response(event, name, with_token_ids=with_ids)
                if response is not None:
                    yield response

    @asynccontextmanager
    async def _live(self, request: Any, context: grpc.aio.ServicerContext, *, is_stream: bool) -> AsyncIterator[Ticket]:
        """A request that lives as long as its call: whatever ends the call, nothing of it stays behind."""
        metadata: Any = context.invocation_metadata() or ()
        with self._traces.call(request, metadata, is_stream=is_stream) as trace, self._call() as call:
            ticket = self._reserve(request, context, call.tenant)
            trace.follow(ticket.live)
            try:
                await self._start(ticket)
                call.on_prompt(ticket.live.usage())
                yield ticket
            finally:
                self._dispatcher.leave(ticket)
                trace.at(ticket.backend)
                _account(call, ticket)

    @contextmanager
    def _call(self) -> Iterator[Call]:
        """A call of whoever calls, within the limits of its tenant."""
        tenant = caller()
        with ExitStack() as stack:
            try:
                call = stack.enter_context(self._gate.call(tenant))
            except OctavoError as error:
                self._refuse(error, tenant)
            yield call

    def _reserve(self, request: Any, context: grpc.aio.ServicerContext, tenant: Tenant) -> Ticket:
        try:
            if self._fleet.is_draining:
                raise refusals.draining()
            backends = self._dispatcher.engines_for(request.model)
            tenant.check_model(backends[0].model.name)
            _check_deadline(context)
            raw = reading.read_request(request)
            checked = validate(raw, backends[0].model, self._limits, uuid.uuid4().hex, tenant)
            self._dispatcher.check_queue_share(backends, tenant)
            return self._dispatcher.reserve(backends, checked)
        except OctavoError as error:
            self._refuse(error, tenant)

    def _refuse(self, error: OctavoError, tenant: Tenant) -> NoReturn:
        self._rejections.on_rejected(error.reason.lower())
        if error.reason == TENANT_LIMIT:
            self._gate.metrics.on_over_limit(tenant.name, error.metadata["limit"])
        raise error

    async def _start(self, ticket: Ticket) -> None:
        try:
            await self._dispatcher.start(ticket)
        except OctavoError as error:
            self._rejections.on_rejected(error.reason.lower(), ticket.backend.model.name, ticket.backend.name)
            raise

    async def Cancel(self, request: Any, context: grpc.aio.ServicerContext) -> inference_pb2.CancelResponse:
        """Idempotent: an unknown id is no error."""
        return inference_pb2.CancelResponse(was_live=self._dispatcher.cancel(request.request_id, caller().name))

    async def Tokenize(self, request: Any, context: grpc.aio.ServicerContext) -> inference_pb2.TokenizeResponse:
        """The ids that Generate would see."""
        backend = self._backend_for(request.model)
        kind = request.WhichOneof("input")
        if kind is None:
            raise _unset("input", "set text or chat")
        prompt = request.text if kind == "text" else reading.read_chat(request.chat)
        adds = request.add_special_tokens if request.HasField("add_special_tokens") else True
        with self._call():
            token_ids = await backend.encode_prompt(prompt, add_special_tokens=adds)
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(self, request: Any, context: grpc.aio.ServicerContext) -> inference_pb2.DetokenizeResponse:
        """Text of any ids of the vocabulary, as many as a context holds."""
        backend = self._backend_for(request.model)
        check_count("token_ids", len(request.token_ids), backend.model.max_context_tokens)
        check_token_ids("token_ids", request.token_ids, backend.model.vocabulary_size)
        skips = reading.wants_special_tokens_skipped(request)
        with self._call():
            text = await backend.decode(tuple(request.token_ids), skip_special_tokens=skips)
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(self, request: Any, context: grpc.aio.ServicerContext) -> inference_pb2.ListModelsResponse:
        """Empty until a model is served."""
        return inference_pb2.ListModelsResponse(models=writing.model_messages(self._backends()))

    async def GetServerInfo(
        self, request: Any, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GetServerInfoResponse:
        """Version, engines and limits."""
        return inference_pb2.GetServerInfoResponse(
            version=importlib.metadata.version("octavo"),
            router_id=self._fleet.router_id,
            engines=map(writing.engine_message, self._links()),
            limits=self._limits_message(),
        )

    async def GetLoad(self, request: Any, context: grpc.aio.ServicerContext) -> inference_pb2.GetLoadResponse:
        """Queues and pools, as this router knows them."""
        return writing.load_message(self._backends())

    def _backend_for(self, model_name: str) -> Backend:
        backend = self._fleet.backends_for(model_name)[0]
        caller().check_model(backend.model.name)
        return backend

    def _backends(self) -> list[Backend]:
        """Of the models that the caller may use."""
        return [backend for backend in self._fleet.backends if caller().may_use(backend.model.name)]

    def _links(self) -> list[Link]:
        return [link for link in self._fleet.links if link.model is None or caller().may_use(link.model.name)]

    def _limits_message(self) -> inference_pb2.Limits:
        config = self._config
        engines: list[EngineLimits | RouterConfig] = [backend.engine.limits for backend in self._fleet.backends]
        return inference_pb2.Limits(
            max_queued_requests=config.max_queued_requests,
            max_running_requests=max(limits.max_running_requests for limits in engines or [config]),
            max_tokens_per_step=max(limits.max_tokens_per_step for limits in engines or [config]),
            max_message_bytes=config.max_message_mib * MIB,
            max_stop_strings=config.max_stop_strings,
            max_stop_string_bytes=config.max_stop_string_bytes,
            max_stop_token_ids=config.max_stop_token_ids,
            max_top_logprobs=validation.MAX_TOP_LOGPROBS,
            max_logit_biases=validation.MAX_LOGIT_BIASES,
            max_bad_words=validation.MAX_BAD_WORDS,
            max_bad_word_bytes=validation.MAX_BAD_WORD_BYTES,
            max_choices=config.max_choices,
        )


def _account(call: Call, ticket: Ticket) -> None:
    """Counting must not hide what ended the call."""
    try:
        call.on_answered(ticket.live.usage())
    except Exception:
        log.exception("request %s is not counted", ticket.live.request_id)


def _check_deadline(context: grpc.aio.ServicerContext) -> None:
    remaining_s = context.time_remaining()
    if remaining_s is not None and remaining_s <= 0:
        raise OctavoError(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the deadline was past when the call arrived")


def _unset(field: str, description: str) -> OctavoError:
    return invalid_argument(FieldViolation(field, f"is unset; {description}"))
