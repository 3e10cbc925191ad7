"""One session with a scripted model: order of steps, stored results, what a step may say, and what a failure leaves."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from executor.ids import SessionId
from executor.session import MAX_STORED_RESULTS, Session
from executor.step import (
    MODEL_ERROR,
    BlockTable,
    RowSampling,
    RowStart,
    Step,
    StepError,
    StepFailed,
    StepGap,
    StepResult,
    TableExtension,
)
from tests.executor_cases import BLOCK, LIMITS, ScriptedRunner, ints, process, row, scripted_session, step


def result_of(session: Session, request: Step) -> StepResult:
    outcome = process(session, request)
    assert isinstance(outcome, StepResult), outcome
    return outcome


def started(runner: ScriptedRunner | None = None) -> Session:
    """A session with one row of 3 tokens in slot 2, prefilled: it knows 4 tokens, 3 of them computed."""
    session = scripted_session(runner)
    result = result_of(session, step(1, [(2, 0, 3)], started_rows=(row(2, [10, 11, 12], [5, 6]),)))
    assert result.token_ids.tolist() == [13]
    return session


# ------------------------------------------------------------------------------------------------------ the happy way


def test_a_row_samples_only_when_its_last_known_token_is_computed():
    """Field failure 15: no token in mid-prefill, one with the last chunk."""
    session = scripted_session()
    first = result_of(session, step(1, [(0, 0, 2)], started_rows=(row(0, [10, 11, 12, 13, 14], [1, 2]),)))
    second = result_of(session, step(2, [(0, 2, 2)]))
    third = result_of(session, step(3, [(0, 4, 1)]))
    assert [each.num_sampled.tolist() for each in (first, second, third)] == [[0], [0], [1]]
    assert third.token_ids.tolist() == [15]


def test_the_next_step_needs_no_sight_of_the_result():
    """The executor feeds its own tokens: 13, then 14, then 15."""
    runner = ScriptedRunner()
    session = started(runner)
    tokens = [result_of(session, step(2 + i, [(2, 3 + i, 1)])).token_ids.tolist() for i in range(3)]
    assert tokens == [[14], [15], [16]]
    assert runner.batches[1].input_ids.tolist() == [13]
    assert runner.batches[1].positions.tolist() == [3]


def test_rows_mix_and_keep_the_steps_order():
    session = started()
    outcome = result_of(
        session, step(2, [(4, 0, 2), (2, 3, 1), (1, 0, 1)], started_rows=(row(4, [20, 21, 22], [7]), row(1, [30], [8])))
    )
    assert outcome.num_sampled.tolist() == [0, 1, 1]
    assert outcome.token_ids.tolist() == [14, 31]


def test_a_batch_says_where_everything_lies():
    runner = ScriptedRunner()
    session = scripted_session(runner)
    rows = (row(0, list(range(10, 16)), [9, 4], computed=3), row(3, [40], [7]))
    result_of(session, step(1, [(3, 0, 1), (0, 3, 3)], started_rows=rows))
    batch = runner.batches[0]
    assert batch.input_ids.tolist() == [40, 13, 14, 15]
    assert batch.positions.tolist() == [0, 3, 4, 5]
    assert batch.logits_tokens.tolist() == [0, 3]
    assert batch.attention.query_starts.tolist() == [0, 1, 4]
    assert batch.attention.context_lengths.tolist() == [1, 6]
    assert batch.attention.tables.tolist() == [[7, 0], [9, 4]]
    assert batch.attention.write_blocks.tolist() == [7, 9, 4, 4]
    assert batch.attention.write_offsets.tolist() == [0, 3, 0, 1]
    assert batch.sampling.position.tolist() == [1, 6]


def test_extensions_append_to_tables():
    runner = ScriptedRunner()
    session = scripted_session(runner)
    rows = (row(0, [1] * 4, [3]), row(1, [2] * 4, [4]))
    result_of(session, step(1, [(0, 0, 4), (1, 0, 4)], started_rows=rows))
    grow = TableExtension(0, ints(1, 0), ints(1, 2), ints(10, 11, 12))
    result_of(session, step(2, [(0, 4, 1), (1, 4, 1)], extensions=(grow,)))
    assert runner.batches[1].attention.tables.tolist() == [[3, 11], [4, 10]]


def test_a_slot_is_taken_over_in_one_step():
    """Retire comes before start."""
    session = started()
    outcome = result_of(session, step(2, [(2, 0, 1)], retired_slots=ints(2), started_rows=(row(2, [50], [5]),)))
    assert outcome.token_ids.tolist() == [51]
    assert session.num_rows == 1


def test_copies_go_to_the_runner_even_when_nothing_runs():
    runner = ScriptedRunner()
    session = started(runner)
    result_of(session, step(2, copy_sources=ints(5, 6), copy_targets=ints(6, 7)))
    assert runner.copies[1] == ([5, 6], [6, 7])
    assert runner.batches[1] is None


def test_long_histories_and_tables_grow():
    runner = ScriptedRunner()
    limits = replace(LIMITS, num_blocks=500, max_context_tokens=2000, max_tokens_per_step=2000)
    session = Session(SessionId(1), 2, limits, runner)
    blocks = list(range(1, 400))
    result_of(session, step(1, [(1, 0, 1500)], started_rows=(row(1, [7] * 1500, blocks[:375]),)))
    extension = TableExtension(0, ints(1), ints(24), ints(*blocks[375:]))
    for index in range(40):
        extensions = (extension,) if index == 0 else ()
        result_of(session, step(2 + index, [(1, 1500 + index, 1)], extensions=extensions))
    assert runner.batches[-1].input_ids.tolist() == [7 + 40]


def test_suppressed_ids_hold_until_the_history_is_long_enough():
    """Field failure 22."""
    runner = ScriptedRunner()
    session = scripted_session(runner)
    sampling = RowSampling(suppressed_token_ids=ints(8, 9), suppress_until=5)
    result_of(session, step(1, [(0, 0, 3)], started_rows=(row(0, [1, 2, 3], [1, 2], sampling=sampling),)))
    result_of(session, step(2, [(0, 3, 1)]))
    result_of(session, step(3, [(0, 4, 1)]))
    assert [batch.adjustments.banned_ids.tolist() for batch in runner.batches] == [[8, 9], [8, 9], []]
    assert runner.batches[0].adjustments.banned_rows.tolist() == [0, 0]


# --------------------------------------------------------------------------------------------- ids, results, failures


def test_a_step_sent_again_returns_the_stored_result():
    runner = ScriptedRunner()
    session = started(runner)
    second = result_of(session, step(2, [(2, 3, 1)]))
    assert process(session, step(2, [(2, 3, 1)])) is second
    assert len(runner.batches) == 2


def test_acknowledged_results_are_dropped():
    session = started()
    result_of(session, step(2, [(2, 3, 1)], acknowledged_step=1))
    assert process(session, step(1)) == StepGap(2)
    session.acknowledge(2)
    assert session.num_stored_results == 0


@pytest.mark.parametrize("step_id", [3, 7, 2**63])
def test_a_skipped_id_is_a_gap(step_id):
    session = started()
    assert process(session, step(step_id, [(2, 3, 1)])) == StepGap(1)
    assert result_of(session, step(2, [(2, 3, 1)])).token_ids.tolist() == [14]


def test_a_failed_step_changes_nothing_and_its_id_is_used_again():
    runner = ScriptedRunner()
    session = started(runner)
    runner.error = StepError(MODEL_ERROR, "broken")
    takes_over = step(2, [(2, 0, 1)], acknowledged_step=1, retired_slots=ints(2), started_rows=(row(2, [50], [9]),))
    assert process(session, takes_over) == StepFailed(2, MODEL_ERROR, "broken")
    assert process(session, step(3, [(2, 4, 1)])) == StepGap(1)  # was in flight behind it
    assert isinstance(process(session, step(1)), StepResult)  # nor was the acknowledgement applied
    assert result_of(session, step(2, [(2, 3, 1)])).token_ids.tolist() == [14]
    assert runner.batches[-1].attention.tables.tolist() == [[5]]


def test_one_row_without_finite_logits_spoils_no_other():
    runner = ScriptedRunner()
    session = scripted_session(runner)
    runner.not_finite = {1}
    rows = tuple(row(slot, [10 * slot], [slot + 1]) for slot in range(3))
    outcome = result_of(session, step(1, [(0, 0, 1), (1, 0, 1), (2, 0, 1)], started_rows=rows))
    assert outcome.num_sampled.tolist() == [1, 0, 1]
    assert outcome.token_ids.tolist() == [1, 21]
    assert [(failure.row, failure.reason) for failure in outcome.failures] == [(1, "LOGITS_NOT_FINITE")]


def test_a_failed_row_in_a_step_that_was_already_sent_is_skipped():
    """Two in flight: the router named the row again before it saw the failure. The others must not suffer."""
    runner = ScriptedRunner()
    session = scripted_session(runner)
    runner.not_finite = {0}
    result_of(session, step(1, [(0, 0, 1), (1, 0, 1)], started_rows=(row(0, [10], [1]), row(1, [20], [2]))))
    behind = result_of(session, step(2, [(0, 1, 1), (1, 1, 1)]))
    assert behind.num_sampled.tolist() == [0, 1]
    assert behind.token_ids.tolist() == [22]
    assert [failure.row for failure in behind.failures] == [0]
    last = result_of(session, step(3, [(0, 0, 1)], retired_slots=ints(0), started_rows=(row(0, [30], [1]),)))
    assert (last.token_ids.tolist(), last.failures) == ([31], ())


def test_a_router_that_acknowledges_nothing_is_refused_before_memory_fills():
    session = scripted_session()
    for step_id in range(1, MAX_STORED_RESULTS + 1):
        result_of(session, step(step_id))
    outcome = process(session, step(MAX_STORED_RESULTS + 1))
    assert isinstance(outcome, StepFailed)
    assert "acknowledge" in outcome.message
    result_of(session, step(MAX_STORED_RESULTS + 1, acknowledged_step=MAX_STORED_RESULTS))


# ------------------------------------------------------------------------------------------------- what a step may say

TABLES = (BlockTable(0, ints(7)),)


def start(**fields: object) -> tuple[RowStart, ...]:
    values: dict = {"slot": 0, "incarnation": 1, "token_ids": ints(1, 2), "num_computed_tokens": 0, "tables": TABLES}
    return (RowStart(**(values | {"sampling": RowSampling()} | fields)),)


def sampling(**fields: object) -> tuple[RowStart, ...]:
    return start(sampling=RowSampling(**({"temperature": 1.0} | fields)))


INVALID: dict[str, tuple[Callable[[], Step], str]] = {
    "slot out of range": (lambda: step(2, [(8, 0, 1)]), "slots: 8"),
    "slot twice": (lambda: step(2, [(2, 3, 1), (2, 3, 1)]), "slots: a slot appears twice"),
    "empty slot": (lambda: step(2, [(3, 0, 1)]), "slot 3 holds no row"),
    "wrong start": (lambda: step(2, [(2, 2, 1)]), "start_positions[0]: 2"),
    "more tokens than known": (lambda: step(2, [(2, 3, 2)]), "has not as many tokens"),
    "no token": (lambda: step(2, [(2, 3, 0)]), "runs no token"),
    "arrays of different lengths": (
        lambda: Step(2, slots=ints(2), start_positions=ints(), num_tokens=ints(1)),
        "differ",
    ),
    "over the budget": (lambda: step(2, [(0, 0, 41)], started_rows=start()), "at most 40"),
    "past its blocks": (
        lambda: step(2, [(0, 0, 5)], started_rows=start(token_ids=ints(*[1] * 5))),
        "runs past its blocks",
    ),
    "retired empty slot": (lambda: step(2, retired_slots=ints(1)), "retired_slots: slot 1 holds no row"),
    "retired twice": (lambda: step(2, retired_slots=ints(2, 2)), "retired_slots: a slot appears twice"),
    "start in a taken slot": (lambda: step(2, started_rows=start(slot=2)), "the slot holds a row"),
    "two starts in a slot": (lambda: step(2, started_rows=start() + start()), "the slot holds a row"),
    "start without tokens": (lambda: step(2, started_rows=start(token_ids=ints())), "0 tokens"),
    "start past the context": (lambda: step(2, started_rows=start(token_ids=ints(*[1] * 66))), "66 tokens"),
    "unknown token": (lambda: step(2, started_rows=start(token_ids=ints(100))), "100 is not below 100"),
    "nothing left to compute": (lambda: step(2, started_rows=start(num_computed_tokens=2)), "leaves no token"),
    "computed beyond blocks": (
        lambda: step(2, started_rows=start(token_ids=ints(*[1] * 9), num_computed_tokens=5)),
        "do not lie",
    ),
    "no table": (lambda: step(2, started_rows=start(tables=())), "expected one table"),
    "another KV group": (lambda: step(2, started_rows=start(tables=(BlockTable(1, ints(7)),))), "kv_group 0"),
    "reserved block": (lambda: step(2, started_rows=start(tables=(BlockTable(0, ints(0)),))), "block 0"),
    "block out of range": (lambda: step(2, started_rows=start(tables=(BlockTable(0, ints(32)),))), "block 32"),
    "block twice": (lambda: step(2, started_rows=start(tables=(BlockTable(0, ints(7, 7)),))), "a block appears twice"),
    "temperature below 0": (lambda: step(2, started_rows=sampling(temperature=-1.0)), "temperature: -1.0"),
    "temperature NaN": (lambda: step(2, started_rows=sampling(temperature=float("nan"))), "temperature: nan"),
    "top_p 0": (lambda: step(2, started_rows=sampling(top_p=0.0)), "top_p: 0.0"),
    "top_p NaN": (lambda: step(2, started_rows=sampling(top_p=float("nan"))), "top_p: nan"),
    "min_p above 1": (lambda: step(2, started_rows=sampling(min_p=1.5)), "min_p: 1.5"),
    "unknown suppressed id": (
        lambda: step(2, started_rows=sampling(suppressed_token_ids=ints(100))),
        "100 is not below",
    ),
    "all suppressed": (lambda: step(2, started_rows=sampling(suppressed_token_ids=np.arange(100))), "no token"),
    "all that is allowed suppressed": (
        lambda: step(2, started_rows=sampling(suppressed_token_ids=ints(4, 5), allowed_token_ids=ints(5))),
        "no token",
    ),
    "all that is allowed may become banned": (
        lambda: step(
            2,
            started_rows=sampling(allowed_token_ids=ints(5), banned_lengths=ints(2), banned_token_ids=ints(7, 5)),
        ),
        "no token",
    ),
    "unknown allowed id": (lambda: step(2, started_rows=sampling(allowed_token_ids=ints(100))), "allowed_token_ids"),
    "banned lengths": (
        lambda: step(2, started_rows=sampling(banned_lengths=ints(2), banned_token_ids=ints(7))),
        "banned_lengths",
    ),
    "a banned sequence of nothing": (
        lambda: step(2, started_rows=sampling(banned_lengths=ints(0, 1), banned_token_ids=ints(7))),
        "banned_lengths",
    ),
    "a bias without an id": (
        lambda: step(2, started_rows=sampling(biases=np.ones(1, dtype=np.float32))),
        "bias_token_ids",
    ),
    "two biases of an id": (
        lambda: step(2, started_rows=sampling(bias_token_ids=ints(3, 3), biases=np.ones(2, dtype=np.float32))),
        "bias_token_ids",
    ),
    "an infinite bias": (
        lambda: step(2, started_rows=sampling(bias_token_ids=ints(3), biases=np.full(1, np.inf, dtype=np.float32))),
        "biases",
    ),
    "presence penalty NaN": (lambda: step(2, started_rows=sampling(presence_penalty=float("nan"))), "presence"),
    "repetition penalty below 0": (lambda: step(2, started_rows=sampling(repetition_penalty=-1.0)), "repetition"),
    "more prompt than history": (lambda: step(2, started_rows=sampling(num_prompt_tokens=99)), "num_prompt_tokens"),
    "prompt log-probabilities from the first token": (
        lambda: step(2, started_rows=sampling(prompt_logprobs_until=1)),
        "prompt_logprobs_from",
    ),
    "prompt log-probabilities past the history": (
        lambda: step(2, started_rows=sampling(prompt_logprobs_from=1, prompt_logprobs_until=99)),
        "prompt_logprobs_from",
    ),
    "extension of an empty slot": (
        lambda: step(2, extensions=(TableExtension(0, ints(1), ints(1), ints(9)),)),
        "slot 1 holds no row",
    ),
    "extension counts": (lambda: step(2, extensions=(TableExtension(0, ints(2), ints(2), ints(9)),)), "do not match"),
    "extension by a held block": (
        lambda: step(2, extensions=(TableExtension(0, ints(2), ints(1), ints(5)),)),
        "a block twice",
    ),
    "extension of another group": (
        lambda: step(2, extensions=(TableExtension(1, ints(2), ints(1), ints(9)),)),
        "kv_group: 1",
    ),
    "extension by block 0": (lambda: step(2, extensions=(TableExtension(0, ints(2), ints(1), ints(0)),)), "block 0"),
    "unpaired copies": (lambda: step(2, copy_sources=ints(1, 2), copy_targets=ints(3)), "2 sources, 1 targets"),
    "copy into block 0": (lambda: step(2, copy_sources=ints(1), copy_targets=ints(0)), "copy_targets: block 0"),
    "two copies into one": (lambda: step(2, copy_sources=ints(1, 2), copy_targets=ints(3, 3)), "target of two copies"),
    "acknowledges the future": (lambda: step(2, acknowledged_step=2), "acknowledged_step: 2"),
    "two rows write one block": (
        lambda: step(2, [(2, 3, 1), (0, 0, 1)], started_rows=start(tables=(BlockTable(0, ints(5)),))),
        "write block 5",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_step_is_named_and_changes_nothing(name):
    """Field failure 28 for the internal protocol: refused before anything changes, and the next step is fine."""
    make, text = INVALID[name]
    runner = ScriptedRunner()
    session = started(runner)
    outcome = process(session, make())
    assert isinstance(outcome, StepFailed)
    assert outcome.reason == "INVALID_STEP"
    assert text in outcome.message
    assert len(runner.batches) == 1
    assert result_of(session, step(2, [(2, 3, 1)])).token_ids.tolist() == [14]


def test_random_steps_agree_with_a_plain_model_of_rows():
    """Field failure 8 for slots: 3,000 random steps, valid and not, against dictionaries and lists."""
    rng = np.random.default_rng(0)
    session = scripted_session()
    rows: dict[int, dict] = {}
    free = set(range(1, 32))
    step_id = 1
    for _ in range(3000):
        retired = [slot for slot in rows if rng.random() < 0.15]
        after = {slot: dict(each) for slot, each in rows.items() if slot not in retired}
        released = {block for slot in retired for block in rows[slot]["blocks"]}
        spare = sorted(free | released)
        starts = []
        for slot in range(8):
            if slot not in after and rng.random() < 0.3 and len(spare) >= 3:
                tokens = rng.integers(0, 100, rng.integers(1, 9)).tolist()
                blocks = [spare.pop(int(rng.integers(len(spare)))) for _ in range(3)]
                after[slot] = {"tokens": tokens, "computed": 0, "blocks": blocks}
                starts.append(row(slot, tokens, blocks))
        runs = []
        for slot, each in after.items():
            todo = min(len(each["tokens"]) - each["computed"], len(each["blocks"]) * BLOCK - each["computed"])
            if todo > 0 and rng.random() < 0.7:
                runs.append((slot, each["computed"], int(rng.integers(1, todo + 1))))
        request = step(
            step_id, runs, retired_slots=ints(*retired), started_rows=tuple(starts), acknowledged_step=step_id - 1
        )
        if rng.random() < 0.2:
            bad = step(step_id, [*runs, (7, 63, 1)], retired_slots=ints(*retired), started_rows=tuple(starts))
            assert isinstance(process(session, bad), StepFailed)
        outcome = result_of(session, request)
        expected = []
        for slot, begin, count in runs:
            each = after[slot]
            each["computed"] = begin + count
            if each["computed"] == len(each["tokens"]):
                expected.append((each["tokens"][-1] + 1) % 100)
                each["tokens"] = [*each["tokens"], expected[-1]]
        assert outcome.token_ids.tolist() == expected
        rows, free, step_id = after, set(range(1, 32)) - {b for e in after.values() for b in e["blocks"]}, step_id + 1
        assert session.num_rows == len(rows)


def test_a_row_draws_several_tokens_when_it_first_samples():
    """For n answers: one token for each choice from the same logits, and then one at a time, beside other rows."""
    runner = ScriptedRunner(lambda batch: 10 + batch.sampling.choice_index.numpy())
    session = scripted_session(runner)
    several = RowSampling(temperature=1.0, choice_index=2, num_samples=3)
    rows = (row(0, [1, 2, 3], [1]), row(1, [4, 5, 6], [2], sampling=several))
    first = process(session, step(1, [(0, 0, 3), (1, 0, 2)], started_rows=rows))
    assert (first.num_sampled.tolist(), first.token_ids.tolist()) == ([1, 0], [10])
    second = process(session, step(2, [(1, 2, 1), (0, 3, 1)]))
    assert (second.num_sampled.tolist(), second.token_ids.tolist()) == ([3, 1], [12, 13, 14, 10])
    assert runner.batches[1].logits_tokens.tolist() == [0, 0, 0, 1]
    assert runner.batches[1].sampling.choice_index.tolist() == [2, 3, 4, 0]
    third = process(session, step(3, [(1, 3, 1)]))
    assert (third.num_sampled.tolist(), third.token_ids.tolist()) == ([1], [12])
    assert runner.batches[2].input_ids.tolist() == [12], "its own history went on with its first draw"


def test_a_row_of_several_draws_whose_logits_are_not_finite_gives_none():
    runner = ScriptedRunner()
    session = scripted_session(runner)
    runner.not_finite = {0, 1}
    several = RowSampling(num_samples=2)
    outcome = process(session, step(1, [(0, 0, 2)], started_rows=(row(0, [1, 2], [1], sampling=several),)))
    assert (outcome.num_sampled.tolist(), outcome.token_ids.tolist()) == ([0], [])
    assert [failure.row for failure in outcome.failures] == [0]


def test_more_draws_than_slots_are_refused():
    session = scripted_session(max_rows=4)
    for num_samples, reason in ((5, "INVALID_STEP"), (4, None)):
        started = (row(0, [1, 2], [1], sampling=RowSampling(num_samples=num_samples)),)
        outcome = process(session, step(1, [(0, 0, 2)], started_rows=started))
        assert getattr(outcome, "reason", None) == reason
