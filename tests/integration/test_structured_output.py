"""Answers under constraints, through all three processes: they match, with whatever runs beside them."""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from octavo import AsyncClient
from tests.engines import RunningEngine, running_engine, running_router

WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}
COUNT = {"type": "integer", "minimum": 0, "maximum": 999}


def thing(**properties: Any) -> dict[str, Any]:
    """An object that has these, and nothing else."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


# Every one of bounded length: an answer that max_tokens cuts is not whole.
SCHEMAS: list[dict[str, Any]] = [
    COUNT,
    WORD,
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["red", "green", 7, None]},
    {"const": {"a": [1, "two"]}},
    {"type": "string", "maxLength": 12},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "integer", "minimum": -20, "maximum": -3},
    {"type": "array", "items": COUNT, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [WORD, COUNT], "items": False, "minItems": 2},
    thing(name=WORD),
    thing(name=WORD, age=COUNT, married={"type": "boolean"}),
    thing(point=thing(x=COUNT, y=COUNT), label=WORD),
    thing(items={"type": "array", "items": thing(id=COUNT), "minItems": 1, "maxItems": 3}),
    thing(value={"anyOf": [COUNT, {"type": "null"}]}),
    thing(value={"anyOf": [thing(kind={"const": "a"}, a=COUNT), thing(kind={"const": "b"}, b=WORD)]}),
    {**thing(a=COUNT, b=WORD), "required": ["a"]},
    {"$ref": "#/$defs/pair", "$defs": {"pair": thing(left=WORD, right=WORD)}},
]


async def check_schema(client: AsyncClient, prompt: Any, schema: dict[str, Any], **options: Any) -> None:
    found = await client.generate(prompt, json_schema=json.dumps(schema), max_tokens=300, **options)
    assert found.finish_reason == "eos", (schema, found.text)
    jsonschema.validate(json.loads(found.text), schema)


async def test_answers_parse_and_validate(llama_engine: RunningEngine) -> None:
    """A model of random weights, which would never write JSON; all schemas at once, beside unconstrained rows."""
    async with running_router(llama_engine) as client:
        free = client.generate([5, 6, 7], temperature=0, max_tokens=60, ignore_eos=True)
        alone = (await free).choices[0].token_ids
        works = [check_schema(client, [9, 8, index], schema, seed=index) for index, schema in enumerate(SCHEMAS)]
        beside = client.generate([5, 6, 7], temperature=0, max_tokens=60, ignore_eos=True)
        answers = await asyncio.gather(beside, *works)
        assert answers[0].choices[0].token_ids == alone


async def test_every_other_kind(llama_engine: RunningEngine) -> None:
    options = ["yes", 'no "q"', "é\n\\ 漢😀", " lead"]
    async with running_router(llama_engine) as client:
        for seed in range(6):
            sampling: dict[str, Any] = {"seed": seed, "max_tokens": 200}
            found = await client.generate([7, 8], regex="[0-9]{3}/[a-f]{2,4}", **sampling)
            assert re.fullmatch("[0-9]{3}/[a-f]{2,4}", found.text), found.text
            found = await client.generate([7, 8], choice=options, **sampling)
            assert found.text in options
            found = await client.generate(
                [7, 8], grammar='start: "(" item ("," item)? ")"\nitem: /[xy]/ | start', **sampling
            )
            assert re.fullmatch(r"[(),xy]+", found.text)
            assert found.finish_reason != "eos" or found.text.count("(") == found.text.count(")")


async def test_with_everything_that_goes_with_it(llama_engine: RunningEngine) -> None:
    """Penalties, biases, stop strings, several answers, log-probabilities: the answer still matches."""
    async with running_router(llama_engine) as client:
        found = await client.generate(
            [7, 8],
            regex="[a-z]{4,6}",
            n=3,
            seed=1,
            presence_penalty=2.0,
            repetition_penalty=1.5,
            logit_bias={20: 50.0},
            logprobs=True,
            max_tokens=20,
        )
        assert len({choice.text for choice in found.choices}) > 1
        for choice in found.choices:
            assert re.fullmatch("[a-z]{4,6}", choice.text)
            assert len(choice.logprobs) == len(choice.token_ids)
        cut = await client.generate([7, 8], choice=["one two"], stop=[" "], max_tokens=20)
        assert (cut.text, cut.finish_reason) == ("one", "stop_string")


@pytest.fixture
def demo_engine() -> Iterator[RunningEngine]:
    with running_engine("demo", "--executor.threads=2", "--executor.kv-memory-mib=512") as engine:
        yield engine


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_the_demo_model_over_many_prompts(demo_engine: RunningEngine) -> None:
    """100 prompts and 20 schemas: every answer parses and validates."""
    rng = random.Random(0)
    topics = [
        "a cat",
        "Paris",
        "the moon",
        "a recipe",
        "a user",
        "a bridge",
        "a song",
        "an invoice",
        "rain",
        "a chess game",
    ]
    verbs = ["Describe", "Give me data about", "Write JSON for", "Summarise", "List facts about"]
    prompts = [f"{rng.choice(verbs)} {rng.choice(topics)}, number {index}." for index in range(100)]
    places = asyncio.Semaphore(16)
    async with running_router(demo_engine) as client:

        async def check(index: int, prompt: str) -> None:
            async with places:
                chat = [{"role": "user", "content": prompt}]
                await check_schema(client, chat, SCHEMAS[index % len(SCHEMAS)], seed=index)

        await asyncio.gather(*(check(index, prompt) for index, prompt in enumerate(prompts)))
