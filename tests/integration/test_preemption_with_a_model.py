"""Field failure 25 with a real model: preempted, resumed, or neither, an answer under rules is the same.

What the executor keeps beside the tokens (counts of penalties, the state of a grammar) is made anew from the history.
"""

import json
from typing import Any

import pytest

from octavo import AsyncClient
from octavo.messages import generate_request
from octavo.results import Generation
from octavo.rpc import open_channel
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc
from tests.engines import RunningEngine, router_in_front_of
from tests.preempting import preempt_at

BLOCK = 16
PROMPT = [7, 40, 8, 90, 91, 40, 7]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{12,20}$"}, "age": {"type": "integer", "maximum": 999}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.6, "repetition_penalty": 1.4}
LENGTH = {"max_tokens": 24, "ignore_eos": True}
CASES: dict[str, dict[str, Any]] = {
    "penalties": {**PENALTIES, **LENGTH},
    "bias, bad words and allowed ids": {
        "logit_bias": {40: 3.0, 41: -9.0},
        "allowed_token_ids": list(range(30, 120)),
        "bad_words": ["aa", "b"],
        **LENGTH,
    },
    "min_tokens": {"min_tokens": 20, "max_tokens": 24, "logit_bias": {2: 30.0}},
    "schema of three with penalties": {"json_schema": json.dumps(SCHEMA), "max_tokens": 120, "n": 3, **PENALTIES},
    "regex": {"regex": "([a-f]{3}-){3,8}z", "max_tokens": 120, "presence_penalty": 1.0},
    "grammar": {"grammar": 'start: "(" (/[a-z]{9,30}/ | start) ")"', "max_tokens": 120},
}
POINTS = {"after token 1": [1], "about a block": [BLOCK - len(PROMPT) - 1, BLOCK - len(PROMPT) + 3], "twice": [3, 11]}


def shown(generation: Generation) -> list[tuple[Any, ...]]:
    return [(each.text, each.token_ids, each.finish_reason) for each in generation.choices]


@pytest.mark.parametrize("name", CASES)
async def test_the_same_with_and_without_preemptions(llama_engine: RunningEngine, name: str) -> None:
    answers = {}
    async with router_in_front_of(llama_engine) as router, AsyncClient(f"127.0.0.1:{router.port}") as client:
        (backend,) = router.fleet.backends
        points: list[int] = []
        done = preempt_at(backend.engine, points)
        for place, wanted in {"never": [], **POINTS}.items():
            points[:] = wanted
            done.clear()
            answers[place] = shown(await client.generate(PROMPT, seed=11, timeout_s=60, **CASES[name]))
            assert len(done) >= len(wanted), place
    assert len({str(answer) for answer in answers.values()}) == 1, answers
    assert all(len(token_ids) > BLOCK for _, token_ids, _ in answers["never"]), "it passes every point"


@pytest.mark.parametrize("name", CASES)
async def test_the_same_when_it_is_resumed(llama_engine: RunningEngine, name: str) -> None:
    """From its first token, from its middle, from its last but one; each choice from elsewhere."""
    request = pb.GenerateRequest.FromString(
        generate_request(PROMPT, {"seed": 11, **CASES[name]}).SerializeToString()  # the two have the same fields
    )
    async with router_in_front_of(llama_engine) as router, open_channel(f"127.0.0.1:{router.port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        whole = await stub.Generate(request, timeout=60)
        for share in (0.01, 0.5, 0.95):
            held = {
                each.index: each.token_ids[: max(1, int(share * len(each.token_ids)) - each.index)]
                for each in whole.choices
            }
            resumed = pb.GenerateRequest()
            resumed.CopyFrom(request)
            resumed.resume.extend(pb.Resume(index=index, token_ids=ids) for index, ids in held.items())
            again = await stub.Generate(resumed, timeout=60)
            assert again.usage.resumed_tokens == sum(map(len, held.values()))
            for before, after in zip(whole.choices, again.choices, strict=True):
                assert after.token_ids == before.token_ids[len(held[before.index]) :], (share, before.index)
                assert before.text.endswith(after.text)
                assert after.finish_reason == before.finish_reason
