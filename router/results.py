"""Results of steps: rows advance, tokens reach their answers, full blocks are committed.

Synchronous, within a turn of the engine. Not here: what a turn does besides (engine), what one token does to an answer
(delivery), who ends and what that gives back (the engine again, through `Enders`).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from octavo.errors import OctavoError
from router import refusals
from router.capacity import Capacity
from router.delivery import Ending, accept_token
from router.live import Choice, LiveRequest, Phase
from router.logprob import TokenLogprob
from router.model import Model
from router.observer import Observer, StepTimes
from router.outbox import Outbox
from router.roster import Roster
from router.searching import Searching
from router.step import Outcome, RunOutput, StepFailed, StepResult
from router.steps import SentRun, SessionSteps

log = logging.getLogger(__name__)


class Enders(Protocol):
    """Who ends answers and requests."""

    def finish(self, choice: Choice, ending: Ending) -> None:
        """An answer is complete."""

    def fail(self, request: LiveRequest, error: OctavoError) -> None:
        """A request ends with an error. Does nothing for one that ended."""


@dataclass
class Results:
    """Outcomes of steps, from their arrival until a turn of the engine has applied them.

    Attributes:
        clock: seconds, monotonic.
    """

    model: Model
    roster: Roster
    capacity: Capacity
    observer: Observer
    outbox: Outbox
    enders: Enders
    searching: Searching
    clock: Callable[[], float]
    _arrived: list[tuple[Outcome, float]] = field(default_factory=list)  # and when

    def add(self, outcome: Outcome) -> None:
        """A step's outcome is here."""
        self._arrived.append((outcome, self.clock()))

    def clear(self) -> None:
        """The session is lost: what came of it means nothing to the next."""
        self._arrived.clear()

    def take(self, steps: SessionSteps) -> None:
        """Apply all that arrived to the session's steps, in order.

        Raises:
            ValueError: an outcome that no step of the session can have.
        """
        arrived, self._arrived = self._arrived, []
        for outcome, received in arrived:
            if steps.drop_refused():
                continue
            if isinstance(outcome, StepResult):
                self._deliver(steps, outcome, received)
            elif isinstance(outcome, StepFailed):
                self._drop_failed_step(steps, outcome)
            else:
                raise ValueError(f"the executor misses a step behind {outcome.last_applied_step}")

    def _deliver(self, steps: SessionSteps, result: StepResult, received: float) -> None:
        began = self.clock()
        sent = steps.complete(result.step_id)
        self.outbox.acknowledge(steps.key, result.step_id)
        for sent_run, output in zip(sent.runs, result.run_outputs(), strict=True):
            failure = output.failure
            if failure is not None:
                self.enders.fail(sent_run.choice.request, refusals.step_failed(failure.reason, failure.message))
            elif sent_run.choice.phase is not Phase.ENDED:
                self._advance_or_fail(sent_run, output, began)
        self.observer.on_step(
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
                delivered=self.clock(),
                execute_began_unix_s=result.execute_began_unix_s,
                execute_s=result.execute_s,
            )
        )

    def _advance_or_fail(self, sent_run: SentRun, output: RunOutput, now: float) -> None:
        """What goes wrong with one request's tokens is its own: the others of the step go on."""
        request = sent_run.choice.request
        try:
            self._advance(sent_run, output, now)
        except Exception:
            log.exception("request %s: a fault of the router, a defect to report; it ends alone", request.request_id)
            self.observer.on_fault()
            self.enders.fail(request, refusals.router_fault())

    def _advance(self, sent_run: SentRun, output: RunOutput, now: float) -> None:
        """A choice is further by one run: also one that was preempted while the run was on its way."""
        choice, beams = sent_run.choice, sent_run.choice.request.beams
        is_running = sent_run.is_current and choice.phase is Phase.RUNNING
        if is_running:
            choice.row.num_computed = sent_run.run.start + sent_run.run.num_tokens
            self.capacity.settle_copy(choice)
        choice.stream.add_prompt_logprobs(output.prompt_logprobs)
        if len(output.token_ids) > 1:
            self._bear(choice, output, now)
        elif output.token_ids:
            self._accept(choice, output.token_ids[0], output.logprobs[:1], now)
        elif output.candidates is not None and beams is not None and is_running:
            self.searching.take_candidates(choice, beams, output.candidates, now)
        self.capacity.commit(choice)

    def _bear(self, first: Choice, output: RunOutput, now: float) -> None:
        """The first token of every choice: those that go on share the blocks of the first, or wait for their own."""
        choices = first.request.choices
        children = []
        for index, token_id in enumerate(output.token_ids[1:], 1):
            ending = self._deliver_token(choices[index], token_id, output.logprobs[index : index + 1], now)
            if ending is not None:
                self.enders.finish(choices[index], ending)
            else:
                children.append(choices[index])
        can_share = bool(children) and first.phase is Phase.RUNNING
        if not (can_share and self.capacity.fork(first, children)):
            for child in children:
                self.roster.enqueue(child)
        self._accept(first, output.token_ids[0], output.logprobs[:1], now)

    def _accept(self, choice: Choice, token_id: int, logprobs: Sequence[TokenLogprob], now: float) -> None:
        ending = self._deliver_token(choice, token_id, logprobs, now)
        if ending is not None:
            self.enders.finish(choice, ending)

    def _deliver_token(
        self, choice: Choice, token_id: int, logprobs: Sequence[TokenLogprob], now: float
    ) -> Ending | None:
        text, ending = accept_token(choice, token_id, self.model.eos_token_ids)
        choice.cumulative_logprob += sum(logprob.logprob for logprob in logprobs)
        choice.stream.add(choice.index, text, [token_id], logprobs if choice.checked.output.logprobs else ())
        self._time_token(choice, now)
        return ending

    def _time_token(self, choice: Choice, now: float) -> None:
        times = choice.request.times
        if times.first_token is None:
            times.first_token = now
            self.observer.on_first_token(now - times.arrived)
        self.observer.on_token(None if choice.last_token_at is None else now - choice.last_token_at)
        times.last_token = choice.last_token_at = now

    def _drop_failed_step(self, steps: SessionSteps, failed: StepFailed) -> None:
        sent = steps.fail(failed.step_id)
        log.error("step %d failed with %s: %s", failed.step_id, failed.reason, failed.message)
        for sent_run in sent.runs:
            self.enders.fail(sent_run.choice.request, refusals.step_failed(failed.reason, failed.message))
