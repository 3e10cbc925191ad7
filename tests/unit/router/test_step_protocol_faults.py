"""A fault at every await of the step protocol, in every step of a run.

The router's engine, the executor's session store and the cache service are the real ones; the clock, the wire and the
memory belong to the test.

    before send         the router has planned a step, and nobody has got it
    after send          the executor has run it, and nobody has got its result
    before acknowledge  the router has the result, and has not told
    after acknowledge   the executor knows that it has
"""

import itertools
import logging
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cache_service import operation as cache
from cache_service.block import BlockId
from cache_service.fence import SessionKey as CacheSessionKey
from cache_service.fence import SessionStep
from executor.batch import Batch
from executor.pending import DoneOutput
from executor.servicer_messages import outcome_response, step_of
from executor.session import Session
from executor.sessions import Opened, Opening, SessionStore
from executor.step import Candidates, Ints, StepOutput, StepResult
from executor.step_check import StepLimits
from octavo.errors import OctavoError
from router import outbox as router_outbox
from router.beam import Candidate, Search, SearchRules
from router.clients.step_messages import outcome_of, step_message
from router.engine import Engine, EngineLimits
from router.ids import SessionKey
from router.live import LiveRequest
from router.metrics import RouterMetrics
from router.model import Model
from router.outbox import Allocation, Commit, Extension, Fork, Outbox, Release
from router.raw import RawRequest
from router.request import BeamSearch, FinishReason, RequestSpec
from router.step import Step
from router.text.answer import AnswerText
from router.text.detokenizer import Detokenizer
from router.text.stop import StopScanner
from router.validation import RequestLimits, validate
from tests.executor_cases import process_in
from tests.property.cache_service.cache_drivers import InProcessDriver, allocation

B, NUM_BLOCKS = 4, 40
MODEL = Model("m", "", "", "f", "a", 100, 64, frozenset(), "cpu", B, NUM_BLOCKS, "float32", "", "", "cpu", 8, 16, 2)
LIMITS = StepLimits(B, NUM_BLOCKS, vocabulary_size=100, max_context_tokens=64, max_tokens_per_step=16)
PROMPTS = {"one": (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11), "two": (50, 51, 52, 53, 54, 55), "beams": (20, 21, 22, 23, 24)}
NUM_ANSWERS = {"one": 1, "two": 2, "beams": 2}
WIDTHS = {"beams": 2}
MAX_TOKENS = 5
EXECUTORS = ("e", "s")
POINTS = ("before send", "after send", "before acknowledge", "after acknowledge")


def next_token(history: tuple[int, ...]) -> int:
    return (history[-1] * 7 + len(history)) % 100


def answer_of(prompt: tuple[int, ...]) -> tuple[int, ...]:
    history = prompt
    for _ in range(MAX_TOKENS):
        history += (next_token(history),)
    return history[len(prompt) :]


def candidates_of(history: tuple[int, ...], count: int) -> list[tuple[int, float]]:
    """The best next tokens, of which one or two are close to each other."""
    first = next_token(history)
    close = (first * 3 + len(history)) % 8 / 16
    best = [(first, -0.25), ((first + 1) % 100, -0.25 - close), ((first + 2) % 100, -1.5), ((first + 3) % 100, -2.0)]
    return sorted(best[:count], key=lambda each: (-each[1], each[0]))


def search_of(prompt: tuple[int, ...], width: int) -> Search:
    """The search, led by hand."""
    search = Search(SearchRules(width, 1.0, False, frozenset(), MAX_TOKENS))
    while not search.is_done:
        histories = [(*prompt, *beam.token_ids()) for beam in search.beams]
        search.advance([[Candidate(*each) for each in candidates_of(history, width)] for history in histories])
    return search


class Memory:
    """KV: each place holds the history that was computed into it. Outlives the executors that compute in it."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, int], tuple[int, ...]] = {}
        self.num_computed = 0

    def begin(self, copy_sources: Ints, copy_targets: Ints, batch: Batch | None, before: object = None) -> DoneOutput:
        """As a `StepRunner`: reads all that is before each token, and it must be that token's own history."""
        found = [[self.places.get((source, i)) for i in range(B)] for source in copy_sources.tolist()]
        for target, places in zip(copy_targets.tolist(), found, strict=True):
            self.places |= {(target, i): place for i, place in enumerate(places) if place is not None}
        if batch is None:
            return DoneOutput(StepOutput(np.zeros(0, np.int64), np.zeros(0, bool), 0))
        self.num_computed += batch.num_tokens
        histories = {}  # of each token in the batch
        bounds = batch.attention.query_starts.tolist()
        for row, (start, end) in enumerate(itertools.pairwise(bounds)):
            table = batch.attention.tables[row].tolist()
            for index in range(start, end):
                histories[index] = self._compute(table, int(batch.positions[index]), int(batch.input_ids[index]))
        sampled = [next_token(histories[index]) for index in batch.logits_tokens.tolist()]
        output = StepOutput(np.array(sampled, np.int64), np.ones(len(sampled), bool), 1)
        if (wanted := batch.candidates) is None:
            return DoneOutput(output)
        ends = [histories[int(batch.logits_tokens[row])] for row in wanted.rows.tolist()]
        best = [candidates_of(end, count) for end, count in zip(ends, wanted.counts.tolist(), strict=True)]
        ids, scores = zip(*itertools.chain.from_iterable(best), strict=True)
        candidates = Candidates(wanted.rows, wanted.counts, np.array(ids, np.int64), np.array(scores, np.float32))
        return DoneOutput(replace(output, candidates=candidates))

    def _compute(self, table: list[int], position: int, token: int) -> tuple[int, ...]:
        before = self.places[table[(position - 1) // B], (position - 1) % B] if position else ()
        for earlier in range(position):
            assert self.places[table[earlier // B], earlier % B] == before[: earlier + 1], "foreign KV"
        self.places[table[position // B], position % B] = (*before, token)
        return (*before, token)


class World:
    """One router, an executor and its spare, one cache service, and one fault: `due` says when it strikes."""

    def __init__(self, depth: int, fault: str, due: Callable[[str, int], bool]) -> None:
        self.fault = fault
        self.due = due
        self.now = 100.0
        self.memory = Memory()
        self.driver = InProcessDriver()
        self.epochs = {name: self.driver.register(name, NUM_BLOCKS, B) for name in EXECUTORS}
        self.name = EXECUTORS[0]  # of the executor that serves
        self.lease_id, self.client_epoch = self.driver.open_lease("router")
        self.metrics = RouterMetrics(lambda: ())
        self.outbox = Outbox()
        limits = EngineLimits(8, 8, 16, depth, 1)
        self.engine = Engine(MODEL, limits, self.outbox, self.metrics.of("engine", "m"), clock=lambda: self.now)
        self.number = 0
        self.pending: list[Any] | None = None  # a message that a cache service in its rebuild has refused
        self.outgoing: deque[Step] = deque()
        self.num_steps = 0
        self.lost_tokens = 0  # of steps in flight when a session was lost
        self.stores: dict[str, SessionStore] = {}
        for name in EXECUTORS:
            self._start_executor(name)
        self._open_session()
        self.requests = [self._submit(name) for name in PROMPTS]

    def _submit(self, name: str) -> LiveRequest:
        beam = BeamSearch(WIDTHS[name], 1.0, early_stopping=False) if name in WIDTHS else None
        about = {"n": NUM_ANSWERS[name], "max_tokens": MAX_TOKENS, "beam": beam}
        raw = RawRequest(request_id=name, token_ids=PROMPTS[name], **about)
        checked = validate(raw, MODEL, RequestLimits(4, 16, 4), "unused")
        live = self.engine.reserve(checked)
        answers = [
            AnswerText(
                Detokenizer(lambda ids: "x" * len(ids), PROMPTS[name], can_split_prompt=True),
                StopScanner((), include_stop=False),
                min_tokens=0,
            )
            for _ in live.choices
        ]
        self.engine.submit(live, RequestSpec(checked, PROMPTS[name], MAX_TOKENS, FinishReason.MAX_TOKENS), answers)
        return live

    # ------------------------------------------------------------------------------------------------------ processes

    @property
    def store(self) -> SessionStore:
        """Of the executor that serves."""
        return self.stores[self.name]

    def _start_executor(self, name: str) -> None:
        self.stores[name] = SessionStore(lambda session_id: Session(session_id, 8, LIMITS, self.memory), 60.0)

    def _open_session(self) -> None:
        self.opened: Opened = self.store.open(Opening("router", self.client_epoch, takeover=True))
        session_id = self.opened.session_id
        name, epoch = self.name, self.epochs[self.name]
        self.driver.open_session(CacheSessionKey(name, epoch, session_id), "router", self.client_epoch, takeover=True)
        self._report_ended()
        self.engine.attach(SessionKey(name, epoch, session_id), self.outgoing.append)

    def _report_ended(self) -> None:
        for ended in self.store.take_ended():
            self.driver.close_session(CacheSessionKey(self.name, self.epochs[self.name], ended))

    def _go_to_the_other(self) -> None:
        [self.name] = set(EXECUTORS) - {self.name}

    def _strike(self, in_flight: Step) -> None:
        """The session is lost, one way or another; what was on its way is gone, or comes late."""
        rows = [choice.row for choice in self.engine.roster.running.values()]
        self.lost_tokens += sum(row.num_sent - row.num_computed for row in rows)
        old = self.opened
        self.engine.detach()
        self.outgoing.clear()
        if self.fault in ("executor died", "spare took over"):
            dead = self.name
            self.driver.kill_executor(dead)
            self._start_executor(dead)
            if self.fault == "spare took over":
                self._go_to_the_other()
            self.epochs[dead] = self.driver.register(dead, NUM_BLOCKS, B)
        self._open_session()
        if self.fault == "late":
            before = dict(self.memory.places)
            with pytest.raises(OctavoError) as refused:
                process_in(self.store, old, step_of(step_message(in_flight)))
            assert refused.value.reason == "SESSION_SUPERSEDED"
            assert self.memory.places == before

    def _hand_over(self, step: Step, outcome: Any) -> None:
        """The executor wants to end: what is on its way comes to its end, and the other one goes on."""
        self.engine.pause()
        self.engine.on_outcome(outcome or self._process(step))
        while self.outgoing:
            self.engine.on_outcome(self._process(self.outgoing.popleft()))
        self.engine.take_results()
        self.store.close(self.opened)
        other = next(name for name in EXECUTORS if name != self.name)
        too_early = CacheSessionKey(other, self.epochs[other], 1_000)
        with pytest.raises(OctavoError, match="not known dead"):
            self.driver.open_session(too_early, "router", self.client_epoch, takeover=True)
        self._report_ended()
        self.engine.detach()
        self._go_to_the_other()
        self._open_session()

    def _kill_cache_service(self) -> None:
        self.driver.die()
        self.number += 1
        snapshots = [
            cache.SequenceSnapshot(
                sequence_id=found.sequence_id,
                arena_id="cpu",
                token_ids=array("I", found.token_ids),
                num_computed_tokens=found.num_computed_tokens,
                block_ids=tuple(map(BlockId, found.block_ids)),
                copy_source=None if found.copy_source is None else BlockId(found.copy_source),
            )
            for found in self.engine.snapshots()
        ]
        sent = _steps(self.engine.sent_steps())
        assert self.driver.reconcile(self._header(), snapshots, sent) == [None] * len(snapshots)
        self.outbox.fence(self.engine.sent_steps())

    # -------------------------------------------------------------------------------------------------------- messages

    def run(self) -> None:
        for _ in range(400):
            if all(live.is_ended for live in self.requests) and not self.outgoing:
                break
            self.now += 0.03
            self.driver.advance(0.03)
            self.engine.turn(self.now)
            self._flush()
            if self.outgoing:
                self._exchange(self.outgoing.popleft())
        else:
            raise AssertionError("it does not end")
        self.engine.turn(self.now)
        self._flush()

    def _exchange(self, step: Step) -> None:
        number = self.num_steps
        self.num_steps += 1
        if self._is_struck("before send", number, step):
            return
        outcome = self._process(step)
        if self._is_struck("after send", number, step, outcome):
            return
        self.engine.on_outcome(outcome)
        self.engine.turn(self.now)
        if not self.outgoing:
            return
        if self._is_struck("before acknowledge", number, self.outgoing[0]):
            return
        if self.due("after acknowledge", number):
            following = self.outgoing.popleft()
            outcome = self._process(following)
            if not self._is_struck("after acknowledge", number, following, outcome):
                self.engine.on_outcome(outcome)

    def _is_struck(self, point: str, number: int, step: Step, outcome: Any = None) -> bool:
        """Whether the fault has cost the session. `outcome`: of the step, which was run."""
        if not self.due(point, number) or self.fault == "doubled":
            return False
        if self.fault == "cache service died":
            self._kill_cache_service()
            return False
        if self.fault == "handed over":
            if self.outgoing and self.outgoing[0] is step:
                self.outgoing.popleft()
            self._hand_over(step, outcome)
            return True
        self._strike(step)
        return True

    def _process(self, step: Step) -> Any:
        message = step_of(step_message(step))
        outcome = process_in(self.store, self.opened, message)
        assert isinstance(outcome, StepResult), outcome
        if self.fault == "doubled":
            computed = self.memory.num_computed
            assert process_in(self.store, self.opened, message) is outcome
            assert self.memory.num_computed == computed
        return outcome_of(outcome_response(outcome))

    def _header(self) -> cache.LeaseHeader:
        return cache.LeaseHeader(self.lease_id, self.number, _steps(self.outbox.acknowledged))

    def _flush(self) -> None:
        """As `LeaseMutations`: one message after another; one that a rebuild refuses is sent again later."""
        while (batch := self.pending or self.outbox.take()) is not None:
            self.pending = None
            self.number += 1
            try:
                self._send(batch)
            except OctavoError as error:
                if error.reason != "REBUILDING":
                    raise
                self.number -= 1
                self.pending = batch
                break
        self.driver.keep_alive(self.lease_id, _steps(self.outbox.acknowledged))
        self.outbox.mark_told(dict(self.outbox.acknowledged))

    def _send(self, batch: list[Any]) -> None:
        send = {
            Allocation: self._allocate,
            Extension: self._extend,
            Commit: self._commit,
            Fork: self._fork,
            Release: self._release,
        }[type(batch[0])]
        send(batch)

    def _allocate(self, batch: list[Allocation]) -> None:
        items = [allocation(item.sequence_id, array("I", item.token_ids), slack=item.slack_blocks) for item in batch]
        for item, found in zip(batch, self.driver.allocate(self._header(), items), strict=True):
            assert isinstance(found, cache.Allocated), found
            self.engine.on_allocated(item, router_outbox.Allocated(found.block_ids, found.num_cached_tokens))

    def _extend(self, batch: list[Extension]) -> None:
        items = [cache.Extension(i.sequence_id, i.have_blocks, i.need_blocks, i.want_blocks) for i in batch]
        for item, found in zip(batch, self.driver.extend(self._header(), items), strict=True):
            error = found if isinstance(found, OctavoError) else None
            blocks = found.block_ids if isinstance(found, cache.Extended) else ()
            self.engine.on_extended(item, router_outbox.Extended(blocks, error))

    def _commit(self, batch: list[Commit]) -> None:
        for error in self.driver.commit(self._header(), [_commit_of(item) for item in batch]):
            assert error is None or error.reason == "RELEASED", error

    def _fork(self, batch: list[Fork]) -> None:
        if releases := [release for fork in batch for release in fork.first]:
            self._release(releases)
            self.number += 1
        items = [cache.Fork(item.parent_id, item.child_ids, _commit_of(item.commit)) for item in batch]
        for item, found in zip(batch, self.driver.fork(self._header(), items), strict=True):
            error = found if isinstance(found, OctavoError) else None
            forked = router_outbox.Forked(error=error)
            if isinstance(found, cache.Forked):
                forked = router_outbox.Forked(found.child_block_ids, found.copies)
            self.engine.on_forked(item, forked)

    def _release(self, batch: list[Release]) -> None:
        items = [
            cache.Release(
                item.sequence_id, _commit_of(item.commit) if item.commit else None, _steps(dict(item.free_after))
            )
            for item in batch
        ]
        assert self.driver.release(self._header(), items) == [None] * len(items)

    # --------------------------------------------------------------------------------------------------------- judging

    def check(self) -> None:
        """Each answer whole, each token once, and no block left behind."""
        for live in self.requests:
            prompt = PROMPTS[live.request_id]
            if live.beams is not None:
                found, right = live.beams.search, search_of(prompt, WIDTHS[live.request_id])
                assert [(each.beam.token_ids(), each.score) for each in found.best(9)] == [
                    (each.beam.token_ids(), pytest.approx(each.score)) for each in right.best(9)
                ]
                continue
            for choice in live.choices:
                assert tuple(choice.tokens[len(prompt) :]) == answer_of(prompt)
        total = sum(count for name, count in NUM_ANSWERS.items() if name not in WIDTHS) * MAX_TOKENS
        total += sum(search_of(PROMPTS[name], width).num_tokens for name, width in WIDTHS.items())
        assert (
            self.metrics.registry.get_sample_value(
                "octavo_generation_tokens_total", {"model_name": "m", "engine": "engine"}
            )
            == total
        )
        counts = self.driver.counts()
        assert counts.violations == ()
        assert (counts.used, counts.fenced, counts.num_sequences) == (0, 0, 0)


def _steps(steps: dict[SessionKey, Any]) -> tuple[SessionStep, ...]:
    return tuple(
        SessionStep(CacheSessionKey(key.executor_id, key.executor_epoch, key.session_id), step)
        for key, step in steps.items()
    )


def _commit_of(commit: Commit) -> cache.Commit:
    return cache.Commit(
        commit.sequence_id, commit.num_computed_tokens, commit.token_offset, array("I", commit.token_ids)
    )


def run_world(depth: int, fault: str, due: Callable[[str, int], bool]) -> World:
    world = World(depth, fault, due)
    world.run()
    world.check()
    return world


FAULTS = ("connection broke", "executor died", "handed over", "late", "doubled", "cache service died")


@pytest.mark.parametrize(("fault", "depth"), [*itertools.product(FAULTS, (1, 2)), ("spare took over", 2)])
async def test_a_fault_at_any_await_of_any_step_changes_no_token(
    fault: str, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Only steps without an acknowledgement are computed again; none is when an executor hands over in order, or when
    the cache service dies."""
    caplog.set_level(logging.CRITICAL)
    undisturbed = run_world(depth, "none", lambda point, number: False)
    num_faults = 0
    for point, struck in itertools.product(POINTS, range(undisturbed.num_steps)):
        world = run_world(depth, fault, lambda at, number, here=(point, struck): (at, number) == here)  # type: ignore[misc]
        num_faults += 1
        again = world.memory.num_computed - undisturbed.memory.num_computed
        assert again <= world.lost_tokens, (point, struck)
        if fault in ("doubled", "cache service died", "handed over"):
            assert again == 0, (point, struck)
    assert num_faults >= 4 * 8


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("fault", ["connection broke", "executor died", "spare took over", "handed over"])
async def test_a_fault_in_every_third_step_changes_no_token(
    fault: str, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    for point in POINTS:
        run_world(depth, fault, lambda at, number, point=point: at == point and number % 3 == 2)  # type: ignore[misc]
