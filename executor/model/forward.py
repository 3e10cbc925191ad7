"""A loaded model as a function from a packed batch to logits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor.arena import LayerGeometry
from executor.attention import PreparedAttention
from executor.batch import Batch
from executor.model.hook import AttentionHook


@dataclass(frozen=True, slots=True)
class CausalModel:
    """A model of `transformers` whose attention is paged."""

    module: Any  # PreTrainedModel
    hook: AttentionHook
    config: Any  # PretrainedConfig
    layers: tuple[LayerGeometry, ...]  # attention layers in order of call
    vocabulary_size: int
    weights_dtype: torch.dtype

    def forward(self, batch: Batch, attention: PreparedAttention) -> Tensor:
        """Logits of the sampling rows, then of the scored tokens. Writes the batch's KV.

        Returns:
            [num_sampling + num_scored, vocabulary_size] float32
        """
        tokens = batch.logits_tokens
        if batch.prompt_scores is not None:
            tokens = torch.cat((tokens, batch.prompt_scores.logits_tokens))
        with torch.inference_mode(), self.hook.during(attention):
            output = self.module(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=tokens,
            )
            return output.logits[0].float()
