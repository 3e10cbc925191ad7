"""What a client gets: plain frozen dataclasses, free of gRPC, with times in seconds and counts in tokens.

Not here: how they travel (`octavo.messages`).
"""

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a choice ended; the names of the protos without their prefix, in lower case."""

    EOS = "eos"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"
    MAX_TOKENS = "max_tokens"
    CONTEXT_LENGTH = "context_length"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the likeliest tokens at a position."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token; rank 1 is the likeliest."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; `cached_tokens` are prompt tokens that were really not computed."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: arrival to first step, first step to first token, arrival to first token, first token to last."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BeamScore:
    """Of an answer that was searched for: `score` ranks it, and is the sum over (tokens ** length_penalty)."""

    score: float
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. `matched_stop`: the stop string, or the stop token's id in decimal. `beam`: of beam search alone."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    beam: BeamScore | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """The whole answer to a request; `text` and `finish_reason` are those of its first choice.

    `prompt_logprobs` begin with the second token of the prompt.
    """

    request_id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    timing: Timing
    effective_seed: int
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason


# --------------------------------------------------------------------------------------------------- events of a stream


@dataclass(frozen=True, slots=True)
class Started:
    """The first event."""

    request_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    effective_seed: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """A piece of the prompt's log-probabilities; `token_offset` is the index in the prompt of its first token."""

    token_offset: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and tokens of one choice; `token_offset` is the number of its tokens in earlier deltas."""

    index: int
    token_offset: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one choice."""

    index: int
    reason: FinishReason
    matched_stop: str = ""
    beam: BeamScore | None = None


@dataclass(frozen=True, slots=True)
class Completed:
    """The last event."""

    usage: Usage
    timing: Timing


Event = Started | PromptLogprobs | Delta | Finished | Completed


@dataclass(slots=True)
class _OpenChoice:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished | None = None

    def build(self, index: int) -> Choice:
        if self.finished is None:
            raise ValueError(f"choice {index} has not finished")
        return Choice(
            index,
            "".join(self.text),
            tuple(self.token_ids),
            self.finished.reason,
            self.finished.matched_stop,
            tuple(self.logprobs),
            self.finished.beam,
        )


class GenerationBuilder:
    """Folds the events of a stream into the answer that the unary call gives."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._completed: Completed | None = None
        self._prompt_logprobs: list[TokenLogprob] = []
        self._choices: dict[int, _OpenChoice] = {}

    def add(self, event: Event) -> None:
        match event:
            case Started():
                self._started = event
            case Completed():
                self._completed = event
            case PromptLogprobs():
                self._prompt_logprobs.extend(event.logprobs)
            case Finished():
                self._choice(event.index).finished = event
            case Delta():
                choice = self._choice(event.index)
                choice.text.append(event.text)
                choice.token_ids.extend(event.token_ids)
                choice.logprobs.extend(event.logprobs)

    def build(self) -> Generation:
        """The answer. Raises ValueError before the last event was added."""
        if self._started is None or self._completed is None:
            raise ValueError("the stream has not completed")
        return Generation(
            self._started.request_id,
            self._started.model,
            tuple(choice.build(index) for index, choice in sorted(self._choices.items())),
            self._completed.usage,
            self._completed.timing,
            self._started.effective_seed,
            tuple(self._prompt_logprobs),
        )

    def _choice(self, index: int) -> _OpenChoice:
        return self._choices.setdefault(index, _OpenChoice())


# ------------------------------------------------------------------------------------------------------ about a server


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that is served, and the pool of its first engine (`block_size` in tokens)."""

    name: str
    fingerprint: str
    architecture: str
    vocabulary_size: int
    max_context_tokens: int
    block_size: int
    num_blocks: int
    kv_dtype: str
    weights_dtype: str
    attention: str
    device: str
    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server refuses to exceed."""

    max_queued_requests: int
    max_running_requests: int
    max_tokens_per_step: int
    max_message_bytes: int
    max_stop_strings: int
    max_stop_string_bytes: int
    max_stop_token_ids: int
    max_choices: int
    max_top_logprobs: int
    max_logit_biases: int
    max_bad_words: int
    max_bad_word_bytes: int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine behind the router.

    Attributes:
        model: empty until it was reached for the first time.
        state: connecting, serving or faulted.
        router_epoch: of the router's lease there; 0 without one.
    """

    name: str
    model: str
    state: str
    router_epoch: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Which router answers, and what is behind it."""

    version: str
    router_id: str
    engines: tuple[EngineInfo, ...]
    limits: Limits


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """How busy a model is; the ratio is of blocks in use to blocks in the pool."""

    name: str
    running_requests: int
    waiting_requests: int
    kv_cache_usage_ratio: float
