"""Steps and their outcomes, as the engine and the executor's client exchange them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from octavo.tracing import NO_TAG, RequestTag
from router.beam import Candidate
from router.ids import BlockId, Slot, StepId
from router.logprob import TokenLogprob
from router.scheduler import Run


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How a row samples: the first time `num_samples` tokens, for choices from `choice_index` on.

    The ids of `suppressed_token_ids` cannot come while the history is shorter than `suppress_until`.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice_index: int
    num_samples: int
    suppressed_token_ids: tuple[int, ...]
    suppress_until: int
    logprobs: bool = False
    num_top_logprobs: int = 0
    num_prompt_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs_from: int = 0
    prompt_logprobs_until: int = 0
    grammar: str = ""
    num_candidates: int = 0  # above 0: the row samples nothing, and answers with as many of the best tokens


@dataclass(frozen=True, slots=True)
class RowStart:
    """A row that the session does not know yet: its whole history and table."""

    slot: Slot
    incarnation: int
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    block_ids: tuple[BlockId, ...]
    sampling: RowSampling
    tag: RequestTag = NO_TAG


@dataclass(frozen=True, slots=True)
class TableExtension:
    slot: Slot
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What changed since the step before, and which rows run."""

    step_id: StepId
    acknowledged_step: StepId
    retired_slots: tuple[Slot, ...]
    started_rows: tuple[RowStart, ...]
    extensions: tuple[TableExtension, ...]
    copies: tuple[tuple[BlockId, BlockId], ...]  # (source, target)
    runs: tuple[Run, ...]
    appended: tuple[tuple[Slot, int], ...] = ()  # (slot, token) of rows that sample none


@dataclass(frozen=True, slots=True)
class RowFailure:
    """`row`: index into the step's runs."""

    row: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class RunOutput:
    """What one run of a step gave; `logprobs` has one entry per token where the row asked for them.

    `candidates` None: the row samples, or is not computed whole.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    failure: RowFailure | None
    candidates: tuple[Candidate, ...] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Per run, in order, how many tokens it sampled; all tokens flat behind each other. Log-probabilities by run."""

    step_id: StepId
    num_sampled: tuple[int, ...]
    token_ids: tuple[int, ...]
    failures: tuple[RowFailure, ...]
    execute_s: float
    execute_began_unix_s: float = 0.0
    logprobs: Mapping[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    candidates: Mapping[int, tuple[Candidate, ...]] = field(default_factory=dict)

    def run_outputs(self) -> Iterator[RunOutput]:
        """One per run, in order."""
        failures = {failure.row: failure for failure in self.failures}
        end = 0
        for index, num_sampled in enumerate(self.num_sampled):
            start, end = end, end + num_sampled
            logprobs, prompt_logprobs = self.logprobs.get(index, ()), self.prompt_logprobs.get(index, ())
            found = (failures.get(index), self.candidates.get(index))
            yield RunOutput(self.token_ids[start:end], logprobs, prompt_logprobs, *found)


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The step changed nothing at the executor, and its id is still to be used."""

    step_id: StepId
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class StepGap:
    """The step is not the next one: one before it was refused or lost."""

    last_applied_step: StepId


Outcome = StepResult | StepFailed | StepGap
