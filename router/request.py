"""A request as the engine takes it: checked, tokenized, every default filled in. Frozen; nothing of gRPC."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum


class FinishReason(IntEnum):
    """Why a choice ended; the numbers are those of the wire."""

    EOS = 1
    STOP_STRING = 2
    STOP_TOKEN = 3
    MAX_TOKENS = 4
    CONTEXT_LENGTH = 5
    TIME_LIMIT = 6
    CANCELLED = 7


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """`width` beams; scores are sums of log-probabilities over (tokens ** length_penalty)."""

    width: int
    length_penalty: float
    early_stopping: bool


@dataclass(frozen=True, slots=True)
class Sampling:
    """Filters in the order in which they apply, then the seed, then what changes the logits before.

    Attributes:
        temperature: 0 is greedy.
        top_k, top_p: 0 and 1 are off.
        n: answers that the client gets.
        num_choices: answers that are generated, at least n; the client gets the likeliest. With beams: the width.
        presence_penalty, frequency_penalty, repetition_penalty: 0, 0 and 1 are off.
        logit_bias: (id, bias), each id once.
        allowed_token_ids: sorted; empty is off.
        bad_words: texts; their ids are in `RequestSpec.banned`.
        beam: None: tokens are drawn.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...]
    bad_words: tuple[str, ...]
    n: int
    num_choices: int
    beam: BeamSearch | None = None

    @property
    def is_ranked(self) -> bool:
        """Whether whole answers are drawn, of which some are shown."""
        return self.beam is None and self.num_choices > self.n

    @property
    def num_written(self) -> int:
        """Answers that are written: all that are drawn; of a search, those that are shown."""
        return self.num_choices if self.beam is None else self.n


@dataclass(frozen=True, slots=True)
class Stopping:
    """When generation ends. `max_tokens` None: as far as context and pool reach."""

    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    include_stop: bool
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class Output:
    """What the client gets beside text and ids; `top_logprobs` alternatives where log-probabilities are asked for."""

    logprobs: bool
    top_logprobs: int
    prompt_logprobs: bool
    echo: bool
    skip_special_tokens: bool


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must match: one schema, regex or grammar, or several texts to choose from.

    Attributes:
        kind: json_schema, regex, grammar or choice.
    """

    kind: str
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Chat:
    """Turns of a conversation; without the generation prompt the last turn is continued."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool


Prompt = str | Sequence[int] | Chat


@dataclass(frozen=True, slots=True)
class CacheScope:
    """What must be equal, besides the model and all tokens, for two requests to share cached blocks.

    Attributes:
        tenant: of the caller, or the group whose tenants share; None: there are no tenants.
        salt: of the request.
    """

    tenant: str | None = None
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """What validation made of a call: every field in range, the prompt not yet tokenized."""

    tenant: str  # name; ids of requests are unique among those of a tenant
    request_id: str
    prompt: Prompt
    sampling: Sampling
    stopping: Stopping
    output: Output
    constraint: Constraint | None
    scope: CacheScope
    bypass_cache: bool
    priority: int
    time_limit_s: float | None  # since arrival
    resume: tuple[tuple[int, tuple[int, ...]], ...]  # (index of a choice, tokens that the client has), each index once
    max_kv_share: float = 1.0  # of an engine's blocks, for all that runs of the tenant

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are wanted: they come before what can be resumed."""
        return self.output.prompt_logprobs and not self.resume

    def echoes(self, index: int) -> bool:
        """Whether a choice begins with the prompt, and the client does not have that yet."""
        return self.output.echo and all(index != resumed for resumed, _ in self.resume)

    def is_same_body(self, other: "CheckedRequest") -> bool:
        """Whether both ask for the same answer, whatever of it the client has, and of its time or quota is left."""
        mine, others = (replace(each, resume=(), time_limit_s=None, max_kv_share=1.0) for each in (self, other))
        return mine == others


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A checked request with its prompt's ids and the length that it may reach.

    Attributes:
        max_tokens: of each answer, at least 1.
        limit_reason: the finish reason when `max_tokens` is reached.
        banned: token sequences that cannot be generated.
        grammar: what each answer must match, as executors follow it; empty: anything.
        echo_text: the prompt's text, where each answer begins with it.
    """

    checked: CheckedRequest
    prompt_ids: tuple[int, ...]
    max_tokens: int
    limit_reason: FinishReason
    banned: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""
    echo_text: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def max_kv_tokens(self) -> int:
        """Tokens that ever need KV: the last one that is generated never does."""
        return len(self.prompt_ids) + self.max_tokens - 1


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int  # the resumed ones among them
    resumed_tokens: int

    @property
    def new_tokens(self) -> int:
        """Generated by this call; none where it ended before those that it resumed were all taken over."""
        return max(0, self.generated_tokens - self.resumed_tokens)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, as inference.proto defines them."""

    queue_s: float
    prefill_s: float
    first_token_s: float
    decode_s: float


def seed_of(request_id: str) -> int:
    """The seed of a request that names none: equal ids draw equal numbers, here and after a restart."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, person=b"octavo-seed").digest()
    return int.from_bytes(digest, "little")
