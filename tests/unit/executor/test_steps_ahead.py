"""Steps that begin before the tokens of the one before are known: what they answer, in what order, and what fails."""

import asyncio
import random
import threading
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from executor.begun import BegunStep
from executor.ids import RouterEpoch, RouterId, SessionId
from executor.session import Session
from executor.session_host import SessionHost
from executor.sessions import Opening, SessionStore
from executor.slots import UNKNOWN
from executor.step import MODEL_ERROR, RowSampling, Step, StepFailed, StepGap, StepOutcome, StepResult
from tests.executor_cases import LIMITS, ints, process, row, step
from tests.late_runner import LateRunner

WIDE = replace(LIMITS, num_blocks=400)
ROWS = 4
SAMPLINGS = (
    RowSampling(),
    RowSampling(bias_token_ids=ints(3, 9), biases=np.float32([1, 2])),
    RowSampling(suppressed_token_ids=ints(5), suppress_until=8),
    RowSampling(frequency_penalty=0.5),
    RowSampling(banned_lengths=ints(2), banned_token_ids=ints(4, 6)),
    RowSampling(num_samples=3),
)


def session_of(runner: LateRunner) -> Session:
    return Session(SessionId(1), ROWS, WIDE, runner)


def tagged(number: int, *arguments: object, **fields: object) -> Step:
    """A step whose number the runner can read."""
    return step(number, *arguments, copy_sources=ints(1), copy_targets=ints(100 + number), **fields)  # type: ignore[arg-type]


class Planner:
    """Random steps that keep the protocol, planned without sight of any token."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._rows: dict[int, list[int]] = {}  # slot -> tokens known, tokens computed, decodes left

    def plan(self, number: int) -> Step:
        rng, retired, started, runs = self._rng, [], [], []
        for slot in range(ROWS):
            held = self._rows.get(slot)
            if held is not None and (held[2] <= 0 or rng.random() < 0.05):
                retired.append(slot)
                held = self._rows.pop(slot, None) and None
            if held is None and rng.random() < 0.5:
                length = rng.randint(1, 6)
                tokens = [rng.randrange(100) for _ in range(length)]
                blocks = range(2 + slot * 20, 2 + slot * 20 + 10)
                started.append(row(slot, tokens, blocks, sampling=rng.choice(SAMPLINGS)))
                held = self._rows[slot] = [length, 0, rng.randint(1, 12)]
            if held is not None and rng.random() < 0.9:
                count = rng.randint(1, held[0] - held[1])
                runs.append((slot, held[1], count))
                held[1] += count
                if held[1] == held[0]:
                    held[0], held[2] = held[0] + 1, held[2] - 1
        rng.shuffle(runs)
        fields = {"retired_slots": ints(*retired), "started_rows": tuple(started)}
        return tagged(number, runs, acknowledged_step=max(0, number - 3), **fields)


def drive(session: Session, steps: list[Step]) -> list[tuple[int, StepOutcome]]:
    """As a router with two steps in flight: what failed is sent again, with all behind it."""
    outcomes, window, number = [], deque(), 0
    while number < len(steps) or window:
        while len(window) < 2 and number < len(steps):
            window.append((number, session.begin(steps[number])))
            number += 1
        sent, begun = window.popleft()
        outcome = session.finish(begun) if isinstance(begun, BegunStep) else begun
        outcomes.append((sent, outcome))
        if isinstance(outcome, StepFailed):
            assert outcome.reason == MODEL_ERROR, outcome
            outcomes += [(later, session.finish(b) if isinstance(b, BegunStep) else b) for later, b in window]
            window.clear()
            number = sent
    return outcomes


def plain(outcome: StepOutcome) -> object:
    """Comparable."""
    if not isinstance(outcome, StepResult):
        return outcome
    return outcome.step_id, outcome.num_sampled.tolist(), outcome.token_ids.tolist(), outcome.failures


@pytest.mark.parametrize("seed", range(6))
def test_steps_ahead_answer_what_steps_one_by_one_answer(seed):
    """Rows come and go, fail, follow rules, draw several tokens; and the device fails now and then."""
    planner, rng = Planner(seed), random.Random(-seed)
    steps = [planner.plan(number) for number in range(1, 61)]
    failing = rng.sample(range(1, 61), 4 if seed % 2 else 0)
    found = []
    for is_prompt in (True, False):
        runner = LateRunner(is_prompt)
        runner.errors.update(failing)
        session = session_of(runner)
        found.append([(number, plain(outcome)) for number, outcome in drive(session, steps)])
        ahead = sum(kind == "ahead" for kind, _ in runner.events)
        assert ahead == 0 if is_prompt else ahead > 10, ahead
        for slot in range(ROWS):
            assert (session._table.history[slot, : session._table.rows["length"][slot]] != UNKNOWN).all()
    assert found[0] == found[1]
    assert sum(isinstance(outcome, StepFailed) for _, outcome in found[0]) == len(failing)


def prefilled(runner: LateRunner, sampling: RowSampling | None = None) -> Session:
    """Slot 0 knows 3 tokens, of which 2 are computed."""
    session = session_of(runner)
    start = row(0, [1, 2], [2, 3, 4, 5], sampling=sampling)
    assert isinstance(process(session, tagged(1, [(0, 0, 2)], started_rows=(start,))), StepResult)
    runner.events.clear()
    return session


def begin(session: Session, request: Step) -> BegunStep:
    begun = session.begin(request)
    assert isinstance(begun, BegunStep), begun
    return begun


def test_the_next_step_is_begun_before_a_token_is_read():
    runner = LateRunner()
    session = prefilled(runner)
    second, third = begin(session, tagged(2, [(0, 2, 1)])), begin(session, tagged(3, [(0, 3, 1)]))
    assert runner.events == [("begun", 2), ("ahead", 3)]
    assert isinstance(session.finish(third), StepResult)
    assert runner.events[2:] == [("computed", 2), ("taken", 2), ("computed", 3), ("taken", 3)]
    assert isinstance(second.outcome, StepResult), "the one before ends first"


def test_no_more_than_two_steps_are_unfinished():
    runner = LateRunner()
    session = prefilled(runner)
    for number in range(2, 6):
        begin(session, tagged(number, [(0, number, 1)]))
    assert ("taken", 3) in runner.events
    assert ("taken", 4) not in runner.events


@pytest.mark.parametrize(
    ("sampling", "waits"),
    [
        (RowSampling(frequency_penalty=0.5), True),
        (RowSampling(repetition_penalty=1.2), True),
        (RowSampling(banned_lengths=ints(2), banned_token_ids=ints(4, 6)), True),
        (RowSampling(banned_lengths=ints(1), banned_token_ids=ints(4)), False),
        (RowSampling(allowed_token_ids=ints(4, 5)), False),
        (RowSampling(suppressed_token_ids=ints(4), suppress_until=9), False),
        (RowSampling(temperature=1.0, top_k=5, seed=3), False),
        (RowSampling(logprobs=True, num_top_logprobs=2), False),
    ],
)
def test_a_row_whose_rules_look_at_its_tokens_waits_for_them(sampling, waits):
    runner = LateRunner()
    session = prefilled(runner, sampling)
    begin(session, tagged(2, [(0, 2, 1)]))
    begin(session, tagged(3, [(0, 3, 1)]))
    assert (("taken", 2) in runner.events) == waits


@pytest.mark.parametrize("sampling", [RowSampling(), RowSampling(num_candidates=2)])
def test_a_row_that_takes_the_slot_of_one_that_may_fail_waits(sampling):
    """What is still to be said of the other one would be said of it: its token, or that it failed."""
    runner = LateRunner()
    session = prefilled(runner)
    stays = row(1, [3, 4], [20, 21], sampling=sampling)
    assert isinstance(process(session, tagged(2, [(1, 0, 1)], started_rows=(stays,))), StepResult)
    begin(session, tagged(3, [(1, 1, 1)]))
    again = {"retired_slots": ints(1), "started_rows": (row(1, [50, 51], [9]),)}
    fourth = begin(session, tagged(4, [(1, 0, 2)], **again))
    assert runner.events[-2:] == [("taken", 3), ("begun", 4)]
    assert isinstance(session.finish(fourth), StepResult)
    assert session._table.history[1, :2].tolist() == [50, 51]


def test_a_step_that_fails_at_its_end_takes_those_behind_it_along():
    """And nobody hears of it before they write nothing any more: their blocks may be given away."""
    runner = LateRunner()
    session = prefilled(runner)
    runner.errors[2] = 1
    second = begin(session, tagged(2, [(0, 2, 1)]))
    third = begin(session, tagged(3, [(0, 3, 1)], retired_slots=ints(), started_rows=(row(1, [9], [30]),)))
    assert session.finish(second) == StepFailed(2, MODEL_ERROR, "broken")
    assert ("computed", 3) in runner.events
    assert session.finish(third) == StepGap(1)
    assert session.num_rows == 1
    assert isinstance(process(session, tagged(2, [(0, 2, 1)])), StepResult)


def test_a_step_that_cannot_begin_behind_another_begins_alone():
    runner = LateRunner()
    session = prefilled(runner)
    runner.begin_errors[3] = 1
    begin(session, tagged(2, [(0, 2, 1)]))
    third = begin(session, tagged(3, [(0, 3, 1)]))
    assert runner.events == [("begun", 2), ("computed", 2), ("taken", 2), ("begun", 3)]
    assert isinstance(session.finish(third), StepResult)


def test_a_step_that_breaks_the_protocol_behind_another_is_refused_and_its_id_used_again():
    session = prefilled(LateRunner())
    second = begin(session, tagged(2, [(0, 2, 1)]))
    outcome = session.begin(tagged(3, [(3, 0, 1)]))
    assert isinstance(outcome, StepFailed)
    assert isinstance(second.outcome, StepResult)
    assert isinstance(process(session, tagged(3, [(0, 3, 1)])), StepResult)


def test_what_is_sent_twice_is_answered_by_the_step_that_was_begun():
    runner = LateRunner()
    session = prefilled(runner)
    second = begin(session, tagged(2, [(0, 2, 1)]))
    assert session.begin(tagged(2, [(0, 2, 1)])) is second.outcome
    assert session.begin(tagged(9)) == StepGap(2)


# ------------------------------------------------------------------------------------------------ sessions and threads

ASKED = Opening(RouterId("a"), RouterEpoch(5))


def store_of(runner: LateRunner) -> SessionStore:
    return SessionStore(lambda session_id: Session(session_id, ROWS, WIDE, runner), timeout_s=30)


FIRST = tagged(1, [(0, 0, 2)], started_rows=(row(0, [1, 2], [2, 3, 4, 5]),))


@pytest.mark.parametrize("ending", ["close", "takeover", "end_all", "expire"])
def test_a_session_ends_when_its_steps_have(ending):
    """Field failure 5: the cache service gives its blocks away as soon as the end is reported."""
    runner = LateRunner()
    store = store_of(runner)
    opened = store.open(ASKED)
    begun = store.begin(opened, FIRST)
    if ending == "close":
        store.close(opened)
    elif ending == "takeover":
        store.open(replace(ASKED, takeover=True))
    elif ending == "end_all":
        store.end_all()
    else:
        store.disconnect(opened, 0.0)
        store.expire(31.0)
    assert runner.events == [("begun", 1), ("computed", 1), ("taken", 1)]
    assert store.take_ended() == [opened.session_id]
    assert isinstance(store.finish(opened, begun), StepResult), "whoever still waits is answered"


def test_a_router_that_comes_again_is_told_of_the_steps_that_were_begun():
    store = store_of(LateRunner())
    opened = store.open(ASKED)
    begun = store.begin(opened, FIRST)
    again = store.open(ASKED)
    assert (again.fresh, again.last_applied_step) == (False, 1)
    assert store.begin(again, FIRST) is store.finish(opened, begun)


class NoAuthority:
    """Nobody keeps account."""

    async def open_session(self, *_: object) -> None: ...

    async def close_session(self, *_: object) -> None: ...

    async def orphaned_sessions(self) -> frozenset[SessionId]:
        return frozenset()


async def test_the_thread_of_the_steps_begins_the_next_one_while_the_device_works():
    """Neither of the first two steps is done before both were begun, and the third comes behind the first's answer."""
    may_compute = threading.Event()
    began = asyncio.Event()
    loop = asyncio.get_running_loop()
    runner = LateRunner(wait_hook=lambda tag: may_compute.wait(30) and None)
    host = SessionHost(store_of(runner), NoAuthority())
    opened = await host.open(ASKED)
    first, second = host.process(opened, FIRST), host.process(opened, tagged(2, [(0, 2, 1)]))
    host._thread.submit(loop.call_soon_threadsafe, began.set)  # behind both
    await began.wait()
    assert runner.events == [("begun", 1), ("ahead", 2)]
    assert not first.done()
    may_compute.set()
    assert isinstance(await first, StepResult)
    third = host.process(opened, tagged(3, [(0, 3, 1)]))
    assert [(await each).step_id for each in (second, third)] == [2, 3]
    await host.shut_down()


async def test_a_step_whose_asker_left_goes_to_its_end():
    may_compute = threading.Event()
    runner = LateRunner(wait_hook=lambda tag: may_compute.wait(30) and None)
    store = store_of(runner)
    host = SessionHost(store, NoAuthority())
    opened = await host.open(ASKED)
    waiting = host.process(opened, FIRST)
    second = host.process(opened, tagged(2, [(0, 2, 1)]))
    begun = asyncio.Event()
    host._thread.submit(asyncio.get_running_loop().call_soon_threadsafe, begun.set)
    await begun.wait()
    assert runner.events == [("begun", 1), ("ahead", 2)]
    waiting.cancel()
    may_compute.set()
    assert isinstance(await second, StepResult)
    assert (await host.open(ASKED)).last_applied_step == 2
    await host.shut_down()
