"""The scatter of K and V into their blocks, for models that rotate queries and keys themselves.

Grid: (num_tokens, 2). Program (t, 0) writes all key heads of token t, program (t, 1) its values, at slot = block *
block_size + offset. A token with slot -1 writes nowhere; padding may also be sent to a slot of block 0, which nobody
reads. Each element is read once and written once, rounded once where the cache has another dtype. With the rotary
embedding in the same pass see `rotary_kv_write`, into int8 and fp8 caches `kv_write_quantized`.
"""

# ruff: noqa: N803
from collections.abc import Container
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import kv_format, view
from kernels.device import device_properties
from kernels.launch import Launch, next_power_of_2
from kernels.numeric import cast_to, to_fp32


@triton.jit
def write_heads(
    cache,
    new,
    token,
    slot,
    num_heads,
    head_dim,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """cache: Blocks; new: Heads; slot: int64, at least 0; HEADS, DIMS: powers of two that hold num_heads, head_dim"""
    heads = tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, DIMS)[None, :]
    live = (heads < num_heads) & (dims < head_dim)
    values = tl.load(new.ptr + token * new.stride_token + heads * new.stride_head + dims * new.stride_dim, mask=live)
    target = cache.ptr + slot // BLOCK_SIZE * cache.stride_block + slot % BLOCK_SIZE * cache.stride_token
    # 64 bits: where heads are outermost, their stride is most of the arena.
    target += heads.to(tl.int64) * cache.stride_head + dims.to(tl.int64) * cache.stride_dim
    if new.ptr.dtype.element_ty != cache.ptr.dtype.element_ty:
        values = cast_to(to_fp32(values), cache.ptr.dtype.element_ty)
    tl.store(target, values, mask=live)


@triton.jit
def kv_write_kernel(
    key,  # Heads [num_tokens, num_kv_heads, head_dim]
    value,  # Heads [num_tokens, num_kv_heads, v_head_dim]
    k_cache,  # Blocks
    v_cache,
    slots,  # [num_tokens] int32 or int64, token -> block * block_size + offset, or -1
    num_kv_heads,
    head_dim,
    v_head_dim,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        if tl.program_id(1) == 0:
            write_heads(k_cache, key, token, slot, num_kv_heads, head_dim, BLOCK_SIZE, BLOCK_HEADS, BLOCK_D)
        else:
            write_heads(v_cache, value, token, slot, num_kv_heads, v_head_dim, BLOCK_SIZE, BLOCK_HEADS, BLOCK_DV)


@dataclass(frozen=True)
class PlainKVWrite:
    """Arguments of a KV write without rotary embedding; see `kv_write`."""

    key: torch.Tensor
    value: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor

    def check(self, cache_dtypes: Container[torch.dtype] = kv_format.DENSE_DTYPES) -> None:
        """ValueError or TypeError that names the argument, before anything is launched."""
        num_tokens, num_kv_heads, _ = self.key.shape
        if self.value.shape[:2] != (num_tokens, num_kv_heads):
            raise ValueError("key and value must agree in tokens and heads")
        if self.slots.shape != (num_tokens,):
            raise ValueError(f"slots must have one entry for each of {num_tokens} tokens")
        num_blocks, _, block_size, _ = self.k_cache.shape
        for name, new in (("k_cache", self.key), ("v_cache", self.value)):
            cache = getattr(self, name)
            if cache.shape != (num_blocks, num_kv_heads, block_size, new.shape[2]):
                raise ValueError(f"{name} {tuple(cache.shape)} does not fit {num_kv_heads} heads of {new.shape[2]}")
            if new.dtype not in kv_format.DENSE_DTYPES:
                raise TypeError(f"values of {new.dtype} for {name}: float16, bfloat16 or float32")
            if cache.dtype not in cache_dtypes:
                raise TypeError(
                    f"{name} of {cache.dtype}: kv_write takes float16, bfloat16 and float32, kv_write_quantized "
                    f"int8 and float8_e4m3fn"
                )

    def args(self) -> dict[str, object]:
        """Of the kernel, as far as both kernels have them."""
        _, num_kv_heads, head_dim = self.key.shape
        v_head_dim = self.value.shape[2]
        return {
            "key": view.heads(self.key),
            "value": view.heads(self.value),
            "k_cache": view.blocks(self.k_cache),
            "v_cache": view.blocks(self.v_cache),
            "slots": self.slots,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "v_head_dim": v_head_dim,
            "BLOCK_SIZE": self.k_cache.shape[2],
            "BLOCK_HEADS": next_power_of_2(num_kv_heads),
            "BLOCK_D": next_power_of_2(head_dim),
            "BLOCK_DV": next_power_of_2(v_head_dim),
        }

    def launch(self) -> Launch:
        self.check()
        return Launch(kv_write_kernel, (self.key.shape[0], 2), self.args(), num_warps=4, num_stages=1)


def kv_write(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, v_head_dim]
    k_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, v_head_dim]
    slots: torch.Tensor,  # [num_tokens] int32 or int64, token -> block * block_size + offset, or -1
) -> None:
    """Copy key into k_cache and value into v_cache. Slots of one call are distinct.

    fp16, bf16 or fp32, the caches' own or another; any strides. Raises ValueError or TypeError for arguments that do
    not fit.
    """
    device_properties(key.device)
    PlainKVWrite(key, value, k_cache, v_cache, slots).launch().run()
