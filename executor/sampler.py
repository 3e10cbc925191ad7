"""From logits to token ids: greedy, temperature, top-k, top-p, min-p, with counter-based noise.

A row's token depends on its own logits and parameters alone, never on the batch around it, on its place in the batch
or on what was sampled before: noise is a pure function of (seed, token id, position, choice). Plain torch, no loop
over rows. Not here: which rows sample, what becomes of the token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from executor.logits.highest import at_least, best_ids
from executor.philox import philox4x32

_WORD = 0xFFFFFFFF
_UNIT = 2.0**-24
# 0.5 + (2^24 - 1) is no float32: it rounds to 2^24, u to 1 and the noise to infinity. The largest u below 1 is meant.
_LARGEST_UNIFORM = 1.0 - _UNIT
# Noise lies in (-2.86, 16.64): a token further below the best one cannot win, and needs none.
_NOISE_SPAN = 20.0
_MIN_TEMPERATURE = 1e-30  # keeps logit / temperature finite; the noise has long vanished
_NUM_CANDIDATES = 1024  # a top-p set is rarely larger; where it is, the whole row is sorted


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Parameters of the sampling rows."""

    temperature: Tensor  # [num_sampling] float32, 0 is greedy
    top_k: Tensor  # [num_sampling] int64, 0 is off
    top_p: Tensor  # [num_sampling] float32, 1 is off
    min_p: Tensor  # [num_sampling] float32, 0 is off
    seed: Tensor  # [num_sampling] int64, the bits of the unsigned seed
    position: Tensor  # [num_sampling] int64, index in the sequence of the token that is sampled
    choice_index: Tensor  # [num_sampling] int64


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """One token per row.

    Args:
        logits: [num_sampling, vocabulary_size] float32; -inf cannot be sampled, and no row is all -inf.
        batch: the rows' parameters.

    Returns:
        [num_sampling] int64. Equal scores go to the lowest id.
    """
    tokens = best_ids(logits)
    rows = (batch.temperature > 0).nonzero().squeeze(1)  # [num_random] -> sampling row
    if len(rows):
        tokens[rows] = _sample_random(logits[rows], batch, rows)
    return tokens


def gumbel(seed: Tensor, token_ids: Tensor, positions: Tensor, choices: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, of the broadcast shape of the arguments (all int64)."""
    zero = torch.zeros_like(token_ids)
    word = philox4x32((token_ids, positions, choices, zero), (seed & _WORD, (seed >> 32) & _WORD))[0]
    uniform = ((word >> 8).float() + 0.5) * _UNIT
    return -torch.log(-torch.log(uniform.clamp_max(_LARGEST_UNIFORM)))


def _sample_random(logits: Tensor, batch: SamplingBatch, rows: Tensor) -> Tensor:
    scaled = logits / batch.temperature[rows].clamp_min(_MIN_TEMPERATURE)[:, None]  # [num_random, vocabulary_size]
    best = scaled.amax(dim=-1, keepdim=True)
    keep = _kept(scaled, best, batch.top_k[rows], batch.top_p[rows], batch.min_p[rows])
    keep &= scaled >= best - _NOISE_SPAN
    row, token = keep.nonzero(as_tuple=True)  # [num_kept] each, in order of row, then id
    source = rows[row]
    noise = gumbel(batch.seed[source], token, batch.position[source], batch.choice_index[source])
    return _argmax_per_row(scaled[row, token] + noise, row, token, len(rows))


def _argmax_per_row(scores: Tensor, row: Tensor, token: Tensor, num_rows: int) -> Tensor:
    """The id of each row's highest score, the lowest id among equals. scores, row, token: [num_kept]."""
    highest = scores.new_full((num_rows,), -torch.inf).scatter_reduce(0, row, scores, "amax")
    wins = scores == highest[row]
    none = torch.iinfo(torch.int64).max
    return token.new_full((num_rows,), none).scatter_reduce(0, row[wins], token[wins], "amin")


def _kept(scaled: Tensor, best: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[num_rows, vocabulary_size] bool: what top-k, then top-p, then min-p leave of each row."""
    vocabulary_size = scaled.shape[1]
    keep = scaled > -torch.inf
    num_top = torch.where((top_k <= 0) | (top_k > vocabulary_size), vocabulary_size, top_k)
    cut = ((num_top < vocabulary_size) | (top_p < 1)).nonzero().squeeze(1)
    if len(cut):
        keep[cut] &= _highest(scaled[cut], best[cut], num_top[cut], top_p[cut])
    if (min_p > 0).any():
        keep &= torch.exp(scaled - best) >= min_p[:, None]  # p / max(p) needs no normalization
    return keep


def _highest(scaled: Tensor, best: Tensor, num_top: Tensor, top_p: Tensor) -> Tensor:
    """[num_rows, vocabulary_size] bool: exactly the tokens of top-k and top-p, ties to the lower id."""
    vocabulary_size = scaled.shape[1]
    num_candidates = min(_NUM_CANDIDATES, vocabulary_size)
    candidates = scaled.topk(num_candidates, dim=-1).values
    num_kept = _num_kept(candidates, scaled, best, num_top, top_p)
    threshold = candidates.gather(1, num_kept[:, None] - 1)
    more = ((num_kept == num_candidates) & (num_top > num_candidates)).nonzero().squeeze(1)
    if len(more):
        whole = scaled[more].sort(dim=-1, descending=True).values
        num_kept[more] = _num_kept(whole, scaled[more], best[more], num_top[more], top_p[more])
        threshold[more] = whole.gather(1, num_kept[more][:, None] - 1)
    return at_least(scaled, threshold, num_kept)


def _num_kept(candidates: Tensor, scaled: Tensor, best: Tensor, num_top: Tensor, top_p: Tensor) -> Tensor:
    """How many of the sorted candidates [num_rows, num_candidates] stay: [num_rows] int64, at least 1.

    A token stays while the mass before it is below top_p of the mass that top-k leaves: the one that crosses belongs.
    """
    num_rows, num_candidates = candidates.shape
    zero = candidates.new_zeros((num_rows, 1), dtype=torch.float64)
    mass = torch.cat((zero, torch.exp((candidates - best).double()).cumsum(dim=-1)), dim=-1)  # before each, and all
    total = mass.gather(1, num_top.clamp_max(num_candidates)[:, None])
    total[num_top > num_candidates] = torch.inf  # not all there: keeps every candidate, and the caller asks again
    whole = (num_top >= scaled.shape[1]) & (top_p < 1)
    if whole.any():
        # cumsum adds in order of id whatever the batch; sum() does not promise that.
        total[whole] = torch.exp((scaled[whole] - best[whole]).double()).cumsum(dim=-1)[:, -1:]
    limit = torch.where(top_p < 1, top_p.double(), torch.inf)[:, None] * total
    order = torch.arange(num_candidates, device=candidates.device)
    return ((mass[:, :-1] < limit) & (order < num_top[:, None])).sum(dim=-1).clamp_min(1)
