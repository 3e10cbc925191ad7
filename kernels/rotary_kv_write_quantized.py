"""Rotary embedding and the scatter of K and V into int8 or fp8 (e4m3fn) blocks, with a scale per token and head.

    scale = max |x| over the head's dimensions / largest code;  code = round(x / scale)

As `rotary_kv_write`, grid (num_tokens, 2): program (t, 0) rotates the queries of token t, program (t, 1) rotates its
keys, and quantizes and writes keys and values. A head with a NaN or an infinity gets a NaN scale: what was broken
stays visible. Codes are rounded to nearest even; e4m3 is encoded by integer arithmetic on every target.
"""

# ruff: noqa: N803
import torch
import triton
import triton.language as tl

from kernels import kv_format, view
from kernels.device import device_properties
from kernels.launch import Launch
from kernels.numeric import FP8_MAX, INT8_MAX, encode_e4m3, round_half_even, to_fp32
from kernels.rotary import load_angles, pair_dims, rotate
from kernels.rotary_kv_write import KVWrite, turn_heads


@triton.jit
def code_scale(largest, broken, FP8: tl.constexpr):
    """largest [H] -> (scale [H], its inverse [H]); a zero head has scale 0 and codes 0, a broken one scale NaN

    Divided as IEEE 754 says: every device, and the back ends on a CPU, are to write the same codes.
    """
    limit = FP8_MAX if FP8 else INT8_MAX
    inverse = tl.where(largest > 0.0, tl.div_rn(limit, tl.where(largest > 0.0, largest, 1.0)), 0.0)
    return tl.div_rn(largest, limit) + broken, inverse


@triton.jit
def encode(x, FP8: tl.constexpr):
    """fp32 in code range -> uint8 e4m3fn or int8"""
    if FP8:
        return encode_e4m3(x)
    else:
        return round_half_even(tl.minimum(tl.maximum(x, -127.0), 127.0)).to(tl.int8)


@triton.jit
def load_fp32(pointers, mask):
    return to_fp32(tl.load(pointers, mask=mask, other=0.0))


@triton.jit
def largest_of(x):
    """[H, D] -> (largest magnitude [H], 0 or NaN [H]): x * 0 is NaN exactly for NaN and infinities"""
    return tl.max(tl.abs(x), axis=1), tl.sum(x * 0.0, axis=1)


@triton.jit
def head_pointers(cache, block, offset, head):
    """Blocks, head [H] -> pointers [H, 1] to one position's heads"""
    start = cache.ptr + block * cache.stride_block + offset * cache.stride_token
    return start + head[:, None] * cache.stride_head


@triton.jit
def store_scale(scales, block, offset, head, scale, live):
    row = block * scales.stride_block + head * scales.stride_head + offset * scales.stride_token
    tl.store(scales.ptr + row, scale, mask=live)


@triton.jit
def write_keys(
    k_cache,  # Blocks
    k_scale,  # Scales
    source,  # pointers [H, 1] to heads whose dimensions are contiguous
    block,
    offset,
    head,  # [H]
    head_live,  # [H]
    cos_row,  # [P]
    sin_row,
    pairs,  # [P]
    rotary_dim,
    head_dim,
    FP8: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Rotate one token's keys; the scale of a head is that of its rotated and its passed dimensions together."""
    live = head_live[:, None] & (pairs < rotary_dim // 2)[None, :]
    a_dim, b_dim = pair_dims(pairs, rotary_dim, INTERLEAVED)
    a, b = rotate(load_fp32(source + a_dim[None, :], live), load_fp32(source + b_dim[None, :], live), cos_row, sin_row)
    largest_a, broken_a = largest_of(a)
    largest_b, broken_b = largest_of(b)
    largest, broken = tl.maximum(largest_a, largest_b), broken_a + broken_b
    if BLOCK_REST > 0:
        rest = rotary_dim + tl.arange(0, BLOCK_REST)
        rest_live = head_live[:, None] & (rest < head_dim)[None, :]
        passed = load_fp32(source + rest[None, :], rest_live)
        largest_rest, broken_rest = largest_of(passed)
        largest, broken = tl.maximum(largest, largest_rest), broken + broken_rest
    scale, inverse = code_scale(largest, broken, FP8)
    target = head_pointers(k_cache, block, offset, head)
    tl.store(target + a_dim[None, :], encode(a * inverse[:, None], FP8), mask=live)
    tl.store(target + b_dim[None, :], encode(b * inverse[:, None], FP8), mask=live)
    if BLOCK_REST > 0:
        tl.store(target + rest[None, :], encode(passed * inverse[:, None], FP8), mask=rest_live)
    store_scale(k_scale, block, offset, head, scale, head_live)


@triton.jit
def write_values(
    v_cache,  # Blocks
    v_scale,  # Scales
    source,  # pointers [H, 1] to heads whose dimensions are contiguous
    block,
    offset,
    head,  # [H]
    head_live,  # [H]
    v_head_dim,
    FP8: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    dims = tl.arange(0, BLOCK_DV)
    live = head_live[:, None] & (dims < v_head_dim)[None, :]
    v = load_fp32(source + dims[None, :], live)
    largest, broken = largest_of(v)
    scale, inverse = code_scale(largest, broken, FP8)
    target = head_pointers(v_cache, block, offset, head)
    tl.store(target + dims[None, :], encode(v * inverse[:, None], FP8), mask=live)
    store_scale(v_scale, block, offset, head, scale, head_live)


@triton.jit
def rotary_kv_write_quantized_kernel(
    query_out,  # Heads [num_tokens, num_q_heads, head_dim], may be query
    query,
    key,  # Heads [num_tokens, num_kv_heads, head_dim]
    value,  # Heads [num_tokens, num_kv_heads, v_head_dim]
    k_cache,  # Blocks, int8 or uint8
    v_cache,
    k_scale,  # Scales
    v_scale,
    cos,  # Matrix [num_positions, rotary_dim // 2]
    sin,
    positions,  # [num_tokens] int32 or int64
    slots,  # [num_tokens] int32 or int64, -1 for nowhere
    num_q_heads,
    num_kv_heads,
    rotary_dim,
    head_dim,
    v_head_dim,
    FP8: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, BLOCK_PAIRS)
    position = tl.load(positions + token).to(tl.int64)
    cos_row, sin_row = load_angles(cos, sin, position, pairs, pairs < rotary_dim // 2)
    if tl.program_id(1) == 0:
        heads = tl.arange(0, BLOCK_Q_HEADS)
        live = (heads < num_q_heads)[:, None]
        target = query_out.ptr + token * query_out.stride_token + (heads * query_out.stride_head)[:, None]
        source = query.ptr + token * query.stride_token + (heads * query.stride_head)[:, None]
        turn_heads(target, source, cos_row, sin_row, pairs, rotary_dim, head_dim, live, INTERLEAVED, BLOCK_REST)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            head = tl.arange(0, BLOCK_KV_HEADS).to(tl.int64)
            live = head < num_kv_heads
            source = key.ptr + token * key.stride_token + head[:, None] * key.stride_head
            write_keys(
                k_cache, k_scale, source, block, offset, head, live, cos_row, sin_row, pairs, rotary_dim, head_dim,
                FP8, INTERLEAVED, BLOCK_REST,
            )  # fmt: skip
            source = value.ptr + token * value.stride_token + head[:, None] * value.stride_head
            write_values(v_cache, v_scale, source, block, offset, head, live, v_head_dim, FP8, BLOCK_DV)


def quantized_args(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor
) -> dict[str, object]:
    """What a kernel that writes codes takes beside its dense twin's arguments. Raises TypeError or ValueError."""
    if k_cache.dtype not in kv_format.QUANTIZED_MAX or v_cache.dtype != k_cache.dtype:
        raise TypeError(f"caches of {k_cache.dtype} and {v_cache.dtype}: both int8 or both float8_e4m3fn")
    kv_format.check_scales(k_cache, k_scale, "k_scale")
    kv_format.check_scales(v_cache, v_scale, "v_scale")
    return {
        "k_scale": view.scales(k_scale),
        "v_scale": view.scales(v_scale),
        "FP8": k_cache.dtype == torch.float8_e4m3fn,
    }


def rotary_kv_write_quantized_launch(write: KVWrite, k_scale: torch.Tensor, v_scale: torch.Tensor) -> Launch:
    write.check()
    args = write.common_args() | quantized_args(write.k_cache, write.v_cache, k_scale, v_scale)
    return Launch(rotary_kv_write_quantized_kernel, (write.query.shape[0], 2), args, num_warps=4, num_stages=1)


def rotary_kv_write_quantized(
    query_out: torch.Tensor,  # as rotary_kv_write, but for:
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim] int8 or float8_e4m3fn
    v_cache: torch.Tensor,
    k_scale: torch.Tensor,  # [num_blocks, num_kv_heads, block_size] fp32
    v_scale: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    interleaved: bool = False,
) -> None:
    """As `rotary_kv_write`, into a quantized cache and its scales."""
    device_properties(query.device)
    write = KVWrite(query_out, query, key, value, k_cache, v_cache, cos, sin, positions, slots, interleaved)
    rotary_kv_write_quantized_launch(write, k_scale, v_scale).run()
