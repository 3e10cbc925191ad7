"""Text cases end to end: stream and unary must agree byte for byte, whatever the tokens do."""

from typing import Any

import pytest

from octavo.v1 import inference_pb2
from tests.fakes import EOS, saying, telling
from tests.stacks import Stack, running_stack

Reason = inference_pb2.FinishReason
REPLACEMENT = "\ufffd"
FAMILY = "👨‍👩‍👧‍👦"


async def both_ways(stack: Stack, prompt: str = "hi?", **fields: Any) -> tuple[str, Any]:
    """Text and choice; the concatenated deltas of a stream are the same bytes."""
    unary = (await stack.generate(prompt, **fields)).choices[0]
    events = await stack.stream(prompt, **fields)
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert "".join(delta.text for delta in deltas) == unary.text
    assert [token for delta in deltas for token in delta.token_ids] == list(unary.token_ids)
    finished = events[-2].finished
    assert (finished.reason, finished.matched_stop) == (unary.finish_reason, unary.matched_stop)
    return unary.text, unary


@pytest.mark.parametrize("text", ["😀!", FAMILY, "漢字", "é"])
async def test_characters_over_several_tokens(source: str, text: str) -> None:
    """Field failure 20: no delta has half a character."""
    async with running_stack(source, saying(text)) as stack:
        assert (await both_ways(stack))[0] == text
        for event in await stack.stream():
            assert REPLACEMENT not in event.delta.text
        await stack.settle()


async def test_max_tokens_inside_a_character(source: str) -> None:
    """Field failure 20: cut after byte 1, 2, 3: valid text, and the whole character after byte 4."""
    async with running_stack(source, saying("😀")) as stack:
        for num_bytes in (1, 2, 3):
            text, _ = await both_ways(stack, stopping={"max_tokens": num_bytes})
            assert text == REPLACEMENT
        assert (await both_ways(stack, stopping={"max_tokens": 4}))[0] == "😀"


async def test_a_prompt_of_ids_that_ends_inside_a_character(source: str) -> None:
    """Field failure 20: the answer shows the character that it completes."""
    emoji = list("😀".encode())
    # The script counts from the "?": the first two of its ids are the prompt's.
    async with running_stack(source, telling([*emoji, *b"ok"])) as stack:
        text, _ = await both_ways(stack, token_ids={"ids": [ord("?"), *emoji[:2]]}, stopping={"max_tokens": 4})
        assert text == "😀ok"


@pytest.mark.parametrize(
    ("said", "stops", "text", "matched"),
    [
        ("one STOP two", ["STOP"], "one ", "STOP"),
        ("abcabd", ["abd", "x"], "abc", "abd"),
        ("xabcx", ["ab", "abc"], "x", "ab"),
        ("STOP", ["STOP"], "", "STOP"),
        ("so STO", ["STOP"], "so STO", ""),
        ("START", ["STOP"], "START", ""),
    ],
)
async def test_stop_strings(source: str, said: str, stops: list[str], text: str, matched: str) -> None:
    """Field failure 21: cut at the earliest match, nothing of it sent, held text released at the end."""
    async with running_stack(source, saying(said)) as stack:
        found, choice = await both_ways(stack, stopping={"stop": stops})
        assert (found, choice.matched_stop) == (text, matched)
        assert choice.finish_reason == (Reason.FINISH_REASON_STOP_STRING if matched else Reason.FINISH_REASON_EOS)
        with_stop, _ = await both_ways(stack, stopping={"stop": stops, "include_stop": True})
        assert with_stop == text + matched
        await stack.settle()


async def test_a_stop_string_that_ends_with_the_last_token(source: str) -> None:
    async with running_stack(source, saying("abSTOP")) as stack:
        _, choice = await both_ways(stack, stopping={"stop": ["STOP"], "max_tokens": 6})
        assert choice.finish_reason == Reason.FINISH_REASON_STOP_STRING
        text, choice = await both_ways(stack, stopping={"stop": ["STOP"], "max_tokens": 5})
        assert (text, choice.finish_reason) == ("abSTO", Reason.FINISH_REASON_MAX_TOKENS)


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
@pytest.mark.parametrize("eos_token_ids", [(EOS,), (EOS, 257, 258)])
async def test_min_tokens_against_end_of_sequence(source: str, min_tokens: int, eos_token_ids: tuple[int, ...]) -> None:
    """Field failure 22: no end before min_tokens, an end at once after."""
    async with running_stack(source, telling([], then=EOS), eos_token_ids=eos_token_ids) as stack:
        text, choice = await both_ways(stack, stopping={"min_tokens": min_tokens, "max_tokens": 9})
        assert text == "_" * min_tokens
        assert len(choice.token_ids) == min_tokens + 1
        assert choice.finish_reason == Reason.FINISH_REASON_EOS


async def test_min_tokens_against_stop_ids_and_stop_strings(source: str) -> None:
    """Field failure 22."""
    async with running_stack(source, saying("aaaaaaaa")) as stack:
        text, choice = await both_ways(stack, stopping={"min_tokens": 3, "stop_token_ids": [ord("a")]})
        assert (text, choice.matched_stop) == ("___", str(ord("a")))
        assert choice.finish_reason == Reason.FINISH_REASON_STOP_TOKEN
        text, choice = await both_ways(stack, stopping={"min_tokens": 3, "stop": ["aa"]})
        assert (text, choice.finish_reason) == ("aa", Reason.FINISH_REASON_STOP_STRING)
        text, choice = await both_ways(stack, stopping={"stop_token_ids": [ord("a")], "include_stop": True})
        assert text == "a"


async def test_ignore_eos_goes_on_to_the_length(source: str) -> None:
    async with running_stack(source, saying("ab")) as stack:
        text, choice = await both_ways(stack, stopping={"ignore_eos": True, "max_tokens": 6})
        assert (text, choice.finish_reason) == ("ab", Reason.FINISH_REASON_MAX_TOKENS)
        text, _ = await both_ways(
            stack, stopping={"ignore_eos": True, "max_tokens": 4}, output={"skip_special_tokens": False}
        )
        assert text == "ab<eos><eos>"


async def test_unset_max_tokens_runs_to_context_or_pool(source: str) -> None:
    """Field failure 27: CONTEXT_LENGTH, whichever of the two is less."""
    async with running_stack(source, max_context_tokens=20) as stack:
        response = await stack.generate("hi?")
        assert response.usage.generated_tokens == 17
        assert response.choices[0].finish_reason == Reason.FINISH_REASON_CONTEXT_LENGTH
    async with running_stack(source, num_blocks=5, max_context_tokens=100) as stack:
        response = await stack.generate("hi?")
        assert response.usage.generated_tokens == 4 * 4 + 1 - 3
        assert response.choices[0].finish_reason == Reason.FINISH_REASON_CONTEXT_LENGTH
        await stack.settle()


async def test_token_ids_only_where_wanted(source: str) -> None:
    async with running_stack(source, saying("hello")) as stack:
        response = await stack.generate(output={"token_ids": False})
        assert (response.choices[0].text, list(response.choices[0].token_ids)) == ("hello", [])
        for event in await stack.stream(output={"token_ids": False}):
            assert not event.delta.token_ids
            assert not event.HasField("delta") or event.delta.text


async def test_chat_and_text_and_ids_are_the_same_prompt(source: str) -> None:
    async with running_stack(source, saying("yes")) as stack:
        chat = {"messages": [{"role": "user", "content": "ok?"}]}
        tokens = await stack.stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat))
        assert bytes(tokens.token_ids) == b"<user>ok?<assistant>"
        answers = [
            await stack.generate(chat=chat, stopping={"max_tokens": 5}),
            await stack.generate("<user>ok?<assistant>", stopping={"max_tokens": 5}),
            await stack.generate(token_ids={"ids": tokens.token_ids}, stopping={"max_tokens": 5}),
        ]
        assert len({answer.choices[0].text for answer in answers}) == 1
        assert {answer.usage.prompt_tokens for answer in answers} == {20}


async def test_seed_is_derived_from_the_request_id_and_reported(source: str) -> None:
    async with running_stack(source) as stack:
        seeds = [(await stack.generate(request_id=name, stopping={"max_tokens": 1})).effective_seed for name in "aab"]
        assert seeds[0] == seeds[1] != seeds[2]
        response = await stack.generate(sampling={"seed": 2**64 - 1, "top_k": 999}, stopping={"max_tokens": 1})
        assert response.effective_seed == 2**64 - 1
        sampling = stack.executor.steps[-2].started_rows or stack.executor.steps[-1].started_rows
        assert sampling[0].sampling.seed == 2**64 - 1
        assert sampling[0].sampling.top_k == 260
