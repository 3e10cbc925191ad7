"""Beam search through the public API: lanes over a real cache service and a scripted executor that proves every block.

What is right is said by the search alone over the whole history; `tests/unit/router/test_beam_search.py` holds the
search itself to its definition.
"""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from octavo.v1 import cache_pb2, inference_pb2
from router.beam import Candidate, Search, SearchRules
from router.live import Phase
from tests.fakes import BLOCK_SIZE, EOS, StepRefusedError, fake_logprob, likely
from tests.stacks import Stack, running_stack, until

Reason = inference_pb2.FinishReason
B = BLOCK_SIZE
LETTERS = "abcdefghijklmnopqrst"


def expected(
    prompt: str,
    width: int,
    num_tokens: int,
    *,
    min_tokens: int = 0,
    ends: frozenset[int] = frozenset({EOS}),
    penalty: float = 1.0,
    early: bool = False,
) -> Search:
    """The search, led by hand."""
    search = Search(SearchRules(width, penalty, early, ends, num_tokens))
    while not search.is_done:
        best = []
        for beam in search.beams:
            found = likely([*prompt.encode(), *beam.token_ids()])
            if beam.num_tokens < min_tokens:
                found = [each for each in found if each[0] not in ends]
            best.append([Candidate(*each) for each in found])
        search.advance(best)
    return search


async def searched(stack: Stack, prompt: str, width: int, n: int, num_tokens: int, **fields: Any) -> Any:
    """The n best; each must be the search's own, with its scores."""
    beam = {"width": width} | fields.pop("beam", {})
    stopping = {"max_tokens": num_tokens} | fields.pop("stopping", {})
    response = await stack.generate(prompt, sampling={"n": n, "beam": beam}, stopping=stopping, **fields)
    ends = frozenset(stopping.get("stop_token_ids", ())) | (frozenset() if stopping.get("ignore_eos") else {EOS})
    search = expected(
        prompt,
        width,
        num_tokens,
        min_tokens=stopping.get("min_tokens", 0),
        ends=ends,
        penalty=beam.get("length_penalty", 1.0),
        early=beam.get("early_stopping", False),
    )
    check(response, search, n, prompt, num_tokens)
    return response


def check(response: Any, search: Search, n: int, prompt: str, num_tokens: int) -> None:
    best = search.best(n)
    assert [choice.index for choice in response.choices] == list(range(len(best)))
    for choice, found in zip(response.choices, best, strict=True):
        assert list(choice.token_ids) == found.beam.token_ids(), (prompt, choice.index)
        assert choice.beam.score == pytest.approx(found.score)
        assert choice.beam.cumulative_logprob == pytest.approx(found.beam.cumulative_logprob)
        letters = [token for token in choice.token_ids if token != EOS]
        if choice.finish_reason == Reason.FINISH_REASON_STOP_TOKEN:
            assert choice.matched_stop == str(letters.pop())
        assert choice.text == bytes(letters).decode()
        if choice.finish_reason == Reason.FINISH_REASON_EOS:
            assert choice.token_ids[-1] == EOS
        if choice.finish_reason == Reason.FINISH_REASON_MAX_TOKENS:
            assert len(choice.token_ids) == num_tokens
    assert response.usage.generated_tokens == search.num_tokens


async def test_answers_are_the_searchs_at_every_length_of_prompt(source: str) -> None:
    """Alone and together, beside drawn answers, chunked, and from the cache; ended by all that ends them."""
    async with running_stack(source, config={"max_tokens_per_step": 7}, num_blocks=256, max_rows=32) as stack:
        lengths = itertools.product((1, B - 1, B, 3 * B + 2), (1, 4))
        await asyncio.gather(*(searched(stack, LETTERS[:length], width, width, 7) for length, width in lengths))
        reasons = set()
        together = [searched(stack, f"p{index}?", 2 + index % 3, 2, 9 + index) for index in range(3)]
        stop = {"stop_token_ids": [ord("c"), ord("f")], "ignore_eos": True}
        together.append(searched(stack, "stops", 3, 3, 12, stopping=stop))
        together.append(searched(stack, "later", 3, 3, 12, stopping={"min_tokens": 8}))
        together.append(searched(stack, "long ones", 4, 2, 12, beam={"length_penalty": 2.0}))
        together.append(searched(stack, "short ones", 4, 2, 12, beam={"length_penalty": -1.0, "early_stopping": True}))
        drawn = [stack.generate("drawn", stopping={"max_tokens": 30}) for _ in range(2)]
        for response in (await asyncio.gather(*together, *drawn))[: len(together)]:
            reasons |= {choice.finish_reason for choice in response.choices}
        assert len(reasons) == 3
        cached = await searched(stack, LETTERS[: 3 * B + 2], 4, 4, 16)
        assert cached.usage.cached_tokens == 3 * B
        await stack.settle()


async def test_steady_beams_ask_nothing_and_forks_share_full_blocks(source: str) -> None:
    """Field failure 9: two beams die and two are doubled; a step copies at most a block for each child."""
    async with running_stack(source, num_blocks=64) as stack:
        await searched(stack, "abcdefghijklmnopqr", 4, 1, 24)
        copies = [list(zip(step.copy_sources, step.copy_targets, strict=True)) for step in stack.executor.steps]
        for pairs in copies:
            assert not {source for source, _ in pairs} & {target for _, target in pairs}
        assert any(len(pairs) == 2 for pairs in copies)
        assert max(map(len, copies)) <= 3
        appended = sum(len(step.appended_slots) for step in stack.executor.steps)
        started = sum(len(step.started_rows) for step in stack.executor.steps)
        assert appended > started > 1, "a beam that goes on once keeps its row"
        stats = await stack.settle()
        assert stats.copied_blocks == sum(map(len, copies))
        alone = 4 * -(-(18 + 24) // B)
        assert stats.allocated_blocks < 2 * alone, "beams share what they have in common"


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
async def test_a_search_gives_way_and_comes_back_as_one(source: str, max_steps_in_flight: int) -> None:
    """Out of blocks again and again: all beams of a search or none run, and every answer is as without."""
    config = {"max_steps_in_flight": max_steps_in_flight}
    async with running_stack(source, config=config, num_blocks=26) as stack:
        halves = []

        async def look(step: Any) -> None:
            for live in stack.engine.roster:
                phases = {choice.phase for choice in live.choices} if live.beams is not None else set()
                halves.append(Phase.WAITING in phases and Phase.RUNNING in phases)

        stack.executor.hooks.before_step = look
        calls = [searched(stack, f"request {index} has a prompt", 3, 2, 18) for index in range(4)]
        calls.append(stack.generate("one that is drawn", stopping={"max_tokens": 40}))
        await asyncio.gather(*calls)
        assert stack.metric("octavo_num_preemptions_total") >= 2
        assert halves
        assert not any(halves)
        await stack.settle()


def apart_then_forked(history: Sequence[int]) -> list[tuple[int, float]]:
    """Four beams part at once and go on alone; late, the first is doubled and the last dies."""
    said = history[17:]
    if not said:
        return [(ord(letter), -0.1 * (1 + place)) for place, letter in enumerate("abcd")]
    if len(said) == 9 and said[0] in b"ad":
        return [(ord("x"), -0.01), (ord("y"), -0.02)] if said[0] == ord("a") else [(ord("x"), -30.0)]
    return [(said[0], -0.05), (ord("z"), -20.0)]


async def test_a_search_alone_fills_the_pool_to_the_last_block(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What admission lets in runs whole: a dying beam makes room for the copy of another, for which there is none."""
    monkeypatch.setattr("tests.fakes.likely", apart_then_forked)
    monkeypatch.setitem(globals(), "likely", apart_then_forked)
    prompt, width = "abcdefghijklmnopq", 4  # 4 full blocks and a part of one
    async with running_stack(source, num_blocks=1 + 4 + width * 3) as stack:
        await searched(stack, prompt, width, width, (4 + 3) * B + 1 - len(prompt), stopping={"ignore_eos": True})
        assert stack.metric("octavo_num_preemptions_total") == 0
        await stack.settle()


async def test_sessions_break_and_executors_die_under_a_search(source: str) -> None:
    """It goes on with the tokens it has: every row is sent whole, and the answers are the same."""
    async with running_stack(source) as stack:
        num_broken = 0

        async def break_some(step: Any) -> None:
            nonlocal num_broken
            if step.step_id in (2, 5) and num_broken < 6:
                num_broken += 1
                stack.executor.hooks.breaks_next = True

        stack.executor.hooks.before_step = break_some
        await searched(stack, "a prompt of some length", 4, 4, 20)
        assert num_broken >= 3
        await stack.settle()


async def test_a_step_of_another_that_fails_takes_none_of_a_searchs_tokens(source: str) -> None:
    """A step of the search, sent behind one that fails, is taken back with its appended tokens, and goes out again."""
    async with running_stack(source) as stack:
        bad = []

        async def refuse(step: Any) -> None:
            if any(bytes(row.token_ids) == b"bad" for row in step.started_rows):
                assert await until(lambda: stack.engine._steps.num_in_flight == 2)
                raise StepRefusedError("MODEL_ERROR", "as the test wants it")
            if step.step_id in (6, 11):
                bad.append(asyncio.ensure_future(stack.generate("bad", stopping={"max_tokens": 3})))
                assert await until(lambda: stack.engine._steps.num_in_flight == 2)

        stack.executor.hooks.before_step = refuse
        await searched(stack, "a prompt of some length", 4, 4, 20)
        assert len(bad) >= 2
        for failure in await asyncio.gather(*bad, return_exceptions=True):
            assert isinstance(failure, grpc.aio.AioRpcError)
        await stack.settle()


async def test_lost_blocks_are_computed_again(source: str) -> None:
    """The lease is lost in the middle: what the beams begin with is computed first, then each its own."""
    async with running_stack(source) as stack:
        call = asyncio.ensure_future(searched(stack, "a prompt of some length", 4, 4, 24))
        assert await until(lambda: len(stack.executor.steps) > 8)
        # Somebody else opens a lease in this router's name: a replacement of it.
        await stack.cache.OpenLease(cache_pb2.OpenLeaseRequest(client_id=stack.link.client_id))
        await call
        assert stack.metric("octavo_recomputed_tokens_total", cause="cache_service_lost") > 0
        await stack.settle()


async def test_ended_early_a_search_gives_what_it_has(source: str) -> None:
    """Cancelled, out of time, left by its client: nothing of it stays."""
    async with running_stack(source) as stack:

        async def wait(step: Any) -> None:
            await asyncio.sleep(0.02)

        stack.executor.hooks.before_step = wait
        fields = {"sampling": {"n": 2, "beam": {"width": 3}}, "stopping": {"max_tokens": 75, "ignore_eos": True}}
        limited = await stack.generate("limited", time_limit={"nanos": 250_000_000}, **fields)
        assert [choice.finish_reason for choice in limited.choices] == [Reason.FINISH_REASON_TIME_LIMIT] * 2
        assert limited.choices[0].beam.score >= limited.choices[1].beam.score
        assert limited.choices[0].token_ids
        call = asyncio.ensure_future(stack.generate("cancelled", request_id="c", **fields))
        assert await until(lambda: stack.engine.roster.num_running == 1)
        await stack.stub.Cancel(inference_pb2.CancelRequest(request_id="c"))
        assert (await call).choices[1].finish_reason == Reason.FINISH_REASON_CANCELLED
        left = asyncio.ensure_future(stack.generate("left", **fields))
        assert await until(lambda: stack.engine.roster.num_running == 1)
        left.cancel()
        await stack.settle()


async def test_a_stream_says_nothing_of_a_search_before_its_end(source: str) -> None:
    """Echo, log-probabilities of each token, scores with the end; in order, and as the unary answer."""
    async with running_stack(source) as stack:
        fields: dict[str, Any] = {
            "sampling": {"n": 2, "beam": {"width": 3}},
            "stopping": {"max_tokens": 9},
            "output": {"logprobs": True, "top_logprobs": 2, "echo": True},
        }
        unary = await stack.generate("some prompt", **fields)
        events = await stack.stream("some prompt", **fields)
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds == ["started", "delta", "finished", "delta", "finished", "completed"]
        for choice, delta, finished in zip(unary.choices, events[1::2], events[2::2], strict=False):
            assert delta.delta.text == choice.text
            assert choice.text.startswith("some prompt")
            assert finished.finished.beam == choice.beam
            generated = list(choice.token_ids)[len("some prompt") :]
            assert [entry.token_id for entry in choice.logprobs] == generated
            places = range(len("some prompt"), len("some prompt") + len(generated))
            values = [fake_logprob(token, place) for token, place in zip(generated, places, strict=True)]
            assert [entry.logprob for entry in choice.logprobs] == values
            assert all(len(entry.top) == 2 for entry in choice.logprobs)
        await stack.settle()
