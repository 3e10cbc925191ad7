"""The executor as the router sees it: what it serves, and sessions of steps. Here gRPC messages become our words."""

import asyncio
import contextlib

import grpc

from octavo.errors import Code, OctavoError
from octavo.rpc import error_of_call, open_channel
from octavo.tls import TlsSource
from octavo.v1 import executor_pb2, executor_pb2_grpc
from router.clients.step_messages import outcome_of, step_message
from router.ids import SessionKey
from router.model import Model, Standing
from router.step import Outcome, Step

CALL_TIMEOUT_S = 5.0


class ExecutorClient:
    """One executor at an address."""

    def __init__(self, address: str, tls: TlsSource | None = None, server_name: str = "") -> None:
        self._channel = open_channel(address, tls, server_name)
        self._stub = executor_pb2_grpc.ExecutorServiceStub(self._channel)

    async def describe(self) -> Standing:
        """What it is, and what it serves now.

        Raises:
            OctavoError: it cannot be reached, or is not ready.
        """
        info = await self._info()
        return Standing(info.executor_id, _model_of(info), info.draining)

    async def open_session(self, executor_id: str, router_id: str, router_epoch: int) -> "Session":
        """A fresh session: the executor knows no row.

        Raises:
            OctavoError: it cannot be reached, or refuses this epoch.
        """
        session = Session(self._stub)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await session.open(executor_id, router_id, router_epoch)
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
    """Steps out, outcomes in. `key` is known once it is open; `is_to_end` is set when the executor says so."""

    def __init__(self, stub: executor_pb2_grpc.ExecutorServiceStub) -> None:
        self._call = stub.Session()
        self._outgoing: asyncio.Queue[executor_pb2.SessionRequest] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None
        self.key = SessionKey("", 0, 0)
        self.is_to_end = asyncio.Event()

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
        self._outgoing.put_nowait(executor_pb2.SessionRequest(step=step_message(step)))

    async def receive(self) -> Outcome:
        """The next outcome, in order of the steps.

        Raises:
            OctavoError: the session is lost.
        """
        while (response := await self._read()).WhichOneof("message") == "draining":
            self.is_to_end.set()
        return outcome_of(response)

    def leave(self) -> None:
        """Close behind the steps on their way: their outcomes still come, and then the session is lost."""
        self._outgoing.put_nowait(executor_pb2.SessionRequest(close=executor_pb2.Close()))

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
