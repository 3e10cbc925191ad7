"""Rows that follow a grammar: over sessions on scripted logits, with a vocabulary of bytes."""

import json
import time

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from executor.ids import SessionId
from executor.logits.constraint import ConstraintMaker
from executor.runner import Runner
from executor.session import Session
from executor.step import CONSTRAINT_FAILED, RowSampling, StepResult
from tests.executor_cases import LIMITS, NoArena, NoAttention, TableModel, process, row, step
from tests.tiny_models import EOS, VOCABULARY_SIZE, tiny_tokenizer

OTHER_EOS = 4
TOKENIZER = tiny_tokenizer()
# Random logits: what is said is the grammar's doing. The ends are unlikely, so that answers end only where they must.
TABLE = torch.randn(VOCABULARY_SIZE, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(5))
TABLE[:, [EOS, OTHER_EOS]] = -9.0
PROMPT = [10, 20, 30]


def vocabulary() -> LLTokenizer:
    return LLTokenizer(TOKENIZER.backend_tokenizer.to_str(), n_vocab=VOCABULARY_SIZE, eos_token=[EOS, OTHER_EOS])


def broken() -> LLTokenizer:
    raise ValueError("no such file")


def regex(pattern: str) -> RowSampling:
    return RowSampling(grammar=LLMatcher.grammar_from_regex(pattern), num_prompt_tokens=len(PROMPT))


def session_of(maker: ConstraintMaker) -> Session:
    limits = LIMITS.__class__(4, 64, VOCABULARY_SIZE, 200, 200)
    runner = Runner(TableModel(TABLE), NoArena(), NoAttention())  # type: ignore[arg-type]
    return Session(SessionId(1), 8, limits, runner, maker.make)


def run(session: Session, samplings: dict[int, RowSampling], num_steps: int) -> list[StepResult]:
    """Rows of one session from the prompt on, a token a step."""
    starts = [
        row(slot, PROMPT, list(range(1 + 15 * slot, 16 + 15 * slot)), sampling=each) for slot, each in samplings.items()
    ]
    results = []
    for index in range(num_steps):
        runs = [
            (slot, 0 if index == 0 else len(PROMPT) + index - 1, len(PROMPT) if index == 0 else 1) for slot in samplings
        ]
        started = tuple(starts) if index == 0 else ()
        result = process(session, step(index + 1, runs, started_rows=started))
        assert isinstance(result, StepResult), result
        results.append(result)
    return results


def answer(results: list[StepResult], place: int = 0) -> list[int]:
    return [int(result.token_ids[place]) for result in results]


@pytest.fixture(scope="module")
def maker() -> ConstraintMaker:
    return ConstraintMaker(vocabulary)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_the_answer_matches_and_ends(maker: ConstraintMaker, temperature: float) -> None:
    sampling = RowSampling(
        temperature=temperature, grammar=regex("[0-9]{3}-[a-c]+z").grammar, num_prompt_tokens=len(PROMPT), seed=3
    )
    tokens = answer(run(session_of(maker), {0: sampling}, 30))
    end = min((tokens.index(each) for each in (EOS, OTHER_EOS) if each in tokens), default=len(tokens))
    text = TOKENIZER.decode(tokens[:end])
    assert [character.isdigit() for character in text[:4]] == [True, True, True, False]
    assert set(text[4:].rstrip("z")) <= set("abc")
    assert end == len(tokens) or text.endswith("z"), "it may end where it is whole alone"


def test_a_whole_answer_can_only_end(maker: ConstraintMaker) -> None:
    """And what a step that was sent behind the end samples is an end too."""
    tokens = answer(run(session_of(maker), {0: regex("ab")}, 5))
    assert TOKENIZER.decode(tokens[:2]) == "ab"
    assert set(tokens[2:]) <= {EOS, OTHER_EOS}


def test_neighbours_without_a_grammar_are_as_ever(maker: ConstraintMaker) -> None:
    alone = answer(run(session_of(maker), {1: RowSampling()}, 5))
    results = run(session_of(maker), {0: regex("[xyz]*"), 1: RowSampling(), 2: regex("[0-9]*")}, 5)
    assert answer(results, 1) == alone
    assert set(TOKENIZER.decode(answer(results, 0))) <= set("xyz")
    assert TOKENIZER.decode(answer(results, 2)).isdigit()


def test_a_row_that_is_sent_again_goes_on_where_it_was(maker: ConstraintMaker) -> None:
    """Field failure 25: after a preemption the grammar has seen what was generated, and not the prompt."""
    sampling = regex("[0-9]{4}(ab|cd)e")
    whole = answer(run(session_of(maker), {0: sampling}, 7))
    for cut in (1, 3, 4, 5, 6):
        history = [*PROMPT, *whole[:cut]]
        start = row(0, history, list(range(1, 16)), sampling=sampling)
        result = process(session_of(maker), step(1, [(0, 0, len(history))], started_rows=(start,)))
        assert isinstance(result, StepResult)
        assert result.token_ids.tolist() == whole[cut : cut + 1]


def test_what_nothing_continues_fails_alone(maker: ConstraintMaker) -> None:
    """A grammar that cannot be compiled, and one that this row's own history broke."""
    bad = RowSampling(grammar="start: nowhere", num_prompt_tokens=len(PROMPT))
    broke = RowSampling(grammar=regex("ab").grammar, num_prompt_tokens=1)  # the prompt's second token is no "a"
    results = run(session_of(maker), {0: bad, 1: RowSampling(), 2: broke}, 2)
    assert [(failure.row, failure.reason) for failure in results[0].failures] == [
        (0, CONSTRAINT_FAILED),
        (2, CONSTRAINT_FAILED),
    ]
    assert "nowhere" in results[0].failures[0].message
    assert [result.num_sampled.tolist() for result in results] == [[0, 1, 0], [0, 1, 0]]


def test_without_a_vocabulary_only_rows_with_a_grammar_fail() -> None:
    results = run(session_of(ConstraintMaker(broken)), {0: regex("ab"), 1: RowSampling()}, 1)
    assert results[0].num_sampled.tolist() == [0, 1]
    assert "no such file" in results[0].failures[0].message


def test_a_schema(maker: ConstraintMaker) -> None:
    """Random logits, and yet JSON."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 10, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
    tokens = answer(run(session_of(maker), {0: RowSampling(grammar=grammar, num_prompt_tokens=3)}, 40))
    end = min(tokens.index(each) for each in (EOS, OTHER_EOS) if each in tokens)
    found = json.loads(TOKENIZER.decode(tokens[:end]))
    assert 10 <= found["a"] <= 99
    assert found["b"] in ("x", "yy")


def test_a_costly_grammar_does_not_hold_up_the_step(maker: ConstraintMaker) -> None:
    """A million letters: each step stays far below the seconds that the library would spend on it by default."""
    session = session_of(maker)
    run(session, {1: RowSampling()}, 1)  # the vocabulary is there
    began = time.monotonic()
    start = row(0, PROMPT, list(range(1, 16)), sampling=regex("(a{1000}){1000}"))
    result = process(session, step(2, [(0, 0, len(PROMPT)), (1, len(PROMPT), 1)], started_rows=(start,)))
    assert isinstance(result, StepResult)
    assert time.monotonic() - began < 1.0
    assert result.num_sampled[1] == 1


def test_no_rules_no_objects() -> None:
    """Rows without a grammar never wait for the vocabulary."""
    session = session_of(ConstraintMaker(broken))
    run(session, {0: RowSampling()}, 1)
    assert not session._table.rules
    assert np.all(session._table.rows["failed"] == 0)
