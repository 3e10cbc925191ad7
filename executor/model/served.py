"""What serving needs of a model, however it came to be, and what routers are told of it."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from executor.arena import LayerGeometry
from executor.batch import Batch
from executor.model.description import ModelDescription
from executor.model.refusal import unsupported
from octavo.model_source import ModelSource


class ServedModel(Protocol):
    """A function from a packed batch to logits."""

    @property
    def layers(self) -> tuple[LayerGeometry, ...]:
        """Attention layers in order of call."""

    @property
    def linear_format(self) -> str:
        """Number format of the linear layers: float32, bfloat16, float16 or int8."""

    @property
    def vocabulary_size(self) -> int:
        """Logits per token."""

    def forward(self, batch: Batch, attention: Any) -> Tensor:
        """Logits of the sampling rows, then of the scored tokens. Writes the batch's KV.

        Returns:
            [num_sampling + num_scored, vocabulary_size] float32
        """


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a loaded model says of itself."""

    revision: str
    fingerprint: str  # hexadecimal
    architecture: str
    vocabulary_size: int  # logits per token
    longest_context: int  # tokens; 0: its configuration does not say
    eos_token_ids: tuple[int, ...]


def describe(facts: ModelFacts, source: ModelSource, name: str, max_context_tokens: int) -> ModelDescription:
    """What routers need to know.

    Args:
        name: what clients ask for; empty: the source's own.
        max_context_tokens: 0: as long as the model allows.

    Raises:
        OctavoError: FAILED_PRECONDITION: the context asked for is longer than the model's.
    """
    return ModelDescription(
        name=name or source.name,
        source=source.reference,
        revision=facts.revision,
        fingerprint=facts.fingerprint,
        architecture=facts.architecture,
        vocabulary_size=facts.vocabulary_size,
        max_context_tokens=_context(facts.longest_context, max_context_tokens),
        eos_token_ids=facts.eos_token_ids,
    )


def _context(allowed: int, wanted: int) -> int:
    if wanted and allowed and wanted > allowed:
        raise unsupported(f"max_context_tokens {wanted}: its positions end at {allowed}")
    if not wanted and not allowed:
        raise unsupported("its configuration names no longest sequence; set max_context_tokens")
    return wanted or allowed
