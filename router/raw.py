"""A Generate call's fields as they came, but for the model, free of gRPC. None: unset. Nothing here is checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from router.request import BeamSearch, Chat, Constraint


@dataclass(frozen=True, slots=True)
class RawRequest:
    """Fields of the public request, flat.

    Attributes:
        text, token_ids, chat: at most one is set.
        unsupported: paths of fields that are set and not supported, each with the values that would be neutral.
    """

    request_id: str = ""
    text: str | None = None
    token_ids: Sequence[int] | None = None
    chat: Chat | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    n: int | None = None
    best_of: int | None = None
    beam: BeamSearch | None = None

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False

    constraint: Constraint | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    echo: bool = False
    skip_special_tokens: bool = True
    salt: str | None = None
    bypass_cache: bool = False
    priority: int = 0
    time_limit_s: float | None = None
    resume: Sequence[tuple[int, Sequence[int]]] = ()  # (index, token ids)
    ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    unsupported: Sequence[str] = ()
