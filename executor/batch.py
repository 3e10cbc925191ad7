"""One step's rows as the tensors of one forward pass: a packed batch of prefill chunks and decodes.

Packing only: rows in, tensors out. Not here: checks of what was asked, attention, sampling.

    row 0 (chunk of 3)     row 1 (decode)   row 2 (chunk of 2)
    [ t4   t5   t6     |   t19          |   t0   t1  ]          input_ids   [num_tokens]
      4    5    6          19               0    1              positions   [num_tokens]
      ^ 0                  ^ 3              ^ 4        ^ 6      query_starts [num_rows + 1]
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor.logits.adjust import Adjustments, pack_adjustments
from executor.sampler import SamplingBatch
from executor.slots import SlotTable, ranges
from executor.step import Ints


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where each token's KV goes, and what each row may read."""

    query_starts: Tensor  # [num_rows + 1] int64, row -> its first token
    context_lengths: Tensor  # [num_rows] int64, tokens with KV after this step's writes
    tables: Tensor  # [num_rows, max_blocks] int32, padded with block 0
    write_blocks: Tensor  # [num_tokens] int64, token -> block id
    write_offsets: Tensor  # [num_tokens] int64, token -> position inside the block


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens that are told their log-probabilities, of the rows that ask."""

    rows: Ints  # [num_scored], what each belongs to
    num_top: Ints  # [num_scored], alternatives


@dataclass(frozen=True, slots=True)
class CandidateRows:
    """Sampling rows that answer with their best tokens instead of one."""

    rows: Ints  # [num_rows], ascending
    counts: Ints  # [num_rows]


@dataclass(frozen=True, slots=True)
class PromptScores(ScoredTokens):
    """Tokens of histories: each is scored by the logits of the token before it."""

    logits_tokens: Tensor  # [num_scored] int64, index in the batch of the token before
    token_ids: Ints  # [num_scored]


@dataclass(frozen=True, slots=True)
class FedTokens:
    """Input tokens that the step before draws, and that the host does not know yet."""

    tokens: Tensor  # [num_fed] int64, index in input_ids
    draws: Tensor  # [num_fed] int64, sampling row of the step before


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one forward pass."""

    input_ids: Tensor  # [num_tokens] int64, UNKNOWN where `fed`
    positions: Tensor  # [num_tokens] int64
    attention: AttentionBatch
    # A row that draws several tokens is as many sampling rows, behind each other.
    logits_tokens: Tensor  # [num_sampling] int64, sampling row -> its last token in the batch
    sampling: SamplingBatch
    adjustments: Adjustments | None  # None: no sampling row has rules
    sample_scores: ScoredTokens | None  # rows: sampling rows; None: no row asks
    prompt_scores: PromptScores | None  # rows: batch rows; None: no row asks
    candidates: CandidateRows | None = None  # None: every row samples
    fed: FedTokens | None = None  # None: every input token is known

    @property
    def num_tokens(self) -> int:
        """Over all rows."""
        return len(self.input_ids)

    @property
    def all_logits_tokens(self) -> Tensor:
        """[num_sampling + num_scored] int64: those of the sampling rows, then those before scored tokens."""
        if self.prompt_scores is None:
            return self.logits_tokens
        return torch.cat((self.logits_tokens, self.prompt_scores.logits_tokens))


def pack_batch(table: SlotTable, slots: Ints, starts: Ints, counts: Ints, block_size: int) -> Batch:
    """Pack rows that run `counts` tokens from `starts` on.

    Args:
        table: holds the rows.
        slots, starts, counts: [num_rows], batch row -> slot, first position, number of tokens; at least one row.
        block_size: in tokens.
    """
    token_slots = np.repeat(slots, counts)  # [num_tokens], token -> slot
    positions = ranges(starts, counts)
    ends = starts + counts
    query_ends = np.cumsum(counts)
    sampling = sampling_rows(table, slots, starts, counts)
    sampled = slots[sampling]
    return Batch(
        input_ids=torch.from_numpy(table.history[token_slots, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        attention=AttentionBatch(
            query_starts=torch.from_numpy(np.concatenate((np.zeros(1, np.int64), query_ends))),
            context_lengths=torch.from_numpy(ends),
            tables=torch.from_numpy(_packed_tables(table, slots, ends, block_size)),
            write_blocks=torch.from_numpy(table.tables[token_slots, positions // block_size].astype(np.int64)),
            write_offsets=torch.from_numpy(positions % block_size),
        ),
        logits_tokens=torch.from_numpy(query_ends[sampling] - 1),
        sampling=_pack_sampling(table, sampled),
        adjustments=_pack_rules(table, sampled),
        sample_scores=_pack_sample_scores(table, sampled),
        prompt_scores=_pack_prompt_scores(table, slots, starts, counts),
        candidates=_pack_candidates(table, sampled),
    )


def pack_fed(slots: Ints, counts: Ints, drawn_slots: Ints) -> FedTokens | None:
    """Rows of a batch that go on with the first token that the step before draws for them; None: there are none.

    Args:
        slots, counts: [num_rows], as of `pack_batch`; a row that goes on runs one token.
        drawn_slots: [num_draws], sampling row of the step before -> slot; those of a slot lie behind each other.
    """
    drawn, first_draws = np.unique(drawn_slots, return_index=True)
    rows = np.flatnonzero(np.isin(slots, drawn))
    if not rows.size:
        return None
    draws = first_draws[np.searchsorted(drawn, slots[rows])]
    return FedTokens(torch.from_numpy(np.cumsum(counts)[rows] - 1), torch.from_numpy(draws))


def sampling_rows(table: SlotTable, slots: Ints, starts: Ints, counts: Ints) -> Ints:
    """The rows that sample in this step, those whose last known token is computed: once for each token they draw.

    Returns:
        [num_sampling], sampling row -> row; ascending.
    """
    rows = np.flatnonzero(starts + counts == table.rows["length"][slots])
    return np.repeat(rows, table.rows["num_samples"][slots[rows]])


def _packed_tables(table: SlotTable, slots: Ints, ends: Ints, block_size: int) -> np.ndarray:
    num_blocks = -(-ends // block_size)  # [num_rows], blocks that the row reads or writes
    width = int(num_blocks.max())
    used = np.arange(width) < num_blocks[:, None]
    return np.where(used, table.tables[slots, :width], np.int32(0))


def _pack_sampling(table: SlotTable, slots: Ints) -> SamplingBatch:
    rows = table.rows[slots]
    is_first = np.diff(slots, prepend=-1) != 0
    order = np.arange(len(slots))
    nth = order - np.maximum.accumulate(np.where(is_first, order, 0))  # which of its row's draws
    return SamplingBatch(
        temperature=torch.from_numpy(rows["temperature"].copy()),
        top_k=torch.from_numpy(rows["top_k"].copy()),
        top_p=torch.from_numpy(rows["top_p"].copy()),
        min_p=torch.from_numpy(rows["min_p"].copy()),
        seed=torch.from_numpy(rows["seed"].astype(np.int64)),
        position=torch.from_numpy(rows["length"].copy()),
        choice_index=torch.from_numpy(rows["choice_index"] + nth),
    )


def _pack_rules(table: SlotTable, slots: Ints) -> Adjustments | None:
    if not table.rules:
        return None
    return pack_adjustments([table.rules.get(slot) for slot in slots.tolist()], table.rows["length"][slots].tolist())


def _pack_sample_scores(table: SlotTable, slots: Ints) -> ScoredTokens | None:
    num_top = table.rows["num_top"][slots]
    rows = np.flatnonzero(num_top >= 0)
    return ScoredTokens(rows, num_top[rows]) if rows.size else None


def _pack_candidates(table: SlotTable, slots: Ints) -> CandidateRows | None:
    counts = table.rows["num_candidates"][slots]
    rows = np.flatnonzero(counts)
    return CandidateRows(rows, counts[rows]) if rows.size else None


def _pack_prompt_scores(table: SlotTable, slots: Ints, starts: Ints, counts: Ints) -> PromptScores | None:
    """Token p is scored when token p - 1 is computed: of [start, start + count) those are [start + 1, ... + count]."""
    rows = table.rows[slots]
    first = np.maximum(starts + 1, rows["score_from"])
    num_scored = np.maximum(np.minimum(starts + counts + 1, rows["score_until"]) - first, 0)  # [num_rows]
    if not num_scored.any():
        return None
    batch_rows = np.repeat(np.arange(len(slots)), num_scored)
    positions = ranges(first, num_scored)
    before = positions - 1 - starts[batch_rows] + (np.cumsum(counts) - counts)[batch_rows]
    token_ids = table.history[slots[batch_rows], positions].astype(np.int64)
    return PromptScores(batch_rows, rows["num_prompt_top"][batch_rows], torch.from_numpy(before), token_ids)
