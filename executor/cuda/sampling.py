"""From logits on a device to token ids, by the fused kernel, with rules applied before it and nothing waited for.

The kernel draws what `executor.sampler` draws: the same filters, the same noise, by its own arithmetic. Not here:
which rows sample, and how what was drawn comes to the host (pending).
"""

from dataclasses import fields, replace

import torch
from torch import Tensor

from executor.batch import Batch
from executor.cuda.transfer import Upload
from executor.logits.adjust import Adjustments, adjust
from executor.logits.candidates import normalize
from executor.sampler import SamplingBatch
from kernels.sampling import sample


def start_sampling(logits: Tensor, batch: Batch, upload: Upload) -> list[Tensor]:
    """Sample one token per row of logits, [num_sampling, vocabulary_size] float32, which are overwritten.

    Returns:
        On the device: token ids [num_sampling] int64, each in the vocabulary; finite [num_sampling] bool, whether the
        row's token counts; where rows ask for log-probabilities, their unchanged logits
        [num_scored, vocabulary_size] float32; where rows answer with candidates, their scores, of the same form.
    """
    lowest, highest = logits.aminmax(dim=-1)  # both are NaN in a row with a NaN
    finite = lowest.isfinite() & highest.isfinite()
    logits.masked_fill_(~finite[:, None], 0)  # keeps the arithmetic below defined; the row's token is dropped
    scores = batch.sample_scores
    unchanged = logits[upload(torch.from_numpy(scores.rows))] if scores is not None else None  # a copy
    beams = upload(torch.from_numpy(batch.candidates.rows)) if batch.candidates is not None else None
    if beams is not None:
        normalize(logits, beams)
    if batch.adjustments is not None:
        adjust(logits, _uploaded(batch.adjustments, upload))
        if batch.adjustments.can_leave_nothing:
            alive = logits.amax(dim=-1) > -torch.inf
            finite &= alive
            logits.masked_fill_(~alive[:, None], 0)
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    sample(token_ids, logits, **_parameters(batch.sampling, upload))
    scores_of_candidates = logits[beams] if beams is not None else None
    return [each for each in (token_ids, finite, unchanged, scores_of_candidates) if each is not None]


def _parameters(batch: SamplingBatch, upload: Upload) -> dict[str, Tensor]:
    """In three copies: one of each width."""
    floats = upload(torch.stack((batch.temperature, batch.top_p, batch.min_p)))
    top_k = batch.top_k.clamp(0, torch.iinfo(torch.int32).max)
    ints = upload(torch.stack((top_k, batch.position, batch.choice_index)).int())
    return {
        "temperatures": floats[0],
        "top_ps": floats[1],
        "min_ps": floats[2],
        "top_ks": ints[0],
        "positions": ints[1],
        "choice_indices": ints[2],
        "seeds": upload(batch.seed),
    }


def _uploaded(adjustments: Adjustments, upload: Upload) -> Adjustments:
    return replace(adjustments, **{each.name: upload(getattr(adjustments, each.name)) for each in fields(adjustments)})
