"""A step on a device whose samples are being computed and copied: what the next step feeds on, and what the host gets.

The tokens stay on the device as well as they come to the host, so a step that goes on with them waits for nothing.
Log-probabilities and candidates are found on the host, in the logits of the rows that ask. Not here: what is launched.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from executor.batch import Batch
from executor.cuda.transfer import Download
from executor.logits.candidates import find_candidates, scored_tokens
from executor.runner import NOTHING
from executor.step import StepOutput, TokenLogprobs


class DeviceClock:
    """When steps ran: one behind the other, whenever they were given to the device."""

    def __init__(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        """As of `Runner`."""
        self._clock = clock
        self._wall_clock = wall_clock
        self._free_at_s = 0.0

    def now(self) -> tuple[float, float]:
        """Seconds by the clock, and since 1970."""
        return self._clock(), self._wall_clock()

    def timed(self, output: StepOutput, given: tuple[float, float], done_s: float) -> StepOutput:
        """The output of a step that was given at `given` and done at `done_s`, with the time that it had the device."""
        began_s = max(given[0], self._free_at_s)
        self._free_at_s = max(done_s, began_s)
        return replace(
            output,
            execute_microseconds=round((self._free_at_s - began_s) * 1e6),
            began_unix_microseconds=round((given[1] + began_s - given[0]) * 1e6),
        )


@dataclass(slots=True)
class DeviceOutput:
    """A `PendingOutput` of a device."""

    token_ids: Tensor | None  # [num_sampling] int64, on the device; None: no row samples
    download: Download  # of what `start_sampling` gave
    batch: Batch | None
    prompt_logprobs: TokenLogprobs | None
    clock: DeviceClock
    given: tuple[float, float]
    guard: Callable[[], AbstractContextManager[None]]  # turns what torch raises into StepError
    done_s: float | None = None

    @property
    def is_done(self) -> bool:
        """See `PendingOutput`."""
        return self.download.is_done

    def wait(self) -> None:
        """See `PendingOutput`."""
        try:
            self.download.wait()
        except RuntimeError:
            return  # `take` meets it again, and says it
        self.done_s = self.done_s or self.clock.now()[0]

    def take(self) -> StepOutput:
        """See `PendingOutput`."""
        self.wait()
        with self.guard(), torch.inference_mode():
            output = self._output(self.download.wait())
        return self.clock.timed(output, self.given, self.done_s or self.clock.now()[0])

    def _output(self, downloaded: list[Tensor]) -> StepOutput:
        if not downloaded or self.batch is None:
            return replace(NOTHING, prompt_logprobs=self.prompt_logprobs)
        token_ids, finite, *rest = downloaded
        output = StepOutput(token_ids.numpy(), finite.numpy(), 0, prompt_logprobs=self.prompt_logprobs)
        if (wanted := self.batch.candidates) is not None:
            output = replace(output, candidates=find_candidates(rest.pop(), wanted))
        if self.batch.sample_scores is None:
            return output
        logprobs = scored_tokens(output.token_ids, rest.pop(), self.batch, output.candidates)
        return replace(output, sampled_logprobs=logprobs)
