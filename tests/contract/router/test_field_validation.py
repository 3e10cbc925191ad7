"""Every field out of its range is refused by name, before anything is allocated; the next request is fine."""

import math
import time
from typing import Any

import grpc
import pytest

from octavo.errors import Code, OctavoError
from octavo.rpc import error_of_call
from octavo.v1 import inference_pb2
from router.servicer.reading import read_request
from router.validation import RequestLimits, validate
from tests.fakes import EOS, VOCABULARY_SIZE
from tests.stacks import Stack, request, running_stack

BAD_IDS = [-1, VOCABULARY_SIZE, 2**31, 2**63 - 1, -(2**63)]
BAD_FLOATS = [math.nan, math.inf, -math.inf]


async def refusal(stack: Stack, prompt: str = "hi?", **fields: Any) -> OctavoError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.generate(prompt, **fields)
    return error_of_call(caught.value)


async def check_refused(stack: Stack, field: str, **fields: Any) -> None:
    error = await refusal(stack, **fields)
    assert error.code is Code.INVALID_ARGUMENT, fields
    assert error.reason == "INVALID_FIELD"
    assert field in [violation.field for violation in error.violations], error.violations


async def check_untouched(stack: Stack) -> None:
    """Nothing was allocated for any refused request, and an ordinary one is served."""
    stats = await stack.arena()
    assert stats.allocated_blocks == 0
    assert (await stack.generate(stopping={"max_tokens": 2})).usage.generated_tokens == 2
    await stack.settle()


async def test_ids_out_of_range_in_every_id_field(source: str) -> None:
    """Field failure 28."""
    async with running_stack(source) as stack:
        for bad in BAD_IDS:
            await check_refused(stack, "token_ids[1]", token_ids={"ids": [1, bad]})
            await check_refused(stack, "stopping.stop_token_ids[0]", stopping={"stop_token_ids": [bad]})
            await check_refused(stack, "sampling.allowed_token_ids[0]", sampling={"allowed_token_ids": [bad]})
            await check_refused(stack, f"sampling.logit_bias[{bad}]", sampling={"logit_bias": {bad: 1.0}})
            await check_refused(stack, "resume[0].token_ids[0]", resume=[{"token_ids": [bad]}])
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stack.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[bad]))
            assert error_of_call(caught.value).violations[0].field == "token_ids[0]"
        await check_untouched(stack)
        response = await stack.generate(
            token_ids={"ids": [0, VOCABULARY_SIZE - 1]},
            stopping={"max_tokens": 1, "stop_token_ids": [0, VOCABULARY_SIZE - 1]},
        )
        assert response.usage.prompt_tokens == 2


async def test_nan_and_infinities_in_every_float_field(source: str) -> None:
    """Field failure 28."""
    plain = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
    async with running_stack(source) as stack:
        for bad in BAD_FLOATS:
            for name in plain:
                await check_refused(stack, f"sampling.{name}", sampling={name: bad})
            await check_refused(stack, "sampling.logit_bias[5]", sampling={"logit_bias": {5: bad}})
            beam = {"width": 2, "length_penalty": bad}
            await check_refused(stack, "sampling.beam.length_penalty", sampling={"beam": beam})
        await check_untouched(stack)


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("sampling.temperature", [-0.1, 2.1], [0.0, 2.0]),
        ("sampling.top_p", [0.0, -1.0, 1.1], [0.001, 1.0]),
        ("sampling.top_k", [-2, -(2**31)], [-1, 0, 1, VOCABULARY_SIZE, VOCABULARY_SIZE + 1, 2**31 - 1]),
        ("sampling.min_p", [-0.1, 1.1], [0.0, 1.0]),
        ("sampling.presence_penalty", [-2.1, 2.1], [-2.0, 0.0, 2.0]),
        ("sampling.frequency_penalty", [-2.1, 2.1], [-2.0, 0.0, 2.0]),
        ("sampling.repetition_penalty", [-1.0, 0.0, 2.1], [1e-30, 1.0, 2.0]),
        ("sampling.bad_words", [["x"] * 65], [["x"] * 64, []]),
        ("output.top_logprobs", [1, 21, 2**32 - 1], [0]),
        ("sampling.n", [0, 17, 10**6], [1, 2, 16]),
        ("sampling.best_of", [0, 17, 10**6], [1, 2, 16]),
        ("stopping.max_tokens", [0, -1, -(2**31)], [1]),
        ("stopping.min_tokens", [-1, 4], [0, 3]),
    ],
)
async def test_ranges(source: str, field: str, bad: list[Any], good: list[Any]) -> None:
    """Field failures 26, 27, 22 (min above max)."""
    group, _, name = field.partition(".")
    async with running_stack(source) as stack:
        for value in bad:
            await check_refused(stack, field, **merged(group, name, value))
        assert (await stack.arena()).allocated_blocks == 0
        for value in good:
            await stack.generate(**merged(group, name, value))
        await stack.settle()


def merged(group: str, name: str, value: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"stopping": {"max_tokens": 3}}
    fields.setdefault(group, {})[name] = value
    return fields


async def test_empty_and_whitespace_prompts(source: str) -> None:
    """Field failure 27: empty is refused, whitespace is a prompt."""
    async with running_stack(source) as stack:
        await check_refused(stack, "text", prompt="")
        await check_refused(stack, "token_ids", token_ids={"ids": []})
        await check_refused(stack, "chat.messages", chat={"messages": []})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.stub.Generate(inference_pb2.GenerateRequest())
        assert error_of_call(caught.value).violations[0].field == "prompt"
        await check_untouched(stack)
        assert (await stack.generate("  \n", stopping={"max_tokens": 1})).usage.prompt_tokens == 3


@pytest.mark.parametrize("resume", [[{"token_ids": [7]}] * 100_000, [{"token_ids": [7] * 4_000_000}]])
async def test_a_message_full_of_entries_is_not_read_to_its_end(source: str, resume: list[Any]) -> None:
    """It would take the event loop for seconds, from every stream. Only what the router itself does is timed."""
    async with running_stack(source) as stack:
        message = request(resume=resume)
        began = time.thread_time()
        with pytest.raises(OctavoError) as refused:
            validate(read_request(message), stack.engine.model, RequestLimits(16, 256, 64), "id")
        assert time.thread_time() - began < 0.1
        assert refused.value.violations[0].field.startswith("resume")


async def test_sizes_of_lists_and_strings(source: str) -> None:
    """Field failure 28: thousands of stops; field failure 36: an error never has the prompt in it."""
    async with running_stack(source, config={"max_stop_string_bytes": 8}) as stack:
        await check_refused(stack, "stopping.stop", stopping={"stop": ["x"] * 5000})
        await check_refused(stack, "stopping.stop[1]", stopping={"stop": ["ok", "é" * 5]})
        await check_refused(stack, "stopping.stop[0]", stopping={"stop": [""]})
        await check_refused(stack, "stopping.stop_token_ids", stopping={"stop_token_ids": [1] * 5000})
        await check_refused(stack, "request_id", request_id="x" * 1000)
        await check_refused(stack, "cache.salt", cache={"salt": "x" * 1000})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[7] * 257))
        assert error_of_call(caught.value).violations[0].field == "token_ids"
        error = await refusal(stack, token_ids={"ids": [7] * 1_500_000})
        assert error.code is Code.FAILED_PRECONDITION
        assert error.metadata["prompt_tokens"] == "1500000"
        assert len(error.message) < 400
        error = await refusal(stack, "secret " * 500_000)
        assert error.code is Code.FAILED_PRECONDITION
        assert "secret" not in error.message
        await check_untouched(stack)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("adapter", {"adapter": "lora"}),
    ],
)
async def test_what_is_not_supported_yet_is_refused_by_name(source: str, field: str, fields: dict[str, Any]) -> None:
    async with running_stack(source) as stack:
        await check_refused(stack, field, **fields)


async def test_what_does_not_go_with_beam_search_is_refused_by_name(source: str) -> None:
    """What draws, ends by text or chooses otherwise; and widths that nothing could serve."""
    beam = {"width": 3}
    others: dict[str, dict[str, Any]] = {
        "sampling.temperature": {"sampling": {"beam": beam, "temperature": 0.5}},
        "sampling.top_p": {"sampling": {"beam": beam, "top_p": 0.5}},
        "sampling.top_k": {"sampling": {"beam": beam, "top_k": 5}},
        "sampling.min_p": {"sampling": {"beam": beam, "min_p": 0.5}},
        "sampling.seed": {"sampling": {"beam": beam, "seed": 0}},
        "sampling.best_of": {"sampling": {"beam": beam, "best_of": 3}},
        "constraint": {"sampling": {"beam": beam}, "constraint": {"regex": "a+"}},
        "stopping.stop": {"sampling": {"beam": beam}, "stopping": {"stop": ["x"]}},
        "resume": {"sampling": {"beam": beam}, "request_id": "r", "resume": [{"index": 0, "token_ids": [1]}]},
        "sampling.beam.width": {"sampling": {"beam": {"width": 17}}},
    }
    async with running_stack(source) as stack:
        for field, fields in others.items():
            await check_refused(stack, field, **fields)
        for bad in ({"width": 0}, {}, {"early_stopping": True}):
            await check_refused(stack, "sampling.beam.width", sampling={"beam": bad})
        await check_refused(stack, "sampling.beam.width", sampling={"n": 4, "beam": beam})
        await check_refused(stack, "sampling.beam.length_penalty", sampling={"beam": beam | {"length_penalty": 10.5}})
        await check_untouched(stack)
        off = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
        response = await stack.generate(sampling={"beam": beam, **off}, stopping={"max_tokens": 2})
        assert response.choices[0].HasField("beam")


async def test_a_beam_wider_than_the_engine_is_refused_with_the_numbers(source: str) -> None:
    async with running_stack(source, max_rows=2) as stack:
        error = await refusal(stack, sampling={"beam": {"width": 3}})
        assert (error.reason, error.metadata["max_running_requests"]) == ("NEVER_FITS", "2")
        await check_untouched(stack)


async def test_neutral_values_of_unsupported_fields_are_fine(source: str) -> None:
    neutral = {"n": 1, "best_of": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    async with running_stack(source) as stack:
        output = {"logprobs": False, "top_logprobs": 0, "prompt_logprobs": False, "echo": False}
        response = await stack.generate(sampling=neutral, output=output, stopping={"max_tokens": 2})
        assert response.usage.generated_tokens == 2


async def test_bad_values_of_logit_rules(source: str) -> None:
    """Field failure 28: each entry of a list or map by its place."""
    async with running_stack(source) as stack:
        for bias in (100.5, -101.0):
            await check_refused(stack, "sampling.logit_bias[7]", sampling={"logit_bias": {7: bias}})
        many = dict.fromkeys(range(1025), 1.0)
        await check_refused(stack, "sampling.logit_bias", sampling={"logit_bias": many})
        await check_refused(stack, "sampling.bad_words[1]", sampling={"bad_words": ["ok", ""]})
        await check_refused(stack, "sampling.bad_words[0]", sampling={"bad_words": ["x" * 257]})
        too_many = [1] * (VOCABULARY_SIZE + 1)
        await check_refused(stack, "sampling.allowed_token_ids", sampling={"allowed_token_ids": too_many})
        await check_refused(stack, "output.top_logprobs", output={"logprobs": True, "top_logprobs": 21})
        await check_untouched(stack)
        biases = {0: -100.0, VOCABULARY_SIZE - 1: 100.0}
        everything = list(range(VOCABULARY_SIZE))
        response = await stack.generate(
            sampling={"logit_bias": biases, "allowed_token_ids": everything, "bad_words": ["é" * 128]},
            output={"logprobs": True, "top_logprobs": 20},
            stopping={"max_tokens": 1},
        )
        assert len(response.choices[0].logprobs[0].top) == 20


async def test_rules_that_leave_no_token_are_refused(source: str) -> None:
    async with running_stack(source) as stack:
        early = {"min_tokens": 1, "max_tokens": 3}
        cases: list[tuple[str, dict[str, Any]]] = [
            ("sampling.allowed_token_ids", {"sampling": {"allowed_token_ids": [EOS]}, "stopping": early}),
            (
                "sampling.allowed_token_ids",
                {"sampling": {"allowed_token_ids": [5, 6]}, "stopping": {"stop_token_ids": [5, 6], **early}},
            ),
            ("sampling.allowed_token_ids", {"sampling": {"allowed_token_ids": [120], "bad_words": ["yx"]}}),
        ]
        for field, fields in cases:
            await check_refused(stack, field, **fields)
        await check_untouched(stack)
        free = {"allowed_token_ids": [EOS, 7]}
        assert (await stack.generate(sampling=free, stopping=early)).choices[0].token_ids


async def test_all_bad_fields_are_named_at_once(source: str) -> None:
    async with running_stack(source) as stack:
        error = await refusal(stack, sampling={"temperature": 9.0, "top_p": 0.0}, stopping={"max_tokens": 0})
        assert {violation.field for violation in error.violations} == {
            "sampling.temperature",
            "sampling.top_p",
            "stopping.max_tokens",
        }
        assert "2]" in error.violations[0].description, "the allowed range is said"
