"""Several answers to one prompt: n and best_of, on shared blocks with copy-on-write."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from octavo.errors import Code
from octavo.rpc import error_of_call
from octavo.v1 import inference_pb2
from tests.fakes import BLOCK_SIZE, EOS, Script, draw
from tests.stacks import Stack, request, running_stack, until

Reason = inference_pb2.FinishReason
B = BLOCK_SIZE
SEED = 42
depths = pytest.mark.parametrize("max_steps_in_flight", [1, 2])


def wandering(history: tuple[int, ...]) -> Sequence[int]:
    """Eight candidates that follow from the history, so that answers that once differ go on differing."""
    return [(sum(history) * 7 + len(history) * 3 + step * 11) % 90 + 33 for step in range(8)]


def expected(prompt: str, num_tokens: int, choice: int, seed: int = SEED, script: Script = wandering) -> list[int]:
    """The answer of one choice, alone."""
    history = list(prompt.encode())
    for _ in range(num_tokens):
        history.append(draw(script(tuple(history)), seed, choice, len(history)))
    return history[len(prompt.encode()) :]


async def answers(stack: Stack, prompt: str, n: int, num_tokens: int, **fields: Any) -> inference_pb2.GenerateResponse:
    """n seeded answers; each must be its choice's own."""
    sampling = {"n": n, "seed": SEED}
    stopping = {"max_tokens": num_tokens, "ignore_eos": True}
    response = await stack.generate(prompt, sampling=sampling, stopping=stopping, **fields)
    assert [choice.index for choice in response.choices] == list(range(n))
    for choice in response.choices:
        assert list(choice.token_ids) == expected(prompt, num_tokens, choice.index), (prompt, choice.index)
        assert choice.finish_reason == Reason.FINISH_REASON_MAX_TOKENS
    assert response.usage.generated_tokens == n * num_tokens
    return response


@depths
async def test_four_seeded_answers_differ_and_come_again(source: str, max_steps_in_flight: int) -> None:
    """Field failure 24: n=4 with a seed; index 0 is the answer of n=1; alone, beside others, streamed."""
    async with running_stack(
        source, wandering, draws=True, config={"max_steps_in_flight": max_steps_in_flight}
    ) as stack:
        alone = await answers(stack, "four answers", 4, 12)
        assert len({choice.text for choice in alone.choices}) == 4
        single = await answers(stack, "four answers", 1, 12)
        assert single.choices[0].text == alone.choices[0].text
        again, *_ = await asyncio.gather(
            answers(stack, "four answers", 4, 12),
            answers(stack, "beside", 3, 5),
            stack.generate("x", stopping={"max_tokens": 9}),
        )
        assert [choice.text for choice in again.choices] == [choice.text for choice in alone.choices]
        events = await stack.stream("four answers", sampling={"n": 4, "seed": SEED}, stopping={"max_tokens": 12})
        for index, choice in enumerate(alone.choices):
            deltas = [event.delta for event in events if event.HasField("delta") and event.delta.index == index]
            assert "".join(delta.text for delta in deltas) == choice.text
            offsets = [delta.token_offset for delta in deltas]
            lengths = [len(delta.token_ids) for delta in deltas]
            assert offsets == [sum(lengths[:number]) for number in range(len(lengths))]
        kinds = [event.WhichOneof("event") for event in events]
        assert (kinds[0], kinds[-1]) == ("started", "completed")
        assert sorted(event.finished.index for event in events if event.HasField("finished")) == [0, 1, 2, 3]
        assert kinds.count("completed") == kinds.count("started") == 1
        await stack.settle()


@depths
@pytest.mark.parametrize("num_prompt", [1, B - 1, B, B + 1, 2 * B, 3 * B + 2])
async def test_the_prompt_is_computed_once_and_its_last_block_is_copied(
    source: str, num_prompt: int, max_steps_in_flight: int
) -> None:
    """Field failure 9: every child reads and writes right; one copy for each where the last block is partly filled."""
    config = {"max_steps_in_flight": max_steps_in_flight}
    async with running_stack(source, wandering, draws=True, config=config) as stack:
        response = await answers(stack, "p" * num_prompt, 3, 10)
        assert response.usage.prompt_tokens == num_prompt
        computed = sum(sum(step.num_tokens) for step in stack.executor.steps)
        assert computed == num_prompt + 3 * 9
        copies = [
            pair for step in stack.executor.steps for pair in zip(step.copy_sources, step.copy_targets, strict=True)
        ]
        assert len(copies) == (2 if num_prompt % B else 0)
        assert len({source for source, _ in copies}) <= 1
        stats = await stack.settle()
        assert stats.copied_blocks == len(copies)


async def test_a_shared_block_is_one_block_of_the_pool(source: str) -> None:
    """Three answers to a prompt of 12 blocks hold those 12 and a few each, not three times 12."""
    async with running_stack(source, wandering, draws=True) as stack:
        call = asyncio.create_task(answers(stack, "p" * 12 * B, 3, 30))
        assert await until(lambda: len(stack.engine.roster.running) == 3)
        num_held = stack.metric("octavo_kv_cache_usage_ratio") * stack.engine.model.num_usable_blocks
        assert 12 < num_held < 2 * 12
        await call
        await stack.settle()


async def test_counts_are_of_requests(source: str) -> None:
    """n answers are one request in every gauge and counter, and n times the tokens."""
    async with running_stack(source, wandering, draws=True) as stack:
        stack.executor.hooks.is_open.clear()
        call = asyncio.create_task(answers(stack, "count me", 4, 6))
        assert await until(lambda: bool(stack.engine.roster.running))
        assert stack.metric("octavo_num_requests_running") == 1
        assert stack.metric("octavo_num_requests_waiting") == 0
        stack.executor.hooks.is_open.set()
        await call
        assert stack.metric("octavo_request_success_total") == 1
        assert stack.metric("octavo_generation_tokens_total") == 24
        assert stack.metric("octavo_time_to_first_token_seconds_count") == 1
        assert stack.metric("octavo_inter_token_latency_seconds_count") == 20
        assert stack.metric("octavo_prompt_tokens_total") == 8
        await stack.settle()


async def test_a_group_that_can_never_fit_is_refused_with_the_numbers(source: str) -> None:
    """Field failure 12: 8 usable blocks; 6 tokens share one block, so four answers have one block each of their own."""
    async with running_stack(source, wandering, draws=True, num_blocks=9) as stack:
        await answers(stack, "prompt", 4, 3)
        for n, max_tokens in ((4, 4), (2, 16)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stack.generate("prompt", sampling={"n": n}, stopping={"max_tokens": max_tokens})
            error = error_of_call(caught.value)
            assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "NEVER_FITS")
            assert (error.metadata["num_choices"], error.metadata["usable_blocks"]) == (str(n), "8")
        unset = await stack.generate("prompt", sampling={"n": 3})
        assert [len(choice.token_ids) for choice in unset.choices] == [(1 + 2) * B + 1 - 6] * 3
        assert unset.choices[0].finish_reason == Reason.FINISH_REASON_CONTEXT_LENGTH
        await stack.settle()


async def test_more_answers_than_rows_are_refused(source: str) -> None:
    async with running_stack(source, max_rows=3) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.generate(sampling={"n": 4}, stopping={"max_tokens": 2})
        error = error_of_call(caught.value)
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "NEVER_FITS")
        assert error.metadata == {"num_choices": "4", "max_running_requests": "3"}
        await stack.generate(sampling={"n": 3}, stopping={"max_tokens": 2})
        await stack.settle()


@depths
@pytest.mark.parametrize("num_blocks", [10, 13, 17])
async def test_groups_under_block_pressure(source: str, num_blocks: int, max_steps_in_flight: int) -> None:
    """Field failures 9, 13: forks that find no block, choices that are preempted one by one; every answer is right."""
    config = {"max_steps_in_flight": max_steps_in_flight, "max_tokens_per_step": 7}
    async with running_stack(source, wandering, draws=True, num_blocks=num_blocks, config=config) as stack:
        jobs = [
            answers(stack, "first group", 3, 10 if num_blocks > 10 else 6),
            answers(stack, "alone", 1, 20),
            answers(stack, "second grp", 2, 11),
            answers(stack, "x", 4, 5),
        ]
        await asyncio.wait_for(asyncio.gather(*jobs), 60)
        assert stack.metric("octavo_num_preemptions_total") >= 1 or num_blocks == 17
        await stack.settle()


@depths
async def test_a_fork_that_finds_no_block_makes_its_children_wait(source: str, max_steps_in_flight: int) -> None:
    """Field failure 9: all or nothing; the children come later, on the prompt's cached blocks."""
    config = {"max_steps_in_flight": max_steps_in_flight, "slack_blocks": 0}

    async def compute(_: Any) -> None:
        await asyncio.sleep(0.01)

    async with running_stack(source, wandering, draws=True, num_blocks=8, config=config) as stack:
        stack.executor.hooks.before_step = compute
        refused = 0
        original = stack.engine.on_forked

        def spied(fork: Any, outcome: Any) -> None:
            nonlocal refused
            refused += outcome.error is not None
            original(fork, outcome)

        stack.engine.on_forked = spied  # type: ignore[method-assign]
        await asyncio.gather(answers(stack, "n" * 17, 1, 4), answers(stack, "g" * 7, 2, 2))
        assert refused == 1
        computed = sum(sum(step.num_tokens) for step in stack.executor.steps)
        assert computed == 17 + 3 + 7 + 1 + (7 - B) + 1, "the child computes what is not in a full block again"
        await stack.settle()


@depths
async def test_slots_are_promised_before_the_prompt_is_computed(source: str, max_steps_in_flight: int) -> None:
    """More groups than slots: nobody's children ever lack a slot."""
    config = {"max_steps_in_flight": max_steps_in_flight}
    async with running_stack(source, wandering, draws=True, max_rows=5, config=config) as stack:
        await asyncio.gather(*(answers(stack, f"group {n} of {n}", n, 7) for n in (3, 2, 4, 5, 1, 3, 2)))
        await stack.settle()


def ending(history: tuple[int, ...]) -> Sequence[int]:
    """The first token of a choice says how long it gets: "!" ends at once, "a" after one more, ..."""
    answer = history[history.index(ord("?")) + 1 :]
    if not answer:
        return [EOS, ord("a"), ord("b"), ord("c"), ord("d")]
    return [EOS] if len(answer) > answer[0] - ord("a") else [ord("x")]


@depths
async def test_choices_end_for_themselves(source: str, max_steps_in_flight: int) -> None:
    """Also at the first token, also the first choice before the others are born."""
    config = {"max_steps_in_flight": max_steps_in_flight}
    async with running_stack(source, ending, draws=True, config=config) as stack:
        for seed in range(12):
            response = await stack.generate("how long?", sampling={"n": 4, "seed": seed}, stopping={"max_tokens": 9})
            for choice in response.choices:
                tokens = list(choice.token_ids)
                first = draw(ending(tuple(b"how long?")), seed, choice.index, 9)
                right = [EOS] if first == EOS else [first, *[ord("x")] * (first - ord("a")), EOS]
                assert tokens == right, (seed, choice.index)
                assert choice.finish_reason == Reason.FINISH_REASON_EOS
            assert response.usage.generated_tokens == sum(len(choice.token_ids) for choice in response.choices)
        await stack.settle()


@depths
async def test_cancelling_a_group_ends_every_choice(source: str, max_steps_in_flight: int) -> None:
    """Field failures 10, 11: at every moment from the queue to the last token."""

    async def compute(_: Any) -> None:
        await asyncio.sleep(0.002)

    config = {"max_steps_in_flight": max_steps_in_flight, "max_tokens_per_step": 4}
    async with running_stack(source, wandering, draws=True, max_rows=6, config=config) as stack:
        stack.executor.hooks.before_step = compute
        for moment in range(12):
            message = request(
                "cancelled group",
                kind=inference_pb2.GenerateStreamRequest,
                request_id="group",
                sampling={"n": 3, "seed": SEED},
                stopping={"max_tokens": 50},
            )
            call = stack.stub.GenerateStream(message)
            beside = asyncio.create_task(answers(stack, "beside", 2, 6))
            await until(lambda: stack.engine.roster.find("group") is not None)
            await asyncio.sleep(0.003 * moment)
            await stack.stub.Cancel(inference_pb2.CancelRequest(request_id="group"))
            events = [event async for event in call]
            finished = [event.finished for event in events if event.HasField("finished")]
            assert sorted(end.index for end in finished) == [0, 1, 2]
            assert {end.reason for end in finished} == {Reason.FINISH_REASON_CANCELLED}
            carried = sum(len(event.delta.token_ids) for event in events)
            assert events[-1].completed.usage.generated_tokens == carried
            await beside
        await stack.settle()


@depths
async def test_a_group_goes_on_over_a_broken_session(source: str, max_steps_in_flight: int) -> None:
    """At whatever step it breaks, before, in and after the fork: the copy is made again, nothing is drawn anew."""
    config = {"max_steps_in_flight": max_steps_in_flight, "max_tokens_per_step": 5}
    async with running_stack(source, wandering, draws=True, config=config) as stack:
        for at in range(1, 9):
            num_seen = 0

            async def break_at(_: Any, at: int = at) -> None:
                nonlocal num_seen
                num_seen += 1
                if num_seen == at:
                    stack.executor.hooks.breaks_next = True

            stack.executor.hooks.before_step = break_at
            await answers(stack, f"broken at {at}", 3, 8)
        await stack.settle()


async def test_the_likeliest_of_best_of_are_answered(source: str) -> None:
    """best_of generates more than n, ranks by summed log-probability, and shows nothing before."""
    async with running_stack(source, wandering, draws=True) as stack:
        sampling = {"n": 2, "best_of": 5, "seed": SEED}
        stopping = {"max_tokens": 6, "ignore_eos": True}
        texts = [expected("ranked", 6, choice) for choice in range(5)]
        best = sorted(texts, key=sum)[:2]  # the script's log-probability is lower for a higher id
        response = await stack.generate("ranked", sampling=sampling, stopping=stopping)
        assert [list(choice.token_ids) for choice in response.choices] == best
        assert [choice.index for choice in response.choices] == [0, 1]
        assert response.usage.generated_tokens == 30
        assert not response.choices[0].logprobs
        events = await stack.stream("ranked", sampling=sampling, stopping=stopping)
        for index in range(2):
            tokens = [token for event in events if event.delta.index == index for token in event.delta.token_ids]
            assert tokens == best[index]
        await stack.settle()


async def test_best_of_below_n_is_refused(source: str) -> None:
    async with running_stack(source) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.generate(sampling={"n": 3, "best_of": 2})
        assert error_of_call(caught.value).violations[0].field == "sampling.best_of"
