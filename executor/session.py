"""One router's ordered steps: which step is next, what it changes, and the results that are kept until acknowledged.

    step_id <= last applied            the stored result again, or StepGap where it is no longer held
    step_id == last applied + 1        runs; StepFailed leaves everything as it was, the step id too
    step_id >  last applied + 1        StepGap

A step that fails uses up no id: the steps behind it that were already sent are answered with StepGap. Synchronous;
no clock and no transport. Not here: which router owns the session and for how long (`sessions`).
"""

from typing import Protocol

import numpy as np

from executor.batch import Batch, pack_batch, sampling_rows
from executor.ids import SessionId, StepId
from executor.logits.constraint import MakeConstraint, no_constraint
from executor.slots import SlotTable
from executor.step import (
    CONSTRAINT_FAILED,
    LOGITS_NOT_FINITE,
    Bools,
    Candidates,
    Ints,
    RowFailure,
    Step,
    StepError,
    StepFailed,
    StepGap,
    StepOutcome,
    StepOutput,
    StepResult,
    TokenLogprobs,
    invalid_step,
)
from executor.step_check import StepLimits, check_step, check_writes, written_blocks

# A router that acknowledges nothing must not fill this process's memory.
MAX_STORED_RESULTS = 64


class StepRunner(Protocol):
    """What computes a batch. Raises StepError."""

    def run(self, copy_sources: Ints, copy_targets: Ints, batch: Batch | None) -> StepOutput:
        """See `Runner.run`."""


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

    def process(self, step: Step) -> StepOutcome:
        """Run the step, or say why not. Never raises for what a router or the model did."""
        if step.step_id <= self.last_applied_step:
            return self._results.get(step.step_id) or StepGap(self.last_applied_step)
        if step.step_id > self.last_applied_step + 1:
            return StepGap(self.last_applied_step)
        try:
            result = self._run(step)
        except StepError as error:
            return StepFailed(step.step_id, error.reason, error.message)
        self.last_applied_step = step.step_id
        self.acknowledge(step.acknowledged_step)
        self._results[step.step_id] = result
        return result

    def _run(self, step: Step) -> StepResult:
        self._check(step)
        before = self._table.apply(step)
        try:
            live = ~self._table.rows["failed"][step.slots]  # [num_rows]
            slots, starts, counts = step.slots[live], step.start_positions[live], step.num_tokens[live]
            sampling = sampling_rows(self._table, slots, starts, counts)
            output = self._runner.run(step.copy_sources, step.copy_targets, self._pack(slots, starts, counts))
        except BaseException:
            self._table.restore(before)
            raise
        self._table.advance(slots, counts)
        sampled = slots[sampling]
        draws = self._table.rows["num_candidates"][sampled] == 0
        first = output.finite & draws & (np.diff(sampling, prepend=-1) > 0)  # the row goes on with its first draw
        self._table.append(sampled[first], output.token_ids[first])
        self._table.fail(sampled[~output.finite])
        return self._result(step, np.flatnonzero(live), sampling, output)

    def _check(self, step: Step) -> None:
        held = sum(stored > step.acknowledged_step for stored in self._results)
        if step.acknowledged_step > self.last_applied_step:
            raise invalid_step(
                f"acknowledged_step: {step.acknowledged_step}, but step {self.last_applied_step} is the last that ran"
            )
        if held >= MAX_STORED_RESULTS:
            raise invalid_step(f"acknowledged_step: {held} results are kept; acknowledge them first")
        check_step(step, self._table, self._limits)

    def _pack(self, slots: Ints, starts: Ints, counts: Ints) -> Batch | None:
        if not slots.size:
            return None
        check_writes(written_blocks(slots, starts, counts, self._table, self._limits.block_size))
        return pack_batch(self._table, slots, starts, counts, self._limits.block_size)

    def _result(self, step: Step, rows: Ints, draws: Ints, output: StepOutput) -> StepResult:
        """rows: [num_live] -> row of the step; draws: [num_sampling] -> live row."""
        sampling = rows[draws]  # [num_sampling] -> row of the step
        drawn = output.finite & (self._table.rows["num_candidates"][step.slots[sampling]] == 0)
        num_sampled = np.bincount(sampling[drawn], minlength=len(step.slots))
        failed = np.flatnonzero(self._table.rows["failed"][step.slots])
        failures = tuple(self._failure(row, int(step.slots[row])) for row in failed.tolist())
        return StepResult(
            step.step_id,
            num_sampled,
            output.token_ids[drawn],
            failures,
            output.execute_microseconds,
            output.began_unix_microseconds,
            sampled_logprobs=_logprobs(output.sampled_logprobs, sampling, output.finite),
            prompt_logprobs=_logprobs(output.prompt_logprobs, rows, np.ones(len(rows), dtype=np.bool_)),
            candidates=_candidates(output.candidates, sampling, output.finite),
        )

    def _failure(self, row: int, slot: int) -> RowFailure:
        rules = self._table.rules.get(slot)
        if rules is not None and rules.constraint is not None and rules.constraint.error:
            return RowFailure(row, CONSTRAINT_FAILED, f"slot {slot}: {rules.constraint.error}")
        return RowFailure(row, LOGITS_NOT_FINITE, f"slot {slot}: its logits hold NaN or infinity")


def _candidates(found: Candidates | None, rows: Ints, good: Bools) -> Candidates | None:
    """As `_logprobs`."""
    return found.kept(good[found.rows], rows) if found is not None else None


def _logprobs(found: TokenLogprobs | None, rows: Ints, good: Bools) -> TokenLogprobs | None:
    """rows: the device's rows -> rows of the step; good: which of the device's rows count."""
    return found.kept(good[found.rows], rows) if found is not None else None
