"""One step on the device: copies, forward pass, sampling. The only place that turns torch's errors into the step's.

Holds no state of rows or sessions. Runs in the worker's thread alone.
"""

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from executor.arena import Arena
from executor.attention import AttentionBackend
from executor.batch import Batch
from executor.model.forward import CausalModel
from executor.sampler import sample
from executor.step import MODEL_ERROR, NO_INTS, OUT_OF_MEMORY, Ints, StepError, StepOutput
from octavo.errors import OctavoError


class Runner:
    """A model on an arena."""

    def __init__(
        self,
        model: CausalModel,
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

    def run(self, copy_sources: Ints, copy_targets: Ints, batch: Batch | None) -> StepOutput:
        """Copy blocks, then compute and sample.

        Args:
            copy_sources, copy_targets: [num_copies] block ids.
            batch: None where no row runs.

        Raises:
            StepError: OUT_OF_MEMORY or MODEL_ERROR; KV was written only where the batch may write.
        """
        began, began_unix = self._clock(), self._wall_clock()
        try:
            with torch.inference_mode():
                if copy_sources.size:
                    self._arena.copy_blocks(torch.from_numpy(copy_sources), torch.from_numpy(copy_targets))
                token_ids, finite = self._compute(batch) if batch is not None else (NO_INTS, NO_INTS.astype(np.bool_))
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise StepError(OUT_OF_MEMORY, f"no memory for a step: {error}; send fewer tokens in one step") from error
        except Exception as error:
            raise _step_error(error) from error
        return StepOutput(token_ids, finite, round((self._clock() - began) * 1e6), round(began_unix * 1e6))

    def _compute(self, batch: Batch) -> tuple[Ints, npt.NDArray[np.bool_]]:
        attention = self._attention.prepare(batch.attention, self._arena.views)
        logits = self._model.forward(batch, attention)
        if not len(logits):
            return NO_INTS, NO_INTS.astype(np.bool_)
        lowest, highest = logits.aminmax(dim=-1)  # both are NaN in a row with a NaN
        finite = lowest.isfinite() & highest.isfinite()
        if not finite.all():
            logits[~finite] = 0  # keeps the sampler's arithmetic defined; the row's token is dropped
        return sample(logits, batch.sampling).numpy(), finite.numpy()


def _step_error(error: Exception) -> StepError:
    if isinstance(error, OctavoError):
        return StepError(MODEL_ERROR, error.message)
    if isinstance(error, RuntimeError) and "not enough memory" in str(error):  # torch's CPU allocator
        return StepError(OUT_OF_MEMORY, f"no memory for a step: {error}; send fewer tokens in one step")
    return StepError(MODEL_ERROR, f"{type(error).__name__}: {error}")
