"""Rotary embedding and the scatter of K and V into their blocks, in one pass over q, k and v.

Grid: (num_tokens, 2). Program (t, 0) rotates all query heads of token t; program (t, 1) rotates all its key heads
and writes them, and the values as they are, at slot = block * block_size + offset. A token with slot -1 writes
nowhere; padding may also be sent to a slot of block 0, which nobody reads. Each element is read once and written
once; products are fp32, rounded once. For int8 and fp8 caches see `rotary_kv_write_quantized`.
"""

# ruff: noqa: N803
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import kv_format, view
from kernels.device import device_properties
from kernels.launch import Launch, next_power_of_2
from kernels.numeric import cast_to, to_fp32
from kernels.rotary import load_angles, pair_dims, rotate


@triton.jit
def rotate_heads(target, source, cos_row, sin_row, pairs, rotary_dim, live, INTERLEAVED: tl.constexpr):
    """target, source: pointers [H, 1] to heads whose dimensions are contiguous; live [H, P]"""
    a_dim, b_dim = pair_dims(pairs, rotary_dim, INTERLEAVED)
    a = to_fp32(tl.load(source + a_dim[None, :], mask=live, other=0.0))
    b = to_fp32(tl.load(source + b_dim[None, :], mask=live, other=0.0))
    a, b = rotate(a, b, cos_row, sin_row)
    tl.store(target + a_dim[None, :], cast_to(a, target.dtype.element_ty), mask=live)
    tl.store(target + b_dim[None, :], cast_to(b, target.dtype.element_ty), mask=live)


@triton.jit
def copy_heads(target, source, dims, live):
    """target, source: pointers [H, 1]; dims [D]; live [H, D]"""
    tl.store(target + dims[None, :], tl.load(source + dims[None, :], mask=live, other=0.0), mask=live)


@triton.jit
def turn_heads(
    target,  # pointers [H, 1] to heads whose dimensions are contiguous
    source,
    cos_row,  # [P]
    sin_row,
    pairs,  # [P]
    rotary_dim,
    head_dim,
    live,  # [H, 1]
    INTERLEAVED: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Whole heads: pairs are rotated, dimensions past rotary_dim copied."""
    pair_live = (pairs < rotary_dim // 2)[None, :]
    rotate_heads(target, source, cos_row, sin_row, pairs, rotary_dim, live & pair_live, INTERLEAVED)
    if BLOCK_REST > 0:
        rest = rotary_dim + tl.arange(0, BLOCK_REST)
        copy_heads(target, source, rest, live & (rest < head_dim)[None, :])


@triton.jit
def rotary_kv_write_kernel(
    query_out,  # Heads [num_tokens, num_q_heads, head_dim], may be query
    query,
    key,  # Heads [num_tokens, num_kv_heads, head_dim]
    value,  # Heads [num_tokens, num_kv_heads, v_head_dim]
    k_cache,  # Blocks
    v_cache,
    cos,  # Matrix [num_positions, rotary_dim // 2]
    sin,
    positions,  # [num_tokens] int32 or int64, token -> row of cos and sin
    slots,  # [num_tokens] int32 or int64, token -> block * block_size + offset, or -1
    num_q_heads,
    num_kv_heads,
    rotary_dim,
    head_dim,
    v_head_dim,
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,  # rotary_dim / 2 as a power of two
    BLOCK_REST: tl.constexpr,  # head_dim - rotary_dim as a power of two, 0 for none
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
            block = slot // BLOCK_SIZE
            offset = slot % BLOCK_SIZE
            heads = tl.arange(0, BLOCK_KV_HEADS)
            live = (heads < num_kv_heads)[:, None]
            head = heads.to(tl.int64)[:, None]
            target = (
                k_cache.ptr + block * k_cache.stride_block + offset * k_cache.stride_token + head * k_cache.stride_head
            )
            source = key.ptr + token * key.stride_token + head * key.stride_head
            turn_heads(target, source, cos_row, sin_row, pairs, rotary_dim, head_dim, live, INTERLEAVED, BLOCK_REST)
            dims = tl.arange(0, BLOCK_DV)
            target = (
                v_cache.ptr + block * v_cache.stride_block + offset * v_cache.stride_token + head * v_cache.stride_head
            )
            source = value.ptr + token * value.stride_token + head * value.stride_head
            copy_heads(target, source, dims, live & (dims < v_head_dim)[None, :])


@dataclass(frozen=True)
class KVWrite:
    """Arguments of a KV write; see `rotary_kv_write`."""

    query_out: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[1]

    def check(self) -> None:
        num_tokens, _, head_dim = self.query.shape
        num_kv_heads, v_head_dim = self.value.shape[1:]
        if self.key.shape != (num_tokens, num_kv_heads, head_dim) or self.value.shape[0] != num_tokens:
            raise ValueError("query, key and value must agree in tokens, key and value in heads, query and key in size")
        if self.query_out.shape != self.query.shape or self.query_out.dtype != self.query.dtype:
            raise ValueError("query_out must be of query's shape and dtype")
        if self.k_cache.shape[1:] != (num_kv_heads, self.k_cache.shape[2], head_dim):
            raise ValueError(f"k_cache {tuple(self.k_cache.shape)} does not fit {num_kv_heads} heads of {head_dim}")
        if self.v_cache.shape[1:] != (num_kv_heads, self.k_cache.shape[2], v_head_dim):
            raise ValueError(f"v_cache {tuple(self.v_cache.shape)} does not fit {num_kv_heads} heads of {v_head_dim}")
        if self.cos.shape != self.sin.shape or self.rotary_dim > head_dim:
            raise ValueError(f"cos and sin are [positions, rotary_dim / 2] with rotary_dim <= head_dim ({head_dim})")
        if self.positions.shape != (num_tokens,) or self.slots.shape != (num_tokens,):
            raise ValueError(f"positions and slots must have one entry for each of {num_tokens} tokens")
        for name in ("query_out", "query", "key", "value", "k_cache", "v_cache"):
            if getattr(self, name).stride(-1) != 1:
                raise ValueError(f"{name}: dimensions of a head must be contiguous")

    def common_args(self) -> dict[str, object]:
        num_q_heads, head_dim = self.query.shape[1:]
        num_kv_heads, v_head_dim = self.value.shape[1:]
        rest = head_dim - self.rotary_dim
        return {
            "query_out": view.heads(self.query_out),
            "query": view.heads(self.query),
            "key": view.heads(self.key),
            "value": view.heads(self.value),
            "k_cache": view.blocks(self.k_cache),
            "v_cache": view.blocks(self.v_cache),
            "cos": view.matrix(self.cos),
            "sin": view.matrix(self.sin),
            "positions": self.positions,
            "slots": self.slots,
            "num_q_heads": num_q_heads,
            "num_kv_heads": num_kv_heads,
            "rotary_dim": self.rotary_dim,
            "head_dim": head_dim,
            "v_head_dim": v_head_dim,
            "BLOCK_SIZE": self.k_cache.shape[2],
            "INTERLEAVED": self.interleaved,
            "BLOCK_Q_HEADS": next_power_of_2(num_q_heads),
            "BLOCK_KV_HEADS": next_power_of_2(num_kv_heads),
            "BLOCK_PAIRS": next_power_of_2(self.rotary_dim // 2),
            "BLOCK_REST": next_power_of_2(rest) if rest else 0,
            "BLOCK_DV": next_power_of_2(v_head_dim),
        }

    def launch(self) -> Launch:
        self.check()
        if self.k_cache.dtype not in kv_format.DENSE_DTYPES:
            raise TypeError(f"cache of {self.k_cache.dtype}: use rotary_kv_write_quantized")
        if self.value.dtype != self.v_cache.dtype or self.k_cache.dtype != self.v_cache.dtype:
            raise TypeError("value and both caches must have one dtype")
        return Launch(rotary_kv_write_kernel, (self.query.shape[0], 2), self.common_args(), num_warps=4, num_stages=1)


def rotary_kv_write(
    query_out: torch.Tensor,  # [num_tokens, num_q_heads, head_dim], may be query
    query: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, v_head_dim]
    k_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, v_head_dim]
    cos: torch.Tensor,  # [num_positions, rotary_dim // 2], rotary_dim <= head_dim
    sin: torch.Tensor,
    positions: torch.Tensor,  # [num_tokens] int32 or int64, token -> row of cos and sin
    slots: torch.Tensor,  # [num_tokens] int32 or int64, token -> block * block_size + offset, or -1
    interleaved: bool = False,
) -> None:
    """Rotate query into query_out and key into k_cache, copy value into v_cache. Slots of one call are distinct.

    fp16, bf16 or fp32; dimensions of a head contiguous, other strides any. Raises ValueError or TypeError for
    arguments that do not fit.
    """
    device_properties(query.device)
    KVWrite(query_out, query, key, value, k_cache, v_cache, cos, sin, positions, slots, interleaved).launch().run()
