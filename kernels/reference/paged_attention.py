"""The definition of paged attention, in plain torch and any float dtype; slow, and it names no block twice."""

import torch


def gather_kv(
    cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    scale: torch.Tensor | None,  # [num_blocks, num_kv_heads, block_size]
    block_ids: torch.Tensor,  # [max_blocks], in order
    kv_len: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """-> [kv_len, num_kv_heads, head_dim] of `dtype`, dequantized"""
    block_size = cache.shape[2]
    position = torch.arange(kv_len, device=cache.device)
    block = block_ids.long()[position // block_size]
    values = cache[block, :, position % block_size].to(dtype)
    if scale is not None:
        values = values * scale[block, :, position % block_size].to(dtype)[..., None]
    return values


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,  # [num_seqs, max_blocks] int
    query_start: torch.Tensor,  # [num_seqs + 1] int
    kv_lens: torch.Tensor,  # [num_seqs] int
    *,
    softmax_scale: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """-> [num_tokens, num_q_heads, v_head_dim] of `dtype`, zero for tokens of no sequence and for empty sequences."""
    num_tokens, num_q_heads, _ = query.shape
    num_kv_heads, v_head_dim = v_cache.shape[1], v_cache.shape[3]
    out = torch.zeros(num_tokens, num_q_heads, v_head_dim, dtype=dtype, device=query.device)
    for seq, kv_len in enumerate(kv_lens.tolist()):
        first, last = query_start[seq].item(), query_start[seq + 1].item()
        if first == last or kv_len == 0:
            continue
        visible_low = max(kv_len - (last - first) - sliding_window + 1, 0) if sliding_window else 0
        k = gather_kv(k_cache, k_scale, block_tables[seq], kv_len, dtype)
        v = gather_kv(v_cache, v_scale, block_tables[seq], kv_len, dtype)
        k[:visible_low] = 0  # blocks before every window may hold anything
        v[:visible_low] = 0
        group = num_q_heads // num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        key = torch.arange(kv_len, device=query.device)
        position = torch.arange(kv_len - (last - first), kv_len, device=query.device)
        scores = torch.einsum("qhd,khd->hqk", query[first:last].to(dtype), k) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.to(dtype)[:, None, None] * (key[None, :] - position[:, None])
        visible = key[None, :] <= position[:, None]
        if sliding_window:
            visible &= key[None, :] > position[:, None] - sliding_window
        weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, v)
    return out
