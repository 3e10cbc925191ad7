"""Rotary embedding and KV writes in plain torch."""

import torch

CODE_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def rotate(
    x: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    cos: torch.Tensor,  # [num_tokens, rotary_dim // 2]
    sin: torch.Tensor,
    interleaved: bool,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """-> [num_tokens, num_heads, head_dim] of `dtype`"""
    rotary_dim = 2 * cos.shape[1]
    x = x.to(dtype).clone()
    cos, sin = cos.to(dtype)[:, None], sin.to(dtype)[:, None]
    a_dims = slice(0, rotary_dim, 2) if interleaved else slice(0, rotary_dim // 2)
    b_dims = slice(1, rotary_dim, 2) if interleaved else slice(rotary_dim // 2, rotary_dim)
    a, b = x[..., a_dims].clone(), x[..., b_dims].clone()
    x[..., a_dims] = a * cos - b * sin
    x[..., b_dims] = b * cos + a * sin
    return x


def quantize(x: torch.Tensor, code_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., head_dim] -> (codes of `code_dtype`, scale [...] fp32), value = code * scale"""
    largest = x.abs().amax(dim=-1).float()
    limit = CODE_MAX[code_dtype]
    inverse = torch.where(largest > 0, limit / largest, 0.0)
    codes = x.float() * inverse[..., None]
    if code_dtype == torch.int8:
        codes = codes.round().clamp(-127, 127)
    return codes.to(code_dtype), largest / limit


def write_slots(
    cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, ...]
    values: torch.Tensor,  # [num_tokens, num_kv_heads, ...]
    slots: torch.Tensor,  # [num_tokens]
) -> None:
    """Scatter, in place; slot -1 writes nowhere."""
    block_size = cache.shape[2]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache[slot // block_size, :, slot % block_size] = values[token]


def rotary_kv_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos: torch.Tensor,  # [num_positions, rotary_dim // 2]
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """-> rotated query of `dtype`; writes the caches in place."""
    cos, sin = cos[positions.long()], sin[positions.long()]
    write_slots(k_cache, rotate(key, cos, sin, interleaved, dtype).to(k_cache.dtype), slots)
    write_slots(v_cache, value.to(v_cache.dtype), slots)
    return rotate(query, cos, sin, interleaved, dtype)
