"""A step that a device was given: what there is of it before its tokens are known on the host.

A runner begins a step and hands this out; the session takes the output from it, now or behind the beginning of the next
step. Not here: who may begin before what (`session`), how a device is asked (`cuda`).
"""

from dataclasses import dataclass
from typing import Protocol

from executor.batch import Batch
from executor.step import Ints, StepOutput


class PendingOutput(Protocol):
    """The output of a step that was begun."""

    @property
    def is_done(self) -> bool:
        """Whether `take` returns without waiting."""

    def wait(self) -> None:
        """Return when nothing of the step runs any more. From any thread; a step that failed is done too."""

    def take(self) -> StepOutput:
        """The output, waited for. Called once. Raises StepError."""


@dataclass(frozen=True, slots=True)
class DoneOutput:
    """Of a step that was computed where it was begun."""

    output: StepOutput

    @property
    def is_done(self) -> bool:
        """See `PendingOutput`."""
        return True

    def wait(self) -> None:
        """See `PendingOutput`."""

    def take(self) -> StepOutput:
        """See `PendingOutput`."""
        return self.output


class StepRunner(Protocol):
    """What computes a batch."""

    def begin(
        self, copy_sources: Ints, copy_targets: Ints, batch: Batch | None, before: PendingOutput | None = None
    ) -> PendingOutput:
        """Copy blocks, then compute and sample, behind every step that was begun earlier.

        Args:
            copy_sources, copy_targets: [num_copies] block ids.
            batch: None where no row runs.
            before: what this runner handed out for the step whose draws `batch.fed` names.

        Raises:
            StepError: the step was not begun. KV was written only where the batch may write.
        """
