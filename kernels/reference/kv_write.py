"""KV writes without rotary embedding in plain torch."""

import torch

from kernels.reference.rotary_kv_write import write_slots


def kv_write(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, v_head_dim]
    k_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: torch.Tensor,
    slots: torch.Tensor,  # [num_tokens]
) -> None:
    """Writes the caches in place."""
    write_slots(k_cache, key.to(k_cache.dtype), slots)
    write_slots(v_cache, value.to(v_cache.dtype), slots)
