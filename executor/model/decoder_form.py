"""The common form of a decoder, taken apart: plain values, on which packing and int8's factors work.

The form: RMSNorm, attention with rotary positions, RMSNorm, gated MLP; norms of queries and keys and norms behind the
two branches where a model has them. Not here: finding the parts in a model's modules (`decoder_parts`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]  # positions [num_positions] -> cos, sin [num_positions, rotary_dim]


@dataclass(frozen=True, slots=True)
class NormPart:
    """x / sqrt(mean(x^2) + epsilon) * weight"""

    weight: Tensor  # [size] float32, with what the module adds to its own
    epsilon: float


@dataclass(frozen=True, slots=True)
class LinearPart:
    """x @ weight.T + bias"""

    weight: Tensor  # [num_outputs, num_inputs]
    bias: Tensor | None  # [num_outputs]


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer."""

    before_attention: NormPart
    after_attention: NormPart | None
    before_mlp: NormPart
    after_mlp: NormPart | None
    query_norm: NormPart | None
    key_norm: NormPart | None
    q: LinearPart
    k: LinearPart
    v: LinearPart
    o: LinearPart
    gate: LinearPart
    up: LinearPart
    down: LinearPart
    num_kv_heads: int
    rotary: int  # index into `DecoderParts.rotaries`


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """A whole model."""

    layers: Sequence[LayerParts]
    rotaries: tuple[Rotary, ...]
    embedding: Tensor  # [vocabulary_size, hidden_size]
    embedding_scale: float
    last_norm: NormPart
    head: LinearPart
    intermediate_size: int
    activation: str  # as `kernels.cpu.library.ACTIVATIONS` names it
    logits_softcap: float  # 0: none
