"""Steps of one session: what each carries, which are on their way, and what is undone when one is refused.

Not here: what a result means for a request (engine), and the wire (clients).
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from router.ids import SessionKey, Slot, StepId
from router.live import Choice, LiveRequest
from router.model import Model
from router.sampling import row_sampling
from router.scheduler import Run, mark_sent
from router.step import RowStart, Step, TableExtension


@dataclass(frozen=True, slots=True)
class SentRun:
    """A choice's part in a sent step; another incarnation since then means that its row is gone."""

    choice: Choice
    incarnation: int
    run: Run
    num_blocks_before: int
    num_known_before: int
    was_at_executor: bool

    @property
    def is_current(self) -> bool:
        return self.incarnation == self.choice.incarnation


@dataclass(frozen=True, slots=True)
class SentStep:
    """Moments in the engine's clock (seconds), as `observer.StepTimes`."""

    step_id: StepId
    runs: tuple[SentRun, ...]
    retired_slots: tuple[Slot, ...]
    plan_began: float
    send_began: float
    sent: float


class SessionSteps:
    """The steps of a session, in order.

    Args:
        key: the session.
        send: puts a step on its way; never blocks.
        clock: seconds, monotonic; only for times that are reported.
    """

    def __init__(self, key: SessionKey, send: Callable[[Step], None], model: Model, clock: Callable[[], float]) -> None:
        self.key = key
        self._send = send
        self._model = model
        self._clock = clock
        self._in_flight: deque[SentStep] = deque()
        self._to_retire: list[Slot] = []
        self._next_id = StepId(1)
        self._num_refused = 0  # outcomes still to come of steps that were sent behind a failed one
        self.last_result = StepId(0)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight) + self._num_refused

    @property
    def last_sent(self) -> StepId:
        return StepId(self._next_id - 1)

    @property
    def has_retirements(self) -> bool:
        return bool(self._to_retire)

    def retire(self, slot: Slot) -> None:
        """The row of this slot leaves with the next step."""
        self._to_retire.append(slot)

    def send(self, runs: Iterable[tuple[Choice, Run]], plan_began: float) -> None:
        """Send the next step, with all that changed since the last one."""
        send_began = self._clock()
        step_id = self._next_id
        started, extensions, copies, appended, sent = [], [], [], [], []
        for choice, run in runs:
            before = (choice.num_blocks_sent, choice.num_known, choice.is_at_executor)
            sent.append(SentRun(choice, choice.incarnation, run, *before))
            if not choice.is_at_executor:
                started.append(_row_start(choice, self._model))
                copies += [choice.copy] if choice.copy is not None else []
            else:
                if choice.row.is_beam:
                    appended += [(run.slot, token_id) for token_id in choice.tokens[choice.num_known :]]
                if len(choice.block_ids) > choice.num_blocks_sent:
                    extensions.append(TableExtension(run.slot, tuple(choice.block_ids[choice.num_blocks_sent :])))
            choice.num_known = len(choice.tokens)
            choice.is_at_executor, choice.num_blocks_sent = True, len(choice.block_ids)
            choice.free_after[self.key] = step_id
            choice.num_steps_in_flight += 1
            mark_sent(choice.row, run)
        retired, self._to_retire = tuple(self._to_retire), []
        self._next_id = StepId(step_id + 1)
        all_runs = tuple(sent_run.run for sent_run in sent)
        changes = (tuple(started), tuple(extensions), tuple(copies))
        self._send(Step(step_id, self.last_result, retired, *changes, all_runs, tuple(appended)))
        self._in_flight.append(SentStep(step_id, tuple(sent), retired, plan_began, send_began, self._clock()))

    def complete(self, step_id: StepId) -> SentStep:
        """The result of the oldest step is here.

        Raises:
            ValueError: it is the result of another step.
        """
        sent = self._pop(step_id)
        self.last_result = step_id
        return sent

    def fail(self, step_id: StepId) -> SentStep:
        """The oldest step was refused and changed nothing: its id, and all it carried, go out again.

        Steps behind it are refused too, as a gap: they are undone here, and their outcomes are awaited and dropped.

        Raises:
            ValueError: another step was refused.
        """
        failed = self._pop(step_id)
        refused = [failed, *self._in_flight]
        self._num_refused += len(self._in_flight)
        for behind in self._in_flight:
            for sent in behind.runs:
                sent.choice.num_steps_in_flight -= 1
        self._in_flight.clear()
        self._next_id = step_id
        for step in reversed(refused):
            self._undo(step)
        return failed

    def drop_refused(self) -> bool:
        """Whether this outcome belongs to a step behind a failed one."""
        if not self._num_refused:
            return False
        self._num_refused -= 1
        return True

    def requests_in_flight(self) -> list[LiveRequest]:
        """Of which a sent step has no result yet."""
        return [sent.choice.request for step in self._in_flight for sent in step.runs]

    def abandon(self) -> None:
        """The session is over: no result will come."""
        for step in self._in_flight:
            for sent in step.runs:
                sent.choice.num_steps_in_flight -= 1
        self._in_flight.clear()

    def _pop(self, step_id: StepId) -> SentStep:
        if not self._in_flight or self._in_flight[0].step_id != step_id:
            raise ValueError(f"an outcome of step {step_id} where {self._in_flight} are awaited")
        sent = self._in_flight.popleft()
        for sent_run in sent.runs:
            sent_run.choice.num_steps_in_flight -= 1
        return sent

    def _undo(self, step: SentStep) -> None:
        lost_starts = set()
        for sent in step.runs:
            if not sent.was_at_executor:
                lost_starts.add(sent.run.slot)
            if sent.is_current:
                choice = sent.choice
                choice.is_at_executor, choice.num_blocks_sent = sent.was_at_executor, sent.num_blocks_before
                choice.num_known = sent.num_known_before
                choice.row.num_sent = sent.run.start
                choice.row.num_tokens -= sent.run.samples
        # A row that started in the refused step is not there to be retired; what the step retired still is.
        self._to_retire = [slot for slot in self._to_retire if slot not in lost_starts]
        self._to_retire = [*step.retired_slots, *self._to_retire]


def _row_start(choice: Choice, model: Model) -> RowStart:
    return RowStart(
        slot=choice.row.slot,
        incarnation=choice.incarnation,
        token_ids=tuple(choice.tokens),
        num_computed_tokens=choice.row.num_computed,
        block_ids=tuple(choice.block_ids),
        sampling=row_sampling(choice, model.eos_token_ids, model.vocabulary_size),
        tag=choice.request.tag,
    )
