"""The rules of a batch's rows, applied to their logits at once: biases, penalties, then what is left to choose from.

    logit' = logit + bias
    logit' = logit' / repetition  where positive, else logit' * repetition      for ids of prompt and answer
    logit' = logit' - frequency * count - presence                              for generated ids
    logit' = -inf                                                               for ids that are out

Repetition: Keskar et al. 2019, CTRL, section 4.1, in the form of `transformers` (multiplied where negative, so that a
repeated token never gains). Frequency and presence: the OpenAI API reference. Sparse: a row costs its own entries, and
rows without rules nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor.logits.row_rules import RowRules
from executor.step import NO_INTS, Ints


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Entries (row of logits, token id), distinct within each kind."""

    bias_rows: Tensor  # [num_biases] int64
    bias_ids: Tensor  # [num_biases] int64
    biases: Tensor  # [num_biases] float32
    seen_rows: Tensor  # [num_seen] int64
    seen_ids: Tensor  # [num_seen] int64
    repetition: Tensor  # [num_seen] float32, 1 is off
    frequency: Tensor  # [num_seen] float32, times the count
    presence: Tensor  # [num_seen] float32, 0 where the count is
    allowed_rows: Tensor  # [num_rows with a list] int64, distinct
    allowed_entries: Tensor  # [num_allowed] int64, index into allowed_rows
    allowed_ids: Tensor  # [num_allowed] int64
    banned_rows: Tensor  # [num_banned] int64
    banned_ids: Tensor  # [num_banned] int64
    masked_rows: Tensor  # [num_constrained] int64, rows that follow a grammar
    masks: Tensor  # [num_constrained, vocabulary_size] bool, what may come next
    dead_rows: Tensor  # [num_dead] int64, rows whose grammar nothing continues

    @property
    def can_leave_nothing(self) -> bool:
        """Whether a row may end up all -inf."""
        return len(self.masked_rows) + len(self.dead_rows) > 0


# Keeps logit / repetition finite; what is as small has long made every repeated token win.
_MIN_REPETITION = 1e-6


def adjust(logits: Tensor, adjustments: Adjustments) -> None:
    """Change logits, [num_rows, vocabulary_size] float32, in place."""
    a = adjustments
    if len(a.bias_rows):
        logits[a.bias_rows, a.bias_ids] += a.biases
    if len(a.seen_rows):
        seen = logits[a.seen_rows, a.seen_ids]
        seen = torch.where(seen > 0, seen / a.repetition, seen * a.repetition)
        logits[a.seen_rows, a.seen_ids] = seen - a.frequency - a.presence
    if len(a.allowed_rows):
        kept = logits.new_full((len(a.allowed_rows), logits.shape[1]), -torch.inf)
        kept[a.allowed_entries, a.allowed_ids] = logits[a.allowed_rows[a.allowed_entries], a.allowed_ids]
        logits[a.allowed_rows] = kept
    if len(a.banned_rows):
        logits[a.banned_rows, a.banned_ids] = -torch.inf
    if len(a.masked_rows):
        logits[a.masked_rows] = logits[a.masked_rows].masked_fill(~a.masks, -torch.inf)
    if len(a.dead_rows):
        logits[a.dead_rows] = -torch.inf


def pack_adjustments(rules: Sequence[RowRules | None], num_tokens: Sequence[int]) -> Adjustments | None:
    """The rules of the rows that sample; None where no row has any.

    Args:
        rules, num_tokens: per row of logits, with the length of its history.
    """
    rows = [(row, rule) for row, rule in enumerate(rules) if rule is not None]
    if not rows:
        return None
    bias_rows, bias_ids = _entries([(row, rule.sampling.bias_token_ids) for row, rule in rows])
    penalized = [(row, rule, rule.counts) for row, rule in rows if rule.counts is not None]
    seen_rows, seen_ids = _entries([(row, counts.token_ids) for row, _, counts in penalized])
    counts = _flat([counts.counts for _, _, counts in penalized])
    sizes = [len(counts.token_ids) for _, _, counts in penalized]
    penalties = [rule.sampling for _, rule, _ in penalized]
    listed = [(row, rule.sampling.allowed_token_ids) for row, rule in rows if len(rule.sampling.allowed_token_ids)]
    allowed_entries, allowed_ids = _entries([(index, ids) for index, (_, ids) in enumerate(listed)])
    banned = [(row, np.array(rule.banned_ids(num_tokens[row]), dtype=np.int64)) for row, rule in rows]
    banned_rows, banned_ids = _entries(banned)
    masks = [(row, rule.constraint.allowed()) for row, rule in rows if rule.constraint is not None]
    alive = [(row, mask) for row, mask in masks if mask is not None]
    return Adjustments(
        bias_rows=bias_rows,
        bias_ids=bias_ids,
        biases=torch.from_numpy(np.concatenate([rule.sampling.biases for _, rule in rows])),
        seen_rows=seen_rows,
        seen_ids=seen_ids,
        repetition=_per_entry([max(each.repetition_penalty, _MIN_REPETITION) for each in penalties], sizes),
        frequency=_per_entry([each.frequency_penalty for each in penalties], sizes) * counts,
        presence=_per_entry([each.presence_penalty for each in penalties], sizes) * (counts > 0),
        allowed_rows=_rows([row for row, _ in listed]),
        allowed_entries=allowed_entries,
        allowed_ids=allowed_ids,
        banned_rows=banned_rows,
        banned_ids=banned_ids,
        masked_rows=_rows([row for row, _ in alive]),
        masks=torch.from_numpy(np.stack([mask for _, mask in alive])) if alive else torch.empty(0, 0, dtype=torch.bool),
        dead_rows=_rows([row for row, mask in masks if mask is None]),
    )


def _rows(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _entries(rows: list[tuple[int, Ints]]) -> tuple[Tensor, Tensor]:
    """Row and id of each entry: [num_entries] int64 twice."""
    numbers = np.array([row for row, _ in rows], dtype=np.int64)
    sizes = [len(ids) for _, ids in rows]
    return torch.from_numpy(np.repeat(numbers, sizes)), _flat([ids for _, ids in rows])


def _per_entry(values: list[float], sizes: list[int]) -> Tensor:
    return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), sizes))


def _flat(parts: list[Ints]) -> Tensor:
    return torch.from_numpy(np.concatenate([NO_INTS, *parts]))
