"""The cache service is killed under running requests and started again: streams go on, and its KV is still there."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from octavo.v1 import cache_pb2
from tests.fakes import FINGERPRINT
from tests.stacks import CacheProcess, Stack, running_stack, until

TOKENS = {"max_tokens": 60, "ignore_eos": True}
depths = pytest.mark.parametrize("max_steps_in_flight", [1, 2])


@pytest.fixture
async def cache() -> AsyncIterator[CacheProcess]:
    with tempfile.TemporaryDirectory(prefix="octavo-test-", dir="/dev/shm") as folder:
        process = CacheProcess(Path(folder))
        await process.start()
        yield process
        process.end()
        assert {*os.listdir(folder)} <= {"cache.sock"}, "the segment went with its owner"


async def slow(_: Any) -> None:
    await asyncio.sleep(0.003)


async def wait_for_tokens(stack: Stack, count: float) -> None:
    assert await until(lambda: stack.metric("octavo_generation_tokens_total") >= count)


@depths
async def test_streams_go_on_when_the_cache_service_is_killed(
    source: str, cache: CacheProcess, max_steps_in_flight: int
) -> None:
    """Decoding goes on on slack meanwhile; every answer is that of an undisturbed run, and no block is lost."""
    config = {"max_steps_in_flight": max_steps_in_flight, "slack_blocks": 2}
    async with running_stack(source, cache=cache, config=config, num_blocks=160) as stack:
        prompts = [{"prompt": letter * 9, "sampling": {"n": n}} for letter, n in (("a", 1), ("b", 3), ("c", 1))]
        whole = [await stack.generate(**prompt, stopping=TOKENS, cache={"salt": "1"}) for prompt in prompts]
        cached = (await stack.settle()).cached_blocks
        before = stack.metric("octavo_generation_tokens_total")
        stack.executor.hooks.before_step = slow
        calls = [
            asyncio.create_task(stack.generate(**prompt, stopping=TOKENS, cache={"salt": "2"})) for prompt in prompts
        ]
        await wait_for_tokens(stack, before + 60)
        num_starts = sum(len(step.started_rows) for step in stack.executor.steps)
        cache.kill()
        await wait_for_tokens(stack, before + 70)
        await cache.start()
        late = asyncio.create_task(stack.generate("d" * 9, stopping=TOKENS))
        for call, expected in zip(calls, whole, strict=True):
            assert (await call).choices == expected.choices
        assert (await late).usage.generated_tokens == 60
        resent = sum(len(step.started_rows) for step in stack.executor.steps) - num_starts
        assert resent == 1, "the late one; no other row was sent again, so nothing was computed twice"
        stack.executor.hooks.before_step = None
        stats = await stack.settle()
        assert stats.cached_blocks > cached


async def test_a_prefix_cached_before_the_death_is_a_hit_after_it(source: str, cache: CacheProcess) -> None:
    async with running_stack(source, cache=cache) as stack:
        await stack.generate("x" * 41, stopping={"max_tokens": 1})
        cached = (await stack.settle()).cached_blocks
        cache.kill()
        await cache.start()
        again = await stack.generate("x" * 41, stopping={"max_tokens": 1})
        assert again.usage.cached_tokens == 40
        assert (await stack.settle()).cached_blocks == cached
        extras = cache_pb2.KeyExtras(model="scripted", revision=FINGERPRINT, kv_dtype="float32")
        lookup = cache_pb2.MatchPrefixRequest(arena_id="cpu", token_ids=b"x" * 41, extras=extras)
        assert (await stack.cache.MatchPrefix(lookup)).num_cached_tokens == 40


async def test_requests_wait_in_the_queue_while_there_is_no_cache_service(source: str, cache: CacheProcess) -> None:
    """Also one that was preempted, cancelled or came while it was away."""
    async with running_stack(source, cache=cache, num_blocks=24) as stack:
        whole = await stack.generate("x" * 9, stopping=TOKENS, cache={"bypass": True})
        stack.executor.hooks.before_step = slow
        running = [
            asyncio.create_task(stack.generate("x" * 9, request_id=name, stopping=TOKENS, cache={"bypass": True}))
            for name in ("first", "second")
        ]
        assert await until(lambda: stack.engine.roster.num_running == 2)
        cache.kill()
        queued = asyncio.create_task(stack.generate("x" * 9, stopping=TOKENS, cache={"bypass": True}))
        running[1].cancel()
        assert await until(lambda: len(stack.engine.roster) == 2)
        await cache.start()
        for call in (running[0], queued):
            assert (await call).choices[0].text == whole.choices[0].text
        stack.executor.hooks.before_step = None
        await stack.settle()


async def test_an_idle_router_speaks_as_soon_as_there_is_a_cache_service_again(
    source: str, cache: CacheProcess
) -> None:
    """Others wait for its word before they get blocks; its next sign of life would be seconds away."""
    async with running_stack(source, cache=cache, config={"lease_ttl_s": 600}) as stack:
        epoch = stack.link.router_epoch
        cache.kill()
        await cache.start()

        async def is_rebuilt() -> bool:
            stats = await stack.arena()
            return stats.free_blocks + stats.cached_blocks + 1 == stats.total_blocks

        assert await until(is_rebuilt, 20)
        assert stack.link.router_epoch == epoch


async def test_a_cache_service_that_dies_again_and_again(source: str, cache: CacheProcess) -> None:
    """Under an answer that is drawn and a search, whose forks are asked for again."""
    stopping = {"max_tokens": 40, "ignore_eos": True}
    beams: dict[str, Any] = {"sampling": {"n": 3, "beam": {"width": 3}}, "stopping": stopping}
    async with running_stack(source, cache=cache) as stack:
        whole = await stack.generate("x" * 9, stopping=TOKENS, cache={"bypass": True})
        found = await stack.generate("y" * 9, cache={"bypass": True}, **beams)
        before = stack.metric("octavo_generation_tokens_total")
        stack.executor.hooks.before_step = slow
        call = asyncio.create_task(stack.generate("x" * 9, stopping=TOKENS, cache={"bypass": True}))
        search = asyncio.create_task(stack.generate("y" * 9, cache={"bypass": True}, **beams))
        for count in (10, 60, 110):
            await wait_for_tokens(stack, before + count)
            cache.kill()
            await cache.start()
        assert (await call).choices == whole.choices
        assert (await search).choices == found.choices
        stack.executor.hooks.before_step = None
        await stack.settle()
