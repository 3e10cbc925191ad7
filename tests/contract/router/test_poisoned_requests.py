"""Executors that die under requests, again and again: who kills them fails alone, and nobody else does."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import pytest

from octavo.errors import Code
from octavo.rpc import error_of_call
from octavo.v1 import executor_pb2
from tests.stacks import Stack, running_stack, until

TOKENS = {"max_tokens": 40, "ignore_eos": True}
BYPASS = {"bypass": True}
depths = pytest.mark.parametrize("max_steps_in_flight", [1, 2])


@dataclass
class Supervisor:
    """Replaces the executor of a stack whenever a step kills it."""

    stack: Stack
    is_deadly: Callable[[list[list[int]]], bool]  # the histories of the rows of a step
    num_deaths: int = 0

    def __post_init__(self) -> None:
        self.has_died = asyncio.Event()
        self.stack.executor.hooks.before_step = self.before_step

    async def before_step(self, step: executor_pb2.Step) -> None:
        await asyncio.sleep(0.001)
        starts = {start.slot: list(start.token_ids) for start in step.started_rows}
        rows = [starts.get(slot) or self.stack.executor.rows[slot].tokens for slot in step.slots]
        if self.is_deadly(rows):
            self.has_died.set()
            await asyncio.Event().wait()  # it answers nothing any more

    async def run(self) -> None:
        while True:
            await self.has_died.wait()
            self.has_died.clear()
            self.num_deaths += 1
            dead = self.stack.executor
            await dead.stop()
            self.stack.process.die()
            self.stack.process.is_dead = False  # the next process of this id
            self.stack.executor = replace(dead, listen=dead.address, steps=[], rows={})
            await self.stack.executor.start()


@asynccontextmanager
async def supervised(stack: Stack, is_deadly: Callable[[list[list[int]]], bool]) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(stack, is_deadly)
    running = asyncio.create_task(supervisor.run())
    try:
        yield supervisor
    finally:
        stack.executor.hooks.before_step = None
        running.cancel()


@depths
@pytest.mark.parametrize("when", [0, 7])
async def test_a_request_that_kills_executors_fails_alone(source: str, max_steps_in_flight: int, when: int) -> None:
    """At its prompt, or at a token in its midst: the others get their answers, and nothing acknowledged is redone."""

    def is_deadly(rows: list[list[int]]) -> bool:
        return any(row[0] == ord("P") and len(row) >= 9 + when for row in rows)

    async with running_stack(source, config={"max_steps_in_flight": max_steps_in_flight}) as stack:
        whole = [await stack.generate(letter * 9, stopping=TOKENS, cache=BYPASS) for letter in "abc"]
        async with supervised(stack, is_deadly) as supervisor:
            calls = [asyncio.create_task(stack.generate(letter * 9, stopping=TOKENS, cache=BYPASS)) for letter in "abc"]
            poisoned = asyncio.create_task(stack.generate("P" * 9, stopping=TOKENS, cache=BYPASS))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await poisoned
            error = error_of_call(caught.value)
            assert (error.code, error.reason, error.retry_after_s) == (Code.INTERNAL, "POISONED", None)
            for call, expected in zip(calls, whole, strict=True):
                assert (await call).choices == expected.choices
            assert supervisor.num_deaths == 3, "with the others, and twice alone"
        assert stack.metric("octavo_takeover_time_seconds_count") == 3
        lost = stack.metric("octavo_recomputed_tokens_total", cause="executor_lost")
        assert 0 < lost <= max_steps_in_flight * (9 * 4) + 2 * 9, "no more than the steps in flight, and the alone ones"
        await stack.settle()


@depths
async def test_executors_that_die_of_themselves_fail_nobody(source: str, max_steps_in_flight: int) -> None:
    """Whoever was there each time, and once alone, is innocent all the same: its next step says so."""
    num_steps = 0

    def is_deadly(rows: list[list[int]]) -> bool:
        nonlocal num_steps
        num_steps += 1
        return num_steps % 9 == 0 and num_steps < 60

    config = {"max_steps_in_flight": max_steps_in_flight}
    async with running_stack(source, config=config) as stack:
        whole = [await stack.generate(letter * 9, stopping=TOKENS, cache=BYPASS) for letter in "abc"]
        async with supervised(stack, is_deadly) as supervisor:
            calls = [asyncio.create_task(stack.generate(letter * 9, stopping=TOKENS, cache=BYPASS)) for letter in "abc"]
            for call, expected in zip(calls, whole, strict=True):
                assert (await call).choices == expected.choices
            assert supervisor.num_deaths == 6
        await stack.settle()


async def test_two_poisoned_requests_at_once(source: str) -> None:
    def is_deadly(rows: list[list[int]]) -> bool:
        return any(row[0] == ord("P") for row in rows)

    async with running_stack(source) as stack, supervised(stack, is_deadly) as supervisor:
        calls = [asyncio.create_task(stack.generate(prompt * 9, stopping=TOKENS)) for prompt in "PaP"]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        reasons = [error_of_call(found).reason if isinstance(found, grpc.RpcError) else "" for found in outcomes]
        assert reasons == ["POISONED", "", "POISONED"]
        assert 5 <= supervisor.num_deaths <= 6, "five where the first death was of both"
        stack.executor.hooks.before_step = None
        await stack.settle()


async def test_a_session_that_only_breaks_accuses_nobody(source: str) -> None:
    async with running_stack(source, config={"poison_limit": 1}) as stack:
        call = asyncio.create_task(stack.generate(stopping={"max_tokens": 100, "ignore_eos": True}))
        for _ in range(4):
            stack.executor.hooks.breaks_next = True
            assert await until(lambda: not stack.executor.hooks.breaks_next)
        assert (await call).usage.generated_tokens == 100
        assert stack.metric("octavo_takeover_time_seconds_count") == 4
