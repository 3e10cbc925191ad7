"""A device without one: steps begin in order, are computed when somebody waits, and feed on the step before."""

from collections import Counter
from collections.abc import Callable

import numpy as np
from torch import Tensor

from executor.batch import Batch
from executor.slots import UNKNOWN
from executor.step import MODEL_ERROR, Ints, StepError, StepOutput
from tests.executor_cases import ints

VOCABULARY = 100


class LateOutput:
    """A `PendingOutput` that is computed as late as can be."""

    def __init__(self, runner: "LateRunner", batch: Batch | None, tag: int, before: "LateOutput | None") -> None:
        self._runner = runner
        self._batch = batch
        self._before = before
        self._tag = tag
        self._output: StepOutput | None = None
        self.is_taken = False

    @property
    def is_done(self) -> bool:
        return self._runner.is_prompt or self._output is not None

    def wait(self) -> None:
        if self._output is None:
            self._runner.wait_hook(self._tag)
            self._output = self._compute()
            self._runner.events.append(("computed", self._tag))

    def take(self) -> StepOutput:
        assert not self.is_taken, "taken twice"
        self.is_taken = True
        self.wait()
        if self._runner.errors[self._tag]:
            self._runner.errors[self._tag] -= 1
            raise StepError(MODEL_ERROR, "broken")
        self._runner.events.append(("taken", self._tag))
        assert self._output is not None
        return self._output

    def _compute(self) -> StepOutput:
        if self._batch is None:
            return StepOutput(ints(), np.zeros(0, bool), 0)
        ids = self._batch.input_ids.numpy().copy()
        if self._batch.fed is not None:
            assert self._before is not None
            self._before.wait()
            assert self._before._output is not None
            ids[self._batch.fed.tokens.numpy()] = self._before._output.token_ids[self._batch.fed.draws.numpy()]
        assert (ids != UNKNOWN).all(), "a token that was never drawn"
        return _sampled(self._batch, ids)


class LateRunner:
    """A `StepRunner` whose steps tell their number by the target of their only copy, less 100."""

    def __init__(self, is_prompt: bool = False, wait_hook: Callable[[int], None] = lambda tag: None) -> None:
        """is_prompt: everything is done when it is begun, as on a CPU. wait_hook: called before a step is computed."""
        self.is_prompt = is_prompt
        self.wait_hook = wait_hook
        self.errors: Counter[int] = Counter()  # step -> how often its end fails
        self.begin_errors: Counter[int] = Counter()  # step -> how often its beginning fails
        self.events: list[tuple[str, int]] = []

    def begin(
        self, copy_sources: Ints, copy_targets: Ints, batch: Batch | None, before: LateOutput | None = None
    ) -> LateOutput:
        tag = int(copy_targets[0]) - 100 if copy_targets.size else 0
        if self.begin_errors[tag]:
            self.begin_errors[tag] -= 1
            raise StepError(MODEL_ERROR, "cannot begin")
        self.events.append(("ahead" if before is not None else "begun", tag))
        return LateOutput(self, batch, tag, before)


def _sampled(batch: Batch, ids: Ints) -> StepOutput:
    """Of the last token, its position, the choice, and what the rules of the row are at this moment."""
    last, sampling = batch.logits_tokens.numpy(), batch.sampling
    score = ids[last] * 7 + sampling.position.numpy() * 3 + sampling.choice_index.numpy() + 1
    if batch.adjustments is not None:
        for rows, ids_of_rows in (
            (batch.adjustments.seen_rows, batch.adjustments.seen_ids),
            (batch.adjustments.bias_rows, batch.adjustments.bias_ids),
            (batch.adjustments.banned_rows, batch.adjustments.banned_ids),
        ):
            score += np.bincount(rows, weights=_plus_one(ids_of_rows), minlength=len(last)).astype(np.int64)
    finite = score % 29 != 0
    return StepOutput(np.where(finite, score % VOCABULARY, 7), finite, 3)


def _plus_one(numbers: Tensor) -> Ints:
    return numbers.numpy() + 1
