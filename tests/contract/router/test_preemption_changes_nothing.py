"""Field failure 25: with and without preemptions an answer is the same, byte for byte.

Text, ids, log-probabilities, reason and usage; at every named point. Penalties and
constraints are not here, because the script knows none: `test_preemption_with_a_model.py`.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from octavo.v1 import inference_pb2
from tests.fakes import BLOCK_SIZE, EOS, Script, saying
from tests.preempting import preempt_at
from tests.stacks import running_stack

B = BLOCK_SIZE
depths = pytest.mark.parametrize("max_steps_in_flight", [1, 2])
LENGTH = 14


def wandering(history: tuple[int, ...]) -> Sequence[int]:
    return [(sum(history) * 7 + len(history) * 3 + step * 11) % 90 + 33 for step in range(8)]


def often_ending(history: tuple[int, ...]) -> Sequence[int]:
    """Would end at any place, were it allowed to."""
    return [EOS, *wandering(history)]


STOPPING = {"max_tokens": LENGTH, "ignore_eos": True}
CASES: dict[str, tuple[Script, dict[str, Any]]] = {
    "seed": (wandering, {"sampling": {"seed": 5}, "stopping": STOPPING}),
    "min_tokens": (often_ending, {"sampling": {"temperature": 0}, "stopping": {"max_tokens": LENGTH, "min_tokens": 9}}),
    "half a stop string": (saying("abSTOabSTOP no"), {"sampling": {"temperature": 0}, "stopping": {"stop": ["STOP"]}}),
    "half a character": (saying("\N{GRINNING FACE}\N{GRINNING FACE}x"), {"sampling": {"temperature": 0}}),
    "logprobs": (
        wandering,
        {"sampling": {"seed": 5}, "stopping": STOPPING, "output": {"logprobs": True, "top_logprobs": 2}},
    ),
    "n=2": (wandering, {"sampling": {"seed": 5, "n": 2}, "stopping": STOPPING}),
}
POINTS = {"after token 1": [1], "after B-1": [B - 1], "after B": [B], "twice": [2, B + 2]}


def visible(response: inference_pb2.GenerateResponse) -> bytes:
    """All that a client sees but times."""
    copy = inference_pb2.GenerateResponse()
    copy.CopyFrom(response)
    copy.ClearField("timing")
    return copy.SerializeToString(deterministic=True)


@depths
@pytest.mark.parametrize("case", CASES)
async def test_an_answer_is_the_same_with_and_without_preemptions(
    source: str, case: str, max_steps_in_flight: int
) -> None:
    script, fields = CASES[case]
    answers = {}
    for name, points in {"never": [], **POINTS}.items():
        config = {"max_steps_in_flight": max_steps_in_flight}
        async with running_stack(source, script, draws=True, config=config) as stack:
            done = preempt_at(stack.engine, points)
            answers[name] = visible(await stack.generate("why?!?", request_id="same", **fields))
            assert len(done) >= len(points), name
            await stack.settle()
    assert len(set(answers.values())) == 1, case
