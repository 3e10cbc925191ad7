"""Tensors as kernels see them: a pointer with named strides.

A kernel takes one named tuple per tensor instead of a pointer and a row of integers. Strides are in elements. Those
that can pass 2^31 once multiplied are multiplied by a 64-bit index in the kernel; the tuple itself promises nothing.
"""

from typing import Any, NamedTuple

import torch


class Matrix(NamedTuple):
    """[rows, columns]"""

    ptr: Any
    stride_row: int
    stride_col: int


class Heads(NamedTuple):
    """[num_tokens, num_heads, head_dim]"""

    ptr: Any
    stride_token: int
    stride_head: int
    stride_dim: int


class Blocks(NamedTuple):
    """[num_blocks, num_kv_heads, block_size, head_dim], any strides"""

    ptr: Any
    stride_block: int
    stride_head: int
    stride_token: int
    stride_dim: int


class Scales(NamedTuple):
    """[num_blocks, num_kv_heads, block_size] fp32, any strides; `ptr` is None where KV is not quantized"""

    ptr: Any
    stride_block: int
    stride_head: int
    stride_token: int


class PagedKV(NamedTuple):
    """One layer's K and V with the tables that lead to them."""

    k: Blocks
    v: Blocks
    k_scale: Scales
    v_scale: Scales
    tables: Matrix  # [num_seqs, max_blocks] int32, sequence -> its blocks in order


def matrix(tensor: torch.Tensor) -> Matrix:
    return Matrix(tensor, *tensor.stride())


def heads(tensor: torch.Tensor) -> Heads:
    return Heads(tensor, *tensor.stride())


def blocks(tensor: torch.Tensor) -> Blocks:
    """fp8 travels as uint8: the same bytes, which every target can load."""
    if tensor.dtype == torch.float8_e4m3fn:
        tensor = tensor.view(torch.uint8)
    return Blocks(tensor, *tensor.stride())


def scales(tensor: torch.Tensor | None) -> Scales:
    if tensor is None:
        return Scales(None, 0, 0, 0)
    return Scales(tensor, *tensor.stride())
