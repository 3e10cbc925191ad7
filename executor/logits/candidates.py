"""The best next tokens of rows that sample none, for a search that another process leads.

    score = rules(log_softmax(logits))

The rules (`adjust`) change log-probabilities as they change the logits of other rows, and nothing is normalized again:
so does `transformers`, whose processors in beam search see log-probabilities. A row's candidates depend on its own
logits and rules alone. Not here: what becomes of them.
"""

import numpy as np
import torch
from torch import Tensor

from executor.batch import Batch, CandidateRows
from executor.logits.highest import highest_ids
from executor.logits.score import token_logprobs
from executor.step import Candidates, Ints, TokenLogprobs


def normalize(logits: Tensor, rows: Tensor) -> None:
    """Logits [num_sampling, vocabulary_size] of some rows, [num_rows] int64, become log-probabilities, in place."""
    logits[rows] = torch.log_softmax(logits[rows], dim=-1)


def find_candidates(scores: Tensor, wanted: CandidateRows) -> Candidates:
    """The best tokens of each row, without those that are out.

    Args:
        scores: [num_rows, vocabulary_size] float32 on the host, of the rows of `wanted`, in their order.
    """
    most = int(wanted.counts.max())
    ids = highest_ids(scores, most)  # [num_rows, most]
    values = scores.gather(1, ids)
    kept = (torch.arange(most) < torch.from_numpy(wanted.counts)[:, None]) & (values > -torch.inf)
    return Candidates(wanted.rows, kept.sum(dim=-1).numpy(), ids[kept].numpy(), values[kept].numpy())


def scored_tokens(token_ids: Ints, unchanged: Tensor, batch: Batch, candidates: Candidates | None) -> TokenLogprobs:
    """Log-probabilities of what rows sampled, and of each candidate of the others.

    Args:
        token_ids: [num_sampling]
        unchanged: [num_scored, vocabulary_size] float32 on the host, the logits of rows that ask.
    """
    scores = batch.sample_scores
    assert scores is not None, "some row asks"
    if candidates is None:
        return token_logprobs(unchanged, scores.rows, token_ids[scores.rows], scores.num_top)
    found = np.split(candidates.token_ids, np.cumsum(candidates.counts)[:-1])
    own = dict(zip(candidates.rows.tolist(), found, strict=True))
    ids = [own.get(row, token_ids[row : row + 1]) for row in scores.rows.tolist()]
    which = np.repeat(np.arange(len(ids)), [len(each) for each in ids])  # entry -> row that asks
    is_first = np.diff(which, prepend=-1) > 0
    num_top = np.where(is_first, scores.num_top[which], 0)  # the alternatives are those of the row: once
    return token_logprobs(unchanged[torch.from_numpy(which)], scores.rows[which], np.concatenate(ids), num_top)
