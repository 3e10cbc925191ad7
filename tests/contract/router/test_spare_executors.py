"""Executors beside the one that serves: who takes over, when, and what is computed again. Scripted, over real gRPC."""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import grpc
import pytest

from octavo.rpc import error_of_call
from octavo.v1 import cache_pb2, inference_pb2
from tests.fakes import Hooks
from tests.stacks import Stack, running_stack, until

TOKENS = {"max_tokens": 60, "ignore_eos": True}
OPTIONS: dict[str, Any] = {"stopping": TOKENS, "cache": {"bypass": True}}
depths = pytest.mark.parametrize("max_steps_in_flight", [1, 2])


async def slow(_: Any) -> None:
    await asyncio.sleep(0.003)


async def never(_: Any) -> None:
    await asyncio.Event().wait()


async def answers_of(stack: Stack) -> list[str]:
    """Of an undisturbed run."""
    return [(await stack.generate(letter * 9, **OPTIONS)).choices[0].text for letter in "abc"]


async def calls_in_the_middle(stack: Stack) -> list[asyncio.Task]:
    """The same requests, each with some tokens."""
    before = stack.metric("octavo_generation_tokens_total")
    for each in (stack.executor, *stack.spares):
        each.hooks.before_step = slow
    calls = [asyncio.create_task(stack.generate(letter * 9, **OPTIONS)) for letter in "abc"]
    assert await until(lambda: stack.metric("octavo_generation_tokens_total") >= before + 30)
    return calls


async def texts(calls: list[asyncio.Task]) -> list[str]:
    return [call.choices[0].text for call in await asyncio.gather(*calls)]


def is_spare_ready(stack: Stack, count: int = 1) -> bool:
    return stack.metric("octavo_spare_executors_ready") == count


async def break_off(stack: Stack) -> None:
    """The executor is gone, as far as anybody can speak to it."""
    stack.executor.hooks.before_step = never
    await stack.executor.stop()


@depths
async def test_a_spare_goes_on_where_a_dead_executor_ended(source: str, max_steps_in_flight: int) -> None:
    """Steps without a result are computed again, and no others; the successor of the dead one is the next spare."""
    async with running_stack(source, config={"max_steps_in_flight": max_steps_in_flight}, num_spares=1) as stack:
        whole = await answers_of(stack)
        assert await until(lambda: is_spare_ready(stack))
        calls = await calls_in_the_middle(stack)
        dead = stack.executor
        await break_off(stack)
        stack.process.die()
        assert await texts(calls) == whole
        resent = list(stack.spares[0].steps[0].started_rows)
        assert all(len(start.token_ids) - start.num_computed_tokens == 1 for start in resent)
        again = stack.metric("octavo_recomputed_tokens_total", cause="executor_lost")
        assert 0 < again <= 3 * max_steps_in_flight
        assert stack.metric("octavo_takeover_time_seconds_count") == 1
        assert is_spare_ready(stack, 0)
        assert stack.metric("octavo_spare_executors") == 1, "which is what should be, not what is"
        stack.process.is_dead = False  # the next process of this id
        stack.executor = replace(dead, listen=dead.address, hooks=Hooks(), steps=[], rows={})
        await stack.executor.start()
        assert await until(lambda: is_spare_ready(stack))
        calls = await calls_in_the_middle(stack)
        stack.spares[0].hooks.before_step = never
        await stack.spares[0].stop()
        stack.spare_processes[1].die()
        assert await texts(calls) == whole
        assert stack.executor.steps
        await stack.settle()


async def test_a_spare_waits_until_its_predecessor_is_known_dead(source: str) -> None:
    """A connection that broke is no death: what nobody can speak to may still write into the blocks."""
    async with running_stack(source, num_spares=1) as stack:
        whole = await answers_of(stack)
        assert await until(lambda: is_spare_ready(stack))
        calls = await calls_in_the_middle(stack)
        await break_off(stack)
        assert await until(lambda: not stack.link.is_ready)
        await asyncio.sleep(0.3)
        assert not stack.spares[0].steps
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.generate()
        assert error_of_call(caught.value).reason == "NO_EXECUTOR"
        stack.process.die()
        assert await texts(calls) == whole
        assert stack.spares[0].steps
        await stack.settle()


async def test_a_broken_session_goes_on_at_its_own_executor(source: str) -> None:
    async with running_stack(source, num_spares=1) as stack:
        whole = await answers_of(stack)
        assert await until(lambda: is_spare_ready(stack))
        calls = await calls_in_the_middle(stack)
        stack.executor.hooks.breaks_next = True
        assert await texts(calls) == whole
        assert not stack.spares[0].steps
        await stack.settle()


async def test_a_spare_of_another_model_is_passed_over(source: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither does it take over, nor does it end what waits for the executor's successor."""
    caplog.set_level(logging.INFO, "router")
    async with running_stack(source, num_spares=2) as stack:
        stranger, good = stack.spares
        stranger.max_rows = stack.executor.max_rows - 1
        assert await until(lambda: "cannot take over" in caplog.text and is_spare_ready(stack))
        whole = await answers_of(stack)
        calls = await calls_in_the_middle(stack)
        await break_off(stack)
        stack.process.die()
        assert await texts(calls) == whole
        assert good.steps
        assert not stranger.steps
        await stack.settle()


@depths
async def test_rows_move_from_an_executor_that_wants_to_end(source: str, max_steps_in_flight: int) -> None:
    """Nothing is computed again, and meanwhile requests are taken."""
    async with running_stack(source, config={"max_steps_in_flight": max_steps_in_flight}, num_spares=1) as stack:
        whole = await answers_of(stack)
        calls = await calls_in_the_middle(stack)
        stack.executor.hooks.is_draining.set()
        assert await until(lambda: bool(stack.spares[0].steps))
        assert (await stack.generate("more", stopping={"max_tokens": 3})).usage.generated_tokens == 3
        assert await texts(calls) == whole
        assert stack.metric("octavo_recomputed_tokens_total") == 0
        assert not stack.executor.rows
        assert stack.metric("octavo_takeover_time_seconds_count") == 1
        await stack.settle()


async def test_an_executor_that_wants_to_end_serves_while_there_is_no_other(source: str) -> None:
    async with running_stack(source, num_spares=1) as stack:
        stack.spares[0].hooks.is_draining.set()
        whole = await answers_of(stack)
        calls = await calls_in_the_middle(stack)
        stack.executor.hooks.is_draining.set()
        await asyncio.sleep(0.1)
        assert not stack.spares[0].steps
        stack.spares[0].hooks.is_draining.clear()
        assert await texts(calls) == whole
        assert await until(lambda: stack.link.backend is not None and not is_spare_ready(stack))
        assert await until(lambda: _serves(stack, "spare-1"))
        assert (await stack.generate("abc", stopping={"max_tokens": 3})).usage.generated_tokens == 3
        await stack.settle()


def _serves(stack: Stack, executor_id: str) -> bool:
    return executor_id in {key.executor_id for key in stack.engine.sent_steps()}


async def test_rows_move_to_and_fro_while_others_are_preempted_and_cancelled(source: str) -> None:
    """A pool too small for all, clients that leave, and an executor that wants to end again and again."""
    async with running_stack(source, num_spares=1, num_blocks=40) as stack:
        options: dict[str, Any] = {"stopping": {"max_tokens": 40, "ignore_eos": True}, "cache": {"bypass": True}}
        options["sampling"] = {"n": 2}
        whole = [(await stack.generate(letter * 9, **options)).choices for letter in "abcd"]
        both = (stack.executor, stack.spares[0])
        for each in both:
            each.hooks.before_step = slow
        calls = [asyncio.create_task(stack.generate(letter * 9, **options)) for letter in "abcd"]
        others = [asyncio.create_task(stack.generate("z" * 20, request_id=f"z{i}", **options)) for i in range(6)]
        for move in range(6):
            leaving, staying = both if move % 2 == 0 else both[::-1]
            staying.hooks.is_draining.clear()
            num_steps = len(staying.steps)
            leaving.hooks.is_draining.set()
            assert await until(lambda there=staying, before=num_steps: len(there.steps) > before)
            others[move].cancel() if move % 2 else await stack.stub.Cancel(
                inference_pb2.CancelRequest(request_id=f"z{move}")
            )
        assert [call.choices for call in await asyncio.gather(*calls)] == whole
        await asyncio.gather(*others, return_exceptions=True)
        assert stack.metric("octavo_num_preemptions_total") > 0
        assert stack.metric("octavo_recomputed_tokens_total", cause="executor_lost") == 0
        await stack.settle()


async def test_a_session_is_refused_while_another_executor_has_one_of_the_lease(source: str) -> None:
    """The cache service says it, whatever routers believe."""
    async with running_stack(source, num_spares=1) as stack:
        key = cache_pb2.SessionKey(executor_id="spare-1", executor_epoch=stack.spares[0].epoch, session_id=7)
        request = cache_pb2.OpenSessionRequest(
            session=key, client_id=stack.link.client_id, client_epoch=stack.link.router_epoch, takeover=True
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.cache.OpenSession(request)
        assert error_of_call(caught.value).reason == "PREDECESSOR_ALIVE"
        assert error_of_call(caught.value).metadata["executor_id"] == "fake"
