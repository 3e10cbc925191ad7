"""Properties of the pure plan function, over random rows and budgets."""

from hypothesis import given
from hypothesis import strategies as st

from router.ids import Slot
from router.scheduler import Row, mark_sent, num_planned_tokens, plan


@st.composite
def a_row(draw: st.DrawFn, slot: int) -> Row:
    num_prompt = draw(st.integers(1, 20))
    max_tokens = draw(st.integers(1, 6))
    num_tokens = num_prompt + draw(st.integers(0, max_tokens))
    num_sent = draw(st.integers(0, num_tokens - 1))
    return Row(
        slot=Slot(slot),
        order=(draw(st.integers(-1, 1)), slot),
        num_tokens=num_tokens,
        num_sent=num_sent,
        num_computed=draw(st.integers(0, num_sent)),
        capacity_tokens=draw(st.integers(0, 8)) * 4,
        max_kv_tokens=num_prompt + max_tokens - 1,
    )


@st.composite
def some_rows(draw: st.DrawFn) -> list[Row]:
    rows = [draw(a_row(slot)) for slot in range(draw(st.integers(0, 8)))]
    return draw(st.permutations(rows))


@given(some_rows(), st.integers(1, 40))
def test_a_plan_is_within_budget_blocks_and_length(rows: list[Row], budget: int) -> None:
    runs = plan(rows, budget)
    by_slot = {row.slot: row for row in rows}
    assert num_planned_tokens(runs) <= budget
    assert len({run.slot for run in runs}) == len(runs)
    for run in runs:
        row = by_slot[run.slot]
        end = run.start + run.num_tokens
        assert run.num_tokens > 0
        assert run.start == row.num_sent
        assert end <= row.capacity_tokens
        assert end <= row.max_kv_tokens, "the last token of an answer is never computed"
        assert run.samples == (end == row.num_tokens)


@given(some_rows(), st.integers(1, 40))
def test_a_plan_wastes_no_budget_and_forgets_nobody_in_front(rows: list[Row], budget: int) -> None:
    runs = plan(rows, budget)
    left = budget - num_planned_tokens(runs)
    planned = {run.slot: run.num_tokens for run in runs}
    short = [row for row in rows if planned.get(row.slot, 0) < row.num_runnable]
    assert not left or not short, "budget is left while a row could run"
    for row in short:
        behind = [
            other
            for other in rows
            if other.slot in planned and other.order > row.order and other.is_decode == row.is_decode
        ]
        assert not behind, "a later row of the same kind runs while an earlier one is short"


@given(some_rows(), st.integers(1, 40))
def test_decodes_come_before_prefills(rows: list[Row], budget: int) -> None:
    runs = plan(rows, budget)
    decodes = [row for row in rows if row.num_runnable and row.is_decode]
    assert {run.slot for run in runs} >= {row.slot for row in sorted(decodes, key=lambda row: row.order)[:budget]}


@given(some_rows(), st.integers(1, 40))
def test_planning_changes_nothing_and_is_repeatable(rows: list[Row], budget: int) -> None:
    before = [repr(row) for row in rows]
    assert plan(rows, budget) == plan(list(reversed(rows)), budget)
    assert [repr(row) for row in rows] == before


@given(some_rows(), st.integers(1, 7))
def test_any_budget_brings_every_row_to_its_end(rows: list[Row], budget: int) -> None:
    """Field failure 15: budgets so small that rows idle; every row still gets there, and idle rows do not move."""
    for row in rows:
        row.capacity_tokens = 1000
    for _ in range(2000):
        runs = plan(rows, budget)
        if not runs:
            break
        moved = {run.slot: run for run in runs}
        for row in rows:
            before = (row.num_sent, row.num_tokens)
            if row.slot in moved:
                mark_sent(row, moved[row.slot])
            assert (row.slot in moved) == ((row.num_sent, row.num_tokens) != before)
    for row in rows:
        assert row.num_sent == row.max_kv_tokens
        assert row.num_tokens == row.max_kv_tokens + 1, "the last sampled token ends the answer, none is beyond it"


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert plan([], 10) == ()


def test_a_row_whose_prompt_is_scored_runs_in_smaller_pieces() -> None:
    """Its logits are all kept for a step; the budget that it leaves goes to the next one."""
    scored, other = (Row(Slot(slot), (0, slot), 1000, 0, 0, 1024, 1000) for slot in range(2))
    scored.max_run_tokens = 256
    assert [(run.slot, run.num_tokens) for run in plan([scored, other], 600)] == [(0, 256), (1, 344)]


@given(some_rows(), st.integers(1, 40), st.integers(1, 10))
def test_prompts_keep_decodes_waiting_for_so_many_tokens_at_most(rows: list[Row], budget: int, beside: int) -> None:
    decodes = {row.slot for row in rows if row.num_runnable and row.is_decode}
    runs = plan(rows, budget, beside)
    num_prefill = sum(run.num_tokens for run in runs if run.slot not in decodes)
    if decodes:
        assert num_prefill <= beside
        assert {run.slot for run in runs} & decodes, "prompts never go in front"
    else:
        assert runs == plan(rows, budget), "nobody waits: the whole budget"
    short = [row for row in rows if row.num_runnable > sum(run.num_tokens for run in runs if run.slot == row.slot)]
    assert not short or num_prefill == beside or num_planned_tokens(runs) == budget
