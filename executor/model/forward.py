"""A loaded model as a function from a packed batch to logits."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from executor.arena import LayerGeometry
from executor.attention import PreparedAttention
from executor.batch import Batch
from executor.model.hook import AttentionHook
from executor.model.probe import Probed


class Rewritten(Protocol):
    """A faster form of the same model."""

    @property
    def weights_format(self) -> str:
        """Number format of its linear layers."""

    @property
    def all_blocks(self) -> bool:
        """Whether all its weights are blocks of codes already (decision 53)."""

    def forward(self, batch: Batch, attention: Any, logits_tokens: Tensor) -> Tensor:
        """Logits of some tokens of the batch, [num_logits, vocabulary_size] float32. Writes the batch's KV."""


@dataclass(frozen=True, slots=True)
class CausalModel:
    """A model of `transformers` whose attention is paged."""

    module: Any  # PreTrainedModel
    hook: AttentionHook
    config: Any  # PretrainedConfig
    probed: Probed
    weights_dtype: torch.dtype
    rewritten: Rewritten | None = None  # None: the modeling code runs as it is

    @property
    def layers(self) -> tuple[LayerGeometry, ...]:
        """Attention layers in order of call."""
        return self.probed.geometry

    @property
    def linear_format(self) -> str:
        """Number format of the linear layers: float32, bfloat16, float16 or int8."""
        loaded = str(self.weights_dtype).removeprefix("torch.")
        return loaded if self.rewritten is None else self.rewritten.weights_format

    @property
    def vocabulary_size(self) -> int:
        """Logits per token."""
        return self.probed.vocabulary_size

    def forward(self, batch: Batch, attention: PreparedAttention) -> Tensor:
        """Logits of the sampling rows, then of the scored tokens. Writes the batch's KV.

        Returns:
            [num_sampling + num_scored, vocabulary_size] float32
        """
        tokens = batch.all_logits_tokens
        if self.rewritten is not None:
            return self.rewritten.forward(batch, attention, tokens)
        device = self.module.device  # `to` the device where a tensor is returns it
        ids, positions = (each.to(device, non_blocking=True) for each in (batch.input_ids, batch.positions))
        return self.forward_tokens(ids, positions, tokens.to(device, non_blocking=True), attention)

    def forward_tokens(self, ids: Tensor, positions: Tensor, wanted: Tensor, attention: PreparedAttention) -> Tensor:
        """Logits of the tokens `wanted` of a packed batch, on the model's device. Writes the batch's KV.

        Args:
            ids, positions: [num_tokens] int64.
            wanted: [num_logits] int64, indices of tokens.

        Returns:
            [num_logits, vocabulary_size] float32
        """
        with torch.inference_mode(), self.hook.during(attention):
            output = self.module(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=wanted
            )
            return output.logits[0].float()
