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
from router import scheduler
from router.capacity import Capacity
from router.delivery import Ending, accept_token
from router.ids import SessionKey, StepId
from router.live import LiveRequest, Phase
from router.model import Model
from router.observer import Observer, StepTimes
from router.outbox import Allocated, Allocation, Extended, Extension, Outbox
from router.request import CheckedRequest, FinishReason, RequestSpec
from router.roster import Roster
from router.step import Outcome, RunOutput, Step, StepFailed, StepResult
from router.steps import SentRun, SessionSteps
from router.stream import Completed, Finished, Started
from router.text.answer import AnswerText

log = logging.getLogger(__name__)


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
        self._outcomes: list[tuple[Outcome, float]] = []  # and when it arrived
        self._steps: SessionSteps | None = None
        self._capacity = Capacity(model, limits.slack_blocks, self.roster, outbox, observer)

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

    def sent_steps(self) -> dict[SessionKey, StepId]:
        """The highest step that was sent to the session: what it may still write."""
        return {self._steps.key: self._steps.last_sent} if self._steps and self._steps.last_sent else {}

    def load(self) -> Load:
        """How busy it is now."""
        ratio = min(1.0, self._capacity.used_blocks / max(1, self.model.num_usable_blocks))
        return Load(len(self.roster.running), self.roster.num_queued, ratio)

    # ------------------------------------------------------------------------------------- what other processes answer

    def attach(self, session: SessionKey, send: Callable[[Step], None]) -> None:
        """A fresh session: every row is sent again, with its blocks and as far as it is known to be computed."""
        self.detach()
        self._steps = SessionSteps(session, send, self.model, self._clock)
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
        self._capacity.forget_session()

    def on_outcome(self, outcome: Outcome) -> None:
        """A step's result is here."""
        self._outcomes.append((outcome, self._clock()))
        self._wakeup.set()

    def on_allocated(self, allocation: Allocation, outcome: Allocated) -> None:
        """Blocks for a request, or none."""
        live = self.roster.find_sequence(allocation.sequence_id)
        if live is None:
            return
        self._wakeup.set()
        if outcome.error is None:
            self._begin(live, outcome)
        elif outcome.error.code is Code.RESOURCE_EXHAUSTED:
            self._capacity.take_refusal(live, self._clock())
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
            self._capacity.take_extension(live, outcome)
        elif outcome.error.code is Code.RESOURCE_EXHAUSTED:
            self._capacity.take_shortage()
        else:
            self._fail(live, outcome.error)

    # -------------------------------------------------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Turn whenever something happened. Ends only by cancellation or by an error of its own."""
        loop = asyncio.get_running_loop()
        while True:
            now = self._clock()
            self.turn(now)
            retry_at = self._capacity.next_retry_after(now)
            try:
                async with asyncio.timeout_at(None if retry_at is None else loop.time() + retry_at - now):
                    await self._wakeup.wait()
            except TimeoutError:
                pass
            self._wakeup.clear()

    def turn(self, now: float) -> None:
        """Everything that can be done now, in this order. Without a session nothing runs and nobody is admitted."""
        self._receive()
        if self._steps is not None:
            self._capacity.preempt(self._steps, now)
            self._capacity.admit(now)
            self._capacity.extend(self._steps, now)
            self._send(self._steps)

    def _receive(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        for outcome, received in outcomes:
            if self._steps is None or self._steps.drop_refused():
                continue
            if isinstance(outcome, StepResult):
                self._deliver(self._steps, outcome, received)
            elif isinstance(outcome, StepFailed):
                self._drop_failed_step(self._steps, outcome)
            else:
                raise ValueError(f"the executor misses a step behind {outcome.last_applied_step}")

    def _deliver(self, steps: SessionSteps, result: StepResult, received: float) -> None:
        began = self._clock()
        sent = steps.complete(result.step_id)
        self._outbox.acknowledge(steps.key, result.step_id)
        for sent_run, output in zip(sent.runs, result.run_outputs(), strict=True):
            if output.failure is not None:
                self._fail(sent_run.live, _internal(output.failure.reason, output.failure.message))
            elif sent_run.live.phase is not Phase.ENDED:
                self._advance(sent_run, output, began)
        self._observer.on_step(
            StepTimes(
                session_id=steps.key.session_id,
                step_id=result.step_id,
                num_rows=len(sent.runs),
                num_tokens=sum(sent_run.run.num_tokens for sent_run in sent.runs),
                plan_began=sent.plan_began,
                send_began=sent.send_began,
                sent=sent.sent,
                received=received,
                deliver_began=began,
                delivered=self._clock(),
                execute_began_unix_s=result.execute_began_unix_s,
                execute_s=result.execute_s,
            )
        )

    def _advance(self, sent_run: SentRun, output: RunOutput, now: float) -> None:
        """A request is further by one run: also one that was preempted while the run was on its way."""
        live = sent_run.live
        if sent_run.is_current and live.phase is Phase.RUNNING:
            live.row.num_computed = sent_run.run.start + sent_run.run.num_tokens
        ending = None
        live.stream.add_prompt_logprobs(output.prompt_logprobs)
        for index, token_id in enumerate(output.token_ids):
            text, ending = accept_token(live, token_id, self.model.eos_token_ids)
            live.stream.add(text, [token_id], output.logprobs[index : index + 1])
            self._time_token(live, now)
        if ending is not None:
            self._finish(live, ending)
        else:
            self._capacity.commit(live)

    def _time_token(self, live: LiveRequest, now: float) -> None:
        times = live.times
        if times.last_token is None:
            times.first_token = now
            self._observer.on_first_token(now - times.arrived)
        else:
            self._observer.on_next_token(now - times.last_token)
        times.last_token = now

    def _drop_failed_step(self, steps: SessionSteps, failed: StepFailed) -> None:
        sent = steps.fail(failed.step_id)
        log.error("step %d failed with %s: %s", failed.step_id, failed.reason, failed.message)
        for sent_run in sent.runs:
            self._fail(sent_run.live, _internal(failed.reason, failed.message))

    def _begin(self, live: LiveRequest, outcome: Allocated) -> None:
        self._capacity.take_allocation(live, outcome)
        if live.num_cached_tokens is None:
            live.num_cached_tokens = outcome.num_cached_tokens
            self._observer.on_admitted(len(live.tokens), outcome.num_cached_tokens)
            live.stream.start(_started(live))
            if live.checked.output.echo:
                live.stream.add(live.spec.echo_text, live.spec.prompt_ids)

    def _send(self, steps: SessionSteps) -> None:
        while steps.num_in_flight < self.limits.max_steps_in_flight:
            began = self._clock()
            rows = [live.row for live in self.roster.running.values()]
            runs = scheduler.plan(rows, self.limits.max_tokens_per_step)
            if not runs and (steps.num_in_flight or not steps.has_retirements):
                break
            lives = [self.roster.running[run.slot] for run in runs]
            for live in lives:
                live.times.first_scheduled = began if live.times.first_scheduled is None else live.times.first_scheduled
            steps.send(zip(lives, runs, strict=True), began)

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
        self._capacity.release(live, self._steps)
        now = self._clock()
        usage, timing = live.usage(), live.timing(now)
        self._observer.on_ended(outcome, usage, timing, now - live.times.arrived)
        log.info(
            "request %s: %s, %s, %s, %d preemptions", live.request_id, outcome, usage, timing, live.num_preemptions
        )
        self.roster.end(live)
        self._wakeup.set()


def _started(live: LiveRequest) -> Started:
    return Started(live.request_id, live.usage().prompt_tokens, live.num_cached_tokens or 0, live.checked.sampling.seed)


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
