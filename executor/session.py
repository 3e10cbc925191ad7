"""One router's ordered steps: which step is next, what it changes, and the results that are kept until acknowledged.

    step_id <= last applied            the stored result again, or StepGap where it is no longer held
    step_id == last applied + 1        runs; StepFailed leaves everything as it was, the step id too
    step_id >  last applied + 1        StepGap

A step that fails uses up no id: the steps behind it that were already sent are answered with StepGap.

A step has a beginning and an end. On a device that computes by itself the next one begins before the tokens of the one
before are seen here, and its rows go on with what lies on the device:

    begin N | begin N+1 | finish N | begin N+2 | finish N+1 ...

Synchronous; no clock and no transport. Not here: which router owns the session and for how long (`sessions`), when the
end of a step is looked for (`session_host`).
"""

from dataclasses import replace

import numpy as np

from executor.batch import Batch, FedTokens, pack_batch, pack_fed, sampling_rows
from executor.begun import BegunStep
from executor.ids import SessionId, StepId
from executor.logits.constraint import MakeConstraint, no_constraint
from executor.pending import StepRunner
from executor.slots import SlotTable
from executor.step import Ints, Step, StepError, StepFailed, StepGap, StepOutcome, StepResult, invalid_step
from executor.step_check import StepLimits, check_step, check_writes, written_blocks

# A router that acknowledges nothing must not fill this process's memory.
MAX_STORED_RESULTS = 64
# Of which the tokens of the last may be unknown: two steps are what a router sends without an answer.
MAX_BEGUN_STEPS = 2


class Session:
    """The state of one session."""

    def __init__(
        self,
        session_id: SessionId,
        max_rows: int,
        limits: StepLimits,
        runner: StepRunner,
        make_constraint: MakeConstraint = no_constraint,
    ) -> None:
        self.session_id = session_id
        self.last_applied_step = StepId(0)
        self._table = SlotTable(max_rows, make_constraint)
        self._limits = limits
        self._runner = runner
        self._results: dict[StepId, StepResult] = {}
        self._begun: list[BegunStep] = []  # in order; the oldest is step last_applied_step + 1

    @property
    def num_rows(self) -> int:
        """Rows in slots."""
        return self._table.num_rows

    @property
    def num_stored_results(self) -> int:
        """Results that are not acknowledged."""
        return len(self._results)

    def acknowledge(self, step_id: StepId) -> None:
        """Drop the results up to step_id."""
        for old in [stored for stored in self._results if stored <= step_id]:
            del self._results[old]

    def begin(self, step: Step) -> BegunStep | StepOutcome:
        """Give the step to the runner, or say why not; where it is computed at once, its outcome.

        Never raises for what a router or the model did. A step that cannot begin behind another, for whatever reason,
        begins anew once that one is finished.
        """
        while len(self._begun) >= MAX_BEGUN_STEPS:
            self._finish_oldest()
        if self._begun and step.step_id == self._next_id and self._begun[-1].is_followed_by(step):
            try:
                return self._begin(step)
            except StepError:
                pass
        self.settle()
        if step.step_id <= self.last_applied_step:
            return self._results.get(step.step_id) or StepGap(self.last_applied_step)
        if step.step_id > self._next_id:
            return StepGap(self.last_applied_step)
        try:
            begun = self._begin(step)
        except StepError as error:
            return StepFailed(step.step_id, error.reason, error.message)
        return self.finish(begun) if begun.output.is_done else begun

    def finish(self, begun: BegunStep) -> StepOutcome:
        """The outcome of a step that was begun, waited for, and of those before it. Never raises for what they did."""
        while begun.outcome is None:
            self._finish_oldest()
        return begun.outcome

    def settle(self) -> None:
        """Finish every step that was begun."""
        while self._begun:
            self._finish_oldest()

    @property
    def _next_id(self) -> int:
        return self.last_applied_step + len(self._begun) + 1

    def _begin(self, step: Step) -> BegunStep:
        self._check(step)
        before = self._table.apply(step)
        try:
            dropped = self._table.rows["failed"][step.slots]  # [num_rows]
            rows = np.flatnonzero(~dropped)
            slots, starts, counts = step.slots[rows], step.start_positions[rows], step.num_tokens[rows]
            draws = sampling_rows(self._table, slots, starts, counts)
            ahead = self._begun[-1] if self._begun else None
            batch = self._pack(slots, starts, counts, pack_fed(slots, counts, ahead.drawn_slots) if ahead else None)
            output = self._runner.begin(step.copy_sources, step.copy_targets, batch, ahead.output if ahead else None)
        except BaseException:
            self._table.restore(before)
            raise
        self._table.advance(slots, counts)
        takes = self._table.rows["num_candidates"][slots[draws]] == 0
        self._table.expect(np.unique(slots[draws][takes]))
        rules = {slot: self._table.rules[slot] for slot in step.slots.tolist() if slot in self._table.rules}
        begun = BegunStep(step, before, rows, starts + counts, draws, takes, rules, dropped, output)
        self._begun.append(begun)
        return begun

    def _finish_oldest(self) -> None:
        begun = self._begun.pop(0)
        try:
            output = begun.output.take()
        except StepError as error:
            self._take_back(begun)
            begun.outcome = StepFailed(begun.step.step_id, error.reason, error.message)
            return
        begun.outcome = result = begun.settle(self._table, output, self._begun)
        self.last_applied_step = begun.step.step_id
        self.acknowledge(begun.step.acknowledged_step)
        self._results[begun.step.step_id] = result

    def _take_back(self, begun: BegunStep) -> None:
        """With the steps behind it, which write nothing any more when this is known."""
        for later in reversed(self._begun):
            later.output.wait()
            self._table.restore(later.before)
            later.outcome = StepGap(self.last_applied_step)
        self._begun.clear()
        self._table.restore(begun.before)

    def _check(self, step: Step) -> None:
        held = sum(stored > step.acknowledged_step for stored in self._results) + len(self._begun)
        if step.acknowledged_step > self.last_applied_step:
            raise invalid_step(
                f"acknowledged_step: {step.acknowledged_step}, but step {self.last_applied_step} is the last that ran"
            )
        if held >= MAX_STORED_RESULTS:
            raise invalid_step(f"acknowledged_step: {held} results are kept; acknowledge them first")
        check_step(step, self._table, self._limits)

    def _pack(self, slots: Ints, starts: Ints, counts: Ints, fed: FedTokens | None) -> Batch | None:
        if not slots.size:
            return None
        check_writes(written_blocks(slots, starts, counts, self._table, self._limits.block_size))
        batch = pack_batch(self._table, slots, starts, counts, self._limits.block_size)
        return replace(batch, fed=fed) if fed is not None else batch
