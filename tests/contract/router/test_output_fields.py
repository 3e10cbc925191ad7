"""What a client may ask for beside text and ids: log-probabilities, those of the prompt, echo; unary and streamed."""

import asyncio
from typing import Any

import grpc
import pytest

from octavo.v1 import executor_pb2
from octavo.v1 import inference_pb2 as pb
from tests.fakes import BLOCK_SIZE, fake_logprob, saying, telling
from tests.stacks import running_stack

PROMPT = "a prompt of some tokens?"


def deltas_of(events: list[Any]) -> list[pb.Delta]:
    return [event.delta for event in events if event.HasField("delta")]


def check_logprobs(found: Any, token_ids: list[int], first_position: int, num_top: int) -> None:
    """Each entry is what the executor said of this token at this position."""
    assert [entry.token_id for entry in found] == token_ids
    for position, entry in enumerate(found, first_position):
        assert entry.logprob == fake_logprob(entry.token_id, position)
        assert entry.rank == 1 + entry.token_id % 7
        expected = [(token, fake_logprob(token, position)) for token in range(num_top)]
        assert [(top.token_id, top.logprob) for top in entry.top] == expected


@pytest.mark.parametrize("num_top", [0, 1, 20])
async def test_every_generated_token_has_its_logprob(source: str, num_top: int) -> None:
    """The token that ends the answer too; streamed, each delta has those of its own tokens."""
    async with running_stack(source, saying("hello")) as stack:
        output = {"logprobs": True, "top_logprobs": num_top}
        choice = (await stack.generate(PROMPT, output=output)).choices[0]
        assert len(choice.token_ids) == 6
        check_logprobs(choice.logprobs, list(choice.token_ids), len(PROMPT), num_top)
        num_carried = 0
        deltas = deltas_of(await stack.stream(PROMPT, output=output))
        for delta in deltas:
            assert delta.token_offset == num_carried
            check_logprobs(delta.logprobs, list(delta.token_ids), len(PROMPT) + num_carried, num_top)
            num_carried += len(delta.token_ids)
        assert num_carried == 6
        await stack.settle()


async def test_logprobs_without_token_ids(source: str) -> None:
    """Text that is held back does not hold back the numbers of its tokens."""
    async with running_stack(source, saying("hello")) as stack:
        output = {"logprobs": True, "token_ids": False}
        for fields in ({}, {"stopping": {"stop": ["hello you"]}}):
            deltas = deltas_of(await stack.stream(PROMPT, output=output, **fields))
            assert not [token for delta in deltas for token in delta.token_ids]
            assert [entry.token_id for delta in deltas for entry in delta.logprobs][:5] == list(b"hello")
            assert "".join(delta.text for delta in deltas) == "hello"


async def test_who_does_not_ask_gets_and_costs_nothing(source: str) -> None:
    async with running_stack(source, saying("hello")) as stack:
        response = await stack.generate(PROMPT)
        assert not response.choices[0].logprobs
        assert not response.prompt_logprobs
        asked = [start.sampling for step in stack.executor.steps for start in step.started_rows]
        assert not any(each.logprobs or each.prompt_logprobs_until for each in asked)


@pytest.mark.parametrize("budget", [1, 3, BLOCK_SIZE, 64])
async def test_prompt_logprobs_in_chunks_cold_and_cached(source: str, budget: int) -> None:
    """Field failure 23: twice, with whatever chunks: the same numbers, each token once, nothing for the first."""
    async with running_stack(source, saying("hello"), config={"max_tokens_per_step": budget}) as stack:
        await stack.generate(PROMPT)  # leaves its blocks in the cache
        output = {"prompt_logprobs": True, "top_logprobs": 2}
        for _ in range(2):
            response = await stack.generate(PROMPT, output=output)
            assert response.usage.cached_tokens == 0
            check_logprobs(response.prompt_logprobs, list(PROMPT.encode())[1:], 1, 2)
            assert not response.choices[0].logprobs
            events = await stack.stream(PROMPT, output=output)
            pieces = [event.prompt_logprobs for event in events if event.HasField("prompt_logprobs")]
            offset = 1
            for piece in pieces:
                assert piece.token_offset == offset
                check_logprobs(piece.logprobs, list(PROMPT.encode())[offset:][: len(piece.logprobs)], offset, 2)
                offset += len(piece.logprobs)
            assert offset == len(PROMPT)
            kinds = [event.WhichOneof("event") for event in events]
            assert kinds.index("delta") > max(i for i, kind in enumerate(kinds) if kind == "prompt_logprobs")
        # They share no block: another one of the same prompt hits what the first request left, no more.
        assert (await stack.generate(PROMPT)).usage.cached_tokens == len(PROMPT) - BLOCK_SIZE
        await stack.settle()


async def test_prompt_logprobs_of_a_prompt_of_one_token(source: str) -> None:
    async with running_stack(source, saying("x")) as stack:
        response = await stack.generate("?", output={"prompt_logprobs": True})
        assert not response.prompt_logprobs
        assert response.choices[0].text == "x"


async def test_prompt_logprobs_over_a_lost_session_come_once(source: str) -> None:
    """Field failures 23, 25: rows are sent again in mid-prompt; what was delivered is not asked for again."""
    async with running_stack(source, saying("hello"), config={"max_tokens_per_step": 3}) as stack:
        num_steps = 0

        async def break_twice(step: executor_pb2.Step) -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps in (3, 6):
                stack.executor.hooks.breaks_next = True

        stack.executor.hooks.before_step = break_twice
        response = await stack.generate(PROMPT, output={"prompt_logprobs": True, "logprobs": True})
        assert len({start.incarnation for step in stack.executor.steps for start in step.started_rows}) > 1
        check_logprobs(response.prompt_logprobs, list(PROMPT.encode())[1:], 1, 0)
        check_logprobs(response.choices[0].logprobs, [*b"hello", 256], len(PROMPT), 0)


async def test_preempted_answers_keep_their_numbers(source: str) -> None:
    """Field failure 25: two requests in a pool for one and a half: the same text, ids and numbers as alone."""
    fields: dict[str, Any] = {
        "output": {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": True, "echo": True},
        "sampling": {"frequency_penalty": 0.5, "bad_words": ["xyz"]},
        "stopping": {"max_tokens": 20},
    }
    prompts = ["first one", "second one"]
    async with running_stack(source, num_blocks=10, config={"max_tokens_per_step": 7}) as stack:
        alone = [await stack.generate(prompt, **fields) for prompt in prompts]
        assert stack.metric("octavo_num_preemptions_total") == 0
        together = await asyncio.gather(*(stack.generate(prompt, **fields) for prompt in prompts))
        assert stack.metric("octavo_num_preemptions_total") > 0
        for prompt, first, second in zip(prompts, alone, together, strict=True):
            assert list(first.choices) == list(second.choices)
            assert list(first.prompt_logprobs) == list(second.prompt_logprobs)
            assert first.usage == second.usage
            check_logprobs(second.prompt_logprobs, list(prompt.encode())[1:], 1, 2)
        restarts = [start.sampling for step in stack.executor.steps for start in step.started_rows]
        assert {each.num_prompt_tokens for each in restarts} == {len(prompt) for prompt in prompts}
        await stack.settle()


async def test_echo_begins_with_the_prompt(source: str) -> None:
    """Text and ids; log-probabilities are those of generated tokens and, of their own, of the prompt."""
    async with running_stack(source, saying("hello")) as stack:
        output = {"echo": True, "logprobs": True, "prompt_logprobs": True}
        response = await stack.generate(PROMPT, output=output)
        choice = response.choices[0]
        assert choice.text == PROMPT + "hello"
        assert list(choice.token_ids) == [*PROMPT.encode(), *b"hello", 256]
        assert response.usage.generated_tokens == 6
        check_logprobs(choice.logprobs, [*b"hello", 256], len(PROMPT), 0)
        assert len(response.prompt_logprobs) == len(PROMPT) - 1
        deltas = deltas_of(await stack.stream(PROMPT, output=output))
        assert "".join(delta.text for delta in deltas) == choice.text
        assert [token for delta in deltas for token in delta.token_ids] == list(choice.token_ids)
        num_carried = 0
        for delta in deltas:
            assert delta.token_offset == num_carried
            num_carried += len(delta.token_ids)


async def test_echo_is_not_searched_for_stop_strings_and_counts_for_no_length(source: str) -> None:
    async with running_stack(source, saying("hello")) as stack:
        response = await stack.generate(PROMPT, output={"echo": True}, stopping={"stop": ["prompt"], "max_tokens": 3})
        assert response.choices[0].text == PROMPT + "hel"


async def test_echo_of_a_chat_and_of_half_a_character(source: str) -> None:
    """A chat echoes what its template makes of it; ids that end inside a character are made whole by the answer."""
    async with running_stack(source, saying("yes")) as stack:
        chat = {"messages": [{"role": "user", "content": "ok?"}]}
        answer = await stack.generate(chat=chat, output={"echo": True}, stopping={"max_tokens": 2})
        assert answer.choices[0].text.startswith("<user>ok?<assistant>")
    emoji = list("😀".encode())
    async with running_stack(source, telling([*emoji, *b"ok"])) as stack:
        ids = {"ids": [ord("?"), *emoji[:2]]}
        choice = (await stack.generate(token_ids=ids, output={"echo": True}, stopping={"max_tokens": 4})).choices[0]
        assert choice.text == "?😀ok"
        assert list(choice.token_ids) == [ord("?"), *emoji, *b"ok"]


@pytest.mark.parametrize("skips", [True, False])
async def test_special_tokens_shown_or_skipped(source: str, skips: bool) -> None:
    """In the answer and in an echoed prompt; ids are the same either way."""
    async with running_stack(source, telling([ord("a"), 257, ord("b")])) as stack:
        output = {"skip_special_tokens": skips, "echo": True}
        ids = {"ids": [257, ord("x"), ord("?")]}
        choice = (
            await stack.generate(token_ids=ids, output=output, stopping={"include_stop": True, "max_tokens": 9})
        ).choices[0]
        assert choice.text == ("x?ab" if skips else "<end>x?a<end>b<eos>")
        assert list(choice.token_ids) == [257, ord("x"), ord("?"), ord("a"), 257, ord("b"), 256]


async def test_what_samples_by_rules_reaches_the_executor(source: str) -> None:
    """Every field of sampling in the words of a step; words banned as they are and behind a space."""
    async with running_stack(source) as stack:
        await stack.generate(
            PROMPT,
            sampling={
                "presence_penalty": 0.5,
                "frequency_penalty": -0.25,
                "repetition_penalty": 1.5,
                "logit_bias": {9: 1.0, 5: -2.0},
                "allowed_token_ids": [7, 3, 7, 120],
                "bad_words": ["no", "x", "no"],
            },
            stopping={"max_tokens": 2},
        )
        found = stack.executor.steps[0].started_rows[0].sampling
        assert found.num_prompt_tokens == len(PROMPT)
        assert (found.presence_penalty, found.frequency_penalty, found.repetition_penalty) == (0.5, -0.25, 1.5)
        assert (list(found.bias_token_ids), list(found.biases)) == ([5, 9], [-2.0, 1.0])
        assert list(found.allowed_token_ids) == [3, 7, 120]
        assert list(found.banned_lengths) == [2, 3, 1, 2]
        assert bytes(found.banned_token_ids) == b"no no" + b"x x"


async def test_limits_are_told(source: str) -> None:
    async with running_stack(source) as stack:
        limits = (await stack.stub.GetServerInfo(pb.GetServerInfoRequest())).limits
        assert (limits.max_top_logprobs, limits.max_logit_biases) == (20, 1024)
        assert (limits.max_bad_words, limits.max_bad_word_bytes) == (64, 256)
        with pytest.raises(grpc.aio.AioRpcError):
            await stack.generate(output={"logprobs": True, "top_logprobs": limits.max_top_logprobs + 1})


async def test_several_answers_share_one_scored_prompt_and_echo_it_each(source: str) -> None:
    """Field failure 23 with n of 2: the prompt's numbers once; each answer its own, behind the echo."""
    async with running_stack(source, saying("hello")) as stack:
        output = {"logprobs": True, "prompt_logprobs": True, "top_logprobs": 1, "echo": True}
        response = await stack.generate(PROMPT, output=output, sampling={"n": 2})
        check_logprobs(response.prompt_logprobs, list(PROMPT.encode())[1:], 1, 1)
        assert [choice.index for choice in response.choices] == [0, 1]
        for choice in response.choices:
            assert choice.text.startswith(PROMPT)
            generated = list(choice.token_ids)[len(PROMPT) :]
            assert len(choice.logprobs) == len(generated)
            check_logprobs(choice.logprobs, generated, len(PROMPT), 1)
        events = await stack.stream(PROMPT, output=output, sampling={"n": 2})
        pieces = [entry for event in events for entry in event.prompt_logprobs.logprobs]
        check_logprobs(pieces, list(PROMPT.encode())[1:], 1, 1)
        for index, choice in enumerate(response.choices):
            mine = [delta for delta in deltas_of(events) if delta.index == index]
            assert "".join(delta.text for delta in mine) == choice.text
            num_carried = 0
            for delta in mine:
                assert delta.token_offset == num_carried
                num_carried += len(delta.token_ids)
            assert [entry.token_id for delta in mine for entry in delta.logprobs] == [
                entry.token_id for entry in choice.logprobs
            ]
        await stack.settle()
