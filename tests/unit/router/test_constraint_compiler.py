"""Constraints into grammars, in a process of its own: a hard one is refused, and harms nothing else."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from octavo.errors import Code, OctavoError
from router.clients.compiler import ConstraintCompiler
from router.request import Constraint
from tests.tiny_models import EOS, VOCABULARY_SIZE, tiny_tokenizer

PLAIN = Constraint("regex", ("[0-9]{3}",))
# Each would hold up whatever compiles it for many seconds, or take all of its memory.
HARD = {
    "a long division": Constraint("json_schema", (json.dumps({"type": "integer", "multipleOf": 999_983}),)),
    "an intersection": Constraint(
        "grammar", ("start: T\nT: " + " & ".join(f"/(.*{'ab'[count % 2] * count}.*)/" for count in range(1, 60)),)
    ),
}
OBJECTS = [{"type": "object", "properties": {f"k{i}_{j}": {"type": "number"} for j in range(5)}} for i in range(300)]
BEYOND = {
    "too many alternatives behind a token": (
        Constraint("json_schema", (json.dumps({"anyOf": OBJECTS}),)),
        "max is 2000",
    ),
    "too big": (Constraint("grammar", ('start: %regex { "substring_words": "' + "abc de " * 9000 + '" }',)), "too big"),
    "no text": (Constraint("regex", ("[^\\x00-\\U0010FFFF]",)), "no text"),
    "no end": (Constraint("grammar", ('start: start "x"',)), "no text"),
    "another form": (Constraint("grammar", (' {"grammars": [{"lark_grammar": "start: /a/"}]}',)), "begins with {"),
}


@pytest_asyncio.fixture
async def compiler() -> AsyncIterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(tiny_tokenizer().backend_tokenizer.to_str, VOCABULARY_SIZE, frozenset({EOS, 4}))
    yield compiler
    await compiler.close()


async def refusal(compiler: ConstraintCompiler, constraint: Constraint) -> str:
    with pytest.raises(OctavoError) as caught:
        await compiler.grammar_of(constraint)
    assert caught.value.code is Code.INVALID_ARGUMENT
    (violation,) = caught.value.violations
    assert violation.field == f"constraint.{constraint.kind}"
    return violation.description


async def test_a_hard_constraint_is_refused_and_the_next_is_compiled(compiler: ConstraintCompiler) -> None:
    """Field failure 25: a schema that compiles for ever."""
    for constraint in HARD.values():
        assert "make it simpler" in await refusal(compiler, constraint)
        assert "make it simpler" in await refusal(compiler, constraint), "asked again, nothing is compiled"
        assert "[0-9]{3}" in await compiler.grammar_of(PLAIN)


@pytest.mark.parametrize(("constraint", "says"), BEYOND.values(), ids=BEYOND)
async def test_what_no_answer_can_begin_with_is_refused(
    compiler: ConstraintCompiler, constraint: Constraint, says: str
) -> None:
    description = await refusal(compiler, constraint)
    assert says in description
    assert "\n" not in description


async def test_a_client_that_leaves_in_the_middle_does_not_shift_the_answers(compiler: ConstraintCompiler) -> None:
    await compiler.grammar_of(PLAIN)
    leaving = asyncio.create_task(compiler.grammar_of(HARD["an intersection"]))
    waiting = asyncio.create_task(compiler.grammar_of(Constraint("regex", ("behind",))))
    await asyncio.sleep(0.05)
    leaving.cancel()
    assert "behind" in await waiting
    assert leaving.cancelled()


async def test_an_engine_that_is_lost_meanwhile(compiler: ConstraintCompiler) -> None:
    await compiler.grammar_of(PLAIN)
    works = [asyncio.create_task(compiler.grammar_of(each)) for each in (*HARD.values(), Constraint("regex", ("x",)))]
    await asyncio.sleep(0.05)
    await compiler.close()
    for work in works:
        with pytest.raises(OctavoError) as caught:
            await work
        assert caught.value.reason == "ENGINE_LOST"


async def test_every_text_can_be_written_without_special_tokens(compiler: ConstraintCompiler) -> None:
    """The library let pass only the token that is spelled as the text, and then refused it."""
    for constraint in (
        Constraint("regex", ("</s>",)),
        Constraint("choice", ("<turn>x",)),
        Constraint("json_schema", ('{"const": "<s>"}',)),
    ):
        assert "no_forcing" in await compiler.grammar_of(constraint)


async def test_resumed_tokens_that_the_constraint_does_not_allow(compiler: ConstraintCompiler) -> None:
    """They are checked where the constraint is: an executor would fail the answer as INTERNAL."""
    encode = tiny_tokenizer().encode
    for text in ("1", "12", "123"):
        await compiler.grammar_of(PLAIN, [encode(text, add_special_tokens=False)])
        await compiler.grammar_of(PLAIN, [[], [*encode("123", add_special_tokens=False), EOS]])
    for text in ("x", "1x", "1234"):
        with pytest.raises(OctavoError) as caught:
            await compiler.grammar_of(PLAIN, [[], encode(text, add_special_tokens=False)])
        assert [each.field for each in caught.value.violations] == ["resume[1].token_ids"]


async def test_a_tokenizer_whose_bytes_are_not_known() -> None:
    for definition in (lambda: None, lambda: "{}"):
        compiler = ConstraintCompiler(definition, VOCABULARY_SIZE, frozenset({EOS}))
        for _ in range(2):
            assert "not known" in await refusal(compiler, PLAIN)
        await compiler.close()
