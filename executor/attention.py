"""The interface of paged attention: what every back end takes, does and returns.

A back end copies blocks, writes a step's new K and V into theirs and attends over each row's. It sees K and V through
views whose strides the cache service reported: nothing here or below knows how a block is laid out inside. The choice
of a back end is `attention_choice`'s.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from executor.batch import AttentionBatch
from executor.step import Ints


@dataclass(frozen=True, slots=True)
class KvViews:
    """One layer's K and V in the arena, any strides; scales where they are codes (`kv_codes`)."""

    k: Tensor  # [num_blocks, num_kv_heads, block_size, k_head_dim]
    v: Tensor  # [num_blocks, num_kv_heads, block_size, v_head_dim]
    k_scale: Tensor | None = None  # [num_blocks, num_kv_heads, block_size] float32
    v_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What a layer's attention is, besides its tensors."""

    layer: int
    scale: float
    window: int | None = None  # the query at position q sees keys at positions > q - window; None: all up to q
    softcap: float | None = None  # a score s becomes softcap * tanh(s / softcap); None: stays


class PreparedAttention(Protocol):
    """The attention of one step, called once per layer in model order."""

    def attend(self, layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write key and value into their blocks, then attend.

        Args:
            layer: which layer, and its parameters.
            query: [num_tokens, num_heads, k_head_dim]; num_heads is a multiple of num_kv_heads.
            key: [num_tokens, num_kv_heads, k_head_dim], rotated.
            value: [num_tokens, num_kv_heads, v_head_dim].

        Returns:
            [num_tokens, num_heads, v_head_dim], of the query's dtype. Never NaN because of what unwritten positions
            of a block hold.
        """


class AttentionBackend(Protocol):
    """An implementation of paged attention on one device."""

    @property
    def name(self) -> str:
        """As the `attention` option names it."""

    def copy_blocks(self, blocks: Tensor, sources: Ints, targets: Ints) -> None:
        """Copy whole blocks, as if all sources were read before any target is written.

        Args:
            blocks: [num_blocks, block_bytes] uint8.
            sources, targets: [num_copies], distinct targets; chains and swaps may be among them.
        """

    def prepare(self, batch: AttentionBatch, views: tuple[KvViews, ...]) -> PreparedAttention:
        """Do once per step what all layers share. views: one per layer, in model order."""
