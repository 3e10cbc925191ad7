"""From logits on a device to token ids, by the fused kernel, with rules applied before it and nothing waited for.

The kernel draws what `executor.sampler` draws: the same filters, the same noise, by its own arithmetic.
Log-probabilities are computed on the host, from the rows that ask for them. Not here: which rows sample.
"""

from dataclasses import fields, replace

import torch
from torch import Tensor

from executor.batch import Batch
from executor.cuda.transfer import Download, Upload
from executor.logits.adjust import Adjustments, adjust
from executor.logits.candidates import find_candidates, normalize, scored_tokens
from executor.sampler import SamplingBatch
from executor.step import StepOutput
from kernels.sampling import sample


class PendingSamples:
    """Token ids that are being computed and copied."""

    def __init__(
        self, token_ids: Tensor, finite: Tensor, unchanged: Tensor | None, scores: Tensor | None, batch: Batch
    ) -> None:
        """Take what is to be copied.

        Args:
            unchanged: [num_scored, vocabulary_size], the logits of rows that ask for log-probabilities.
            scores: [num_rows, vocabulary_size], of the rows that answer with candidates.
        """
        self._download = Download([each for each in (token_ids, finite, unchanged, scores) if each is not None])
        self._batch = batch

    def wait(self) -> StepOutput:
        """The samples, once they are there."""
        token_ids, finite, *rest = self._download.wait()
        output = StepOutput(token_ids.numpy(), finite.numpy(), 0)
        if (wanted := self._batch.candidates) is not None:
            output = replace(output, candidates=find_candidates(rest.pop(), wanted))
        if self._batch.sample_scores is None:
            return output
        logprobs = scored_tokens(output.token_ids, rest.pop(), self._batch, output.candidates)
        return replace(output, sampled_logprobs=logprobs)


def start_sampling(logits: Tensor, batch: Batch, upload: Upload) -> PendingSamples:
    """Sample one token per row of logits, [num_sampling, vocabulary_size] float32, which are overwritten."""
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
    return PendingSamples(token_ids, finite, unchanged, logits[beams] if beams is not None else None, batch)


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
