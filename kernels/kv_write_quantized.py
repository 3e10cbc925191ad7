"""The scatter of K and V into int8 or fp8 (e4m3fn) blocks, for models that rotate queries and keys themselves.

Grid: (num_tokens, 2), as `kv_write`: program (t, 0) writes all key heads of token t, program (t, 1) its values, each
with a scale per head. Scales and codes are those of `rotary_kv_write_quantized`.
"""

# ruff: noqa: N803
import torch
import triton
import triton.language as tl

from kernels import kv_format
from kernels.device import device_properties
from kernels.kv_write import PlainKVWrite
from kernels.launch import Launch
from kernels.rotary_kv_write_quantized import (
    code_scale,
    encode,
    head_pointers,
    largest_of,
    load_fp32,
    quantized_args,
    store_scale,
)


@triton.jit
def encode_heads(
    cache,
    scales,
    new,
    token,
    slot,
    num_heads,
    head_dim,
    FP8: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """cache: Blocks; scales: Scales; new: Heads; slot: int64, at least 0; HEADS, DIMS: powers of two, see `kv_write`"""
    heads = tl.arange(0, HEADS).to(tl.int64)  # 64 bits: where heads are outermost, their stride is most of the arena
    dims = tl.arange(0, DIMS).to(tl.int64)
    live = (heads < num_heads)[:, None] & (dims < head_dim)[None, :]
    source = new.ptr + token * new.stride_token + (heads * new.stride_head)[:, None]
    x = load_fp32(source + (dims * new.stride_dim)[None, :], live)
    largest, broken = largest_of(x)
    scale, inverse = code_scale(largest, broken, FP8)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    target = head_pointers(cache, block, offset, heads) + (dims * cache.stride_dim)[None, :]
    tl.store(target, encode(x * inverse[:, None], FP8), mask=live)
    store_scale(scales, block, offset, heads, scale, heads < num_heads)


@triton.jit
def kv_write_quantized_kernel(
    key,  # Heads [num_tokens, num_kv_heads, head_dim]
    value,  # Heads [num_tokens, num_kv_heads, v_head_dim]
    k_cache,  # Blocks, int8 or uint8
    v_cache,
    k_scale,  # Scales
    v_scale,
    slots,  # [num_tokens] int32 or int64, token -> block * block_size + offset, or -1
    num_kv_heads,
    head_dim,
    v_head_dim,
    FP8: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        if tl.program_id(1) == 0:
            encode_heads(
                k_cache, k_scale, key, token, slot, num_kv_heads, head_dim, FP8, BLOCK_SIZE, BLOCK_HEADS, BLOCK_D
            )
        else:
            encode_heads(
                v_cache, v_scale, value, token, slot, num_kv_heads, v_head_dim, FP8, BLOCK_SIZE, BLOCK_HEADS, BLOCK_DV
            )


def kv_write_quantized_launch(write: PlainKVWrite, k_scale: torch.Tensor, v_scale: torch.Tensor) -> Launch:
    write.check(kv_format.QUANTIZED_MAX)
    args = write.args() | quantized_args(write.k_cache, write.v_cache, k_scale, v_scale)
    return Launch(kv_write_quantized_kernel, (write.key.shape[0], 2), args, num_warps=4, num_stages=1)


def kv_write_quantized(
    key: torch.Tensor,  # as kv_write, but for:
    value: torch.Tensor,
    k_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim] int8 or float8_e4m3fn
    v_cache: torch.Tensor,
    k_scale: torch.Tensor,  # [num_blocks, num_kv_heads, block_size] fp32
    v_scale: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """As `kv_write`, into a quantized cache and its scales."""
    device_properties(key.device)
    kv_write_quantized_launch(PlainKVWrite(key, value, k_cache, v_cache, slots), k_scale, v_scale).run()
