"""The rows of one session: token histories, block tables and computed lengths, in numbered slots.

Everything is an array over slots, so that a batch is packed without a loop over rows. The table trusts the steps it
is given (`step_check` vets them first) and can go back to the state before a step. Not here: what a step may say,
step ids, anything of the model.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from executor.logits.constraint import MakeConstraint, no_constraint
from executor.logits.row_rules import RowRules, has_rules
from executor.step import Ints, RowStart, Step, TableExtension

# fmt: off
ROW = np.dtype([
    ("occupied", np.bool_),
    ("failed", np.bool_),           # its logits were not finite: it runs no more
    ("incarnation", np.uint64),
    ("length", np.int64),           # tokens known
    ("computed", np.int64),         # tokens whose KV lies in the blocks
    ("num_blocks", np.int64),
    ("temperature", np.float32),
    ("top_k", np.int64),
    ("top_p", np.float32),
    ("min_p", np.float32),
    ("seed", np.uint64),
    ("choice_index", np.int64),
    ("num_samples", np.int64),      # tokens drawn when the row samples next
    ("num_candidates", np.int64),   # above 0: it answers with as many tokens, and samples none
    ("num_top", np.int64),          # alternatives of sampled tokens; -1: no log-probabilities
    ("num_prompt_top", np.int64),   # alternatives of prompt tokens
    ("score_from", np.int64),       # tokens of the history in [from, until) are scored
    ("score_until", np.int64),
])
# fmt: on

UNKNOWN = -1  # in a history: a token that is drawn and that the host has not seen; no vocabulary has it

_INITIAL_TOKENS = 256
_INITIAL_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state before a step: all small columns, and the wide ones of the slots that the step took over.

    A token that is appended lies behind the length that its row had, and so needs no keeping.
    """

    rows: npt.NDArray[np.void]  # [max_rows] ROW
    rules: dict[int, RowRules]
    slots: Ints  # [num_started]
    history: npt.NDArray[np.int32]  # [num_started, token capacity]
    tables: npt.NDArray[np.int32]  # [num_started, block capacity]


def stand_still(rows: npt.NDArray[np.void], slots: Ints, lengths: Ints) -> None:
    """Rows that run no more, with `lengths` tokens known and computed: they are skipped until they are retired."""
    rows["failed"][slots] = True
    rows["length"][slots] = rows["computed"][slots] = lengths


class SlotTable:
    """The only owner of a session's rows.

    Attributes:
        rows: [max_rows] ROW
        history: [max_rows, token capacity] int32, valid up to `length`
        tables: [max_rows, block capacity] int32, valid up to `num_blocks`
        rules: slot -> what the row asks beyond the columns; most rows have no entry
    """

    def __init__(self, max_rows: int, make_constraint: MakeConstraint = no_constraint) -> None:
        self._make_constraint = make_constraint
        self.rows = np.zeros(max_rows, dtype=ROW)
        self.history = np.zeros((max_rows, _INITIAL_TOKENS), dtype=np.int32)
        self.tables = np.zeros((max_rows, _INITIAL_BLOCKS), dtype=np.int32)
        self.rules: dict[int, RowRules] = {}

    @property
    def max_rows(self) -> int:
        """Slots are 0 .. max_rows - 1."""
        return len(self.rows)

    @property
    def num_rows(self) -> int:
        """Occupied slots."""
        return int(self.rows["occupied"].sum())

    def apply(self, step: Step) -> Snapshot:
        """Retire and start rows, append to and extend others. Returns what `restore` needs to take it back."""
        before = self._snapshot(np.array([row.slot for row in step.started_rows], dtype=np.int64))
        self.rows["occupied"][step.retired_slots] = False
        for slot in step.retired_slots.tolist():
            self.rules.pop(slot, None)
        for row in step.started_rows:
            self._start(row)
        if step.appended_slots.size:
            for slot in step.appended_slots.tolist():
                if slot in self.rules:
                    self.rules[slot] = self.rules[slot].copy()  # those of before may come back
            self.append(step.appended_slots, step.appended_token_ids)
        for extension in step.extensions:
            self._extend(extension)
        return before

    def restore(self, before: Snapshot) -> None:
        """Undo the `apply` that returned `before`, and all that came of that step.

        Steps that were applied behind it are undone first.
        """
        self.rows = before.rows
        self.rules = before.rules
        self.history[before.slots, : before.history.shape[1]] = before.history
        self.tables[before.slots, : before.tables.shape[1]] = before.tables

    def advance(self, slots: Ints, num_tokens: Ints) -> None:
        """Count tokens as computed; `slots` are distinct."""
        self.rows["computed"][slots] += num_tokens

    def append(self, slots: Ints, token_ids: Ints) -> None:
        """Append one token to each of some distinct rows, which draw one at a time from now on."""
        lengths = self.rows["length"][slots]
        self.expect(slots)
        self.fill(slots, lengths, token_ids)
        if self.rules:
            for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
                if slot in self.rules:
                    self.rules[slot].append(token_id)

    def expect(self, slots: Ints) -> None:
        """One more token of each of some distinct rows, which draw one at a time from now on. `fill` says which."""
        lengths = self.rows["length"][slots]
        if lengths.size:
            self._reserve_tokens(int(lengths.max()) + 1)
        self.history[slots, lengths] = UNKNOWN
        self.rows["length"][slots] = lengths + 1
        self.rows["num_samples"][slots] = 1

    def fill(self, slots: Ints, positions: Ints, token_ids: Ints) -> None:
        """What was drawn for the places that `expect` made. Rules are told by their owner."""
        self.history[slots, positions] = token_ids

    def _snapshot(self, slots: Ints) -> Snapshot:
        return Snapshot(self.rows.copy(), dict(self.rules), slots, self.history[slots], self.tables[slots])

    def _start(self, start: RowStart) -> None:
        block_ids, sampling = start.tables[0].block_ids, start.sampling
        self._reserve_tokens(len(start.token_ids) + 1)
        self._reserve_blocks(len(block_ids))
        self.history[start.slot, : len(start.token_ids)] = start.token_ids
        self.tables[start.slot, : len(block_ids)] = block_ids
        row = self.rows[start.slot]
        row["occupied"], row["failed"], row["incarnation"] = True, False, start.incarnation
        row["length"], row["computed"] = len(start.token_ids), start.num_computed_tokens
        row["num_blocks"] = len(block_ids)
        row["temperature"], row["top_k"] = sampling.temperature, sampling.top_k
        row["top_p"], row["min_p"] = sampling.top_p, sampling.min_p
        row["seed"], row["choice_index"] = sampling.seed, sampling.choice_index
        row["num_samples"] = max(1, sampling.num_samples)
        row["num_candidates"] = sampling.num_candidates
        row["num_top"] = sampling.num_top_logprobs if sampling.logprobs else -1
        row["num_prompt_top"] = sampling.num_top_logprobs
        row["score_from"], row["score_until"] = sampling.prompt_logprobs_from, sampling.prompt_logprobs_until
        if has_rules(sampling):
            self.rules[start.slot] = RowRules(sampling, start.token_ids, self._make_constraint)

    def _extend(self, extension: TableExtension) -> None:
        have = self.rows["num_blocks"][extension.slots]
        grown = have + extension.counts
        if grown.size:
            self._reserve_blocks(int(grown.max()))
        rows = np.repeat(extension.slots, extension.counts)
        self.tables[rows, ranges(have, extension.counts)] = extension.block_ids
        self.rows["num_blocks"][extension.slots] = grown

    def _reserve_tokens(self, capacity: int) -> None:
        self.history = _widened(self.history, capacity)

    def _reserve_blocks(self, capacity: int) -> None:
        self.tables = _widened(self.tables, capacity)


def ranges(starts: Ints, counts: Ints) -> Ints:
    """Concatenated `arange(start, start + count)`: starts [n], counts [n] -> [sum(counts)]."""
    total = int(counts.sum())
    before = np.cumsum(counts) - counts  # elements of the earlier ranges
    return np.arange(total, dtype=np.int64) + np.repeat(starts - before, counts)


def _widened(array: npt.NDArray[np.int32], capacity: int) -> npt.NDArray[np.int32]:
    """The array with at least `capacity` columns; doubled, so that growth costs O(1) per column."""
    if capacity <= array.shape[1]:
        return array
    wide = np.zeros((array.shape[0], max(capacity, 2 * array.shape[1])), dtype=array.dtype)
    wide[:, : array.shape[1]] = array
    return wide
