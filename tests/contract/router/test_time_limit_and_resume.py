"""The soft deadline, and a client that comes back with what it already has."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from octavo.errors import Code
from octavo.rpc import error_of_call
from octavo.v1 import inference_pb2
from tests.fakes import EOS, saying
from tests.stacks import request, running_stack, until

Reason = inference_pb2.FinishReason
STEP_S = 0.005
depths = pytest.mark.parametrize("max_steps_in_flight", [1, 2])


async def compute(_: Any) -> None:
    await asyncio.sleep(STEP_S)


def wandering(history: tuple[int, ...]) -> Sequence[int]:
    return [(sum(history) * 7 + len(history) * 3 + step * 11) % 90 + 33 for step in range(8)]


async def read_to_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


def limit(seconds: float) -> dict[str, int]:
    return {"seconds": int(seconds), "nanos": round(seconds % 1 * 1e9)}


# ----------------------------------------------------------------------------------------------------------- time_limit


@depths
async def test_at_the_time_limit_the_partial_answer_is_complete(source: str, max_steps_in_flight: int) -> None:
    """Status OK, TIME_LIMIT, what there is; blocks are free; streamed and unary."""
    config = {"max_steps_in_flight": max_steps_in_flight}
    async with running_stack(source, config=config) as stack:
        stack.executor.hooks.before_step = compute
        stopping = {"max_tokens": 200, "ignore_eos": True}
        response, events = await asyncio.gather(
            stack.generate(stopping=stopping, time_limit=limit(0.6)),
            stack.stream(stopping=stopping, time_limit=limit(0.1)),
        )
        [choice] = response.choices
        assert choice.finish_reason == Reason.FINISH_REASON_TIME_LIMIT
        assert 3 < len(choice.token_ids) == response.usage.generated_tokens < 200
        finished = [event.finished for event in events if event.HasField("finished")]
        assert [end.reason for end in finished] == [Reason.FINISH_REASON_TIME_LIMIT]
        carried = sum(len(event.delta.token_ids) for event in events)
        assert events[-1].completed.usage.generated_tokens == carried < response.usage.generated_tokens
        assert stack.metric("octavo_request_success_total", finished_reason="time_limit") == 2
        await stack.settle()


async def test_the_time_limit_holds_in_the_queue_and_without_an_executor(source: str) -> None:
    async with running_stack(source, max_rows=1) as stack:
        stack.executor.hooks.is_open.clear()
        call = asyncio.create_task(stack.generate(stopping={"max_tokens": 3}))
        assert await until(lambda: bool(stack.engine.roster.running))
        response = await stack.generate(time_limit=limit(0.05), sampling={"n": 1})
        assert response.choices[0].finish_reason == Reason.FINISH_REASON_TIME_LIMIT
        assert (response.choices[0].text, response.usage.generated_tokens) == ("", 0)
        stack.executor.hooks.is_open.set()
        assert (await call).usage.generated_tokens == 3
        await stack.settle()


async def test_held_text_is_released_at_the_time_limit(source: str) -> None:
    """Half a stop string is text when the answer ends without the other half."""
    async with running_stack(source, saying("one stop", then=ord("s"))) as stack:

        async def halt(step: Any) -> None:
            if len(stack.executor.steps) == 7:
                await asyncio.sleep(0.4)

        stack.executor.hooks.before_step = halt
        response = await stack.generate("go?", stopping={"stop": ["stopping"]}, time_limit=limit(0.2))
        assert response.choices[0].text == "one sto"[: len(response.choices[0].token_ids)]
        assert response.choices[0].finish_reason == Reason.FINISH_REASON_TIME_LIMIT


async def test_an_answer_within_the_time_limit_does_not_notice_it(source: str) -> None:
    async with running_stack(source, saying("done")) as stack:
        response = await stack.generate("quick?", time_limit=limit(1000))
        assert response.choices[0].text == "done"
        assert not stack.engine._ends.time_limits


@pytest.mark.parametrize("bad", [{"seconds": 0}, {"seconds": -1}, {"nanos": -1}, {"seconds": 2**40}])
async def test_time_limits_out_of_range_are_refused(source: str, bad: dict[str, int]) -> None:
    async with running_stack(source) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.generate(time_limit=bad)
        assert error_of_call(caught.value).violations[0].field == "time_limit"


async def test_text_that_the_time_limit_releases_comes_without_a_token(source: str) -> None:
    """So that a client whose call breaks right behind it does not take it for text of the tokens that it has."""
    async with running_stack(source, saying("abEND of it")) as stack:

        async def stall(_: Any) -> None:
            if len(stack.executor.steps) == 5:
                await asyncio.sleep(1.0)

        stack.executor.hooks.before_step = stall
        events = await stack.stream("go?", stopping={"stop": ["END it"]}, time_limit=limit(0.5))
        *deltas, last = [event.delta for event in events if event.HasField("delta")]
        assert (last.text, list(last.token_ids)) == ("END", [])
        assert "".join(delta.text for delta in deltas) == "ab"
        assert last.token_offset == sum(len(delta.token_ids) for delta in deltas) == 5
        await stack.settle()


# --------------------------------------------------------------------------------------------------------------- resume


@depths
async def test_a_resumed_answer_goes_on_where_it_was(source: str, max_steps_in_flight: int) -> None:
    """At every place, with no seed given: the same tokens and text as in one go, and usage says what was resumed."""
    config = {"max_steps_in_flight": max_steps_in_flight}
    async with running_stack(source, wandering, draws=True, config=config) as stack:
        fields: dict[str, Any] = {"request_id": "mine", "stopping": {"max_tokens": 14, "ignore_eos": True}}
        whole = (await stack.generate("a prompt", **fields)).choices[0]
        for had in range(1, 15):
            tokens = list(whole.token_ids)
            events = await stack.stream("a prompt", resume=[{"token_ids": tokens[:had]}], **fields)
            deltas = [event.delta for event in events if event.HasField("delta")]
            assert [token for delta in deltas for token in delta.token_ids] == tokens[had:]
            assert "".join(delta.text for delta in deltas) == whole.text[had:]
            assert not deltas or deltas[0].token_offset == had
            assert events[-2].finished.reason == Reason.FINISH_REASON_MAX_TOKENS
            usage = events[-1].completed.usage
            assert (usage.prompt_tokens, usage.generated_tokens, usage.resumed_tokens) == (8, 14, had)
            assert usage.cached_tokens <= usage.prompt_tokens
        await stack.settle()


async def test_resume_inside_a_character_and_a_held_stop_string(source: str) -> None:
    """Text that came with the resumed tokens is not sent again; what was held then comes when it is certain."""
    answer = "ab\N{GRINNING FACE}END it"
    async with running_stack(source, saying(answer)) as stack:
        fields: dict[str, Any] = {"request_id": "r", "stopping": {"stop": ["END of"]}}
        whole = (await stack.stream("go?", **fields))[1:-2]
        assert "".join(event.delta.text for event in whole) == answer
        tokens = list(answer.encode())
        shown = ["", "a", "ab", "ab", "ab", "ab", "ab\N{GRINNING FACE}"]  # "END" is held
        for had in range(1, len(tokens)):
            events = await stack.stream("go?", resume=[{"token_ids": tokens[:had]}], **fields)
            text = "".join(event.delta.text for event in events)
            before = (
                shown[had]
                if had < len(shown)
                else answer[:3]
                if had < 11
                else answer[: len(answer) - len(tokens) + had]
            )
            assert before + text == answer, had


@depths
async def test_choices_are_resumed_each_for_itself(source: str, max_steps_in_flight: int) -> None:
    """Some with tokens, some without, one that had ended."""
    config = {"max_steps_in_flight": max_steps_in_flight}
    async with running_stack(source, wandering, draws=True, config=config) as stack:
        fields: dict[str, Any] = {
            "request_id": "group",
            "sampling": {"n": 4, "seed": 3},
            "stopping": {"max_tokens": 9, "ignore_eos": True},
        }
        whole = await stack.generate("resumed", **fields)
        had = {0: 4, 2: 9, 3: 1}
        resume = [{"index": index, "token_ids": whole.choices[index].token_ids[:count]} for index, count in had.items()]
        again = await stack.generate("resumed", resume=resume, **fields)
        for index, choice in enumerate(again.choices):
            count = had.get(index, 0)
            assert list(choice.token_ids) == list(whole.choices[index].token_ids)[count:]
            assert choice.text == whole.choices[index].text[count:]
            assert choice.finish_reason == Reason.FINISH_REASON_MAX_TOKENS
        assert (again.usage.generated_tokens, again.usage.resumed_tokens) == (36, 14)
        await stack.settle()


async def test_an_answer_that_had_ended_is_not_computed_again(source: str) -> None:
    async with running_stack(source, saying("yes")) as stack:
        resume = [{"token_ids": [*b"yes", EOS]}]
        events = await stack.stream("really?", request_id="r", resume=resume)
        assert [event.WhichOneof("event") for event in events] == ["started", "finished", "completed"]
        assert events[1].finished.reason == Reason.FINISH_REASON_EOS
        assert not stack.executor.steps
        await stack.settle()


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("resume[0].token_ids", {"resume": [{"token_ids": [65, EOS, 66]}]}),
        ("resume[0].token_ids", {"resume": [{"token_ids": [65] * 4}], "stopping": {"max_tokens": 3}}),
        (
            "resume[1].token_ids",
            {"sampling": {"n": 2}, "resume": [{"index": 1, "token_ids": [65]}, {"token_ids": [65, EOS, 66]}]},
        ),
        ("resume[0].token_ids[1]", {"resume": [{"token_ids": [65, 2**40]}]}),
        ("resume[0].index", {"resume": [{"index": 1, "token_ids": [65]}]}),
        ("resume", {"resume": [{"token_ids": [65]}, {"token_ids": [65]}]}),
        ("resume[1].index", {"sampling": {"n": 2}, "resume": [{"token_ids": [65]}, {"token_ids": [65]}]}),
        ("request_id", {"request_id": "", "resume": [{"token_ids": [65]}]}),
        ("sampling.best_of", {"sampling": {"best_of": 2}, "resume": [{"token_ids": [65]}]}),
    ],
)
async def test_what_cannot_be_resumed_is_refused_by_name(source: str, field: str, fields: dict[str, Any]) -> None:
    async with running_stack(source) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.generate(**({"request_id": "r"} | fields))
        error = error_of_call(caught.value)
        assert error.code is Code.INVALID_ARGUMENT
        assert [violation.field for violation in error.violations] == [field]
        await stack.settle()


@depths
async def test_the_same_request_sent_again_supersedes_the_live_one(source: str, max_steps_in_flight: int) -> None:
    """A client that lost its connection need not wait for the router to find out; another body is refused."""
    config = {"max_steps_in_flight": max_steps_in_flight}
    async with running_stack(source, wandering, draws=True, config=config) as stack:
        fields: dict[str, Any] = {"request_id": "same", "stopping": {"max_tokens": 40, "ignore_eos": True}}
        whole = (await stack.generate("again", **fields)).choices[0]
        stack.executor.hooks.before_step = compute
        message = request("again", kind=inference_pb2.GenerateStreamRequest, **fields)
        old = stack.stub.GenerateStream(message)
        had: list[int] = []
        while len(had) < 5:
            had += (await old.read()).delta.token_ids
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.generate("another prompt", **fields)
        assert error_of_call(caught.value).reason == "REQUEST_ID_LIVE"
        new = await stack.generate("again", resume=[{"token_ids": had}], time_limit=limit(60), **fields)
        assert had + list(new.choices[0].token_ids) == list(whole.token_ids)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(read_to_end(old), 5)
        error = error_of_call(caught.value)
        assert (error.code, error.reason) == (Code.ABORTED, "SUPERSEDED")
        await stack.settle()
