"""What tests of whole workloads share: answers read from raw calls, and the rules that every answer keeps."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from octavo.v1 import inference_pb2 as pb


@dataclass
class Shown:
    """One choice as its client saw it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    reason: int = 0


@dataclass
class Answer:
    """What a call gave, unary or streamed."""

    choices: dict[int, Shown] = field(default_factory=dict)
    usage: Any = None
    seed: int = 0


async def read_stream(events: AsyncIterator[pb.GenerateStreamResponse]) -> Answer:
    """All of a stream that ends well. Raises AssertionError where its events break a rule of the API."""
    answer, is_started = Answer(), False
    async for event in events:
        kind = event.WhichOneof("event")
        assert answer.usage is None, f"{kind} behind Completed"
        assert is_started == (kind != "started"), f"{kind}: Started comes first, once"
        if kind == "started":
            is_started, answer.seed = True, event.started.effective_seed
        elif kind == "delta":
            _add_delta(answer, event.delta)
        elif kind == "finished":
            shown = answer.choices.setdefault(event.finished.index, Shown())
            assert not shown.reason, "a choice finished twice"
            assert event.finished.reason, "a reason that is never sent"
            shown.reason = event.finished.reason
        elif kind == "completed":
            answer.usage = event.completed.usage
        else:
            assert kind == "prompt_logprobs", kind
    assert answer.usage is not None, "the stream ended without Completed"
    assert all(shown.reason for shown in answer.choices.values()), "a choice is not finished"
    return answer


def _add_delta(answer: Answer, delta: pb.Delta) -> None:
    shown = answer.choices.setdefault(delta.index, Shown())
    assert not shown.reason, "a delta behind Finished"
    shown.text += delta.text
    shown.token_ids += delta.token_ids


def answer_of(response: pb.GenerateResponse) -> Answer:
    """The same of a unary call."""
    choices = {each.index: Shown(each.text, list(each.token_ids), each.finish_reason) for each in response.choices}
    assert all(shown.reason for shown in choices.values()), "a choice without a reason"
    return Answer(choices, response.usage, response.effective_seed)
