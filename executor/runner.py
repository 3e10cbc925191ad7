"""One step on the device: copies, forward pass, sampling. The only place that turns torch's errors into the step's.

Holds no state of rows or sessions. Runs in the worker's thread alone.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from executor.arena import Arena
from executor.attention import AttentionBackend
from executor.batch import Batch
from executor.logits.adjust import adjust
from executor.logits.candidates import find_candidates, normalize, scored_tokens
from executor.logits.score import token_logprobs
from executor.model.served import ServedModel
from executor.pending import DoneOutput, PendingOutput
from executor.sampler import sample
from executor.step import MODEL_ERROR, NO_INTS, OUT_OF_MEMORY, Ints, StepError, StepOutput
from octavo.errors import OctavoError

NOTHING = StepOutput(NO_INTS, NO_INTS.astype(np.bool_), 0)


class Runner:
    """A model on an arena."""

    def __init__(
        self,
        model: ServedModel,
        arena: Arena,
        attention: AttentionBackend,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """clock: seconds, monotonic; wall_clock: seconds since 1970."""
        self._model = model
        self._arena = arena
        self._attention = attention
        self._clock = clock
        self._wall_clock = wall_clock

    def begin(
        self, copy_sources: Ints, copy_targets: Ints, batch: Batch | None, before: PendingOutput | None = None
    ) -> PendingOutput:
        """See `StepRunner`. Computed at once, so that every input token is known, and `before` not looked at.

        Raises:
            StepError: OUT_OF_MEMORY or MODEL_ERROR.
        """
        began, began_unix = self._clock(), self._wall_clock()
        with step_errors(), torch.inference_mode():
            self._copy(copy_sources, copy_targets)
            output = self._compute(batch) if batch is not None else NOTHING
        execute_microseconds = round((self._clock() - began) * 1e6)
        return DoneOutput(
            replace(output, execute_microseconds=execute_microseconds, began_unix_microseconds=round(began_unix * 1e6))
        )

    def _copy(self, sources: Ints, targets: Ints) -> None:
        if sources.size:
            self._attention.copy_blocks(self._arena.blocks, sources, targets)

    def _compute(self, batch: Batch) -> StepOutput:
        attention = self._attention.prepare(batch.attention, self._arena.views)
        logits = self._model.forward(batch, attention)
        num_sampling = len(batch.logits_tokens)
        output = _sample(logits[:num_sampling], batch) if num_sampling else NOTHING
        scores = batch.prompt_scores
        if scores is None:
            return output
        prompt = token_logprobs(logits[num_sampling:], scores.rows, scores.token_ids, scores.num_top)
        return replace(output, prompt_logprobs=prompt)


@contextmanager
def step_errors() -> Iterator[None]:
    """What torch raises here, as StepError: OUT_OF_MEMORY or MODEL_ERROR."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise StepError(OUT_OF_MEMORY, f"no memory for a step: {error}; send fewer tokens in one step") from error
    except StepError:
        raise
    except Exception as error:
        raise _step_error(error) from error


def _sample(logits: Tensor, batch: Batch) -> StepOutput:
    """One token per row of logits, [num_sampling, vocabulary_size] float32, which are overwritten."""
    values = logits.numpy()
    finite = torch.from_numpy(np.isfinite(values.min(axis=-1)) & np.isfinite(values.max(axis=-1)))  # NaN comes through
    if not finite.all():
        logits[~finite] = 0  # keeps the arithmetic below defined; the row's token is dropped
    scores = batch.sample_scores
    unchanged = logits[torch.from_numpy(scores.rows)] if scores is not None else None  # a copy
    beams = torch.from_numpy(batch.candidates.rows) if batch.candidates is not None else None
    if beams is not None:
        normalize(logits, beams)
    if batch.adjustments is not None:
        adjust(logits, batch.adjustments)
        if batch.adjustments.can_leave_nothing:
            alive = logits.amax(dim=-1) > -torch.inf
            finite &= alive
            logits[~alive] = 0
    token_ids = sample(logits, batch.sampling).numpy()
    wanted = batch.candidates
    candidates = find_candidates(logits[beams], wanted) if wanted is not None and beams is not None else None
    logprobs = scored_tokens(token_ids, unchanged, batch, candidates) if unchanged is not None else None
    return StepOutput(token_ids, finite.numpy(), 0, sampled_logprobs=logprobs, candidates=candidates)


def _step_error(error: Exception) -> StepError:
    if isinstance(error, OctavoError):
        return StepError(MODEL_ERROR, error.message)
    if isinstance(error, RuntimeError) and "not enough memory" in str(error):  # torch's CPU allocator
        return StepError(OUT_OF_MEMORY, f"no memory for a step: {error}; send fewer tokens in one step")
    return StepError(MODEL_ERROR, f"{type(error).__name__}: {error}")
