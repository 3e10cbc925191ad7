"""The executor as the router sees it: what it serves, and sessions of steps. Here gRPC messages become our words."""

import asyncio
import contextlib

import grpc

from octavo.errors import Code, OctavoError
from octavo.rpc import error_of_call, open_channel
from octavo.v1 import cache_pb2, executor_pb2, executor_pb2_grpc
from router.ids import SessionKey, StepId
from router.model import Model
from router.step import Outcome, RowFailure, RowStart, Step, StepFailed, StepGap, StepResult

CALL_TIMEOUT_S = 5.0


class ExecutorClient:
    """One executor at an address."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = executor_pb2_grpc.ExecutorServiceStub(self._channel)

    async def describe(self) -> Model:
        """What it serves now.

        Raises:
            OctavoError: it cannot be reached, or is not ready.
        """
        return _model_of(await self._info())

    async def open_session(self, router_id: str, router_epoch: int) -> "Session":
        """A fresh session: the executor knows no row.

        Raises:
            OctavoError: it cannot be reached, or refuses this epoch.
        """
        session = Session(self._stub)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await session.open((await self._info()).executor_id, router_id, router_epoch)
        except TimeoutError:
            session.abandon()
            raise OctavoError(Code.UNAVAILABLE, "EXECUTOR_SILENT", "the executor did not open a session") from None
        except OctavoError:
            session.abandon()
            raise
        return session

    async def close(self) -> None:
        await self._channel.close()

    async def _info(self) -> executor_pb2.GetExecutorInfoResponse:
        try:
            return await self._stub.GetExecutorInfo(executor_pb2.GetExecutorInfoRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error) from error


class Session:
    """Steps out, outcomes in. `key` is known once it is open."""

    def __init__(self, stub: executor_pb2_grpc.ExecutorServiceStub) -> None:
        self._call = stub.Session()
        self._outgoing: asyncio.Queue[executor_pb2.SessionRequest] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None
        self.key = SessionKey("", 0, 0)

    async def open(self, executor_id: str, router_id: str, router_epoch: int) -> None:
        """The first exchange.

        Raises:
            OctavoError: refused, or the connection broke.
        """
        request = executor_pb2.Open(router_id=router_id, router_epoch=router_epoch, takeover=True)
        await self._write(executor_pb2.SessionRequest(open=request))
        response = await self._read()
        if response.WhichOneof("message") != "opened":
            raise OctavoError(Code.INTERNAL, "SESSION_NOT_OPENED", "the executor answered something else than Opened")
        self.key = SessionKey(executor_id, response.opened.executor_epoch, response.opened.session_id)
        self._writer = asyncio.create_task(self._write_all(), name="session-writer")

    def send(self, step: Step) -> None:
        """Put a step on its way."""
        self._outgoing.put_nowait(executor_pb2.SessionRequest(step=_step_message(step)))

    async def receive(self) -> Outcome:
        """The next outcome, in order of the steps.

        Raises:
            OctavoError: the session is lost.
        """
        return _outcome_of(await self._read())

    async def close(self) -> None:
        """Leave in order: the executor frees the session's slots."""
        self._stop_writer()
        with contextlib.suppress(OctavoError, TimeoutError):
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._write(executor_pb2.SessionRequest(close=executor_pb2.Close()))
                await self._call.done_writing()
                while True:
                    await self._read()
        self._call.cancel()

    def abandon(self) -> None:
        """Leave without a word: the session is lost."""
        self._stop_writer()
        self._call.cancel()

    def _stop_writer(self) -> None:
        if self._writer is not None:
            self._writer.cancel()

    async def _write_all(self) -> None:
        # A broken stream shows at the reader, which says why.
        with contextlib.suppress(OctavoError):
            while True:
                await self._write(await self._outgoing.get())

    async def _write(self, request: executor_pb2.SessionRequest) -> None:
        try:
            await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise _lost(error) from error

    async def _read(self) -> executor_pb2.SessionResponse:
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _lost(error) from error
        if response is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise OctavoError(Code.UNAVAILABLE, "SESSION_ENDED", "the executor ended the session")
        return response


def _lost(error: Exception) -> OctavoError:
    if isinstance(error, grpc.aio.AioRpcError):
        return error_of_call(error)
    return OctavoError(Code.UNAVAILABLE, "SESSION_LOST", "the connection to the executor broke")


def _model_of(info: executor_pb2.GetExecutorInfoResponse) -> Model:
    model = info.model
    return Model(
        name=model.name,
        source=model.source,
        revision=model.revision,
        fingerprint=model.fingerprint,
        architecture=model.architecture,
        vocabulary_size=model.vocabulary_size,
        max_context_tokens=model.max_context_tokens,
        eos_token_ids=frozenset(model.eos_token_ids),
        arena_id=info.arena_id,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        kv_dtype=info.kv_dtype,
        weights_dtype=info.weights_dtype,
        attention=info.attention,
        device=info.device,
        max_rows=info.max_rows,
        max_tokens_per_step=info.max_tokens_per_step,
        max_steps_in_flight=info.max_steps_in_flight,
    )


def _step_message(step: Step) -> executor_pb2.Step:
    message = executor_pb2.Step(
        step_id=step.step_id,
        acknowledged_step=step.acknowledged_step,
        retired_slots=step.retired_slots,
        started_rows=[_row_start_message(start) for start in step.started_rows],
        slots=[run.slot for run in step.runs],
        start_positions=[run.start for run in step.runs],
        num_tokens=[run.num_tokens for run in step.runs],
    )
    if step.extensions:
        message.extensions.add(
            slots=[extension.slot for extension in step.extensions],
            counts=[len(extension.block_ids) for extension in step.extensions],
            block_ids=[block_id for extension in step.extensions for block_id in extension.block_ids],
        )
    return message


def _row_start_message(start: RowStart) -> executor_pb2.RowStart:
    sampling = start.sampling
    return executor_pb2.RowStart(
        slot=start.slot,
        incarnation=start.incarnation,
        token_ids=start.token_ids,
        num_computed_tokens=start.num_computed_tokens,
        tables=[cache_pb2.BlockTable(block_ids=start.block_ids)],
        sampling=executor_pb2.RowSampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            suppressed_token_ids=sampling.suppressed_token_ids,
            suppress_until=sampling.suppress_until,
        ),
    )


def _outcome_of(response: executor_pb2.SessionResponse) -> Outcome:
    kind = response.WhichOneof("message")
    if kind == "result":
        result = response.result
        failures = tuple(RowFailure(failure.row, failure.reason, failure.message) for failure in result.failures)
        return StepResult(
            StepId(result.step_id),
            tuple(result.num_sampled),
            tuple(result.token_ids),
            failures,
            result.execute_microseconds / 1e6,
        )
    if kind == "failed":
        return StepFailed(StepId(response.failed.step_id), response.failed.reason, response.failed.message)
    if kind == "gap":
        return StepGap(StepId(response.gap.last_applied_step))
    raise OctavoError(Code.INTERNAL, "UNEXPECTED_MESSAGE", f"the executor sent {kind} in the middle of a session")
