"""ExecutorService at the edge: streams and calls onto the session host. No rule of the protocol lives here but order.

A stream has two tasks. The reader takes requests in and hands steps to the host, at most MAX_STEPS_IN_FLIGHT without
an answer; the stream itself sends the answers in order.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import grpc

from executor.ids import StepId
from executor.servicer_messages import (
    ExecutorDescription,
    execute_response,
    info_message,
    opening_of,
    outcome_response,
    step_of,
)
from executor.servicer_requests import SessionRequests
from executor.session_host import SessionHost
from executor.sessions import Opened
from executor.step import StepOutcome
from octavo.errors import Code, FieldViolation, OctavoError, invalid_argument
from octavo.rpc import ServerParts, start_server
from octavo.tracing import NO_TRACING, Tracing
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import executor_pb2_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ExecutorService"].full_name
MAX_STEPS_IN_FLIGHT = 2


class ExecutorServicer(executor_pb2_grpc.ExecutorServiceServicer):
    """See executor.proto."""

    def __init__(self, tracing: Tracing = NO_TRACING) -> None:
        self._ready: _Ready | None = None
        self._tracing = tracing

    def begin(self, host: SessionHost, description: ExecutorDescription) -> None:
        """Take calls from now on; before, they are answered with UNAVAILABLE."""
        self._ready = _Ready(host, description)

    async def GetExecutorInfo(
        self, request: pb.GetExecutorInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetExecutorInfoResponse:
        ready = self._get_ready()
        return info_message(ready.description, is_draining=ready.host.is_draining)

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.SessionResponse]:
        ready = self._get_ready()
        opened = await _open(ready.host, request_iterator)
        requests = SessionRequests(self._tracing)
        stream = _Stream(ready.host, opened, requests)
        reader = asyncio.create_task(stream.read(request_iterator))
        stop_listening = ready.host.listen(stream.tell_draining)
        try:
            yield pb.SessionResponse(
                opened=pb.Opened(
                    executor_epoch=ready.description.executor_epoch,
                    session_id=opened.session_id,
                    last_applied_step=opened.last_applied_step,
                )
            )
            async for outcome in stream.outcomes():
                yield outcome_response(outcome) if outcome is not None else pb.SessionResponse(draining=pb.Draining())
        finally:
            stop_listening()
            reader.cancel()
            ready.host.disconnect(opened)
            requests.end()

    async def ExecuteStep(
        self, request: pb.ExecuteStepRequest, context: grpc.aio.ServicerContext
    ) -> pb.ExecuteStepResponse:
        _require(request.HasField("open"), "open", "missing; it names the router and its epoch")
        _require(request.HasField("step"), "step", "missing")
        host = self._get_ready().host
        opened = await host.open(opening_of(request.open))
        try:
            return execute_response(await host.process(opened, step_of(request.step)))
        finally:
            host.disconnect(opened)

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:
        return pb.DrainResponse(num_sessions=await self._get_ready().host.drain())

    def _get_ready(self) -> "_Ready":
        if self._ready is None:
            raise OctavoError(Code.UNAVAILABLE, "STARTING", "the model is being loaded", retry_after_s=1.0)
        return self._ready


@dataclass(frozen=True, slots=True)
class _Ready:
    """What calls need."""

    host: SessionHost
    description: ExecutorDescription


async def start_executor_server(listen: str, servicer: ExecutorServicer, **options: Any) -> ServerParts:
    """Bind and start, with options of `octavo.rpc.start_server`; NOT_SERVING. Raises OSError."""

    def register(server: grpc.aio.Server) -> None:
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, server)

    return await start_server(listen, [(SERVICE_NAME, register)], **options)


async def _open(host: SessionHost, requests: AsyncIterator[pb.SessionRequest]) -> Opened:
    first = await anext(aiter(requests), pb.SessionRequest())
    _require(first.WhichOneof("message") == "open", "open", "the first message of a session must be Open")
    return await host.open(opening_of(first.open))


class _Told(Enum):
    """What a stream says besides outcomes."""

    DRAINING = auto()


class _Stream:
    """What is between the two tasks of one stream: steps in flight, in order."""

    def __init__(self, host: SessionHost, opened: Opened, requests: SessionRequests) -> None:
        self._host = host
        self._requests = requests
        self._opened = opened
        self._in_flight: asyncio.Queue[asyncio.Future[StepOutcome] | _Told | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(MAX_STEPS_IN_FLIGHT)

    async def read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Until the router closes or leaves. An error becomes the last outcome."""
        try:
            async for request in requests:
                if not await self._take(request):
                    break
        except OctavoError as error:
            failed: asyncio.Future[StepOutcome] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            self._in_flight.put_nowait(failed)
        finally:
            self._in_flight.put_nowait(None)

    def tell_draining(self) -> None:
        """Behind the steps that came before."""
        self._in_flight.put_nowait(_Told.DRAINING)

    async def outcomes(self) -> AsyncIterator[StepOutcome | None]:
        """In the order of the steps, each when it is there; None: this executor drains."""
        while (waiting := await self._in_flight.get()) is not None:
            if isinstance(waiting, _Told):
                yield None
            else:
                outcome = await waiting
                self._requests.answer(outcome)
                yield outcome
                self._room.release()

    async def _take(self, request: pb.SessionRequest) -> bool:
        """False: it was the last."""
        kind = request.WhichOneof("message")
        if kind == "step":
            await self._room.acquire()
            future = self._host.process(self._opened, step_of(request.step))
            self._requests.take(request.step)
            future.add_done_callback(_retrieve)  # the stream may be gone when it fails
            self._in_flight.put_nowait(future)
        elif kind == "acknowledge":
            await self._host.acknowledge(self._opened, StepId(request.acknowledge.step_id))
        elif kind == "close":
            self._host.close(self._opened)
            return False
        else:
            _require(False, "message", f"{kind or 'nothing'}; expected step, acknowledge or close")
        return True


def _retrieve(future: "asyncio.Future[StepOutcome]") -> None:
    if not future.cancelled():
        future.exception()


def _require(condition: bool, field: str, what: str) -> None:
    if not condition:
        raise invalid_argument(FieldViolation(field, what))
