"""Whether a step may be applied: every rule of the session protocol, checked before anything changes.

`check_step` reads the rows as they are and the step as it came, and raises for the first rule that is broken. It
changes nothing. Step ids are the session's business, not this module's.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from executor.sampling_check import check_sampling
from executor.slots import SlotTable, ranges
from executor.step import Ints, RowSampling, RowStart, Step, TableExtension, invalid_step


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What this executor takes."""

    block_size: int  # tokens
    num_blocks: int  # block 0, reserved, included
    vocabulary_size: int
    max_context_tokens: int
    max_tokens_per_step: int


@dataclass(slots=True)
class _Rows:
    """The small columns as they will be once the step has retired, started and extended rows."""

    occupied: npt.NDArray[np.bool_]  # [max_rows]
    failed: npt.NDArray[np.bool_]  # [max_rows]
    length: Ints  # [max_rows]
    computed: Ints  # [max_rows]
    num_blocks: Ints  # [max_rows]
    started: dict[int, RowStart]


def check_step(step: Step, table: SlotTable, limits: StepLimits) -> None:
    """Raise unless the whole step may be applied to the rows of `table`.

    Raises:
        StepError: INVALID_STEP, with the field, its value and what is allowed.
    """
    rows = _Rows(
        occupied=table.rows["occupied"].copy(),
        failed=table.rows["failed"].copy(),
        length=table.rows["length"].copy(),
        computed=table.rows["computed"].copy(),
        num_blocks=table.rows["num_blocks"].copy(),
        started={},
    )
    _check_retired(step.retired_slots, rows)
    for start in step.started_rows:
        _check_start(start, rows, limits)
    _check_appended(step, rows, table, limits)
    for extension in step.extensions:
        _check_extension(extension, rows, table, limits)
    _check_copies(step, limits)
    _check_running(step, rows, limits)


def written_blocks(slots: Ints, starts: Ints, counts: Ints, table: SlotTable, block_size: int) -> Ints:
    """The blocks that running rows write, one entry per row and block: [num_written]."""
    first = starts // block_size
    num = (starts + counts - 1) // block_size - first + 1
    return table.tables[np.repeat(slots, num), ranges(first, num)].astype(np.int64)


def check_writes(block_ids: Ints) -> None:
    """Raise where two rows of a step would write into one block: a shared block must be copied first.

    Raises:
        StepError: INVALID_STEP.
    """
    unique, counts = np.unique(block_ids, return_counts=True)
    if (counts > 1).any():
        raise invalid_step(
            f"slots: two rows of the step write block {unique[counts > 1][0]}; copy a shared block before writing"
        )


# ---------------------------------------------------------------------------------------------- rows that come and go


def _check_retired(slots: Ints, rows: _Rows) -> None:
    _check_slots("retired_slots", slots, rows)
    empty = slots[~rows.occupied[slots]]
    if empty.size:
        raise invalid_step(f"retired_slots: slot {empty[0]} holds no row")
    rows.occupied[slots] = False


def _check_start(start: RowStart, rows: _Rows, limits: StepLimits) -> None:
    where = f"started_rows[slot {start.slot}]"
    _check_slots("started_rows.slot", np.array([start.slot], dtype=np.int64), rows)
    if rows.occupied[start.slot]:
        raise invalid_step(f"{where}: the slot holds a row; retire it first, in this step or before")
    _check_history(where, start, limits)
    if [table.kv_group for table in start.tables] != [0]:
        raise invalid_step(f"{where}.tables: expected one table, of kv_group 0")
    block_ids = start.tables[0].block_ids
    _check_block_ids(f"{where}.tables", block_ids, limits)
    _check_candidates(where, start.sampling, limits)
    if len(np.unique(block_ids)) != len(block_ids):
        raise invalid_step(f"{where}.tables: a block appears twice")
    if start.num_computed_tokens > len(block_ids) * limits.block_size:
        raise invalid_step(
            f"{where}.num_computed_tokens: {start.num_computed_tokens} do not lie in {len(block_ids)} blocks "
            f"of {limits.block_size}"
        )
    if start.sampling.num_samples > len(rows.occupied):
        raise invalid_step(
            f"{where}.sampling.num_samples: {start.sampling.num_samples}; at most {len(rows.occupied)}, one a slot"
        )
    check_sampling(f"{where}.sampling", start.sampling, len(start.token_ids), limits.vocabulary_size)
    rows.occupied[start.slot], rows.failed[start.slot] = True, False
    rows.length[start.slot], rows.computed[start.slot] = len(start.token_ids), start.num_computed_tokens
    rows.num_blocks[start.slot] = len(block_ids)
    rows.started[start.slot] = start


def _check_candidates(where: str, sampling: RowSampling, limits: StepLimits) -> None:
    if sampling.num_candidates > limits.vocabulary_size:
        most = limits.vocabulary_size
        raise invalid_step(f"{where}.sampling.num_candidates: {sampling.num_candidates}; at most {most}, all ids")
    if sampling.num_candidates and (sampling.grammar or sampling.num_samples > 1):
        raise invalid_step(f"{where}.sampling.num_candidates: does not go with a grammar, nor with num_samples above 1")


def _check_appended(step: Step, rows: _Rows, table: SlotTable, limits: StepLimits) -> None:
    slots, token_ids = step.appended_slots, step.appended_token_ids
    if len(slots) != len(token_ids):
        raise invalid_step(f"appended_slots: {len(slots)} slots, {len(token_ids)} ids in appended_token_ids")
    if not slots.size:
        return
    _check_slots("appended_slots", slots, rows)
    if token_ids.max() >= limits.vocabulary_size:
        raise invalid_step(f"appended_token_ids: {token_ids.max()} is not below {limits.vocabulary_size}")
    is_new = np.isin(slots, list(rows.started))
    takes = rows.occupied[slots] & ~is_new & (table.rows["num_candidates"][slots] > 0)
    _reject("appended_slots", slots, ~takes, "holds no row of candidates from a step before")
    _reject("appended_slots", slots, rows.computed[slots] != rows.length[slots], "is not computed whole")
    full = rows.length[slots] > limits.max_context_tokens
    _reject("appended_slots", slots, full, f"has {limits.max_context_tokens} tokens and one more, the context")
    rows.length[slots] += 1


def _check_history(where: str, start: RowStart, limits: StepLimits) -> None:
    num_tokens = len(start.token_ids)
    if not 1 <= num_tokens <= limits.max_context_tokens + 1:
        raise invalid_step(f"{where}.token_ids: {num_tokens} tokens; allowed are 1 to {limits.max_context_tokens + 1}")
    if start.token_ids.max() >= limits.vocabulary_size:
        raise invalid_step(f"{where}.token_ids: {start.token_ids.max()} is not below {limits.vocabulary_size}")
    if start.num_computed_tokens >= num_tokens:
        raise invalid_step(
            f"{where}.num_computed_tokens: {start.num_computed_tokens} leaves no token of {num_tokens} to compute"
        )


# -------------------------------------------------------------------------------------------------- blocks and copies


def _check_extension(extension: TableExtension, rows: _Rows, table: SlotTable, limits: StepLimits) -> None:
    if extension.kv_group != 0:
        raise invalid_step(f"extensions.kv_group: {extension.kv_group}; this model has group 0 alone")
    slots, counts = extension.slots, extension.counts
    if len(slots) != len(counts) or counts.sum() != len(extension.block_ids):
        raise invalid_step(
            f"extensions: {len(slots)} slots, {len(counts)} counts that add up to {counts.sum()}, and "
            f"{len(extension.block_ids)} block ids do not match"
        )
    _check_slots("extensions.slots", slots, rows)
    empty = slots[~rows.occupied[slots]]
    if empty.size:
        raise invalid_step(f"extensions.slots: slot {empty[0]} holds no row")
    _check_block_ids("extensions.block_ids", extension.block_ids, limits)
    for slot, new in zip(slots.tolist(), np.split(extension.block_ids, np.cumsum(counts)[:-1]), strict=True):
        old = rows.started[slot].tables[0].block_ids if slot in rows.started else table.tables[slot]
        held = np.concatenate((old[: rows.num_blocks[slot]], new))
        if len(np.unique(held)) != len(held):
            raise invalid_step(f"extensions.block_ids: slot {slot} would hold a block twice")
    rows.num_blocks[slots] += counts


def _check_block_ids(field: str, block_ids: Ints, limits: StepLimits) -> None:
    bad = block_ids[(block_ids < 1) | (block_ids >= limits.num_blocks)]
    if bad.size:
        raise invalid_step(
            f"{field}: block {bad[0]}; allowed are 1 to {limits.num_blocks - 1} (block 0 is reserved for padding)"
        )


def _check_copies(step: Step, limits: StepLimits) -> None:
    if len(step.copy_sources) != len(step.copy_targets):
        raise invalid_step(f"copy_sources: {len(step.copy_sources)} sources, {len(step.copy_targets)} targets")
    _check_block_ids("copy_sources", step.copy_sources, limits)
    _check_block_ids("copy_targets", step.copy_targets, limits)
    if len(np.unique(step.copy_targets)) != len(step.copy_targets):
        raise invalid_step("copy_targets: a block is the target of two copies")


# -------------------------------------------------------------------------------------------------- rows that run


def _check_running(step: Step, rows: _Rows, limits: StepLimits) -> None:
    slots, starts, counts = step.slots, step.start_positions, step.num_tokens
    if not len(slots) == len(starts) == len(counts):
        raise invalid_step(
            f"slots, start_positions, num_tokens: their lengths differ ({len(slots)}, {len(starts)}, {len(counts)})"
        )
    _check_slots("slots", slots, rows)
    if counts.sum() > limits.max_tokens_per_step:
        raise invalid_step(f"num_tokens: {counts.sum()} in all; at most {limits.max_tokens_per_step} fit in a step")
    _reject("slots", slots, ~rows.occupied[slots], "holds no row")
    _reject("num_tokens", slots, counts < 1, "runs no token; leave the row out")
    live = ~rows.failed[slots]  # a failed row's lengths stand still while steps that were sent already name it
    computed, length = rows.computed[slots], rows.length[slots]
    wrong = live & (starts != computed)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise invalid_step(
            f"start_positions[{row}]: {starts[row]}, but slot {slots[row]} has {computed[row]} computed tokens"
        )
    _reject("num_tokens", slots, live & (starts + counts > length), "has not as many tokens")
    room = np.minimum(rows.num_blocks[slots] * limits.block_size, limits.max_context_tokens)
    _reject("num_tokens", slots, live & (starts + counts > room), "runs past its blocks or the context length")


def _check_slots(field: str, slots: Ints, rows: _Rows) -> None:
    if slots.size and slots.max() >= len(rows.occupied):
        raise invalid_step(f"{field}: {slots.max()}; slots are 0 to {len(rows.occupied) - 1}")
    if len(np.unique(slots)) != len(slots):
        raise invalid_step(f"{field}: a slot appears twice")


def _reject(field: str, slots: Ints, bad: npt.NDArray[np.bool_], what: str) -> None:
    if bad.any():
        raise invalid_step(f"{field}[{int(np.argmax(bad))}]: slot {slots[np.argmax(bad)]} {what}")
