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
from router import admission, scheduler
from router.delivery import Ending, accept_token
from router.ids import SessionKey, StepId
from router.live import LiveRequest, Phase
from router.model import Model
from router.observer import Observer
from router.outbox import Allocated, Allocation, Commit, Extended, Extension, Outbox, Release
from router.request import CheckedRequest, FinishReason, RequestSpec
from router.roster import Roster
from router.scheduler import Row
from router.step import Outcome, Step, StepFailed, StepResult
from router.steps import SentRun, SessionSteps
from router.stream import Completed, Finished, Started
from router.text.answer import AnswerText

log = logging.getLogger(__name__)

# Blocks can come free at others' hands (other routers, fences that lift), which nobody tells us.
RETRY_BLOCKS_S = 0.02


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """`max_running_requests` and `max_tokens_per_step` within what the executor takes."""

    max_queued_requests: int
    max_running_requests: int
    max_tokens_per_step: int
    max_steps_in_flight: int
    slack_blocks: int


class Load(NamedTuple):
    """Requests and blocks now; a shared block counts for each who holds it, but never past the whole pool."""

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
        self._outbox = outbox
        self._observer = observer
        self._clock = clock
        self._wakeup = asyncio.Event()
        self._outcomes: list[Outcome] = []
        self._steps: SessionSteps | None = None
        # Out of blocks: who waits is tried again when a request ended, or after a while.
        self._retry_admission_at: float | None = None
        self._is_closed_by_preemption = False
        self._is_short_of_blocks = False
        self._retry_extension_at: float | None = None
        self._hold_extensions_until = StepId(0)

    # ------------------------------------------------------------------------------------------- calls of the servicer

    def reserve(self, checked: CheckedRequest) -> LiveRequest:
        """Take an id and a place in the queue for a request whose prompt is not tokenized yet.

        Raises:
            OctavoError: ALREADY_EXISTS, or RESOURCE_EXHAUSTED when the queue is full.
        """
        queued = self.roster.num_queued
        if queued >= self.limits.max_queued_requests + self.roster.num_free_slots:
            raise _queue_full(queued, self.limits.max_queued_requests)
        return self.roster.reserve(checked, self._clock())

    def submit(self, live: LiveRequest, spec: RequestSpec, answer: AnswerText) -> None:
        """The prompt is tokenized: queue it, unless it was cancelled meanwhile."""
        if live.phase is Phase.PREPARING:
            live.submit(spec, answer)
            self.roster.enqueue(live)
            self._wakeup.set()

    def cancel(self, request_id: str) -> bool:
        """End a request in order: its client hears CANCELLED. False: no live request has this id."""
        live = self.roster.find(request_id)
        if live is None:
            return False
        self._finish(live, Ending(FinishReason.CANCELLED))
        return True

    def leave(self, live: LiveRequest) -> None:
        """The client is gone. Does nothing for a request that ended."""
        if live.phase is not Phase.ENDED:
            self._end(live, "abort")

    def fail_all(self, error: OctavoError) -> None:
        """End every live request with an error."""
        for live in self.roster:
            self._fail(live, error)

    @property
    def used_blocks(self) -> int:
        """Blocks that running requests hold; a shared one counts for each."""
        return sum(len(live.block_ids) for live in list(self.roster.running.values()))

    def sent_steps(self) -> dict[SessionKey, StepId]:
        """The highest step that was sent to the session: what it may still write."""
        return {self._steps.key: self._steps.last_sent} if self._steps and self._steps.last_sent else {}

    def load(self) -> Load:
        """How busy it is now."""
        ratio = min(1.0, self.used_blocks / max(1, self.model.num_usable_blocks))
        return Load(len(self.roster.running), self.roster.num_queued, ratio)

    # ------------------------------------------------------------------------------------- what other processes answer

    def attach(self, session: SessionKey, send: Callable[[Step], None]) -> None:
        """A fresh session: every row is sent again, with its blocks and as far as it is known to be computed."""
        self.detach()
        self._steps = SessionSteps(session, send, self.model)
        for live in self.roster.running.values():
            live.reset_at_executor()
            live.row.num_sent, live.row.num_tokens = live.row.num_computed, len(live.tokens)
        self._wakeup.set()

    def detach(self) -> None:
        """The session is lost: nothing runs until the next is attached."""
        if self._steps is not None:
            self._steps.abandon()
            self._outbox.forget_session(self._steps.key)
        self._steps = None
        self._outcomes.clear()
        self._hold_extensions_until = StepId(0)

    def on_outcome(self, outcome: Outcome) -> None:
        """A step's result is here."""
        self._outcomes.append(outcome)
        self._wakeup.set()

    def on_allocated(self, allocation: Allocation, outcome: Allocated) -> None:
        """Blocks for a request, or none."""
        live = self.roster.find_sequence(allocation.sequence_id)
        if live is None:
            return
        self._wakeup.set()
        if outcome.error is None:
            self._start(live, outcome)
        elif outcome.error.code is Code.RESOURCE_EXHAUSTED:
            self.roster.refuse_allocation(live)
            self._retry_admission_at = self._clock() + RETRY_BLOCKS_S
        else:
            self._fail(live, outcome.error)

    def on_extended(self, extension: Extension, outcome: Extended) -> None:
        """More blocks for a row, or none."""
        live = self.roster.find_sequence(extension.sequence_id)
        if live is None or live.phase is not Phase.RUNNING:
            return
        self._wakeup.set()
        live.is_extending = False
        if outcome.error is None:
            live.block_ids += outcome.block_ids
            live.row.capacity_tokens = len(live.block_ids) * self.model.block_size
            live.was_extend_refused = not outcome.block_ids
        elif outcome.error.code is Code.RESOURCE_EXHAUSTED:
            self._is_short_of_blocks = True
        else:
            self._fail(live, outcome.error)

    # -------------------------------------------------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Turn whenever something happened. Ends only by cancellation or by an error of its own."""
        while True:
            try:
                async with asyncio.timeout_at(self._next_retry_at()):
                    await self._wakeup.wait()
            except TimeoutError:
                pass
            self._wakeup.clear()
            self.turn()

    def turn(self) -> None:
        """Everything that can be done now."""
        self._receive()
        self._preempt()
        self._admit()
        self._extend()
        self._send()

    def _next_retry_at(self) -> float | None:
        """When to turn without being woken, in the time of the event loop."""
        retries = [moment for moment in (self._retry_admission_at, self._retry_extension_at) if moment is not None]
        return asyncio.get_running_loop().time() + max(0.0, min(retries) - self._clock()) if retries else None

    def _receive(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        for outcome in outcomes:
            if self._steps is None or self._steps.drop_refused():
                continue
            if isinstance(outcome, StepResult):
                self._deliver(self._steps, outcome)
            elif isinstance(outcome, StepFailed):
                self._drop_failed_step(self._steps, outcome)
            else:
                raise ValueError(f"the executor misses a step behind {outcome.last_applied_step}")

    def _deliver(self, steps: SessionSteps, result: StepResult) -> None:
        began = self._clock()
        sent = steps.complete(result.step_id)
        self._outbox.acknowledge(steps.key, result.step_id)
        failures = {failure.row: failure for failure in result.failures}
        offset = 0
        for index, (sent_run, num_sampled) in enumerate(zip(sent.runs, result.num_sampled, strict=True)):
            token_ids = result.token_ids[offset : offset + num_sampled]
            offset += num_sampled
            if index in failures:
                error = _internal(failures[index].reason, failures[index].message)
                self._fail(sent_run.live, error)
            elif sent_run.live.phase is not Phase.ENDED:
                self._advance(sent_run, token_ids, began)
        self._observer.on_delivered(self._clock() - began, result.execute_s)

    def _advance(self, sent_run: SentRun, token_ids: tuple[int, ...], now: float) -> None:
        """A request is further by one run: also one that was preempted while the run was on its way."""
        live = sent_run.live
        if sent_run.is_current and live.phase is Phase.RUNNING:
            live.row.num_computed = sent_run.run.start + sent_run.run.num_tokens
        ending = None
        for token_id in token_ids:
            text, ending = accept_token(live, token_id, self.model.eos_token_ids)
            live.stream.add(text, [token_id])
            self._time_token(live, now)
        if ending is not None:
            self._finish(live, ending)
        else:
            self._commit(live)

    def _time_token(self, live: LiveRequest, now: float) -> None:
        times = live.times
        if times.last_token is None:
            times.first_token = now
            self._observer.on_first_token(now - times.arrived)
        else:
            self._observer.on_next_token(now - times.last_token)
        times.last_token = now

    def _commit(self, live: LiveRequest) -> None:
        """Tell the cache service of blocks that became full: from now on others can find them."""
        if live.phase is not Phase.RUNNING:
            return
        num_full = live.row.num_computed // self.model.block_size
        if num_full > live.num_committed_blocks:
            live.num_committed_blocks = num_full
            self._outbox.commit(_commit_of(live))

    def _drop_failed_step(self, steps: SessionSteps, failed: StepFailed) -> None:
        sent = steps.fail(failed.step_id)
        log.error("step %d failed with %s: %s", failed.step_id, failed.reason, failed.message)
        for sent_run in sent.runs:
            self._fail(sent_run.live, _internal(failed.reason, failed.message))

    # --------------------------------------------------------------------------------------------- who comes and goes

    def _preempt(self) -> None:
        """Out of blocks: the newest of the lowest priority gives up its own, and is computed again later."""
        if not self._is_short_of_blocks:
            return
        self._is_short_of_blocks = False
        victim = admission.choose_victim(live.row for live in self.roster.running.values())
        if victim is None:
            self._retry_extension_at = self._clock() + RETRY_BLOCKS_S
            return
        live = self.roster.running[victim.slot]
        live.num_preemptions += 1
        self._release(live)
        self.roster.preempt(live)
        # Nobody comes in before somebody ended, or the same request would be preempted again and again.
        self._is_closed_by_preemption = True
        if self._steps is not None and live.num_steps_in_flight:
            self._hold_extensions_until = self._steps.last_sent
        self._observer.on_preempted()

    def _admit(self) -> None:
        roster, now = self.roster, self._clock()
        if not roster.running and not roster.allocating:
            self._is_closed_by_preemption = False
        if self._steps is None or self._is_closed_by_preemption:
            return
        num_places = roster.num_free_slots - len(roster.allocating)
        if self._retry_admission_at is not None:
            if now < self._retry_admission_at or roster.allocating:
                return
            num_places = min(1, num_places)  # who was refused is tried alone: nobody passes it again and again
        for live in roster.waiting[: max(0, num_places)]:
            if live.num_steps_in_flight:
                break
            self._allocate(live)

    def _allocate(self, live: LiveRequest) -> None:
        checked = live.checked
        self.roster.begin_allocation(live)
        num_waiting = len(self.roster.waiting) if self._retry_admission_at is not None else 0
        most = admission.blocks_for(live.spec.max_kv_tokens, self.model.block_size)
        slack = admission.slack_blocks(self.limits.slack_blocks, self.used_blocks, self.model, num_waiting)
        slack = min(slack, most - admission.blocks_for(len(live.tokens), self.model.block_size))
        allocation = Allocation(live.sequence_id, tuple(live.tokens), checked.salt, max(0, slack), checked.bypass_cache)
        self._outbox.allocate(allocation)

    def _start(self, live: LiveRequest, outcome: Allocated) -> None:
        self._retry_admission_at = None
        slot = self.roster.take_slot(live)
        num_tokens, num_cached = len(live.tokens), outcome.num_cached_tokens
        capacity = len(outcome.block_ids) * self.model.block_size
        row = Row(slot, live.order, num_tokens, num_cached, num_cached, capacity, live.spec.max_kv_tokens)
        live.begin_row(row, list(outcome.block_ids))
        live.num_committed_blocks = num_cached // self.model.block_size
        if live.num_cached_tokens is None:
            live.num_cached_tokens = num_cached
            self._observer.on_admitted(num_tokens, num_cached)
            live.stream.start(_started(live))

    def _extend(self) -> None:
        """Ask for blocks ahead of need, so that no decode step waits for them."""
        if self._retry_extension_at is not None and self._clock() < self._retry_extension_at:
            return
        self._retry_extension_at = None
        steps, model = self._steps, self.model
        if steps is None or (steps.num_in_flight and steps.last_result < self._hold_extensions_until):
            return
        num_waiting = len(self.roster.waiting)
        slack = admission.slack_blocks(self.limits.slack_blocks, self.used_blocks, model, num_waiting)
        for live in self.roster.running.values():
            if live.is_extending:
                continue
            have = len(live.block_ids)
            grown = admission.growth(live.row, have, slack, model.block_size, was_refused=live.was_extend_refused)
            if grown is not None:
                live.is_extending = True
                self._outbox.extend(Extension(live.sequence_id, have, grown.need_blocks, grown.want_blocks))

    def _send(self) -> None:
        steps = self._steps
        while steps is not None and steps.num_in_flight < self.limits.max_steps_in_flight:
            began = self._clock()
            rows = [live.row for live in self.roster.running.values()]
            runs = scheduler.plan(rows, self.limits.max_tokens_per_step)
            if not runs and (steps.num_in_flight or not steps.has_retirements):
                break
            lives = [self.roster.running[run.slot] for run in runs]
            for live in lives:
                live.times.first_scheduled = began if live.times.first_scheduled is None else live.times.first_scheduled
            steps.send(zip(lives, runs, strict=True))
            self._observer.on_planned(self._clock() - began, scheduler.num_planned_tokens(runs))

    # ------------------------------------------------------------------------------------------------------- the end

    def _finish(self, live: LiveRequest, ending: Ending) -> None:
        """The answer is complete, or as complete as it will be."""
        if ending.reason is FinishReason.CANCELLED:
            self._show_rest(live)
        finished = Finished(ending.reason, ending.matched_stop)
        live.stream.finish(finished, Completed(live.usage(), live.timing(self._clock())))
        self._end(live, ending.reason.name.lower())

    def _show_rest(self, live: LiveRequest) -> None:
        """What a cancelled request owes its client: its beginning, if it never ran, and the text that was held."""
        if live.num_cached_tokens is None:
            live.stream.start(_started(live))
        if live.tokens:
            live.stream.add(live.answer.finish(), [])

    def _fail(self, live: LiveRequest, error: OctavoError) -> None:
        if live.phase is not Phase.ENDED:
            live.stream.fail(error)
            self._end(live, "error")

    def _end(self, live: LiveRequest, outcome: str) -> None:
        """Give back all that the request holds."""
        if live.phase in (Phase.RUNNING, Phase.ALLOCATING):
            self._release(live)
            self._retry_admission_at = None
            self._retry_extension_at = None
            self._is_closed_by_preemption = False
        now = self._clock()
        usage, timing = live.usage(), live.timing(now)
        self._observer.on_ended(outcome, usage, timing, now - live.times.arrived)
        log.info(
            "request %s: %s, %s, %s, %d preemptions", live.request_id, outcome, usage, timing, live.num_preemptions
        )
        self.roster.end(live)
        self._wakeup.set()

    def _release(self, live: LiveRequest) -> None:
        """Blocks back to the cache service, committed as far as computed; the row leaves the executor."""
        commit = None
        if live.phase is Phase.RUNNING:
            commit = _commit_of(live)
            if live.is_at_executor and self._steps is not None:
                self._steps.retire(live.row.slot)
        free_after = tuple((key, step_id) for key, step_id in live.free_after.items())
        self._outbox.release(Release(live.sequence_id, commit, free_after))


def _started(live: LiveRequest) -> Started:
    return Started(live.request_id, live.usage().prompt_tokens, live.num_cached_tokens or 0, live.checked.sampling.seed)


def _commit_of(live: LiveRequest) -> Commit:
    """All that is computed, with the ids that the cache service does not know yet."""
    num_computed, offset = live.row.num_computed, live.num_cache_tokens
    token_ids = tuple(live.tokens[offset:num_computed])
    live.num_cache_tokens = max(offset, num_computed)
    return Commit(live.sequence_id, num_computed, offset, token_ids)


def _internal(reason: str, message: str) -> OctavoError:
    return OctavoError(
        Code.INTERNAL,
        "STEP_FAILED",
        f"the executor could not compute this request: {message}",
        metadata={"reason": reason},
    )


def _queue_full(queued: int, allowed: int) -> OctavoError:
    return OctavoError(
        Code.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        f"{queued} requests wait, and {allowed} may; try again later or send to another router",
        metadata={"queued": str(queued), "max_queued_requests": str(allowed)},
        retry_after_s=1.0,
    )
