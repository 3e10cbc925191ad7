"""The engine: one turn after another brings requests from the queue through steps to their answers.

A turn receives, delivers, admits, extends, plans and sends; it never waits. All that waits for other processes is at
the other side of two buffers: the outbox (cache service) and the session (executor). The engine is the one owner of all
live requests; every change happens on its event loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from octavo.errors import Code, OctavoError
from router import refusals, scheduler
from router.capacity import Capacity
from router.delivery import replay_tokens
from router.ends import Ends, started
from router.ids import SequenceId, SessionKey, StepId
from router.live import Choice, LiveRequest, Phase, Times
from router.model import Model
from router.observer import Observer
from router.outbox import Allocated, Allocation, Extended, Extension, Fork, Forked, Outbox, Snapshot
from router.request import CheckedRequest, FinishReason, RequestSpec
from router.results import Results
from router.roster import Roster
from router.searching import Searching, search_of
from router.step import Outcome, Step
from router.steps import SessionSteps
from router.suspects import Suspects
from router.text.answer import AnswerText

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """`max_running_requests` and `max_tokens_per_step` within what the executor takes.

    `poison_limit`: deaths of executors, while a request ran alone, that end it.
    """

    max_queued_requests: int
    max_running_requests: int
    max_tokens_per_step: int
    max_steps_in_flight: int
    slack_blocks: int
    poison_limit: int = 2
    max_prefill_tokens_beside_decodes: int = scheduler.UNBOUNDED


class Load(NamedTuple):
    """Requests now, and the part of the pool's blocks that they hold."""

    num_running: int
    num_waiting: int
    kv_usage_ratio: float


class Engine:
    """Continuous batching over one executor.

    Args:
        outbox: where messages to the cache service gather.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        model: Model,
        limits: EngineLimits,
        outbox: Outbox,
        observer: Observer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.limits = limits
        self.roster = Roster(limits.max_running_requests)
        self.outbox = outbox
        self._observer = observer
        self._clock = clock
        self._wakeup = asyncio.Event()
        self._steps: SessionSteps | None = None
        self.is_paused = False
        self._capacity = Capacity(model, limits.slack_blocks, self.roster, outbox, observer)
        self._suspects = Suspects(limits.poison_limit, limits.max_steps_in_flight)
        self._lost_at: float | None = None  # the last session; None: it is there, or there was none yet
        about = (self._capacity, observer)
        self._ends = Ends(model, self.roster, *about, lambda: self._steps, clock, self._wakeup.set)
        self._searching = Searching(*about, self._ends, lambda: self._steps, clock)
        self._results = Results(model, self.roster, *about, outbox, self._ends, self._searching, clock)

    # ------------------------------------------------------------------------------------------- calls of the servicer

    def reserve(self, checked: CheckedRequest) -> LiveRequest:
        """Take a place in the queue for a request whose prompt is not tokenized yet, and whose id no live one has.

        Raises:
            OctavoError: RESOURCE_EXHAUSTED when the queue is full, FAILED_PRECONDITION when it has more choices than
                can run at once.
        """
        num_choices, rows = checked.sampling.num_choices, self.limits.max_running_requests
        if num_choices > rows:
            raise refusals.too_many_choices(num_choices, rows)
        if not self.has_room:
            raise refusals.queue_full(self.roster.num_queued, self.limits.max_queued_requests)
        live = LiveRequest(checked, Times(self._clock()))
        self.adopt(live)
        return live

    @property
    def has_room(self) -> bool:
        """Whether one more request may wait."""
        return self.roster.num_queued < self.limits.max_queued_requests + self.roster.num_free_slots

    def can_begin(self, num_choices: int) -> bool:
        """Whether a request would run at once, as far as rows go: nobody stands before it."""
        roster = self.roster
        num_asked = sum(choice.num_places for choice in roster.allocating.values())
        return not roster.waiting and roster.num_free_slots - num_asked >= num_choices

    def adopt(self, live: LiveRequest) -> None:
        """Take a request that has not begun: a new one, or one that another engine handed over."""
        self.roster.add(live)
        for choice in live.choices:
            if choice.phase is Phase.WAITING:
                self.roster.enqueue(choice)
        if live.checked.time_limit_s is not None:
            self._ends.time_limits[live] = live.times.arrived + live.checked.time_limit_s
        self._wakeup.set()

    def hand_over(self, live: LiveRequest) -> None:
        """Forget a request that has not begun: another engine takes it."""
        for choice in live.choices:
            self._capacity.release(choice, self._steps)
        self.roster.remove(live)
        self._ends.time_limits.pop(live, None)

    def submit(self, live: LiveRequest, spec: RequestSpec, answers: list[AnswerText]) -> None:
        """The prompt is tokenized: queue it, unless it was cancelled meanwhile. `answers`: one for each choice.

        Raises:
            OctavoError: INVALID_ARGUMENT where resumed tokens go on behind the end of their answer.
        """
        if live.is_ended:
            return
        live.beams = search_of(spec, self.model)
        live.submit(spec, answers)
        for choice in live.choices:
            if choice.phase is Phase.WAITING:
                self.roster.enqueue(choice)
        self._replay(live)
        self._wakeup.set()

    def _replay(self, live: LiveRequest) -> None:
        """What the client already has: it may hold the end of an answer."""
        endings = {}
        for place, (index, token_ids) in enumerate(live.checked.resume):
            field = f"resume[{place}].token_ids"
            endings[index] = replay_tokens(live.choices[index], token_ids, self.model.eos_token_ids, field)
            num_echoed = live.spec.num_prompt_tokens if live.checked.output.echo else 0
            live.stream.resume(index, num_echoed + len(token_ids))
        for index, ending in endings.items():
            if ending is not None:
                self._ends.finish(live.choices[index], ending)
        if live.is_ended:
            live.stream.start(started(live))

    def cancel(self, request_id: str, tenant: str = "") -> bool:
        """End a request in order: its client hears CANCELLED. False: no live request of the tenant has this id."""
        live = self.roster.find(request_id, tenant)
        if live is None:
            return False
        self._ends.finish_all(live, FinishReason.CANCELLED)
        return True

    def leave(self, live: LiveRequest) -> None:
        """The client is gone. Does nothing for a request that ended."""
        self._ends.abort(live)

    def fail(self, request: LiveRequest, error: OctavoError) -> None:
        """End a request with an error. Does nothing for one that ended."""
        self._ends.fail(request, error)

    def fail_all(self, error: OctavoError) -> None:
        """End every live request with an error, also where a fault left one in a state that it cannot be in."""
        for live in self.roster:
            try:
                self.fail(live, error)
            except Exception:
                log.exception("request %s: it could not be ended in order", live.request_id)

    def sent_steps(self) -> dict[SessionKey, StepId]:
        """The highest step that was sent to the session, 0 for none: what it may still write."""
        return {self._steps.key: self._steps.last_sent} if self._steps else {}

    @property
    def num_held_blocks(self) -> int:
        """Blocks that its requests hold, a shared one once."""
        return self._capacity.num_held_blocks

    def load(self) -> Load:
        """How busy it is now."""
        ratio = self.num_held_blocks / max(1, self.model.num_usable_blocks)
        return Load(self.roster.num_running, self.roster.num_queued, ratio)

    # ------------------------------------------------------------------------------------- what other processes answer

    def attach(self, session: SessionKey, send: Callable[[Step], None]) -> None:
        """A fresh session: every row is sent again, with its blocks and as far as it is known to be computed."""
        self.detach()
        self.is_paused = False
        self._steps = SessionSteps(session, send, self.model, self._clock)
        accused = self._suspects.reopen(session.executor_id, session.executor_epoch)
        num_again = sum(choice.row.num_sent - choice.row.num_computed for choice in self.roster.running.values())
        self._observer.on_recomputed("executor_lost", num_again)
        if self._lost_at is not None:
            elapsed_s, self._lost_at = self._clock() - self._lost_at, None
            self._observer.on_takeover(elapsed_s)
            text = "executor %s, epoch %d, took over after %.3f s: %d sequences go on, %d tokens are computed again"
            num_running = self.roster.num_running
            log.info(text, session.executor_id, session.executor_epoch, elapsed_s, num_running, num_again)
        for choice in self.roster.running.values():
            choice.reset_at_executor()
            choice.row.num_sent, choice.row.num_tokens = choice.row.num_computed, len(choice.tokens)
        for request in accused:
            self.fail(request, refusals.poisoned(self.limits.poison_limit))
        self._wakeup.set()

    def detach(self) -> None:
        """The session is lost: nothing runs until the next is attached."""
        if self._steps is not None:
            self._lost_at = self._clock()
            self._suspects.lose(self._steps.requests_in_flight())
            self._steps.abandon()
            self.outbox.forget_session(self._steps.key)
        self._steps = None
        self._results.clear()
        self._capacity.forget_session()

    def pause(self) -> None:
        """Send no more steps in this session: what runs goes on in the next one."""
        self.is_paused = True

    def take_results(self) -> None:
        """Take what has come now, not in the next turn: the session may be over by then."""
        if self._steps is not None:
            self._results.take(self._steps)

    def lose_lease(self) -> None:
        """All blocks are gone with the lease: what ran waits with the tokens it has, and is computed again."""
        self.detach()
        self.outbox.clear()
        self._capacity.lose_all()

    def on_outcome(self, outcome: Outcome) -> None:
        """A step's result is here."""
        self._results.add(outcome)
        self._wakeup.set()

    def on_allocated(self, allocation: Allocation, outcome: Allocated) -> None:
        """Blocks for a choice, or none."""
        choice = self.roster.find_sequence(allocation.sequence_id)
        if choice is None:
            return
        self._wakeup.set()
        if outcome.error is None:
            self._begin(choice, outcome)
        elif outcome.error.code is Code.RESOURCE_EXHAUSTED:
            self._capacity.take_refusal(choice, self._clock())
        else:
            self.fail(choice.request, outcome.error)

    def on_extended(self, extension: Extension, outcome: Extended) -> None:
        """More blocks for a row, or none."""
        choice = self.roster.find_sequence(extension.sequence_id)
        if choice is None or choice.phase is not Phase.RUNNING:
            return
        self._wakeup.set()
        choice.is_extending = False
        if outcome.error is None:
            self._capacity.take_extension(choice, outcome)
        elif outcome.error.code is Code.RESOURCE_EXHAUSTED:
            self._capacity.take_shortage(choice)
        else:
            self.fail(choice.request, outcome.error)

    def on_forked(self, fork: Fork, outcome: Forked) -> None:
        """Shares of a choice's blocks for others; where there are none, they wait for blocks, a search as a whole."""
        self._wakeup.set()
        for position, child_id in enumerate(fork.child_ids):
            child = self.roster.find_sequence(child_id)
            if child is None:
                continue
            beams = child.request.beams
            if outcome.error is None:
                self._capacity.take_fork(child, outcome.tables[position], outcome)
                if beams is not None:
                    self._searching.take_share(child, beams)
            elif outcome.error.code not in (Code.RESOURCE_EXHAUSTED, Code.NOT_FOUND):
                self.fail(child.request, outcome.error)
            # Not found: the parent gave its blocks up while the cache service was restarted.
            elif beams is not None:
                self._capacity.break_off(child.request, self._steps, self._clock(), "pool")
            else:
                self._capacity.take_refusal(child, self._clock())

    def snapshots(self) -> list[Snapshot]:
        """What is held, for a cache service that was restarted."""
        return self._capacity.snapshots()

    def on_disowned(self, sequence_id: SequenceId, error: OctavoError) -> None:
        """A cache service that was restarted did not give a sequence its blocks back."""
        choice = self.roster.find_sequence(sequence_id)
        if choice is not None and choice.phase is Phase.RUNNING:
            log.error("request %s is computed again: %s", choice.request.request_id, error.message)
            self._capacity.disown(choice, self._steps)
            self._wakeup.set()

    # -------------------------------------------------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Turn whenever something happened. Ends only by cancellation or by an error of its own."""
        loop = asyncio.get_running_loop()
        while True:
            now = self._clock()
            self.turn(now)
            moments = (self._capacity.next_retry_after(now), *self._ends.time_limits.values())
            retry_at = min((moment for moment in moments if moment is not None), default=None)
            try:
                async with asyncio.timeout_at(None if retry_at is None else loop.time() + retry_at - now):
                    await self._wakeup.wait()
            except TimeoutError:
                pass
            self._wakeup.clear()

    def turn(self, now: float) -> None:
        """Everything that can be done now, in this order. Without a session nothing runs and nobody is admitted."""
        self.take_results()
        self._ends.expire(now)
        if self._steps is not None:
            self._capacity.preempt(self._steps, now)
            self._capacity.admit(now)
            self._capacity.extend(self._steps, now)
            if not self.is_paused:
                self._send(self._steps)

    def _begin(self, choice: Choice, outcome: Allocated) -> None:
        self._capacity.take_allocation(choice, outcome)
        request = choice.request
        if request.num_cached_tokens is None:
            num_prompt = request.spec.num_prompt_tokens
            request.num_cached_tokens = min(num_prompt, outcome.num_cached_tokens)  # resumed tokens are no prompt
            self._observer.on_admitted(num_prompt, request.num_cached_tokens)
            request.stream.start(started(request))
            for each in request.choices[: request.checked.sampling.num_written]:
                if request.checked.echoes(each.index):
                    request.stream.add(each.index, request.spec.echo_text, request.spec.prompt_ids)

    def _send(self, steps: SessionSteps) -> None:
        while steps.num_in_flight < self.limits.max_steps_in_flight:
            began = self._clock()
            if not steps.num_in_flight:
                self._suspects.end_trial()
            groups = self._suspects.groups(self.roster.running.values())
            if len(groups) > 1 and steps.num_in_flight:
                break
            budgets = self.limits.max_tokens_per_step, self.limits.max_prefill_tokens_beside_decodes
            plans = (scheduler.plan([choice.row for choice in group], *budgets) for group in groups)
            runs = next(filter(None, plans), ())
            if not runs and (steps.num_in_flight or not steps.has_retirements):
                break
            choices = [self.roster.running[run.slot] for run in runs]
            for choice in choices:
                times = choice.request.times
                times.first_scheduled = began if times.first_scheduled is None else times.first_scheduled
            if choices:
                self._suspects.try_alone(choices[0].request)
            steps.send(zip(choices, runs, strict=True), began)
