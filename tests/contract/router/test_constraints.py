"""Constraints at the edge: what is refused and why, and what an executor is sent. Following them is the executor's."""

import json
from typing import Any

import grpc
import pytest

from octavo.errors import Code, OctavoError
from octavo.rpc import error_of_call
from tests.fakes import saying
from tests.stacks import Stack, running_stack


async def refusal(stack: Stack, **fields: Any) -> OctavoError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.generate(**fields)
    error = error_of_call(caught.value)
    assert error.code is Code.INVALID_ARGUMENT, error
    return error


@pytest.mark.parametrize(
    ("constraint", "field", "says"),
    [
        ({}, "constraint", "0 texts"),
        ({"json_schema": ""}, "constraint.json_schema", "0 bytes"),
        ({"json_schema": "{"}, "constraint.json_schema", "no JSON"),
        ({"json_schema": "[]"}, "constraint.json_schema", "an object"),
        ({"json_schema": "true"}, "constraint.json_schema", "an object"),
        ({"json_schema": "[" * 60_000}, "constraint.json_schema", "no JSON"),
        ({"json_schema": '{"type": "nope"}'}, "constraint.json_schema", "nope"),
        ({"json_schema": '{"type": "array", "uniqueItems": true}'}, "constraint.json_schema", "uniqueItems"),
        ({"json_schema": '{"not": {"type": "string"}}'}, "constraint.json_schema", "not"),
        ({"json_schema": '{"$ref": "http://127.0.0.1/x"}'}, "constraint.json_schema", "not fetch"),
        (
            {"json_schema": '{}}, {"lark_grammar": "start: /a/"}, {"json_schema": {}'},
            "constraint.json_schema",
            "no JSON",
        ),
        ({"regex": "("}, "constraint.regex", "unclosed"),
        ({"regex": "(?=a)b"}, "constraint.regex", "look-around"),
        ({"regex": "a" * 70_000}, "constraint.regex", "70000 bytes"),
        ({"grammar": "start: nowhere"}, "constraint.grammar", "nowhere"),
        ({"grammar": "begin: /a/"}, "constraint.grammar", "start"),
        ({"choice": {"options": []}}, "constraint.choice", "0 texts"),
        ({"choice": {"options": ["x"] * 257}}, "constraint.choice", "257 texts"),
    ],
)
async def test_what_cannot_be_followed_is_refused(source: str, constraint: Any, field: str, says: str) -> None:
    async with running_stack(source) as stack:
        violation = (await refusal(stack, constraint=constraint)).violations[0]
        assert violation.field == field
        assert says in violation.description
        assert len(violation.description) <= 300


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("stopping.ignore_eos", {"stopping": {"ignore_eos": True}}),
        ("stopping.min_tokens", {"stopping": {"min_tokens": 1}}),
        ("sampling.allowed_token_ids", {"sampling": {"allowed_token_ids": [1]}}),
        ("sampling.bad_words", {"sampling": {"bad_words": ["x"]}}),
    ],
)
async def test_what_could_leave_no_token_does_not_go_with_one(source: str, field: str, fields: dict[str, Any]) -> None:
    async with running_stack(source) as stack:
        error = await refusal(stack, constraint={"regex": "a+"}, **fields)
        assert [violation.field for violation in error.violations] == [field]


async def test_every_kind_becomes_a_grammar(source: str) -> None:
    constraints: list[dict[str, Any]] = [
        {"json_schema": json.dumps({"type": "object", "properties": {"ä": {"type": "integer"}}})},
        {"regex": "[a-z]/+"},
        {"grammar": 'start: "a" b+\nb: /[0-9]/'},
        {"choice": {"options": ["yes", 'no "q"', "é\n\\ 漢😀", " lead"]}},
    ]
    async with running_stack(source, saying("hello")) as stack:
        for constraint in constraints:
            assert (await stack.generate(constraint=constraint)).choices[0].text == "hello"
        assert (await stack.generate()).choices[0].text == "hello"
        grammars = [start.sampling.grammar for each in stack.executor.steps for start in each.started_rows]
        assert len(grammars) == 5
        assert all(grammars[:4])
        assert not grammars[4]
        await stack.settle()
