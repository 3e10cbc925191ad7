"""Exceptions that nobody expected: INTERNAL for what they concern, counted, logged, and nobody else hears of them."""

import asyncio
import logging
from typing import Any

import grpc
import pytest

from octavo.errors import Code, OctavoError
from octavo.rpc import error_of_call
from octavo.v1 import inference_pb2
from router import link, results
from router.live import Choice, LiveRequest
from tests.fleets import running_fleet
from tests.stacks import Front, running_stack, until

LONG = {"max_tokens": 60, "ignore_eos": True}


class DefectError(Exception):
    """Of ours."""


async def fault_of(call: Any) -> OctavoError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = error_of_call(caught.value)
    assert (error.code, error.reason, error.retry_after_s) == (Code.INTERNAL, "ROUTER_FAULT", None)
    return error


async def states(front: Front) -> list[int]:
    info = await front.stub.GetServerInfo(inference_pb2.GetServerInfoRequest())
    return [engine.state for engine in info.engines]


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.exc_info and record.levelno == logging.ERROR]


async def test_a_fault_in_one_answer_ends_that_request_alone(
    source: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = results.accept_token

    def accept(choice: Choice, *arguments: Any) -> Any:
        if choice.request.request_id == "bad" and choice.num_generated == 5:
            raise DefectError
        return original(choice, *arguments)

    monkeypatch.setattr(results, "accept_token", accept)
    async with running_stack(source) as stack:
        epoch = stack.link.router_epoch
        bad, good, pair = (
            asyncio.create_task(stack.generate(f"{name}?", request_id=name, stopping=LONG, sampling={"n": n}))
            for name, n in (("bad", 2), ("good", 1), ("pair", 2))
        )
        await fault_of(bad)
        assert (await good).usage.generated_tokens == 60
        assert (await pair).usage.generated_tokens == 120
        assert stack.metric("octavo_router_faults_total", engine="engine-0") == 1
        assert stack.metric("octavo_request_success_total", finished_reason="error") == 1
        assert stack.link.router_epoch == epoch, "lease and session go on"
        assert any(text.startswith("request bad: a fault of the router") for text in tracebacks(caplog))
        await stack.settle()


async def test_a_fault_in_a_turn_ends_the_engine_s_requests_and_no_other_s(
    source: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not UNAVAILABLE, which clients send again; and the engine is taken up after a pause, with a fresh lease."""
    monkeypatch.setattr(link, "FIRST_FAULT_PAUSE_S", 2.0)  # in which the state is looked at
    async with running_fleet(source, {"left": {"model_name": "a"}, "right": {"model_name": "b"}}) as fleet:
        for engine in fleet.engines.values():
            engine.executor.hooks.is_open.clear()
        broken = [asyncio.create_task(fleet.generate(f"{i}?", model="a", stopping=LONG)) for i in range(3)]
        whole = asyncio.create_task(fleet.generate(model="b", stopping=LONG))
        assert await until(lambda: fleet.metric("octavo_num_requests_running") == 4)
        left, _ = fleet.router.fleet.links
        assert left.backend is not None

        def turn(now: float) -> None:
            raise DefectError

        monkeypatch.setattr(left.backend.engine, "turn", turn)
        for engine in fleet.engines.values():
            engine.executor.hooks.is_open.set()
        for call in broken:
            await fault_of(call)
        assert await until(lambda: left.state is link.LinkState.FAULTED)
        assert await states(fleet) == [inference_pb2.ENGINE_STATE_FAULTED, inference_pb2.ENGINE_STATE_SERVING]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fleet.generate(model="a")
        assert error_of_call(caught.value).reason == "NO_EXECUTOR", "who comes now may come again"
        assert (await whole).usage.generated_tokens == 60
        assert fleet.metric("octavo_router_faults_total", engine="left") == 1
        assert fleet.metric("octavo_router_faults_total", engine="right") == 0
        assert [text for text in tracebacks(caplog) if text.startswith("a fault of the router on engine left")]
        assert await until(lambda: fleet.is_up("left"))
        assert (await fleet.generate(model="a", stopping=LONG)).usage.generated_tokens == 60
        assert await states(fleet) == [inference_pb2.ENGINE_STATE_SERVING] * 2
        await fleet.settle()


async def test_a_fault_while_a_request_moves_ends_that_request_alone(
    source: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It moves while its engine is given up: what goes wrong with it must not keep the others from hearing of that."""
    config = {"recovery_grace_s": 0.5}
    async with running_fleet(source, {"left": {"max_rows": 1}, "right": {"max_rows": 1}}, config=config) as fleet:
        for engine in fleet.engines.values():
            engine.executor.hooks.is_open.clear()
        calls = [asyncio.create_task(fleet.generate(f"{i}?", request_id=f"{i}", stopping=LONG)) for i in range(6)]
        assert await until(lambda: fleet.metric("octavo_num_requests_running") == 2)
        assert await until(lambda: fleet.metric("octavo_num_requests_waiting_by_reason", reason="capacity") == 4)
        original, broken = LiveRequest.refit, []

        def refit(live: LiveRequest, spec: Any) -> None:
            broken.append(live.request_id)
            if len(broken) == 1:
                raise DefectError
            original(live, spec)

        monkeypatch.setattr(LiveRequest, "refit", refit)
        await fleet.engines["left"].vanish()
        assert await until(lambda: len(broken) == 2)
        fleet.engines["right"].executor.hooks.is_open.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        reasons = [error_of_call(result).reason for result in results if isinstance(result, grpc.aio.AioRpcError)]
        assert sorted(reasons) == ["ENGINE_LOST", "ROUTER_FAULT"]
        assert fleet.metric("octavo_router_faults_total") == 1
        assert len(tracebacks(caplog)) >= 1


async def test_faults_in_a_row_are_ever_further_apart(
    source: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that always fails is no busy loop of connections."""
    monkeypatch.setattr(link, "FIRST_FAULT_PAUSE_S", 0.05)
    monkeypatch.setattr(link, "MAX_FAULT_PAUSE_S", 0.2)

    async def run(self: Any) -> None:
        raise DefectError

    async with running_stack(source) as stack:
        monkeypatch.setattr(link.Engine, "run", run)
        backend = stack.link.backend
        assert backend is not None
        monkeypatch.setattr(backend.engine, "turn", lambda now: (_ for _ in ()).throw(DefectError()))
        backend.engine._wakeup.set()
        assert await until(lambda: stack.metric("octavo_router_faults_total") >= 5)
        pauses = [record.args[1] for record in caplog.records if record.msg.startswith("a fault of the router on")]
        assert pauses[:5] == [0.05, 0.1, 0.2, 0.2, 0.2]
        monkeypatch.undo()
        assert await until(lambda: stack.link.is_ready)
        assert (await stack.generate(stopping=LONG)).usage.generated_tokens == 60
