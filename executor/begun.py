"""A step of a session between its beginning and its end: what is needed to form its result, or to take it back.

Not here: the order of steps (`session`), the device (`pending`).
"""

from dataclasses import dataclass

import numpy as np

from executor.logits.row_rules import RowRules
from executor.pending import PendingOutput
from executor.slots import SlotTable, Snapshot, stand_still
from executor.step import (
    CONSTRAINT_FAILED,
    LOGITS_NOT_FINITE,
    Bools,
    Candidates,
    Ints,
    RowFailure,
    Step,
    StepOutcome,
    StepOutput,
    StepResult,
    TokenLogprobs,
)


@dataclass(slots=True)
class BegunStep:
    """A step that was applied to the table and given to the runner."""

    step: Step
    before: Snapshot
    rows: Ints  # [num_live] -> row of the step: those that were given to the runner
    ends: Ints  # [num_live], tokens computed with this step
    draws: Ints  # [num_draws] -> live row, ascending
    takes: Bools  # [num_draws], whether the row takes a token; others answer with candidates
    rules: dict[int, RowRules]  # of the step's slots, as they were when it began
    dropped: Bools  # [num_rows of the step]: rows that failed, before this step or in it
    output: PendingOutput
    outcome: StepOutcome | None = None  # None: not known yet

    @property
    def drawn_slots(self) -> Ints:
        """[num_draws], -1 where the row takes no token."""
        return np.where(self.takes, self._slots, -1)

    @property
    def _slots(self) -> Ints:
        """[num_draws]"""
        return self.step.slots[self.rows[self.draws]]

    def is_followed_by(self, step: Step) -> bool:
        """Whether a step can begin before what this one draws is known: nothing of it depends on these tokens.

        It may go on with them. But rules that look at them need the host, and a slot that is given to another row
        would have no place for what comes late.
        """
        started = np.array([row.slot for row in step.started_rows], dtype=np.int64)
        if np.isin(started, self._slots).any():
            return False
        running = step.slots[np.isin(step.slots, self.drawn_slots)].tolist()
        return not any(slot in self.rules and self.rules[slot].depend_on_answer for slot in running)

    def settle(self, table: SlotTable, output: StepOutput, behind: "list[BegunStep]") -> StepResult:
        """Put what was drawn into the table, and form the result.

        Args:
            table: holds the rows.
            output: what `self.output` gave.
            behind: steps that were begun since; a row that fails here is none of theirs.
        """
        finite = output.finite & ~self.dropped[self.rows[self.draws]]
        first = finite & self.takes & (np.diff(self.draws, prepend=-1) > 0)  # the row goes on with its first draw
        slots, ends = self._slots, self.ends[self.draws]
        self._fill(table, slots[first], ends[first], output.token_ids[first])
        lost = ~finite & ~self.dropped[self.rows[self.draws]]
        self._drop(table, slots[lost], ends[lost], behind)
        return self._result(output, finite)

    def _fill(self, table: SlotTable, slots: Ints, positions: Ints, token_ids: Ints) -> None:
        table.fill(slots, positions, token_ids)
        if self.rules:
            for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
                if slot in self.rules:
                    self.rules[slot].append(token_id)

    def _drop(self, table: SlotTable, slots: Ints, ends: Ints, behind: "list[BegunStep]") -> None:
        """Also in what a later step would go back to."""
        for rows in (table.rows, *(later.before.rows for later in behind)):
            stand_still(rows, slots, ends)
        for begun in (self, *behind):
            begun.dropped |= np.isin(begun.step.slots, slots)

    def _result(self, output: StepOutput, finite: Bools) -> StepResult:
        sampling, drawn = self.rows[self.draws], finite & self.takes  # [num_draws] -> row of the step
        return StepResult(
            self.step.step_id,
            np.bincount(sampling[drawn], minlength=len(self.step.slots)),
            output.token_ids[drawn],
            tuple(self._failure(row) for row in np.flatnonzero(self.dropped).tolist()),
            output.execute_microseconds,
            output.began_unix_microseconds,
            sampled_logprobs=_logprobs(output.sampled_logprobs, sampling, finite),
            prompt_logprobs=_logprobs(output.prompt_logprobs, self.rows, np.ones(len(self.rows), dtype=np.bool_)),
            candidates=_candidates(output.candidates, sampling, finite),
        )

    def _failure(self, row: int) -> RowFailure:
        slot = int(self.step.slots[row])
        rules = self.rules.get(slot)
        if rules is not None and rules.constraint is not None and rules.constraint.error:
            return RowFailure(row, CONSTRAINT_FAILED, f"slot {slot}: {rules.constraint.error}")
        return RowFailure(row, LOGITS_NOT_FINITE, f"slot {slot}: its logits hold NaN or infinity")


def _candidates(found: Candidates | None, rows: Ints, good: Bools) -> Candidates | None:
    """As `_logprobs`."""
    return found.kept(good[found.rows], rows) if found is not None else None


def _logprobs(found: TokenLogprobs | None, rows: Ints, good: Bools) -> TokenLogprobs | None:
    """rows: the device's rows -> rows of the step; good: which of the device's rows count."""
    return found.kept(good[found.rows], rows) if found is not None else None
