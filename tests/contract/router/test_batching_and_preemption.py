"""Field failures 12 to 16: what fits, who waits, who gives way; the scripted executor proves every block it reads."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from octavo.errors import Code
from octavo.rpc import error_of_call
from octavo.v1 import inference_pb2
from tests.fakes import counting
from tests.stacks import Stack, running_stack

Reason = inference_pb2.FinishReason
depths = pytest.mark.parametrize("max_steps_in_flight", [1, 2])


def expected(prompt: str, num_tokens: int) -> list[int]:
    """What the default script answers, alone."""
    history: list[int] = list(prompt.encode())
    for _ in range(num_tokens):
        history.append(counting(tuple(history))[0])
    return history[len(prompt.encode()) :]


async def compute(_: Any) -> None:
    await asyncio.sleep(0.003)


async def generate_all(stack: Stack, jobs: Sequence[tuple[str, int]], **fields: Any) -> list[Any]:
    """All at once; each answer must be that of the script alone."""
    calls = [
        stack.generate(prompt, stopping={"max_tokens": num_tokens, "ignore_eos": True}, **fields)
        for prompt, num_tokens in jobs
    ]
    responses = await asyncio.gather(*calls)
    for response, (prompt, num_tokens) in zip(responses, jobs, strict=True):
        assert list(response.choices[0].token_ids) == expected(prompt, num_tokens), prompt
    return responses


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens"),
    [(36, None), (33, None), (30, 4), (1, 33), (32, 2), (20, 2**31 - 1)],
)
async def test_what_can_never_fit_is_refused_with_the_numbers(
    source: str, prompt_tokens: int, max_tokens: int | None
) -> None:
    """Field failure 12: a pool of 8 usable blocks holds 32 tokens; the last token of an answer needs no place."""
    async with running_stack(source, num_blocks=9) as stack:
        stopping = {} if max_tokens is None else {"max_tokens": max_tokens}
        small = asyncio.create_task(stack.generate("small", stopping={"max_tokens": 3}))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.generate("x" * prompt_tokens, stopping=stopping)
        error = error_of_call(caught.value)
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "NEVER_FITS")
        assert error.metadata["prompt_tokens"] == str(prompt_tokens)
        assert error.metadata["max_tokens"] == ("" if max_tokens is None else str(max_tokens))
        assert (error.metadata["usable_blocks"], error.metadata["pool_tokens"]) == ("8", "33")
        assert (await small).usage.generated_tokens == 3
        await stack.settle()


async def test_what_fits_exactly_is_served(source: str) -> None:
    """Field failure 12, the other side of the edge."""
    async with running_stack(source, num_blocks=9) as stack:
        await generate_all(stack, [("x" * 29, 4)])
        await generate_all(stack, [("x" * 32, 1)])
        await generate_all(stack, [("x", 32)])
        await stack.settle()


@depths
async def test_two_chunked_prompts_share_a_small_pool(source: str, max_steps_in_flight: int) -> None:
    """Field failure 13: 6 blocks each in a pool of 10: both finish."""
    config = {"max_tokens_per_step": 5, "max_steps_in_flight": max_steps_in_flight}
    async with running_stack(source, num_blocks=10, config=config) as stack:
        await generate_all(stack, [("a" * 22, 10), ("b" * 22, 10)])
        await stack.settle()


@depths
@pytest.mark.parametrize("seed", range(5))
async def test_random_mixes_in_a_small_pool_all_finish(source: str, seed: int, max_steps_in_flight: int) -> None:
    """Field failure 13: ten random mixes for each seed and depth."""
    draw = random.Random(seed)
    config = {"max_tokens_per_step": draw.randint(1, 9), "max_steps_in_flight": max_steps_in_flight}
    async with running_stack(source, num_blocks=10, config=config) as stack:
        for _ in range(5):
            jobs = []
            for _ in range(draw.randint(2, 6)):
                num_prompt = draw.randint(1, 28)
                prompt = "".join(draw.choice("ab") for _ in range(num_prompt))
                jobs.append((prompt, draw.randint(1, 37 - num_prompt)))
            await asyncio.wait_for(generate_all(stack, jobs), 30)
        stats = await stack.settle()
        assert not stats.violations


@depths
async def test_preemptions_are_bounded_and_first_come_finishes_first(source: str, max_steps_in_flight: int) -> None:
    """Field failure 14: a pool for one and a half requests, four equal ones."""
    config = {"max_steps_in_flight": max_steps_in_flight}
    ended: list[str] = []

    async def one(stack: Stack, name: str) -> Any:
        response = await stack.generate(name * 8, stopping={"max_tokens": 100, "ignore_eos": True})
        ended.append(name)
        return response

    async with running_stack(source, num_blocks=41, max_context_tokens=200, config=config) as stack:
        tasks = []
        for name in "abcd":
            tasks.append(asyncio.create_task(one(stack, name)))
            await asyncio.sleep(0.02)
        for name, response in zip("abcd", await asyncio.gather(*tasks), strict=True):
            assert list(response.choices[0].token_ids) == expected(name * 8, 100)
        assert ended == list("abcd")
        preemptions = stack.metric("octavo_num_preemptions_total")
        assert 1 <= preemptions <= 3 + 2 + 1, "each at most once per request before it"
        await stack.settle()


async def test_a_preempted_request_begins_once(source: str) -> None:
    """Its own blocks, found again when it comes back, are no hits: those are counted at the first start."""
    async with running_stack(source, num_blocks=41, max_context_tokens=200) as stack:
        stopping = {"max_tokens": 100, "ignore_eos": True}
        streams = await asyncio.gather(*(stack.stream(name * 8, stopping=stopping) for name in "abcd"))
        assert stack.metric("octavo_num_preemptions_total") > 0
        for events in streams:
            kinds = [event.WhichOneof("event") for event in events]
            assert kinds[0] == "started"
            assert kinds.count("started") == 1
            assert events[0].started.cached_tokens == events[-1].completed.usage.cached_tokens == 0
        assert stack.metric("octavo_prefix_cache_queries_total") == 4 * 8
        assert stack.metric("octavo_prefix_cache_hits_total") == 0
        await stack.settle()


async def test_the_lowest_priority_gives_way(source: str) -> None:
    """The newest of the lowest priority is preempted, also when it came first."""
    ended: list[str] = []

    async def one(stack: Stack, name: str, priority: int) -> None:
        await stack.generate(name * 8, stopping={"max_tokens": 100, "ignore_eos": True}, priority=priority)
        ended.append(name)

    async with running_stack(source, num_blocks=41, max_context_tokens=200) as stack:
        low = asyncio.create_task(one(stack, "low", 0))
        await asyncio.sleep(0.02)
        await asyncio.gather(low, one(stack, "high", 5))
        assert ended == ["high", "low"]
        assert stack.metric("octavo_num_preemptions_total") >= 1


@depths
@pytest.mark.parametrize("budget", [1, 2])
async def test_a_budget_below_the_number_of_rows(source: str, budget: int, max_steps_in_flight: int) -> None:
    """Field failure 15: rows idle in most steps; nobody loses or gains a token."""
    config = {"max_tokens_per_step": budget, "max_steps_in_flight": max_steps_in_flight}
    async with running_stack(source, config=config) as stack:
        await generate_all(stack, [(letter * 5, 6) for letter in "abcdefg"])
        assert all(sum(step.num_tokens) <= budget for step in stack.executor.steps)
        await stack.settle()


@depths
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 64])
async def test_the_same_tokens_for_every_chunk_size(source: str, budget: int, max_steps_in_flight: int) -> None:
    """Field failure 16: chunks around the block size, cold and with cached blocks."""
    config = {"max_tokens_per_step": budget, "max_steps_in_flight": max_steps_in_flight}
    async with running_stack(source, config=config) as stack:
        cold = await generate_all(stack, [("prefix one", 7)])
        warm = await generate_all(stack, [("prefix one", 7), ("prefix two", 7)])
        assert cold[0].usage.cached_tokens == 0
        assert [response.usage.cached_tokens for response in warm] == [8, 4]
        await stack.settle()


async def test_a_prefix_is_found_again_and_a_salt_or_a_bypass_hides_it(source: str) -> None:
    async with running_stack(source) as stack:
        stopping = {"max_tokens": 2}
        for cache, hits in [
            ({}, 0),
            ({}, 12),
            ({"salt": "s"}, 0),
            ({"salt": "s"}, 12),
            ({"salt": ""}, 0),
            ({"bypass": True}, 0),
        ]:
            response = await stack.generate("x" * 16, stopping=stopping, cache=cache)
            assert response.usage.cached_tokens == hits, cache
        assert stack.metric("octavo_prefix_cache_queries_total") == 6 * 16
        assert stack.metric("octavo_prefix_cache_hits_total") == 24
        await stack.settle()


async def test_decodes_go_on_beside_a_long_prefill(source: str) -> None:
    """Chunked prefill fills what decodes leave: no step without the decode, once it decodes."""
    async with running_stack(source, config={"max_tokens_per_step": 4}) as stack:
        stack.executor.hooks.before_step = compute
        await asyncio.gather(
            stack.generate("a", stopping={"max_tokens": 30}), stack.generate("b" * 60, stopping={"max_tokens": 1})
        )
        mixed = [step for step in stack.executor.steps if len(step.slots) == 2]
        assert len(mixed) >= 15
        assert all(1 in step.num_tokens for step in mixed)


@depths
async def test_decode_steps_do_not_wait_for_extensions(source: str, max_steps_in_flight: int) -> None:
    """Blocks are asked for ahead of need: no row ever stands at the end of its blocks while a step could be sent."""
    async with running_stack(source, config={"max_steps_in_flight": max_steps_in_flight}) as stack:
        stack.executor.hooks.before_step = compute
        stalls = 0
        original = stack.engine._send

        def counted(steps: Any) -> None:
            nonlocal stalls
            if steps.num_in_flight < max_steps_in_flight:
                stalls += sum(
                    live.row.num_target > live.row.num_sent and not live.row.num_runnable
                    for live in stack.engine.roster.running.values()
                )
            original(steps)

        stack.engine._send = counted  # type: ignore[method-assign]
        await stack.generate("a", stopping={"max_tokens": 120, "ignore_eos": True})
        assert stalls == 0
