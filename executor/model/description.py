"""What routers are told of a model. Values only, light to import."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What routers need to know of a model."""

    name: str
    source: str  # what the tokenizer is loaded from
    revision: str
    fingerprint: str  # hexadecimal
    architecture: str
    vocabulary_size: int  # logits per token
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
