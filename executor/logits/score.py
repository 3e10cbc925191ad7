"""Log-probabilities of given tokens by the model's own distribution, with ranks and the likeliest alternatives.

A token's numbers depend on its own logits alone, never on the rows beside it. Not here: which tokens are asked about.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.logits.highest import highest_ids
from executor.step import Ints, TokenLogprobs

# Rows that are scored at once: temporaries are a few times as large as their logits.
_ROWS_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Scores:
    """`top_ids` and `top_logprobs` hold as many columns as the row that asks for most."""

    logprobs: Tensor  # [num_tokens] float32
    ranks: Tensor  # [num_tokens] int64, 1 is the likeliest
    top_ids: Tensor  # [num_tokens, num_top] int64
    top_logprobs: Tensor  # [num_tokens, num_top] float32


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> Scores:
    """Score one token per row.

    Args:
        logits: [num_tokens, vocabulary_size] float32, finite, not yet adjusted.
        token_ids: [num_tokens] int64.
        num_top: alternatives, at most the vocabulary size.
    """
    norm = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None])
    # Ranks are those of the logits: log-probabilities of different logits may round to the same number.
    ids = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > chosen) | ((logits == chosen) & (ids < token_ids[:, None]))
    top_ids = highest_ids(logits, num_top) if num_top else token_ids.new_empty((len(logits), 0))
    return Scores((chosen - norm)[:, 0], before.sum(dim=-1) + 1, top_ids, logits.gather(1, top_ids) - norm)


def token_logprobs(logits: Tensor, rows: Ints, token_ids: Ints, num_top: Ints) -> TokenLogprobs:
    """Score tokens, each with as many alternatives as it asks for.

    Args:
        logits: [num_tokens, vocabulary_size] float32; a row that is not finite is scored NaN.
        rows: [num_tokens], what the entries are said to be of.
        token_ids, num_top: [num_tokens]
    """
    num_top = np.minimum(num_top, logits.shape[1])
    parts = [
        _scored(logits[first : first + _ROWS_AT_ONCE], token_ids[first : first + _ROWS_AT_ONCE], int(num_top.max()))
        for first in range(0, len(rows), _ROWS_AT_ONCE)
    ]
    kept = np.arange(num_top.max()) < num_top[:, None]  # [num_tokens, num_top]
    return TokenLogprobs(
        rows=rows,
        token_ids=token_ids,
        logprobs=_joined([part.logprobs for part in parts]),
        ranks=_joined([part.ranks for part in parts]),
        num_top=num_top,
        top_token_ids=_joined([part.top_ids for part in parts])[kept],
        top_logprobs=_joined([part.top_logprobs for part in parts])[kept],
    )


def _scored(logits: Tensor, token_ids: Ints, num_top: int) -> Scores:
    finite = logits.isfinite().all(dim=-1)
    scores = score(logits.where(finite[:, None], 0.0), torch.from_numpy(token_ids), num_top)
    scores.logprobs[~finite] = torch.nan
    return scores


def _joined(parts: list[Tensor]) -> Any:
    return torch.cat(parts).numpy()
