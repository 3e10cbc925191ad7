"""Rows that answer with their best tokens and sample none: scores, appended tokens, and what a failure takes back."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from executor.ids import SessionId
from executor.runner import Runner
from executor.session import Session
from executor.step import MODEL_ERROR, RowSampling, Step, StepError, StepFailed, StepResult
from tests.executor_cases import LIMITS, NoArena, NoAttention, TableModel, ints, process, row, step, table_session

VOCABULARY = 12
LIMIT = {"vocabulary_size": VOCABULARY}


def table() -> torch.Tensor:
    """Logits behind each token; every fourth is as high as its neighbour."""
    logits = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2
    logits[:, 3::4] = logits[:, 2::4]
    return logits


def result_of(session: Session, request: Step) -> StepResult:
    outcome = process(session, request)
    assert isinstance(outcome, StepResult), outcome
    return outcome


def best_directly(scores: np.ndarray, count: int) -> list[tuple[int, float]]:
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    return [(token, float(scores[token])) for token in order[:count] if scores[token] > -np.inf]


def found(result: StepResult) -> list[list[tuple[int, float]]]:
    assert result.candidates is not None
    pairs = list(zip(result.candidates.token_ids.tolist(), result.candidates.scores.tolist(), strict=True))
    ends = np.cumsum(result.candidates.counts)
    return [pairs[end - count : end] for end, count in zip(ends, result.candidates.counts, strict=True)]


def assert_equal(pairs: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    assert [token for token, _ in pairs] == [token for token, _ in expected]
    np.testing.assert_allclose([score for _, score in pairs], [score for _, score in expected], rtol=1e-5)


def logprobs(token: int) -> np.ndarray:
    return torch.log_softmax(table()[token].double(), dim=-1).numpy()


def test_candidates_are_the_best_and_the_row_waits_for_one() -> None:
    session = table_session(table(), **LIMIT)
    starts = (row(0, [1, 2, 5], [1, 2], sampling=RowSampling(num_candidates=5)), row(1, [1, 4], [3]))
    first = result_of(session, step(1, [(0, 0, 3), (1, 0, 2)], started_rows=starts))
    assert first.num_sampled.tolist() == [0, 1]
    assert first.token_ids.tolist() == [int(table()[4].argmax())]
    assert_equal(found(first)[0], best_directly(logprobs(5), 5))
    assert isinstance(process(session, step(2, [(0, 3, 1)])), StepFailed), "nothing to compute before a token is chosen"
    second = result_of(session, step(2, [(0, 3, 1)], appended_slots=ints(0), appended_token_ids=ints(7)))
    assert_equal(found(second)[0], best_directly(logprobs(7), 5))
    assert second.num_sampled.tolist() == [0]


def test_rules_change_log_probabilities_not_logits() -> None:
    """As in `transformers`: nothing is normalized again, and what is out is left out."""
    sampling = RowSampling(
        num_candidates=VOCABULARY,
        num_prompt_tokens=2,
        repetition_penalty=1.5,
        frequency_penalty=0.25,
        presence_penalty=0.5,
        bias_token_ids=ints(4),
        biases=np.array([3.0], dtype=np.float32),
        suppressed_token_ids=ints(0),
        suppress_until=4,
        banned_lengths=ints(2),
        banned_token_ids=ints(7, 9),
    )
    session = table_session(table(), **LIMIT)
    starts = (row(0, [1, 2, 7], [1, 2], sampling=sampling),)
    first = result_of(session, step(1, [(0, 0, 3)], started_rows=starts))
    expected = logprobs(7)
    expected[4] += 3
    expected[[1, 2, 7]] *= 1.5
    expected[7] -= 0.75
    expected[[0, 9]] = -np.inf
    assert_equal(found(first)[0], best_directly(expected, VOCABULARY))
    second = result_of(session, step(2, [(0, 3, 1)], appended_slots=ints(0), appended_token_ids=ints(7)))
    expected = logprobs(7)
    expected[4] += 3
    expected[[1, 2, 7]] *= 1.5
    expected[7] -= 2 * 0.25 + 0.5
    expected[9] = -np.inf
    assert_equal(found(second)[0], best_directly(expected, VOCABULARY))


class FailingRunner(Runner):
    """Fails where it is told to."""

    fails = False

    def begin(self, *arguments):  # type: ignore[no-untyped-def]
        if self.fails:
            raise StepError(MODEL_ERROR, "as the test wants it")
        return super().begin(*arguments)


def test_a_failed_step_takes_its_appended_tokens_back() -> None:
    """Length and counts are as before: the step goes out again with another token."""
    runner = FailingRunner(TableModel(table()), NoArena(), NoAttention())  # type: ignore[arg-type]
    session = Session(SessionId(1), 4, replace(LIMITS, **LIMIT), runner)
    sampling = RowSampling(num_candidates=VOCABULARY, frequency_penalty=1.0, num_prompt_tokens=1)
    result_of(session, step(1, [(0, 0, 1)], started_rows=(row(0, [3], [1], sampling=sampling),)))
    runner.fails = True
    failed = process(session, step(2, [(0, 1, 1)], appended_slots=ints(0), appended_token_ids=ints(8)))
    assert isinstance(failed, StepFailed)
    runner.fails = False
    again = result_of(session, step(2, [(0, 1, 1)], appended_slots=ints(0), appended_token_ids=ints(6)))
    expected = logprobs(6)
    expected[6] -= 1
    assert_equal(found(again)[0], best_directly(expected, VOCABULARY))


def test_each_candidate_has_its_log_probability_and_the_row_its_alternatives_once() -> None:
    """Raw ones, beside a row that samples: entries in order of row."""
    session = table_session(table(), **LIMIT)
    biased = RowSampling(
        num_candidates=3,
        logprobs=True,
        num_top_logprobs=2,
        bias_token_ids=ints(6),
        biases=np.array([9.0], dtype=np.float32),
    )
    starts = (
        row(0, [5], [1], sampling=RowSampling(logprobs=True, num_top_logprobs=1)),
        row(1, [5], [2], sampling=biased),
        row(2, [4], [3], sampling=RowSampling(logprobs=True)),
    )
    result = result_of(session, step(1, [(0, 0, 1), (1, 0, 1), (2, 0, 1)], started_rows=starts))
    entries = result.sampled_logprobs
    assert entries is not None
    assert entries.rows.tolist() == [0, 1, 1, 1, 2]
    assert entries.num_top.tolist() == [1, 2, 0, 0, 0]
    candidates = [token for token, _ in found(result)[0]]
    assert candidates[0] == 6
    assert entries.token_ids[1:4].tolist() == candidates
    np.testing.assert_allclose(entries.logprobs[1:4], logprobs(5)[candidates], rtol=1e-5)
    assert entries.top_token_ids[1:3].tolist() == [token for token, _ in best_directly(logprobs(5), 2)]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"appended_slots": ints(0), "appended_token_ids": ints()}, "appended_slots"),
        ({"appended_slots": ints(0, 0), "appended_token_ids": ints(1, 1)}, "appended_slots"),
        ({"appended_slots": ints(0), "appended_token_ids": ints(VOCABULARY)}, "appended_token_ids"),
        ({"appended_slots": ints(1), "appended_token_ids": ints(1)}, "appended_slots"),
        ({"appended_slots": ints(2), "appended_token_ids": ints(1)}, "appended_slots"),
        ({"started_rows": (row(3, [1], [4], sampling=RowSampling(num_candidates=VOCABULARY + 1)),)}, "num_candidates"),
        (
            {"started_rows": (row(3, [1], [4], sampling=RowSampling(num_candidates=2, num_samples=2)),)},
            "num_candidates",
        ),
    ],
)
def test_an_invalid_step_is_named_and_changes_nothing(fields: dict, named: str) -> None:
    """Slot 1 samples by itself, and slot 2 is not computed whole."""
    session = table_session(table(), **LIMIT)
    asks = RowSampling(num_candidates=2)
    starts = (row(0, [1], [1], sampling=asks), row(1, [1], [2]), row(2, [1, 2], [3], sampling=asks))
    result_of(session, step(1, [(0, 0, 1), (1, 0, 1), (2, 0, 1)], started_rows=starts))
    outcome = process(session, step(2, **fields))
    assert isinstance(outcome, StepFailed)
    assert named in outcome.message
    result_of(session, step(2, [(0, 1, 1)], appended_slots=ints(0), appended_token_ids=ints(1)))
