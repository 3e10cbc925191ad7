"""What a router asks of one step, and what it gets back: the executor's own words, free of gRPC.

Values only. Checking them belongs to `step_check`, applying them to `slots` and `session`.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from executor.ids import StepId

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]

NO_INTS: Ints = np.empty(0, dtype=np.int64)
NO_INTS.setflags(write=False)
NO_FLOATS: Floats = np.empty(0, dtype=np.float32)
NO_FLOATS.setflags(write=False)

INVALID_STEP = "INVALID_STEP"
MODEL_ERROR = "MODEL_ERROR"
OUT_OF_MEMORY = "OUT_OF_MEMORY"
LOGITS_NOT_FINITE = "LOGITS_NOT_FINITE"
CONSTRAINT_FAILED = "CONSTRAINT_FAILED"
REASONS = (INVALID_STEP, MODEL_ERROR, OUT_OF_MEMORY, LOGITS_NOT_FINITE, CONSTRAINT_FAILED)


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How a row samples once its last known token has been computed."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    seed: int = 0  # unsigned, 64 bits
    choice_index: int = 0
    num_samples: int = 0  # tokens drawn the first time, for choices from choice_index on; 0 and 1: one
    suppressed_token_ids: Ints = field(default_factory=lambda: NO_INTS)  # [num_suppressed]
    suppress_until: int = 0  # history length in tokens from which those ids may be sampled
    num_prompt_tokens: int = 0  # of the history; the rest counts as generated
    presence_penalty: float = 0.0  # 0: off
    frequency_penalty: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off
    bias_token_ids: Ints = field(default_factory=lambda: NO_INTS)  # [num_biases], distinct
    biases: Floats = field(default_factory=lambda: NO_FLOATS)  # [num_biases]
    allowed_token_ids: Ints = field(default_factory=lambda: NO_INTS)  # [num_allowed], empty: all
    banned_lengths: Ints = field(default_factory=lambda: NO_INTS)  # [num_banned], of sequences that cannot be generated
    banned_token_ids: Ints = field(default_factory=lambda: NO_INTS)  # [sum(banned_lengths)], flat
    logprobs: bool = False
    num_top_logprobs: int = 0
    prompt_logprobs_from: int = 0  # tokens of the history in [from, until) are scored as they are computed
    prompt_logprobs_until: int = 0
    grammar: str = ""  # what generated tokens must match
    num_candidates: int = 0  # above 0: the row answers with as many of the best tokens, and samples none


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Blocks of one row in one KV group, in order of position."""

    kv_group: int
    block_ids: Ints  # [num_blocks]


@dataclass(frozen=True, slots=True)
class RowStart:
    """A sequence that enters a free slot."""

    slot: int
    incarnation: int
    token_ids: Ints  # [num_tokens], the whole history
    num_computed_tokens: int
    tables: tuple[BlockTable, ...]  # one per KV group
    sampling: RowSampling


@dataclass(frozen=True, slots=True)
class TableExtension:
    """Blocks that are appended to the tables of some rows."""

    kv_group: int
    slots: Ints  # [num_rows]
    counts: Ints  # [num_rows], blocks per slot
    block_ids: Ints  # [sum(counts)], flat


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a session. Applied in this order: acknowledge, retire, start, append, extend, copy, run."""

    step_id: StepId
    acknowledged_step: StepId = StepId(0)
    retired_slots: Ints = field(default_factory=lambda: NO_INTS)
    started_rows: tuple[RowStart, ...] = ()
    extensions: tuple[TableExtension, ...] = ()
    copy_sources: Ints = field(default_factory=lambda: NO_INTS)  # [num_copies], block ids
    copy_targets: Ints = field(default_factory=lambda: NO_INTS)  # [num_copies], block ids
    slots: Ints = field(default_factory=lambda: NO_INTS)  # [num_rows], batch row -> slot
    start_positions: Ints = field(default_factory=lambda: NO_INTS)  # [num_rows], equal to the computed length
    num_tokens: Ints = field(default_factory=lambda: NO_INTS)  # [num_rows], a decode is 1
    appended_slots: Ints = field(default_factory=lambda: NO_INTS)  # [num_appended], distinct
    appended_token_ids: Ints = field(default_factory=lambda: NO_INTS)  # [num_appended]


@dataclass(frozen=True, slots=True)
class RowFailure:
    """One row whose answer is unusable; the others of its step are good."""

    row: int  # index into the running rows of the step
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities by the model's own distribution, one entry per token, in order of row, then position."""

    rows: Ints  # [num_entries]
    token_ids: Ints  # [num_entries]
    logprobs: Floats  # [num_entries]
    ranks: Ints  # [num_entries], 1 is the likeliest
    num_top: Ints  # [num_entries]
    top_token_ids: Ints  # [sum(num_top)], the likeliest first
    top_logprobs: Floats  # [sum(num_top)]

    def kept(self, keep: Bools, rows: Ints) -> "TokenLogprobs":
        """The entries of `keep` [num_entries], with `rows[row]` for each row."""
        top = np.repeat(keep, self.num_top)
        return TokenLogprobs(
            rows[self.rows[keep]],
            self.token_ids[keep],
            self.logprobs[keep],
            self.ranks[keep],
            self.num_top[keep],
            self.top_token_ids[top],
            self.top_logprobs[top],
        )


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best next tokens of some rows: log-probabilities by the model, then changed by the rows' rules."""

    rows: Ints  # [num_rows], ascending
    counts: Ints  # [num_rows]
    token_ids: Ints  # [sum(counts)], the best first, of equal ones the lower id
    scores: Floats  # [sum(counts)], none is -inf

    def kept(self, keep: Bools, rows: Ints) -> "Candidates":
        """Those of `keep` [num_rows], with `rows[row]` for each row."""
        flat = np.repeat(keep, self.counts)
        return Candidates(rows[self.rows[keep]], self.counts[keep], self.token_ids[flat], self.scores[flat])


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled. Log-probabilities are None where no row asks; their rows are running rows of the step."""

    step_id: StepId
    num_sampled: Ints  # [num_rows], 0 in mid-prefill and for failed rows
    token_ids: Ints  # [sum(num_sampled)], flat
    failures: tuple[RowFailure, ...] = ()
    execute_microseconds: int = 0
    began_unix_microseconds: int = 0
    sampled_logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    candidates: Candidates | None = None  # None where no row asks


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The step changed nothing, and its id is still to be used."""

    step_id: StepId
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class StepGap:
    """The step is not the next one, and its result is not held."""

    last_applied_step: StepId


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a device answers: the rows that sampled, in batch order.

    Log-probabilities are None where no row asks; of samples `rows` index the sampling rows, of the prompt the batch's.
    """

    token_ids: Ints  # [num_sampling], undefined where not finite
    finite: Bools  # [num_sampling]: the row's logits hold no NaN and no infinity
    execute_microseconds: int
    began_unix_microseconds: int = 0
    sampled_logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    candidates: Candidates | None = None  # rows: sampling rows; their token ids are not meant


StepOutcome = StepResult | StepFailed | StepGap


class StepError(Exception):
    """Why a step cannot run: `reason` becomes that of its `StepFailed`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def invalid_step(message: str) -> StepError:
    """The router broke the protocol; `message` names the field, its value and what is allowed."""
    return StepError(INVALID_STEP, message)
