"""ExecutorService over a real channel, with a scripted model and a scripted cache service."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc
import pytest

from executor.ids import RouterEpoch, RouterId, SessionId
from executor.model.description import ModelDescription
from executor.servicer import ExecutorServicer, start_executor_server
from executor.servicer_messages import ExecutorDescription
from executor.session import Session
from executor.session_host import SessionHost
from executor.sessions import Opening, SessionStore
from octavo import rpc
from octavo.errors import Code, OctavoError
from octavo.v1 import cache_pb2, executor_pb2_grpc
from octavo.v1 import executor_pb2 as pb
from tests.executor_cases import LIMITS, ScriptedRunner

DESCRIPTION = ExecutorDescription(
    executor_id="executor-7",
    executor_epoch=99,
    model=ModelDescription("name", "demo", "", "f00d", "Scripted", 100, 64, (2, 4)),
    arena_id="cpu",
    block_size=4,
    num_blocks=32,
    kv_dtype="float32",
    device="cpu",
    attention="torch",
    weights_dtype="float32",
    max_rows=8,
    max_tokens_per_step=40,
    max_steps_in_flight=2,
    version="0",
)


@dataclass
class Authority:
    """The cache service's part: what it was told, and what it says next."""

    opened: list[tuple[SessionId, RouterId, RouterEpoch]] = field(default_factory=list)
    closed: list[SessionId] = field(default_factory=list)
    orphans: set[SessionId] = field(default_factory=set)
    error: OctavoError | None = None

    async def open_session(self, session_id: SessionId, opening: Opening) -> None:
        if self.error is not None:
            raise self.error
        self.opened.append((session_id, opening.router_id, opening.router_epoch))

    async def close_session(self, session_id: SessionId) -> None:
        if self.error is not None:
            raise self.error
        self.closed.append(session_id)

    async def orphaned_sessions(self) -> frozenset[SessionId]:
        return frozenset(self.orphans)


@dataclass
class Edge:
    """A served host and its parts."""

    stub: executor_pb2_grpc.ExecutorServiceStub
    authority: Authority
    runner: "GatedRunner"
    host: SessionHost
    store: SessionStore
    now_s: list[float]  # one number: what the host's clock says
    idle: list[bool]  # what the host said of itself since the first session

    async def until(self, condition) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


class GatedRunner(ScriptedRunner):
    """A model that waits at a gate in its thread."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.num_begun = 0

    def begin(self, *arguments):
        self.num_begun += 1
        assert self.gate.wait(10)
        return super().begin(*arguments)


@asynccontextmanager
async def serving() -> AsyncIterator[Edge]:
    runner, authority = GatedRunner(), Authority()
    store = SessionStore(lambda session_id: Session(session_id, 8, LIMITS, runner), timeout_s=30)
    now_s, idle = [0.0], []

    async def on_idle(is_idle: bool) -> None:
        if authority.opened:
            idle.append(is_idle)

    host = SessionHost(store, authority, clock=lambda: now_s[0], on_idle=on_idle)
    servicer = ExecutorServicer()
    server = await start_executor_server("127.0.0.1:0", servicer, enable_reflection=False)
    house = asyncio.create_task(host.keep_house(0.01))
    async with rpc.open_channel(f"127.0.0.1:{server.port}") as channel:
        servicer.begin(host, DESCRIPTION)
        edge = Edge(executor_pb2_grpc.ExecutorServiceStub(channel), authority, runner, host, store, now_s, idle)
        yield edge
        runner.gate.set()
    await server.server.stop(0)
    house.cancel()
    with suppress(asyncio.CancelledError):
        await house
    await host.shut_down()


def open_request(router: str = "r", epoch: int = 5, **fields: object) -> pb.SessionRequest:
    return pb.SessionRequest(open=pb.Open(router_id=router, router_epoch=epoch, **fields))


def first_step() -> pb.SessionRequest:
    start = pb.RowStart(slot=1, token_ids=[10, 11], tables=[cache_pb2.BlockTable(block_ids=[3, 4, 5])])
    return pb.SessionRequest(
        step=pb.Step(step_id=1, started_rows=[start], slots=[1], start_positions=[0], num_tokens=[2])
    )


def next_step(step_id: int) -> pb.SessionRequest:
    return pb.SessionRequest(step=pb.Step(step_id=step_id, slots=[1], start_positions=[step_id], num_tokens=[1]))


async def opened(edge: Edge, **fields: object):
    """A stream after Opened, and what it said."""
    call = edge.stub.Session()
    await call.write(open_request(**fields))
    return call, (await call.read()).opened


async def test_info_says_everything():
    async with serving() as edge:
        await edge.host.drain()
        info = await edge.stub.GetExecutorInfo(pb.GetExecutorInfoRequest())
    assert not [
        name for name, _ in pb.GetExecutorInfoResponse.DESCRIPTOR.fields_by_name.items() if not getattr(info, name)
    ]
    assert list(info.model.eos_token_ids) == [2, 4]
    assert (info.executor_epoch, info.max_steps_in_flight) == (99, 2)


async def test_two_steps_are_sent_before_the_first_answer():
    async with serving() as edge:
        call, answer = await opened(edge)
        assert (answer.executor_epoch, answer.last_applied_step) == (99, 0)
        edge.runner.gate.clear()
        await call.write(first_step())
        await call.write(next_step(2))
        await edge.until(lambda: edge.runner.num_begun == 1)
        edge.runner.gate.set()
        results = [(await call.read()).result for _ in range(2)]
        assert [list(result.token_ids) for result in results] == [[12], [13]]
        assert [result.step_id for result in results] == [1, 2]
        call.cancel()


async def test_steps_beyond_those_in_flight_wait_and_are_answered_in_order():
    async with serving() as edge:
        call, _ = await opened(edge)
        await call.write(first_step())
        for step_id in range(2, 8):
            await call.write(next_step(step_id))
        tokens = [list((await call.read()).result.token_ids) for _ in range(7)]
        assert tokens == [[12 + index] for index in range(7)]
        call.cancel()


async def test_a_session_is_announced_before_it_is_opened_and_reported_when_closed():
    async with serving() as edge:
        call, answer = await opened(edge)
        assert edge.authority.opened == [(answer.session_id, "r", 5)]
        await call.write(first_step())
        await call.write(pb.SessionRequest(close=pb.Close()))
        assert (await call.read()).result.step_id == 1
        assert await call.read() is grpc.aio.EOF
        await edge.until(lambda: edge.authority.closed == [answer.session_id])
        assert edge.store.num_sessions == 0


async def test_a_refused_announcement_refuses_the_open():
    async with serving() as edge:
        edge.authority.error = OctavoError(Code.FAILED_PRECONDITION, "LEASE_EXPIRED", "no lease")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await opened(edge)
        assert rpc.error_of_call(caught.value).reason == "LEASE_EXPIRED"
        edge.authority.error = None
        await edge.until(lambda: edge.store.num_sessions == 0)
        _, answer = await opened(edge)
        assert answer.session_id == 2


async def test_a_broken_stream_is_resumed_with_its_results():
    """Results are kept until acknowledged; the same epoch continues with rows and lengths."""
    async with serving() as edge:
        call, answer = await opened(edge)
        await call.write(first_step())
        assert (await call.read()).result.step_id == 1
        edge.runner.gate.clear()
        await call.write(next_step(2))
        await edge.until(lambda: edge.runner.num_begun == 2)
        call.cancel()
        edge.runner.gate.set()
        again, reopened = await opened(edge, last_seen_step=1)
        assert (reopened.session_id, reopened.last_applied_step) == (answer.session_id, 2)
        await again.write(next_step(2))
        assert list((await again.read()).result.token_ids) == [13]
        await again.write(next_step(1))
        assert (await again.read()).gap.last_applied_step == 2
        assert edge.runner.num_begun == 2
        assert edge.authority.closed == []
        again.cancel()


async def test_a_superseded_stream_is_ended():
    async with serving() as edge:
        old, _ = await opened(edge)
        new, _ = await opened(edge)
        await old.write(first_step())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await old.read()
        assert rpc.error_of_call(caught.value).reason == "SESSION_SUPERSEDED"
        await new.write(first_step())
        assert list((await new.read()).result.token_ids) == [12]
        new.cancel()


async def test_a_higher_epoch_replaces_and_the_old_session_is_reported():
    async with serving() as edge:
        _, first = await opened(edge)
        call, second = await opened(edge, epoch=6)
        assert second.session_id != first.session_id
        await edge.until(lambda: edge.authority.closed == [first.session_id])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await opened(edge, epoch=5)
        assert rpc.error_of_call(caught.value).reason == "STALE_EPOCH"
        call.cancel()


async def test_a_session_whose_router_stays_away_is_reported_after_the_timeout():
    async with serving() as edge:
        call, answer = await opened(edge)
        call.cancel()
        await edge.until(lambda: edge.store._held[RouterId("r")].disconnected_at_s is not None)
        edge.now_s[0] = 29.0
        await asyncio.sleep(0.05)
        assert edge.authority.closed == []
        edge.now_s[0] = 31.0
        await edge.until(lambda: edge.authority.closed == [answer.session_id])


async def test_an_orphan_ends_after_the_step_that_runs():
    async with serving() as edge:
        call, answer = await opened(edge)
        edge.runner.gate.clear()
        await call.write(first_step())
        await edge.until(lambda: edge.runner.num_begun == 1)
        edge.authority.orphans = {answer.session_id}
        await asyncio.sleep(0.05)
        assert edge.authority.closed == []
        edge.runner.gate.set()
        await edge.until(lambda: answer.session_id in edge.authority.closed)
        call.cancel()


async def test_an_end_is_reported_again_until_it_is_heard():
    async with serving() as edge:
        call, answer = await opened(edge)
        edge.authority.error = OctavoError(Code.UNAVAILABLE, "UNAVAILABLE", "restarting")
        await call.write(pb.SessionRequest(close=pb.Close()))
        assert await call.read() is grpc.aio.EOF
        await asyncio.sleep(0.05)
        edge.authority.error = None
        await edge.until(lambda: edge.authority.closed == [answer.session_id])


async def test_the_unary_twin_is_the_same_session():
    async with serving() as edge:
        request = pb.ExecuteStepRequest(open=open_request().open, step=first_step().step)
        first = await edge.stub.ExecuteStep(request)
        again = await edge.stub.ExecuteStep(request)
        assert list(first.result.token_ids) == [12]
        assert again == first
        call, answer = await opened(edge)
        assert (answer.session_id, answer.last_applied_step) == (1, 1)
        await call.write(next_step(2))
        assert list((await call.read()).result.token_ids) == [13]
        call.cancel()


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (first_step(), "the first message of a session must be Open"),
        (pb.SessionRequest(), "the first message of a session must be Open"),
        (open_request(router=""), "open.router_id"),
    ],
)
async def test_a_stream_that_does_not_begin_with_open_is_refused(request_, text):
    async with serving() as edge:
        call = edge.stub.Session()
        await call.write(request_)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert text in caught.value.details()


async def test_a_second_open_in_a_stream_is_refused():
    async with serving() as edge:
        call, _ = await opened(edge)
        await call.write(open_request())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_drain_refuses_fresh_sessions_and_counts_live_ones():
    async with serving() as edge:
        call, _ = await opened(edge)
        assert (await edge.stub.Drain(pb.DrainRequest())).num_sessions == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await opened(edge, router="other")
        error = rpc.error_of_call(caught.value)
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "DRAINING")
        await call.write(first_step())
        assert (await call.read()).WhichOneof("message") == "draining"
        assert list((await call.read()).result.token_ids) == [12]
        again, _ = await opened(edge, takeover=True)  # who was here before may come back: it found no other
        assert (await again.read()).WhichOneof("message") == "draining"
        await edge.host.take_again()
        other, _ = await opened(edge, router="other")
        for each in (call, again, other):
            each.cancel()


async def test_a_router_that_leaves_gets_the_results_of_its_last_steps():
    """Close behind steps on their way: they run, their outcomes come, and only then the session is over."""
    async with serving() as edge:
        call, _ = await opened(edge)
        edge.runner.gate.clear()
        await call.write(first_step())
        await call.write(next_step(2))
        await call.write(pb.SessionRequest(close=pb.Close()))
        await edge.until(lambda: edge.runner.num_begun == 1)
        assert not edge.authority.closed
        edge.runner.gate.set()
        assert [(await call.read()).result.step_id for _ in range(2)] == [1, 2]
        assert await call.read() is grpc.aio.EOF
        await edge.until(lambda: edge.idle[-1:] == [True])
        assert edge.authority.closed == [1]


async def test_before_the_model_is_there_calls_are_told_to_come_back():
    server = await start_executor_server("127.0.0.1:0", ExecutorServicer(), enable_reflection=False)
    async with rpc.open_channel(f"127.0.0.1:{server.port}") as channel:
        stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetExecutorInfo(pb.GetExecutorInfoRequest())
    await server.server.stop(0)
    error = rpc.error_of_call(caught.value)
    assert (error.code, error.retry_after_s) == (Code.UNAVAILABLE, 1.0)


async def test_every_field_of_a_row_arrives():
    """What a router sends is what a row samples by: no field of RowSampling is dropped.

    But `num_candidates`, of rows that draw nothing: test_candidates.py.
    """
    async with serving() as edge:
        sampling = pb.RowSampling(
            temperature=0.5,
            top_k=7,
            top_p=0.25,
            min_p=0.125,
            seed=2**64 - 3,
            choice_index=4,
            num_samples=1,
            suppressed_token_ids=[8],
            suppress_until=50,
            num_prompt_tokens=1,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            repetition_penalty=1.5,
            bias_token_ids=[3],
            biases=[-2.0],
            allowed_token_ids=[9, 12],
            banned_lengths=[1, 2],
            banned_token_ids=[13, 11, 14],
            logprobs=True,
            num_top_logprobs=2,
            prompt_logprobs_from=1,
            prompt_logprobs_until=2,
            grammar='start: "x"',
        )
        request = first_step().step
        request.started_rows[0].sampling.CopyFrom(sampling)
        await edge.stub.ExecuteStep(pb.ExecuteStepRequest(open=open_request().open, step=request))
        batch = edge.runner.batches[0]
    found = batch.sampling
    missing = [name for name in pb.RowSampling.DESCRIPTOR.fields_by_name if not getattr(sampling, name)]
    assert missing == ["num_candidates"]
    assert (found.temperature.item(), found.top_k.item(), found.top_p.item()) == (0.5, 7, 0.25)
    assert (found.min_p.item(), found.seed.item(), found.choice_index.item()) == (0.125, -3, 4)
    rules = batch.adjustments
    assert (rules.banned_ids.tolist(), rules.allowed_ids.tolist()) == (
        [8, 13, 14],
        [9, 12],
    )  # 11 was generated, so that 14 is out
    assert (rules.bias_ids.tolist(), rules.biases.tolist()) == ([3], [-2.0])
    history = request.started_rows[0].token_ids
    assert rules.seen_ids.tolist() == sorted(history)
    assert rules.repetition.tolist() == [1.5] * len(history)
    generated = [token != history[0] for token in sorted(history)]
    assert rules.presence.tolist() == [0.5 * is_generated for is_generated in generated]
    assert rules.frequency.tolist() == [0.25 * is_generated for is_generated in generated]
    assert rules.dead_rows.tolist() == [0], "this executor has no vocabulary to follow a grammar with"
    assert batch.sample_scores.num_top.tolist() == [2]
    assert batch.prompt_scores.token_ids.tolist() == [history[1]]
