"""The keyword options of a generation, named once for both clients, and where each travels in the request.

Not here: what values are allowed. The server says that, field by field.
"""

from collections.abc import Mapping, Sequence
from typing import TypedDict

# Text as it is; token ids as they are; or the messages of a chat, each with "role" and "content".
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
Messages = str | Sequence[Mapping[str, str]]


class GenerateOptions(TypedDict, total=False):
    """Left out: the server's default. The protos say what each means and its range."""

    request_id: str
    model: str
    # sampling
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    n: int
    best_of: int
    # beam search: the last two need the first
    beam_width: int
    length_penalty: float
    early_stopping: bool
    # stopping
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop: bool
    ignore_eos: bool
    # what the answer must match: at most one
    json_schema: str
    regex: str
    grammar: str
    choice: Sequence[str]
    # output
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: bool
    echo: bool
    skip_special_tokens: bool
    token_ids: bool
    # the rest
    adapter: str
    cache_salt: str
    bypass_cache: bool
    priority: int
    time_limit_s: float
    # chats only: False continues the last message
    add_generation_prompt: bool


# Option -> path of its field in the request.
FIELD_PATHS: Mapping[str, str] = {
    **{name: name for name in ("request_id", "model", "adapter", "priority")},
    **{
        name: f"sampling.{name}"
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
            *("repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "n", "best_of"),
        )
    },
    "beam_width": "sampling.beam.width",
    **{name: f"sampling.beam.{name}" for name in ("length_penalty", "early_stopping")},
    **{
        name: f"stopping.{name}"
        for name in ("max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop", "ignore_eos")
    },
    **{
        name: f"output.{name}"
        for name in ("logprobs", "top_logprobs", "prompt_logprobs", "echo", "skip_special_tokens", "token_ids")
    },
    **{name: f"constraint.{name}" for name in ("json_schema", "regex", "grammar")},
    "choice": "constraint.choice.options",
    "cache_salt": "cache.salt",
    "bypass_cache": "cache.bypass",
    "time_limit_s": "time_limit",
    "add_generation_prompt": "chat.add_generation_prompt",
}
